"""`ql3 provision`: the passwords and the nats-server configuration of an installation of one's own.

Written once and kept: a second run adds what is new (another worker) and changes nothing else. The folder is 0700; the
files in it are 0644, because a container reads them through a bind mount as a user of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from schemas.errors import Ql3Error
from schemas.ids import is_slug
from schemas.subjects import SERVICES
from services.kit import whole_files

OWNERS = tuple(service for service in SERVICES if service != "worker")


def provision(folder: Path, *, workers: Sequence[str], port: int, host: str, store: str, database: str) -> list[str]:
    """Write the files; answers their names. Raises `invalid` for a worker id that is not a slug.

    `store` is the JetStream folder as the server sees it; `database` is `host:port/name` as the services see it.
    """
    from services.kit.natsserver import render_config
    from services.kit.natsusers import MAINTENANCE, OPERATOR, users

    for worker in workers:
        if not is_slug(worker):
            raise Ql3Error("invalid", "A worker's id is lower-case letters, digits and hyphens.", field="--worker")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        nats_users = [*OWNERS, OPERATOR, MAINTENANCE, *(f"worker-{worker}" for worker in workers)]
        known = [path.name.removeprefix("nats_worker-") for path in folder.glob("nats_worker-*")]
        nats_users += [f"worker-{worker}" for worker in known if worker not in workers]
        nats = {user: _password(folder / f"nats_{user}") for user in nats_users}
        owners = {service: _password(folder / f"database_{service}") for service in OWNERS}
        admin = _password(folder / "postgres_password")
        _write(folder / "database_passwords.json", msgspec.json.format(msgspec.json.encode(owners)) + b"\n")
        _write(folder / "database_admin_url", f"postgresql://postgres:{admin}@{database}\n".encode())
        config = {
            "server_name": "ql3",
            "host": host,
            "port": port,
            "max_payload": 1024 * 1024,
            "jetstream": {"store_dir": store},
            "authorization": {"timeout": 5, "users": users(nats, sorted({*workers, *known}))},
        }
        _write(folder / "nats.conf", render_config(config).encode())
    except OSError as error:
        raise Ql3Error("setup_invalid", f"It cannot be written ({error.strerror}).", field="--output") from error
    return sorted(path.name for path in folder.iterdir())


def _password(path: Path) -> str:
    if path.exists():
        return path.read_text().strip()
    word = secrets.token_urlsafe(32)
    _write(path, word.encode())
    return word


def _write(path: Path, content: bytes) -> None:
    whole_files.replace(path, content, mode=0o644)
