"""What the options of `task create` and `task update` say about a task, written into its spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from services.cli import execution as how
from services.cli.options import milliseconds, pair, size

Env = Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="A public variable; may be repeated.")]
SecretNames = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="[ENV=]NAME", help="A secret as variable ENV, else its NAME in capitals."),
]
Timeout = Annotated[
    str | None, typer.Option("--timeout", metavar="DURATION", help="End each attempt after 30s, 5m, 2h, …")
]
Grace = Annotated[str | None, typer.Option("--grace", metavar="DURATION", help="Between TERM and KILL; default 5s.")]
MaxAttempts = Annotated[
    int | None, typer.Option("--max-attempts", metavar="N", help="Automatic attempts, 1 to 16; default 1.")
]
Safety = Annotated[
    Literal["unknown", "idempotent", "deduplicated"] | None,
    typer.Option("--safety", help="May it run again when its worker was lost? unknown (default) says no."),
]
Overlap = Annotated[
    Literal["allow", "skip", "queue", "replace"] | None,
    typer.Option("--overlap", help="When it is due while it still runs; default allow."),
]
OverlapLimit = Annotated[
    int | None,
    typer.Option("--overlap-limit", metavar="N", help="With allow: at most so many at once; with queue: so many wait."),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--concurrency", metavar="KEY=N", help="At most N at once of all tasks that name KEY; repeatable."),
]
Workdir = Annotated[str | None, typer.Option("--workdir", metavar="DIR", help="The working directory on the worker.")]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label; may be repeated.")]
Folder = Annotated[str | None, typer.Option("--folder", metavar="FOLDER", help="A folder for people, such as team/a.")]
Notes = Annotated[str | None, typer.Option("--notes", metavar="TEXT", help="Notes for people: who owns it, and why.")]
Parameters = Annotated[
    str | None,
    typer.Option("--parameters", metavar="JSON", help="A JSON Schema of a run's inputs; @FILE reads it, - from stdin."),
]
Title = Annotated[str | None, typer.Option("--title", metavar="TEXT", help="A title for people.")]


def write_spec(
    spec: dict[str, Any],
    *,
    command: list[str] | None = None,
    env: list[str] | None = None,
    secret: list[str] | None = None,
    unset: list[str] | None = None,
    timeout: str | None = None,
    grace: str | None = None,
    max_attempts: int | None = None,
    safety: str | None = None,
    overlap: str | None = None,
    overlap_limit: int | None = None,
    concurrency: list[str] | None = None,
    needs_approval: bool | None = None,
    workdir: str | None = None,
    label: list[str] | None = None,
    title: str | None = None,
    folder: str | None = None,
    notes: str | None = None,
    parameters: str | None = None,
    file: list[str] | None = None,
    secret_file: list[str] | None = None,
    log_quota: str | None = None,
    runtime: str | None = None,
    requirement: list[str] | None = None,
    script: Path | None = None,
    image: str | None = None,
    executor: str | None = None,
    clear: list[str] | None = None,
    **bounds: Any,
) -> dict[str, Any]:
    """The spec with what was given; what was not given stays as it is. Raises `invalid`, naming the option.

    `bounds` are those of `execution.write_limits`.
    """
    from schemas.errors import Ql3Error
    from services.cli.typed import json_from

    execution: dict[str, Any] = dict(spec.get("execution", {}))
    terms: dict[str, Any] = dict(spec.get("terms", {}))
    how.clear(execution, terms, clear)
    _set(execution, "command", command)
    _set(execution, "timeout_ms", None if timeout is None else milliseconds(timeout, "--timeout"))
    _set(execution, "grace_ms", None if grace is None else milliseconds(grace, "--grace"))
    _set(execution, "working_directory", workdir)
    _set(execution, "log_quota_bytes", None if log_quota is None else size(log_quota, "--log-quota"))
    how.write_runtime(execution, kind=runtime, requirements=requirement, script=script)
    how.write_limits(execution, **bounds)
    variables: dict[str, Any] = {variable["name"]: variable for variable in execution.get("environment", [])}
    for name in unset or []:
        if variables.pop(name, None) is None:
            raise Ql3Error("invalid", f"The task has no variable {name}.", field="--unset")
    given = [*map(_public, env or []), *map(how.file_variable, file or []), *map(_secret, secret or [])]
    given += [{**_secret(text), "as_file": True} for text in secret_file or []]
    for variable in given:
        variables[variable["name"]] = variable
    if variables or "environment" in execution:
        execution["environment"] = list(variables.values())
    how.write_container(execution, terms, image=image, executor=executor)
    retry: dict[str, Any] = dict(terms.get("retry", {}))
    _set(retry, "max_attempts", max_attempts)
    _set(retry, "safety", safety)
    _set(terms, "retry", retry or None)
    rule: dict[str, Any] = dict(terms.get("overlap", {}))
    if overlap is not None and overlap != rule.get("policy"):
        rule = {"policy": overlap}  # a limit means something else under another policy
    _set(rule, "limit", overlap_limit)
    _set(terms, "overlap", rule or None)
    if concurrency:
        keys = {one["key"]: one for one in terms.get("concurrency", [])}
        keys |= {one["key"]: one for one in map(_key, concurrency)}
        terms["concurrency"] = list(keys.values())
    _set(terms, "needs_approval", needs_approval)
    if label:
        terms["labels"] = {**terms.get("labels", {}), **dict(pair(text, "--label") for text in label)}
    written = {**spec, "execution": execution}
    _set(written, "terms", terms or None)
    _set(written, "title", title)
    _set(written, "folder", folder)
    _set(written, "notes", notes)
    _set(written, "parameters", None if parameters is None else json_from(parameters, "--parameters"))
    return written


def _set(where: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        where[name] = value


def _key(text: str) -> dict[str, Any]:
    from schemas.errors import Ql3Error

    key, most = pair(text, "--concurrency")
    if not (most.isascii() and most.isdigit()):
        raise Ql3Error("invalid", "Write KEY=N, such as db=3.", field="--concurrency")
    return {"key": key, "limit": int(most[:9])}


def _public(text: str) -> dict[str, Any]:
    name, value = pair(text, "--env")
    return {"name": name, "value": value}


def _secret(text: str) -> dict[str, Any]:
    variable, found, name = text.partition("=")
    if not found:
        variable, name = text.upper().replace("-", "_"), text
    return {"name": variable, "secret": {"secret": name}}
