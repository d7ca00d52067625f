"""Tasks kept in files: applied all or none, idempotent, with a preview that is the truth; revisions compared."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import Ql3Error
from schemas.paging import Page
from schemas.tasks import (
    ApplyAnswer,
    Execution,
    RevisionList,
    TaskDiff,
    TaskFile,
    TaskList,
    TaskRestore,
    TasksApply,
    TaskSpec,
    Variable,
)
from schemas.triggers import TriggerCreate, TriggerSpec
from services.kit.clock import ManualClock
from services.kit.differences import differences
from services.scheduler.files import Files
from tests.scheduler.conftest import ALICE, ALLOW, PROJECT, Room, cron, spec


def file(name: str, *triggers: Any, **more: Any) -> TaskFile:
    """A task in a file."""
    return TaskFile(name=name, spec=more.pop("spec", spec()), triggers=list(triggers), **more)


async def apply(room: Room, *tasks: TaskFile, dry_run: bool = False) -> ApplyAnswer:
    """Apply files."""
    files = Files(room.database, room.clock, room.catalogue, room.timetable)
    return await files.apply(TasksApply(actor=ALICE, project=PROJECT, tasks=list(tasks), dry_run=dry_run), ALLOW)


async def stored(room: Room) -> list[tuple[str, int, bool, list[str | None]]]:
    """Names, revisions, whether enabled, and expressions."""
    page = await room.catalogue.list(TaskList(actor=ALICE, project=PROJECT))
    return [
        (task.name, task.revision, task.enabled, sorted(str(one.spec.expression) for one in task.triggers))
        for task in page.items
    ]


async def test_files_are_applied_once_and_then_are_so(room: Room) -> None:
    wanted = [file("a", {"expression": "@daily"}, {"expression": "0 12 * * MON"}), file("b", enabled=False)]
    first = await apply(room, *wanted)
    assert [item.action for item in first.items] == ["created", "created"]
    before = await stored(room)
    assert before == [("a", 1, True, ["0 0 * * *", "0 12 * * mon"]), ("b", 1, False, [])]
    again = await apply(room, *wanted)
    assert [(item.action, item.changes) for item in again.items] == [("unchanged", [])] * 2
    assert await stored(room) == before


async def test_a_dry_run_tells_what_would_change_and_changes_nothing(room: Room) -> None:
    await apply(room, file("a", {"expression": "@daily"}))
    rows = await room.rows("SELECT count(*) AS count FROM audit_events")
    told = await apply(
        room, file("a", {"expression": "@hourly"}, spec=spec("/bin/echo"), enabled=False), file("new"), dry_run=True
    )
    assert told.dry_run
    assert [(item.name, item.action) for item in told.items] == [("a", "changed"), ("new", "created")]
    changes = {change.path: (change.before, change.after) for change in told.items[0].changes}
    assert changes["spec.execution.command[0]"] == ("/bin/true", "/bin/echo")
    assert changes["triggers"] == ({"expression": "0 0 * * *"}, {"expression": "0 * * * *"})
    assert changes["enabled"] == (True, False)
    assert await stored(room) == [("a", 1, True, ["0 0 * * *"])]
    assert await room.rows("SELECT count(*) AS count FROM audit_events") == rows


async def test_a_changed_trigger_keeps_its_id_and_its_history(room: Room, clock: ManualClock) -> None:
    await apply(room, file("a", {"expression": "@hourly"}, {"expression": "@every 5m"}))
    triggers = {row["kind"]: row["id"] for row in await room.rows("SELECT id, kind FROM triggers")}
    clock.advance(3_600_000)
    await room.look()
    await apply(room, file("a", {"expression": "@daily"}, {"expression": "@every 5m"}))
    after = await room.rows("SELECT id, kind, revision FROM triggers WHERE deleted = 0 ORDER BY kind")
    assert [(row["kind"], row["id"], row["revision"]) for row in after] == [
        ("cron", triggers["cron"], 2),
        ("interval", triggers["interval"], 1),
    ]


async def test_triggers_that_no_file_names_go_and_webhooks_stay(room: Room) -> None:

    await apply(room, file("a", {"expression": "@hourly"}, {"kind": "boot"}))
    hook = TriggerCreate(
        actor=ALICE, project=PROJECT, task="a", spec=TriggerSpec(kind="webhook"), token_digest="a" * 64
    )
    await room.timetable.create(hook, ALLOW)
    await apply(room, file("a", {"expression": "@hourly"}))
    rows = await room.rows("SELECT kind FROM triggers WHERE deleted = 0 ORDER BY kind")
    assert [row["kind"] for row in rows] == ["cron", "webhook"]


async def test_one_wrong_task_keeps_all_from_being_applied(room: Room) -> None:
    with pytest.raises(Ql3Error) as refused:
        await apply(room, file("good"), file("bad", {"expression": "61 * * * *"}))
    assert (refused.value.code, refused.value.field) == ("cron_invalid", "bad.triggers[0].expression.minute")
    with pytest.raises(Ql3Error) as refused:
        await apply(room, file("twice"), file("twice"))
    assert refused.value.field == "twice"
    assert await stored(room) == []


async def test_a_disabled_trigger_is_enabled_again_by_its_file(room: Room) -> None:
    await apply(room, file("a", {"expression": "@hourly"}))
    await room.enable_trigger(await room.trigger(), False)
    answer = await apply(room, file("a", {"expression": "@hourly"}))
    assert answer.items[0].action == "changed"
    trigger = await room.trigger()
    assert (trigger.enabled, trigger.next_fire_at_ms is not None) == (True, True)


# Revisions


async def test_the_order_of_files_that_follow_each_other_does_not_count(room: Room) -> None:
    def after(name: str) -> dict[str, str]:
        return {"kind": "after_task", "after_task": name}

    await apply(room, file("a"))
    answer = await apply(room, file("a", after("z")), file("z"))
    assert [item.warnings for item in answer.items] == [[], []]
    await apply(room, file("a"), file("z", after("a")))
    answer = await apply(room, file("a", after("z"), after("x")), file("z"))
    assert answer.items[0].warnings == ["There is no task `x` to follow yet."]
    for wrong in (file("z", after("a")), file("x", after("x"))):
        with pytest.raises(Ql3Error) as refused:
            await apply(room, wrong)
        assert (refused.value.code, refused.value.field) == ("invalid", f"{wrong.name}.triggers.after_task")


async def test_revisions_are_listed_compared_and_restored(room: Room) -> None:
    one = TaskSpec(
        execution=Execution(
            command=["/bin/echo", "one"], environment=[Variable(name="A", value="1"), Variable(name="B", value="2")]
        )
    )
    two = TaskSpec(
        execution=Execution(
            command=["/bin/echo", "two"], environment=[Variable(name="B", value="3"), Variable(name="C", value="4")]
        )
    )
    task = await room.create("a", spec=one)
    await room.update(task, two)
    diff = await room.catalogue.diff(TaskDiff(actor=ALICE, project=PROJECT, task="a", before=1, after=2))
    assert [(change.path, change.before, change.after) for change in diff.changes] == [
        ("execution.command[1]", "one", "two"),
        ("execution.environment.A", {"name": "A", "value": "1"}, None),
        ("execution.environment.B.value", "2", "3"),
        ("execution.environment.C", None, {"name": "C", "value": "4"}),
    ]
    ask = TaskRestore(actor=ALICE, project=PROJECT, task="a", revision=1, expected_revision=2)
    restored = await room.catalogue.restore(ask, ALLOW)
    assert (restored.revision, restored.spec) == (3, one)
    with pytest.raises(Ql3Error) as refused:
        await room.catalogue.restore(ask, ALLOW)
    assert refused.value.code == "version_conflict"
    seen: list[int] = []
    cursor = None
    while True:
        page = await room.catalogue.revisions(
            RevisionList(actor=ALICE, project=PROJECT, task="a", page=Page(limit=2, cursor=cursor))
        )
        seen += [row.revision for row in page.items]
        assert {row.created_by.id for row in page.items} == {"alice"}
        cursor = page.next
        if cursor is None:
            break
    assert seen == [3, 2, 1]


def test_differences_are_bounded() -> None:
    changes, more = differences({}, {f"k{number:04}": number for number in range(500)})
    assert len(changes) == 200
    assert more
    ((change,), more) = differences({"a": "x"}, {"a": "y" * 5_000})
    assert not more
    assert len(change.after) == 2_001


def test_what_is_equal_has_no_differences() -> None:
    assert differences(cron("@daily"), cron("@daily")) == ([], False)
