"""Start what runs for long: `worker`, `up` (supervised workers), `reaper` (the watchman alone)."""

import os
import signal
import sys
import threading
from dataclasses import replace
from typing import Annotated

import typer

from unstuck import config
from unstuck.cli import ledgers
from unstuck.cli.app_settings import settings_of
from unstuck.cli.common import Common, Misuse, command
from unstuck.cli.show import Show
from unstuck.config import Recovery
from unstuck.domain.names import checked_name
from unstuck.notify.alerts.sender import sender_of, sending
from unstuck.store.contract import Ledger

MAX_WORKERS = 1_000
STOP_MARGIN_S = 15.0

Target = Annotated[
    str | None, typer.Argument(metavar="MODULE:APP", help="The app; else --app or $UNSTUCK_APP.", show_default=False)
]
Queues = Annotated[str | None, typer.Option("--queues", metavar="A,B", help="Serve these; default: all of the app's.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", metavar="N", min=1, max=4000, help="Jobs at once.")]
Migrate = Annotated[bool, typer.Option("--migrate/--no-migrate", help="Make or update the tables first.")]


@command(log_level="info")
def worker(
    common: Common,
    target: Target = None,
    queues: Queues = None,
    concurrency: Concurrency = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="A name for people; ids are unique anyway.")
    ] = None,
    reaper: Annotated[bool, typer.Option("--reaper/--no-reaper", help="Watch over other workers too.")] = True,
    migrate: Migrate = True,
) -> None:
    """Run a worker. SIGTERM or Ctrl-C drains it; a second one hurries."""
    path = _app_path(common, target, "worker")
    _before(common, migrate)
    if name is not None:
        checked_name(name, "Worker")
    from unstuck.worker.main import run_worker

    code = run_worker(path, queues=_queues(queues), concurrency=concurrency, name=name, reaper=reaper, url=common.url)
    raise typer.Exit(code)


@command(log_level="info")
def up(
    common: Common,
    target: Target = None,
    workers: Annotated[
        int, typer.Option("--workers", "-n", metavar="N", min=1, max=MAX_WORKERS, help="So many processes.")
    ] = 1,
    queues: Queues = None,
    concurrency: Concurrency = None,
    migrate: Migrate = True,
) -> None:
    """Run supervised workers and a reaper in one command: whoever dies is replaced."""
    from unstuck.worker.herald import take_herald
    from unstuck.worker.supervisor import Supervisor

    # First of all: what we start must not speak to systemd in our name, and the next thing is the app's own code.
    herald = take_herald()
    path = _app_path(common, target, "up")
    _before(common, migrate)
    names = _queues(queues)
    settings = settings_of(path)
    if common.url is not None:
        settings = replace(settings, url=common.url)
    arguments = [sys.executable, "-m", "unstuck.cli.main", "worker", path]
    arguments += ["--url", common.url] if common.url is not None else []
    arguments += ["--queues", ",".join(names)] if names else []
    arguments += ["--concurrency", str(concurrency)] if concurrency is not None else []
    ledger = ledgers.open_or_create(settings)
    try:
        # Longer than a worker's own grace: it ends by itself before anybody has to kill it.
        patience_s = settings.shutdown_grace_s + STOP_MARGIN_S
        sender = sender_of(ledger, settings)
        supervisor = Supervisor(arguments, workers, ledger, settings.recovery, stop_grace_s=patience_s, herald=herald)
        with sending(sender):
            raise typer.Exit(supervisor.run())
    finally:
        ledger.close()


@command(log_level="info")
def reaper(
    common: Common,
    once: Annotated[bool, typer.Option("--once", help="One round, for cron; says what it did.")] = False,
) -> None:
    """Run the watchman alone, as a daemon or for one round: finds the dead and settles what they held."""
    settings = common.settings()
    ledger = ledgers.open_existing(settings)
    try:
        if once:
            _one_round(common.show, ledger, settings.recovery)
            return
        from unstuck.reaper.watchman import run_daemon

        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        with sending(sender_of(ledger, settings)):
            run_daemon(ledger, settings.recovery, stop)
    finally:
        ledger.close()


def _one_round(show: Show, ledger: Ledger, recovery: Recovery) -> None:
    from unstuck.reaper.watchman import run_once

    counts = run_once(ledger, recovery).counts()
    if show.as_json:
        show.json(counts)
    elif counts:
        show.say(", ".join(f"{name}: {number}" for name, number in counts.items()))
    else:
        show.say("All is well: nothing to do.", "green")


def _app_path(common: Common, target: str | None, command: str) -> str:
    path = target or common.app_path
    if path is None:
        raise Misuse(f"Name the app as module:attribute, for example `unstuck {command} app:app`.")
    return path


def _queues(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise Misuse("--queues names no queue. Write --queues a,b, or leave it out to serve all.")
    return tuple(checked_name(name, "Queue") for name in names)


def _before(common: Common, migrate: bool) -> None:
    """Check what can be checked without the app, and hand down what the app's process must know."""
    if common.url is not None:
        config.check_url(common.url)
    if not migrate:
        os.environ["UNSTUCK_AUTO_MIGRATE"] = "false"
