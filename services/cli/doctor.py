"""`ql3 doctor`: what is well, what is not, and what to do about it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from services.cli.options import Data, Json


class Check(NamedTuple):
    """One finding. `exit_code` is that of the command when this is what is wrong."""

    name: str
    ok: bool
    detail: str
    exit_code: int = 1


NAMES_ZH: Final = {
    "data folder": "数据目录",
    "free space": "剩余空间",
    "service": "服务",
    "ready": "就绪",
    "whole": "完整",
    "sign-in": "登录",
    "workers": "执行节点",
}
"""Names of checks as people read them; files and programs keep theirs, and JSON is English always."""


def doctor_command(as_json: Json = False, data: Data = None) -> None:
    """Check the set-up and the running system. Exit code 0: all is well; 5: not reachable or not ready; else 1 or 6."""
    from services.cli import output
    from services.cli.words import chinese, say

    checks = list(run_checks(data))
    if as_json:
        items = [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in checks]
        output.document({"items": items, "next": None})
    else:
        output.table(
            [say("CHECK", "检查"), say("RESULT", "结果"), ""],
            (
                (
                    NAMES_ZH.get(check.name, check.name) if chinese() else check.name,
                    say("well", "正常") if check.ok else say("NOT WELL", "异常"),
                    check.detail,
                )
                for check in checks
            ),
        )
    wrong = [check.exit_code for check in checks if not check.ok]
    if wrong:
        raise typer.Exit(max(wrong))


def run_checks(data: Path | None) -> list[Check]:
    """Every check that makes sense; those behind an unreachable service are left out."""
    from schemas.errors import Ql3Error
    from services.cli.client import connect, data_folder
    from services.cli.words import error_line

    checks = [_python()]
    local = data is not None or not os.environ.get("QL3_URL")
    if local:
        checks += _folder(data_folder(data))
    try:
        client = connect(data)
    except Ql3Error as error:
        return [*checks, Check("service", False, error_line(error), error.kind.exit_code)]
    with client:
        for name, look in _LOOKS:
            found = _guarded(name, look, client)
            checks.append(found)
            if name == "service" and not found.ok:
                break
    return checks


def _guarded(name: str, look: Callable[[Any], Check], client: Any) -> Check:
    from schemas.errors import Ql3Error
    from services.cli.words import error_line

    try:
        return look(client)
    except Ql3Error as error:
        return Check(name, False, error_line(error), error.kind.exit_code)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), version)


def _folder(folder: Path) -> list[Check]:
    from services.cli.output import size
    from services.cli.words import say

    if not folder.is_dir():
        return [Check("data folder", False, say(f"{folder} is not there", f"{folder} 不存在"), 5)]
    checks: list[Check] = []
    mode = stat.S_IMODE(folder.stat().st_mode)
    checks.append(Check("data folder", mode & 0o077 == 0, f"{folder} {mode:04o}"))
    for name in ("console.json", "keys/keyring.json", "nats/credentials.json"):
        path = folder / name
        if path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
            checks.append(Check(name, mode & 0o077 == 0, f"{mode:04o}"))
    free = shutil.disk_usage(folder).free
    checks.append(Check("free space", free >= 256 * 1024 * 1024, size(free)))
    return checks


def _alive(client: Any) -> Check:
    answer = client.root("/livez")
    return Check("service", answer.status_code == 200, f"/livez {answer.status_code}", 5)


def _ready(client: Any) -> Check:
    answer = client.root("/readyz")
    detail = "; ".join(_told(answer, "reasons")) or f"/readyz {answer.status_code}"
    return Check("ready", answer.status_code == 200, detail, 5)


def _whole(client: Any) -> Check:
    from services.cli.words import say

    missing = _told(client.root("/readyz"), "degraded")
    return Check("whole", not missing, "; ".join(missing) or say("nothing else is missing", "没有其他缺失"))


def _told(answer: Any, name: str) -> list[str]:
    try:
        return [str(reason) for reason in answer.json().get(name, [])]
    except (ValueError, AttributeError):
        return []


def _signed_in(client: Any) -> Check:
    found = client.get("/projects", limit=200)["items"]
    return Check("sign-in", True, ", ".join(project["id"] for project in found))


def _workers(client: Any) -> Check:
    from services.cli.words import say

    found = client.get("/workers", limit=200)["items"]
    online = [worker["id"] for worker in found if worker["status"] == "online"]
    return Check("workers", bool(online), ", ".join(online) or say("no worker is online", "没有在线的节点"))


_LOOKS: tuple[tuple[str, Callable[[Any], Check]], ...] = (
    ("service", _alive),
    ("ready", _ready),
    ("whole", _whole),
    ("sign-in", _signed_in),
    ("workers", _workers),
)
