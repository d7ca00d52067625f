"""The loops that every service with tables runs beside its own."""

from __future__ import annotations

from services.kit import audit, metrics, outbox
from services.kit.database import Database
from services.kit.loops import Aside, Loop


def upkeep(database: Database, publisher: outbox.Publisher, *, aside: Aside | None = None) -> list[Loop]:
    """The outbox's relay and pruner and the audit's sealer, not started yet. Start them with the service, stop them
    after its own loops, so that what those committed last still goes out.

    `aside` is what the relay waits for before it publishes; only for an outbox of facts, which nobody rings again.
    """

    async def count_backlog() -> None:
        metrics.OUTBOX.labels(database.service).set(await database.read(outbox.backlog))

    metrics.look_at(f"outbox of {database.service}", count_backlog)
    relay = outbox.Relay(database, publisher)
    pruner, sealer = outbox.Pruner(database), audit.Sealer(database)
    return [
        Loop("outbox-relay", relay.step, every_s=outbox.FALLBACK_S, bell=relay.bell, aside=aside),
        Loop("outbox-pruner", pruner.step, every_s=outbox.PRUNE_EVERY_S),
        Loop("audit-sealer", sealer.step, every_s=audit.FALLBACK_S, bell=sealer.bell),
    ]
