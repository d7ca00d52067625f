"""The ql3 command and the composition root."""

import sys

# httpx brings a command of its own and loads what that needs (click, rich, pygments) whenever those can be found; ours
# would wait for it at every start. Without it httpx does the same.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
