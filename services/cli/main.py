"""The `ql3` command."""

import typer

from services.cli import platform
from services.cli.cron import cron_app

app = typer.Typer(no_args_is_help=True, add_completion=False)

platform.register(app)
app.add_typer(cron_app, name="cron")


@app.callback()
def root() -> None:
    """ql3 runs people's scripts and never loses, doubles or forgets a run."""


def main() -> None:
    """Entry point of the `ql3` console script."""
    app()


if __name__ == "__main__":
    main()
