"""`ql3 up`, `serve`, `migrate` and `demo`: the commands that run the platform itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from schemas.errors import Ql3Error
from services.cli.refusals import refusals, say

T = TypeVar("T")
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", envvar="QL3_DATA", help="The data folder; ./ql3-data when absent."),
]
StopRuns = Annotated[
    bool, typer.Option("--stop-runs", help="At the end, cancel what runs instead of leaving it to the process host.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(up)
    app.command()(serve)
    app.command()(migrate)
    app.command()(demo)
    app.command()(provision)
    app.command()(keyring)


def up(
    data: Data = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where panel and API listen; 127.0.0.1:5700.")
    ] = None,
    stop_runs: StopRuns = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log at info level on stderr.")] = False,
) -> None:
    """Run everything on this box, in the foreground, until Ctrl-C or SIGTERM."""
    with refusals():
        from services.cli.output import when
        from services.cli.up import Ready, config_for, run
        from services.kit.config import load
        from services.kit.logging import configure

        config = config_for(data, listen, load())
        configure("info" if verbose else max_level(config.log_level))

        def ready(state: Ready) -> None:
            line = say(f"ql3 is ready at {state.url}", f"ql3 已就绪：{state.url}")
            until = when(state.owner_link_until_ms)
            if state.owner_link:
                line += say(
                    f" - become its owner, until {until}: {state.owner_link}",
                    f" - 成为所有者，{until} 之前有效：{state.owner_link}",
                )
            elif until:
                line += say(
                    f" - the owner link of the last start is good until {until}; a start after that makes another",
                    f" - 上次启动的所有者链接在 {until} 之前有效；此后启动会生成新的链接",
                )
            print(line, flush=True)

        def stopping(cancelling: bool) -> None:
            if cancelling:
                line = say("stopping, and cancelling what runs", "正在停止，并取消正在运行的任务")
            else:
                line = say("stopping; what runs goes on in the process host", "正在停止；正在运行的任务由进程宿主继续")
            print(line, file=sys.stderr, flush=True)

        run_async(run(config, stop_runs=stop_runs, on_ready=ready, on_stopping=stopping))


def serve(
    services: Annotated[list[str], typer.Argument(metavar="SERVICE...", help="One or more services by name.")],
    migrating: Annotated[bool, typer.Option("--migrate", help="Migrate the services' databases first.")] = False,
    stop_runs: StopRuns = False,
) -> None:
    """Run the named services against a NATS server and a database of your own (QL3_NATS_URL, QL3_DATABASE_URL)."""
    with refusals():
        from services.cli.serve import run
        from services.kit.config import load
        from services.kit.logging import configure

        config = load()
        configure(config.log_level)
        run_async(
            run(
                config,
                services,
                migrating=migrating,
                stop_runs=stop_runs,
                on_ready=lambda names: print(f"serving {', '.join(names)}", flush=True),
            )
        )


def migrate() -> None:
    """Bring databases, roles and streams to this version, before services of this version start."""
    with refusals():
        from services.cli.serve import migrate_all
        from services.kit.config import load
        from services.kit.logging import configure

        config = load()
        configure(config.log_level)
        done = run_async(migrate_all(config))
        for line in done:
            print(line)
        if not done:
            print(say("nothing to do", "没有需要迁移的内容"))


def demo() -> None:
    """Show the main job in a temporary folder: a schedule, a live log, an approval, an artifact. Leaves nothing."""
    with refusals():
        from services.cli.demo import run

        raise typer.Exit(run())


def provision(
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder for the files.")],
    worker: Annotated[
        list[str] | None, typer.Option("--worker", metavar="ID", help="A worker that gets a NATS user; repeatable.")
    ] = None,
    nats_host: Annotated[str, typer.Option("--nats-host", help="Where nats-server listens.")] = "0.0.0.0",  # noqa: S104
    nats_port: Annotated[int, typer.Option("--nats-port", min=1, max=65535, help="And at which port.")] = 4222,
    nats_store: Annotated[str, typer.Option("--nats-store", help="JetStream's folder, as it sees it.")] = "/data",
    database: Annotated[
        str, typer.Option("--database", metavar="HOST:PORT/NAME", help="PostgreSQL, as the services see it.")
    ] = "postgres:5432/ql3",
) -> None:
    """Write passwords and a nats-server configuration for an installation with a process per service."""
    with refusals():
        from services.cli.provision import provision as write

        workers = worker or ["local"]
        names = write(output, workers=workers, host=nats_host, port=nats_port, store=nats_store, database=database)
        for name in names:
            print(output / name)


def keyring(
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="The vault's keyring; kept when it is there.")],
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Encrypt under a fresh key from now on; old keys stay for what they hold.")
    ] = False,
) -> None:
    """Make the vault's keyring (mode 0600) before its first start; `ql3 up` does it by itself."""
    with refusals():
        import importlib

        vault: Any = importlib.import_module("services.vault.keyring")
        path = file.absolute()
        try:
            if rotate:
                vault.rotate(path, vault.KeyringFile(path).read().active_key_id)
            else:
                vault.provision(path)
        except OSError as error:
            raise Ql3Error("setup_invalid", f"It cannot be written ({error.strerror}).", field="--file") from error
        print(file)


def max_level(level: str) -> str:
    """On a terminal `up` shows one line, so only warnings follow it unless more was asked for."""
    return "warning" if level == "info" else level


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop, which halves the cost of a message; on asyncio's own loop where uvloop is not built."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
