"""Show that a job survives its worker: a fleet, a stream of jobs, a killer, and the score."""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstuck import config
from unstuck.cli.common import Common, command
from unstuck.cli.demo_record import VARIABLE
from unstuck.cli.show import Show

if TYPE_CHECKING:
    from unstuck.cli.demo_summary import Summary

SCHEMA = "unstuck_demo"


@command()
def demo(
    common: Common,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="N", min=1, max=86_400, help="How long jobs stream and workers die.")
    ] = 30.0,
    workers: Annotated[int, typer.Option("--workers", metavar="N", min=1, max=64, help="So many processes.")] = 4,
    kill_every: Annotated[
        float, typer.Option("--kill-every", metavar="SECONDS", min=0, max=86_400, help="0: kill nobody.")
    ] = 2.0,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Serve the page too, where it is installed.")
    ] = True,
) -> None:
    """Watch jobs survive: workers and runners are killed with kill -9, and nothing is lost.

    Runs on SQLite in a fresh temporary directory, or on the ledger that --url names."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="unstuck-demo-"))
    keep = False
    try:
        ledger = _settle_in(common.url, folder)
        # Imported here: the app inside reads the settings that were made just now.
        from unstuck.cli.demo_run import perform

        stream = sys.stderr if common.as_json else sys.stdout
        summary = perform(
            folder,
            stream,
            ledger=ledger,
            seconds=seconds,
            workers=workers,
            kill_every_s=kill_every,
            dashboard=dashboard,
        )
        keep = not summary.ok
        _print(common.show, summary, common.url, folder)
    except KeyboardInterrupt:
        common.show.note("The demo was interrupted; its workers and its files are gone.")
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(0 if summary.ok else 1)


def _settle_in(url: str | None, folder: Path) -> str:
    """Tell the demo's app, here and in the workers, where to work; give the name of the place for people."""
    if url is not None:
        config.check_url(url)
        # Beside a ledger that is in use, in a schema of its own.
        os.environ.setdefault("UNSTUCK_SCHEMA", SCHEMA)
    # Never where $UNSTUCK_URL points by chance: the demo was not asked to go there.
    os.environ["UNSTUCK_URL"] = url or f"sqlite:///{folder}/demo.db"
    os.environ[VARIABLE] = str(folder / "record")
    return "SQLite" if url is None or url.startswith("sqlite:") else "PostgreSQL"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _print(show: Show, summary: "Summary", url: str | None, folder: Path) -> None:
    if show.as_json:
        show.json(summary.as_json() | ({} if summary.ok else {"kept": str(folder)}))
        return
    show.line()
    for cells in summary.lines():
        show.rich(*cells)
    show.line()
    show.rich("  ", summary.verdict())
    if not summary.ok:
        show.rich(f"  Logs of the workers and the record of what ran are kept in {folder}.")
    if url is not None:
        schema = "" if url.startswith("sqlite:") else f"UNSTUCK_SCHEMA={os.environ['UNSTUCK_SCHEMA']} "
        show.rich(f"  Its jobs are still there: {schema}unstuck jobs --url {config.public_url(url)}")
