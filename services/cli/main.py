"""The `ql3` command."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Final

import typer

from services.cli import files, history, occasion, platform
from services.cli.approval import approval_app
from services.cli.audit import audit_app
from services.cli.authority import project_app, role_app
from services.cli.credential import credential_app
from services.cli.cron import cron_app
from services.cli.dead import dead_app
from services.cli.doctor import doctor_command
from services.cli.identity import identity_app
from services.cli.nats import nats_app
from services.cli.refusals import chinese, refuse
from services.cli.retention import retention_app
from services.cli.run import run_app
from services.cli.secret import secret_app
from services.cli.task import task_app
from services.cli.trigger import trigger_app
from services.cli.worker import worker_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help is the same everywhere and starts faster
    pretty_exceptions_enable=False,  # a traceback with local values would show secrets
)

platform.register(app)
files.register(app)
history.register(task_app)
occasion.register(trigger_app)
app.add_typer(task_app, name="task")
app.add_typer(trigger_app, name="trigger")
app.add_typer(run_app, name="run")
app.add_typer(secret_app, name="secret")
app.add_typer(worker_app, name="worker")
app.add_typer(approval_app, name="approval")
app.add_typer(project_app, name="project")
app.add_typer(role_app, name="role")
app.add_typer(identity_app, name="identity")
app.add_typer(audit_app, name="audit")
app.add_typer(retention_app, name="retention")
app.add_typer(cron_app, name="cron")
app.add_typer(credential_app, name="credential")
app.add_typer(dead_app, name="dead")
app.add_typer(nats_app, name="nats")
app.command("doctor")(doctor_command)


def _version(wanted: bool) -> None:
    if wanted:
        from services.kit.version import VERSION

        print(f"ql3 {VERSION}")
        raise typer.Exit


BROKEN_PIPE: Final = 128 + 13
"""As a shell tells the end by SIGPIPE."""


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """ql3 runs people's scripts and never loses, doubles or forgets a run.

    Exit codes: 0 success (with --wait: the run succeeded), 1 the run failed, 2 usage or refused input, 3 cancelled, 4
    timed out, 5 the service cannot be reached, 6 denied; 130 interrupted, 141 the reader of the output has gone.
    """


def main() -> None:
    """Entry point of the `ql3` console script: every end is an exit code of the list above."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command with these arguments; its exit code. Errors are one line on standard error."""
    from schemas.errors import Ql3Error

    try:
        answer = app(arguments, prog_name="ql3", standalone_mode=False)
    except Ql3Error as error:
        return refuse(error, arguments)
    except (BrokenPipeError, SystemExit):
        # Whoever read our output has had enough (typer turns that into an exit of its own); the command is not done.
        _say_no_more()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _usage(error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _say_no_more()
    return answer if isinstance(answer, int) else 0


def _say_no_more() -> None:
    # What is still buffered must not raise again at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _usage(error: Exception) -> int:
    show = getattr(error, "show", None)
    if callable(show):  # a usage error of the command line
        if chinese() and type(error).__name__ != "NoArgsIsHelpError":  # help is English always
            _show_in_chinese(error)
        else:
            show()
        return 2
    if type(error).__name__ == "Abort":
        return 130
    raise error


def _show_in_chinese(error: Any) -> None:
    from services.cli import details

    context = getattr(error, "ctx", None)
    if context is not None:
        usage = str(context.get_usage()).removeprefix("Usage: ")
        print(f"用法: {usage}\n试试 '{context.command_path} --help'。\n", file=sys.stderr)
    print(f"错误: {details.usage(str(error.format_message()))}", file=sys.stderr)


if __name__ == "__main__":
    main()
