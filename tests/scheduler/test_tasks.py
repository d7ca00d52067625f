"""Tasks: revisions that never change, edits that compare, mutations that replay, and refusals that name the field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.errors import Ql3Error
from schemas.ids import is_id
from schemas.paging import Page
from schemas.tasks import Execution, Overlap, SecretRef, TaskList, TaskRead, TaskSpec, Terms, Variable
from schemas.triggers import TriggerCreate, TriggerDelete, TriggerSpec, TriggerUpdate
from services.kit.database import NotPermitted, Statement
from services.kit.ids import new_id
from tests.scheduler.conftest import ALICE, ALLOW, PROJECT, Room, cron, spec


async def get(room: Room, task: str, revision: int | None = None) -> Any:
    """One task."""
    return await room.catalogue.get(TaskRead(actor=ALICE, project=PROJECT, task=task, revision=revision))


def with_environment(*variables: Variable) -> TaskSpec:
    """A specification with these variables."""
    return TaskSpec(execution=Execution(command=["/bin/true"], environment=list(variables)))


async def test_a_task_is_made_with_its_triggers(room: Room) -> None:
    task = await room.create("backup", cron("@daily"), cron("@every 2h"), spec=spec("/bin/sh", "-c", "true"))
    assert is_id(task.id)
    assert (task.revision, task.version, task.enabled, task.deleted) == (1, 1, True, False)
    assert [trigger.spec.kind for trigger in task.triggers] == ["cron", "interval"]
    assert task == await get(room, "backup") == await get(room, task.id)


async def test_a_name_is_unique_in_its_project_and_free_again_after_the_end(room: Room) -> None:
    task = await room.create("backup")
    with pytest.raises(Ql3Error) as refused:
        await room.create("backup")
    assert (refused.value.code, refused.value.field) == ("name_taken", "name")
    assert (await room.create("backup", project="other")).name == "backup"
    await room.delete(task)
    with pytest.raises(Ql3Error, match="no such task"):
        await get(room, "backup")
    assert (await get(room, task.id)).deleted
    again = await room.create("backup")
    assert again.id != task.id
    assert (await get(room, "backup")).id == again.id


async def test_an_edit_makes_a_revision_and_old_ones_stay(room: Room) -> None:
    task = await room.create("backup", spec=spec("/bin/echo", "one"))
    edited = await room.update(task, spec("/bin/echo", "two"))
    assert (edited.revision, edited.spec.execution.command) == (2, ["/bin/echo", "two"])
    old = await get(room, "backup", 1)
    assert (old.revision, old.spec.execution.command) == (1, ["/bin/echo", "one"])
    assert old.digest == task.digest != edited.digest
    with pytest.raises(Ql3Error, match="no such revision"):
        await get(room, "backup", 3)


async def test_an_edit_of_what_somebody_changed_meanwhile_is_refused(room: Room) -> None:
    task = await room.create("backup")
    edits = [room.update(task, spec("/bin/echo", str(number))) for number in range(5)]
    outcomes = await asyncio.gather(*edits, return_exceptions=True)
    won = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    lost = [outcome.code for outcome in outcomes if isinstance(outcome, Ql3Error)]
    assert len(won) == 1
    assert lost == ["version_conflict"] * 4
    assert (await get(room, "backup")).revision == 2


async def test_a_mutation_replays_and_its_id_is_of_one_content(room: Room) -> None:
    mutation = new_id()
    task = await room.create("backup", mutation_id=mutation)
    assert await room.create("backup", mutation_id=mutation) == task
    with pytest.raises(Ql3Error) as refused:
        await room.create("other", mutation_id=mutation)
    assert refused.value.code == "mutation_conflict"
    edit = new_id()
    first = await room.update(task, spec("/bin/echo"), mutation_id=edit)
    assert await room.update(task, spec("/bin/echo"), mutation_id=edit) == first
    assert first.revision == 2


async def test_the_same_mutation_at_once_makes_one_task(room: Room) -> None:
    mutation = new_id()
    made = await asyncio.gather(*(room.create("backup", mutation_id=mutation) for _ in range(6)))
    assert {task.id for task in made} == {made[0].id}


async def test_a_change_that_overlaps_with_its_repeat_is_the_same_change(room: Room) -> None:
    task = await room.create("backup", cron("@daily"))
    (trigger,) = task.triggers
    for number in range(1, 9):
        edit, move = new_id(), new_id()
        ask = TriggerUpdate(
            actor=ALICE,
            project=task.project,
            trigger=trigger.id,
            expected_revision=number,
            spec=cron(f"{number} * * * *"),
            mutation_id=move,
        )
        edits = [room.update(task, spec(f"/bin/{number}"), expected=number, mutation_id=edit) for _ in range(5)]
        moves = [room.timetable.update(ask, ALLOW) for _ in range(5)]
        assert {one.revision for one in await asyncio.gather(*edits, *moves)} == {number + 1}


async def test_revisions_cannot_be_changed_nor_deleted(room: Room) -> None:
    await room.create("backup", cron("@daily"))
    for table in ("task_revisions", "task_execution_revisions", "execution_context_recipes", "trigger_revisions"):
        for sql in (f"UPDATE {table} SET content_digest = content_digest", f"DELETE FROM {table}"):
            with pytest.raises(NotPermitted):
                await room.database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))


async def test_every_mutation_has_its_audit_row(room: Room) -> None:
    task = await room.create("backup", cron("@daily"))
    await room.update(task, spec("/bin/echo"))
    await room.enable(task, False)
    await room.enable(task, False)
    await room.enable(task, True)
    await room.delete(task)
    rows = await room.rows("SELECT action, actor_id, project, target FROM audit_events ORDER BY id")
    assert [row["action"] for row in rows] == [
        "task.create",
        "task.update",
        "task.disable",
        "task.enable",
        "task.delete",
    ]
    assert {(row["actor_id"], row["project"], row["target"]) for row in rows} == {("alice", PROJECT, task.id)}


async def test_a_list_goes_by_name_in_pages(room: Room) -> None:
    for name in ("c", "a", "b", "d"):
        labels = {"team": "night"} if name in "ac" else {}
        await room.create(
            name,
            spec=TaskSpec(execution=Execution(command=["/bin/true"]), terms=Terms(labels=labels), folder=f"/{name}"),
        )
    seen: list[str] = []
    cursor = None
    while True:
        page = await room.catalogue.list(TaskList(actor=ALICE, project=PROJECT, page=Page(limit=3, cursor=cursor)))
        seen += [task.name for task in page.items]
        cursor = page.next
        if cursor is None:
            break
    assert seen == ["a", "b", "c", "d"]
    labelled = await room.catalogue.list(TaskList(actor=ALICE, project=PROJECT, label="team=night"))
    assert [task.name for task in labelled.items] == ["a", "c"]
    inside = await room.catalogue.list(TaskList(actor=ALICE, project=PROJECT, folder="/b"))
    assert [task.name for task in inside.items] == ["b"]


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        (spec(""), "invalid", "spec.execution.command[0]"),
        (spec("/bin/echo", "a\0b"), "invalid", "spec.execution.command[1]"),
        (spec("/bin/echo", *["x" * 70_000] * 2), "too_large", "spec.execution.command"),
        (with_environment(Variable(name="A", value="1"), Variable(name="A", value="2")), "invalid", "environment.A"),
        (with_environment(Variable(name="QL3_X", value="1")), "invalid", "environment.QL3_X"),
        (with_environment(Variable(name="A")), "invalid", "environment.A"),
        (with_environment(Variable(name="A", value="1", secret=SecretRef(secret="s"))), "invalid", "environment.A"),
        (with_environment(Variable(name="A", value="\0")), "invalid", "environment.A"),
        (with_environment(Variable(name="BIG", value="x" * 131_070)), "too_large", "environment.BIG"),
        (
            with_environment(*(Variable(name=f"N{n}", value="x" * 100_000) for n in range(3))),
            "too_large",
            "spec.execution.environment",
        ),
        (
            TaskSpec(execution=Execution(command=["x"], working_directory="relative")),
            "invalid",
            "spec.execution.working_directory",
        ),
        (spec(overlap=Overlap(policy="skip", limit=2)), "invalid", "spec.terms.overlap.limit"),
        (TaskSpec(execution=Execution(command=["x"]), parameters={"type": "array"}), "invalid", "spec.parameters"),
    ],
)
async def test_a_wrong_specification_is_refused_by_field(room: Room, wrong: TaskSpec, code: str, field: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        await room.create("wrong", spec=wrong)
    assert refused.value.code == code
    assert refused.value.field is not None
    assert refused.value.field.endswith(field)
    assert await room.rows("SELECT id FROM task_definitions") == []


async def test_the_kernels_limit_is_for_what_goes_through_the_kernel(room: Room) -> None:
    fits = with_environment(Variable(name="BIG", value="x" * (131_071 - 4)))
    assert (await room.create("fits", spec=fits)).revision == 1
    as_file = with_environment(Variable(name="BIG", value="x" * 200_000, as_file=True))
    assert (await room.create("file", spec=as_file)).revision == 1


async def test_a_public_value_with_a_secrets_name_is_warned_about(room: Room) -> None:
    variables = [
        Variable(name="API_TOKEN", value="abc"),
        Variable(name="DB_PASSWORD", secret=SecretRef(secret="db-password")),
        Variable(name="COLOUR", value="red"),
        Variable(name="AUTHOR", value="ada"),
    ]
    task = await room.create("warned", spec=with_environment(*variables))
    (warning,) = task.warnings
    assert "API_TOKEN" in warning
    assert "abc" not in warning


@pytest.mark.parametrize(
    ("trigger", "code", "field"),
    [
        (TriggerSpec(expression="? * * * *"), "cron_invalid", "triggers[0].expression.minute"),
        (TriggerSpec(expression="0 0 30 2 *"), "cron_never_fires", "triggers[0].expression.day of month"),
        (TriggerSpec(expression="@daily", timezone="Mars/Olympus"), "timezone_invalid", "triggers[0].timezone"),
        (TriggerSpec(), "invalid", "triggers[0].expression"),
        (TriggerSpec(kind="once"), "invalid", "triggers[0].at_ms"),
        (TriggerSpec(expression="@once 1960-01-01T00:00:00Z"), "invalid", "triggers[0].expression"),
        (TriggerSpec(expression="@once 9999-12-31T23:59:59Z"), "invalid", "triggers[0].expression"),
        (
            TriggerSpec(expression="@once 9999-12-31T23:59:59-12:00"),
            "cron_invalid",
            "triggers[0].expression.expression",
        ),
        (TriggerSpec(kind="interval", expression="* * * * *"), "invalid", "triggers[0].kind"),
        (TriggerSpec(expression="@daily", catch_up=3), "invalid", "triggers[0].catch_up"),
        (TriggerSpec(expression="@daily", start_at_ms=2, end_at_ms=1), "invalid", "triggers[0].end_at_ms"),
        (TriggerSpec(kind="manual", expression="@daily"), "invalid", "triggers[0].expression"),
        ({"expression": "@daily", "timezon": "UTC"}, "unknown_field", "triggers[0].timezon"),
        ({"expression": 5}, "invalid", "triggers[0].expression"),
    ],
)
async def test_a_wrong_trigger_makes_no_task(room: Room, trigger: Any, code: str, field: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        await room.create("wrong", trigger)
    assert (refused.value.code, refused.value.field) == (code, field)
    assert await room.rows("SELECT id FROM task_definitions") == []


async def test_triggers_are_added_and_taken_away(room: Room) -> None:
    await room.create("backup")
    ask = TriggerCreate(actor=ALICE, project=PROJECT, task="backup", spec=cron("@hourly"), mutation_id=new_id())
    trigger = await room.timetable.create(ask, ALLOW)
    assert await room.timetable.create(ask, ALLOW) == trigger
    assert trigger.next_fire_at_ms is not None
    gone = await room.timetable.delete(TriggerDelete(actor=ALICE, project=PROJECT, trigger=trigger.id), ALLOW)
    assert (gone.enabled, gone.next_fire_at_ms) == (False, None)
    assert (await get(room, "backup")).triggers == []
    with pytest.raises(Ql3Error, match="no such trigger"):
        await room.enable_trigger(trigger, True)


async def test_a_row_that_is_not_what_was_written_is_never_passed_on(room: Room) -> None:
    task = await room.create("backup")
    table = "task_execution_revisions"
    guards = [f"DROP TRIGGER ql3_{table}_no_update"]
    if room.database.dialect == "postgresql":
        pytest.skip("the service's role cannot tamper; the file's owner can")
    for sql in (*guards, f"UPDATE {table} SET execution_template = replace(execution_template, 'true', 'false')"):
        await room.database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))
    with pytest.raises(Ql3Error) as refused:
        await room.run(task.name)
    assert refused.value.code == "revision_unavailable"
    assert room.ledger.runs == {}
