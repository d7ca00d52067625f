"""A held run that ends without us voids its request, also when the fact of its end was lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import pytest_asyncio

from schemas.base import encode
from schemas.errors import Ql3Error
from schemas.runs import RunChanged
from schemas.system import FeedItem, FeedPage
from services.approval.store import holds
from services.approval.store.holds import Held
from services.approval.watching import SOURCE, HeldRuns
from services.kit.ids import new_id
from tests.approval.conftest import HOUR, NOW, Works, hold


class Dispatcher:
    """The facts and the runs of the other side."""

    def __init__(self) -> None:
        self.pages: dict[str | None, FeedPage] = {}
        self.asked: list[str | None] = []
        self.ended: set[str] = set()
        self.gone: set[str] = set()
        self.looked: list[str] = []
        self.away = False

    async def read(self, after: str | None) -> FeedPage:
        if self.away:
            raise Ql3Error("unavailable")
        self.asked.append(after)
        return self.pages.get(after, FeedPage(items=[], position=after, more=False))

    async def look(self, held: Held) -> Any:
        if self.away:
            raise Ql3Error("unavailable")
        self.looked.append(held.run)
        if held.run in self.gone:
            raise Ql3Error("not_found")
        return msgspec.defstruct("Seen", ["status"])("cancelled" if held.run in self.ended else "waiting_approval")


def fact(run: str, status: Any = "cancelled") -> FeedItem:
    changed = RunChanged(
        project="default",
        run_id=run,
        task_id=new_id(),
        task_name="backup",
        status=status,
        version=2,
        trigger_type="manual",
        trigger_id=None,
        attempt_id=None,
        worker_id=None,
        exit_code=None,
        error_code=None,
        at_ms=NOW,
        events=[],
    )
    return FeedItem(subject="ql3.evt.run.default.x.y", schema="run.changed/1", payload=msgspec.Raw(encode(changed)))


class Watch:
    """A watch on a real database."""

    def __init__(self, works: Works) -> None:
        self.works = works
        self.other = Dispatcher()
        self.begin()

    def begin(self) -> None:
        """The watch's next life."""
        self.runs = HeldRuns(self.works.gate, self.works.approvals, read=self.other.read, look=self.other.look)

    async def pending(self, **more: Any) -> str:
        order = hold(now_ms=self.works.clock.now_ms(), **more)
        await self.works.approvals.hold([order])
        return order.request_id

    async def state(self, run: str) -> str:
        return (await self.works.approvals.view("default", run)).state

    async def position(self) -> str | None:
        return await self.works.database.read(lambda tx: holds.position(tx, SOURCE))


@pytest_asyncio.fixture
async def watch(works: Works) -> Watch:
    return Watch(works)


async def test_a_lost_fact_is_read_from_the_feed(watch: Watch) -> None:
    cancelled, timed_out, waits = [await watch.pending() for _ in range(3)]
    approved = await watch.works.approved()
    watch.other.pages = {
        None: FeedPage(items=[fact(cancelled), fact(new_id()), fact(waits, "queued")], position="3", more=True),
        "3": FeedPage(items=[fact(timed_out, "timed_out"), fact(approved)], position="5", more=False),
    }
    assert await watch.runs.step() is True
    assert [await watch.state(run) for run in (cancelled, timed_out, waits)] == ["withdrawn", "pending", "pending"]
    # Killed between two pages: the next life goes on behind what was dealt with.
    watch.begin()
    assert await watch.runs.step() is None
    assert [await watch.state(run) for run in (timed_out, approved, waits)] == ["withdrawn", "withdrawn", "pending"]
    assert await watch.position() == "5"
    await watch.runs.step()
    assert watch.other.asked == [None, "3", "5"]


async def test_a_position_is_stored_only_behind_what_was_voided(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await watch.pending()
    watch.other.pages = {None: FeedPage(items=[fact(run)], position="1", more=False)}

    async def broken(_: str) -> bool:
        raise Ql3Error("database_unavailable")

    monkeypatch.setattr(watch.works.approvals, "run_ended", broken)
    with pytest.raises(Ql3Error):
        await watch.runs.step()
    assert await watch.position() is None
    monkeypatch.undo()
    await watch.runs.step()
    assert (await watch.state(run), await watch.position()) == ("withdrawn", "1")


async def test_behind_a_gap_every_waiting_run_is_asked_about(watch: Watch) -> None:
    await watch.runs.step()
    ended, gone, waits = [await watch.pending() for _ in range(3)]
    expired = await watch.pending(ttl_ms=60_000)
    watch.works.clock.advance(60_000)
    watch.other.ended, watch.other.gone = {ended}, {gone}
    watch.other.pages = {None: FeedPage(items=[], position="9", more=False, gap=True)}
    await watch.runs.step()
    assert [await watch.state(run) for run in (ended, gone, waits)] == ["withdrawn", "withdrawn", "pending"]
    assert expired not in watch.other.looked


async def test_a_run_that_was_over_before_its_request_came(watch: Watch) -> None:
    await watch.runs.step()
    watch.other.looked.clear()
    over, waits = [await watch.pending() for _ in range(2)]
    watch.other.ended = {over}
    watch.runs.asked([over, waits])
    await watch.runs.step()
    assert sorted(watch.other.looked) == sorted([over, waits])
    assert (await watch.state(over), await watch.state(waits)) == ("withdrawn", "pending")
    await watch.runs.step()
    assert len(watch.other.looked) == 2


async def test_while_the_dispatcher_is_away_nothing_is_forgotten(watch: Watch) -> None:
    run = await watch.pending(ttl_ms=HOUR)
    watch.other.away = True
    watch.other.ended = {run}
    assert await watch.runs.step() is None
    assert await watch.state(run) == "pending"
    watch.other.away = False
    await watch.runs.step()
    assert await watch.state(run) == "withdrawn"
