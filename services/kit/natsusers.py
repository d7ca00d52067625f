"""Who may say and hear what on the bus: one NATS user per service, per worker, for operators and for maintenance.

The same table makes the configuration of the embedded server and of a server that is set up by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from schemas.endpoints import ARTIFACTS_RETIRED, ATTEMPTS_START, CONTEXT_OPEN, WORKERS_BEAT, WORKERS_REGISTER
from schemas.ids import is_slug
from schemas.subjects import COMMANDS, DEAD, EVENTS, SERVICES, STREAMS, WORKERS

OPERATOR: Final = "operator"
MAINTENANCE: Final = "maintenance"

_WORKER_ORDERS: Final = frozenset({"dispatcher", "retention"})
"""Who sends orders to workers."""
_READS: Final = ("STREAM.NAMES", "STREAM.LIST", "STREAM.INFO.*", "CONSUMER.NAMES.*", "CONSUMER.LIST.*")


def users(passwords: Mapping[str, str], workers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The `users` of a server's `authorization`, for every user in `passwords` that is known here."""
    rows = {service: service_permissions(service) for service in SERVICES if service != "worker"}
    rows[OPERATOR] = operator_permissions()
    rows[MAINTENANCE] = maintenance_permissions()
    for worker in workers:
        rows[f"worker-{worker}"] = worker_permissions(worker)
    return [
        {"user": name, "password": passwords[name], "permissions": permissions}
        for name, permissions in rows.items()
        if name in passwords
    ]


def service_permissions(service: str) -> dict[str, Any]:
    """A service asks, orders and tells; it hears its own inbox, endpoints and answers, reads its own orders only."""
    publish = [
        f"_INBOX_{service}.>",
        "ql3.rpc.>",
        "ql3.cmd.>",
        "ql3.evt.>",
        "ql3.ack.*",
        f"ql3.dead.{service}.*",
        *_declare_streams(),
        *_consume(COMMANDS.name, service, f"ql3.cmd.{service}.>"),
    ]
    if service in _WORKER_ORDERS:
        publish.append("ql3.worker.*.*")
    subscribe = [
        f"_INBOX_{service}.>",
        f"ql3.rpc.{service}.>",
        f"ql3.ack.{service}",
        "ql3.evt.>",
        *_micro(service),
    ]
    if service == "gateway":
        # People follow logs and see to dead letters through the gateway, which asks policy first.
        subscribe.append("ql3.log.>")
        # It shows dead letters and, on an owner's word, sends one again to where it came from.
        publish += [f"$JS.API.STREAM.MSG.{verb}.{DEAD.name}" for verb in ("GET", "DELETE")]
        publish.append("ql3.worker.*.*")
    return _permissions(publish, subscribe)


def worker_permissions(worker: str) -> dict[str, Any]:
    """A worker speaks only on subjects that end in its own id, and hears only what is for it.

    Live log chunks are the one exception (`ql3.log.<project>.<run>.<attempt>`): they are shown and never kept.
    """
    if not is_slug(worker):
        raise ValueError("a worker's id is a slug")
    user = f"worker-{worker}"
    endpoints = (ATTEMPTS_START, WORKERS_REGISTER, WORKERS_BEAT, CONTEXT_OPEN, ARTIFACTS_RETIRED)
    publish = [
        *(f"{endpoint.subject}.{worker}" for endpoint in endpoints),
        "ql3.rpc.vault.key",
        f"ql3.cmd.dispatcher.report.{worker}",
        "ql3.log.*.*.*",
        "ql3.dead.worker.*",
        *_consume(WORKERS.name, worker, f"ql3.worker.{worker}.>"),
    ]
    subscribe = [f"_INBOX_{user}.>", f"ql3.rpc.worker.{worker}.>", f"ql3.ack.{worker}", *_micro("worker")]
    return _permissions([*publish, f"_INBOX_{user}.>"], subscribe)


def operator_permissions() -> dict[str, Any]:
    """Looks inside with the `nats` command: facts, orders, dead letters, statistics, JetStream reads; no questions."""
    publish = ["$SRV.>", *(f"$JS.API.{read}" for read in _READS), "$JS.API.INFO", "$JS.API.CONSUMER.INFO.*.*"]
    # To page through facts and dead letters; orders are a work queue and are not touched by looking.
    for stream in (EVENTS.name, DEAD.name):
        publish += [
            f"$JS.API.STREAM.MSG.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}.>",
        ]
    subscribe = ["_INBOX.>", f"_INBOX_{OPERATOR}.>", "ql3.evt.>", "ql3.cmd.>", "ql3.dead.>"]
    return _permissions(publish, subscribe)


def maintenance_permissions() -> dict[str, Any]:
    """`ql3 migrate` and the sending again of dead letters: streams, consumers, orders."""
    publish = [f"_INBOX_{MAINTENANCE}.>", "$JS.API.>", "ql3.cmd.>", "ql3.worker.*.*", "$SRV.>"]
    return _permissions(publish, [f"_INBOX_{MAINTENANCE}.>", "ql3.dead.>", "ql3.evt.>"])


def _declare_streams() -> list[str]:
    # Creating is not changing: the server refuses a creation that differs from what is there.
    return [f"$JS.API.STREAM.CREATE.{stream.name}" for stream in STREAMS]


def _consume(stream: str, consumer: str, subjects: str) -> list[str]:
    return [
        f"$JS.API.CONSUMER.CREATE.{stream}.{consumer}.{subjects}",
        f"$JS.API.CONSUMER.INFO.{stream}.{consumer}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}",
        f"$JS.ACK.{stream}.{consumer}.>",
    ]


def _micro(service: str) -> list[str]:
    verbs = ("PING", "INFO", "STATS")
    name = f"ql3-{service}"
    return [f"$SRV.{verb}{rest}" for verb in verbs for rest in ("", f".{name}", f".{name}.*")]


def _permissions(publish: Sequence[str], subscribe: Sequence[str]) -> dict[str, Any]:
    return {
        "publish": {"allow": list(publish)},
        "subscribe": {"allow": list(subscribe)},
        # Answers go to the asker's inbox, which nobody else may write to or hear.
        "allow_responses": {"max": 1, "expires": "1m"},
    }
