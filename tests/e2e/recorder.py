"""The command of end-to-end tests: records its own start and end as files, by attempt, then works for a while.

Run as `recorder.py FOLDER NAME SECONDS`; the file NAME.enough in the folder ends its work sooner. A start is published
under its attempt and process, so that a second start of the same attempt would be seen as a second file.
"""

import json
import os
import sys
import time


def main() -> None:
    folder, name, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    attempt = os.environ["QL3_ATTEMPT_ID"]
    row = {"name": name, "attempt": attempt, "run": os.environ["QL3_RUN_ID"], "pid": os.getpid()}
    path = os.path.join(folder, f"{attempt}.{os.getpid()}.start")
    with open(path + ".tmp", "w") as file:
        json.dump(row, file)
    os.rename(path + ".tmp", path)
    print("started", name, flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not os.path.exists(os.path.join(folder, f"{name}.enough")):
        time.sleep(0.05)
    print("ended", name, flush=True)
    with open(os.path.join(folder, f"{attempt}.end"), "w"):
        pass


main()
