"""Workers. Owner: dispatcher."""

from __future__ import annotations

from schemas import endpoints
from schemas.workers import Worker, WorkerDrain, WorkerList
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("workers")


@operations.get("/workers", Paged, Listing[Worker])
async def list_workers(call: Call[Paged]) -> Listing[Worker]:
    """The workers and what they can do."""
    return listing(await call.ask(endpoints.WORKERS_LIST, WorkerList(actor=call.actor, page=call.input.page)))


@operations.post("/workers/{worker}/drain", Nothing, Worker)
async def drain_worker(call: Call[Nothing]) -> Worker:
    """Give a worker nothing new; what it runs goes on."""
    return await _set_drained(call, drain=True)


@operations.post("/workers/{worker}/resume", Nothing, Worker)
async def resume_worker(call: Call[Nothing]) -> Worker:
    """Let a drained worker work again."""
    return await _set_drained(call, drain=False)


async def _set_drained(call: Call[Nothing], *, drain: bool) -> Worker:
    question = WorkerDrain(actor=call.actor, worker=call.slug("worker"), drain=drain)
    return (await call.ask(endpoints.WORKERS_DRAIN, question)).worker
