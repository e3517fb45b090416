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
from unstuck.cli.common import Common, Misuse, command, log_ledger
from unstuck.cli.show import Show
from unstuck.cli.web import check_installed
from unstuck.config import Recovery
from unstuck.domain.names import checked_name
from unstuck.metrics.serving import LOOPBACK, Listen, served
from unstuck.metrics.tallies import Tallies
from unstuck.notify.alerts.sender import sender_of, sending
from unstuck.store.contract import Ledger

MAX_WORKERS = 1_000
STOP_MARGIN_S = 15.0

Target = Annotated[
    str | None, typer.Argument(metavar="MODULE:APP", help="The app; else --app or $UNSTUCK_APP.", show_default=False)
]
Queues = Annotated[str | None, typer.Option("--queues", metavar="A,B", help="Serve these; default: all of the app's.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", metavar="N", min=1, max=4000, help="Jobs at once.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", metavar="N", min=0, max=65535, help="Serve this process's own /metrics; 0: a free port."
    ),
]
MetricsHost = Annotated[
    str, typer.Option("--metrics-host", metavar="ADDRESS", help="Where to serve them. No token is asked for.")
]
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
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
) -> None:
    """Run a worker. SIGTERM or Ctrl-C drains it; a second one hurries."""
    path = _app_path(common, target, "worker")
    _before(common, migrate)
    if name is not None:
        checked_name(name, "Worker")
    from unstuck.worker.main import run_worker

    code = run_worker(
        path,
        queues=_queues(queues),
        concurrency=concurrency,
        name=name,
        reaper=reaper,
        url=common.url,
        metrics=_listen(metrics_host, metrics_port),
    )
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
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Serve the web door too (`unstuck serve`).")] = False,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Of the web door.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", min=0, max=65535, help="Of the web door; default: 8642.")
    ] = None,
    migrate: Migrate = True,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
) -> None:
    """Run supervised workers and a reaper in one command: whoever dies is replaced."""
    from unstuck.worker.companion import Companion
    from unstuck.worker.herald import take_herald
    from unstuck.worker.supervisor import Supervisor

    # First of all: what we start must not speak to systemd in our name, and the next thing is the app's own code.
    herald = take_herald()
    path = _app_path(common, target, "up")
    _before(common, migrate)
    names = _queues(queues)
    settings = settings_of(path)
    if common.url is not None:
        config.check_url(common.url)
        settings = replace(settings, url=common.url)
    arguments = [sys.executable, "-m", "unstuck.cli.main", "worker", path]
    arguments += ["--url", common.url] if common.url is not None else []
    arguments += ["--queues", ",".join(names)] if names else []
    arguments += ["--concurrency", str(concurrency)] if concurrency is not None else []
    companions = [Companion("Web door", _web_door(common, path, host, port))] if dashboard else []
    ledger = ledgers.open_or_create(settings)
    try:
        # Longer than a worker's own grace: it ends by itself before anybody has to kill it.
        patience_s = settings.shutdown_grace_s + STOP_MARGIN_S
        tallies = Tallies()
        supervisor = Supervisor(
            arguments,
            workers,
            ledger,
            settings.recovery,
            stop_grace_s=patience_s,
            herald=herald,
            companions=companions,
            tallies=tallies,
            own=lambda number: _metrics_of_place(metrics_host, metrics_port, number),
        )
        with served(tallies, _listen(metrics_host, metrics_port)), sending(sender_of(ledger, settings)):
            log_ledger("The supervisor", settings)
            code = supervisor.run()
        raise typer.Exit(code)
    finally:
        ledger.close()


@command(log_level="info")
def reaper(
    common: Common,
    once: Annotated[bool, typer.Option("--once", help="One round, for cron; says what it did.")] = False,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
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
        tallies = Tallies()
        with served(tallies, _listen(metrics_host, metrics_port)), sending(sender_of(ledger, settings)):
            log_ledger("The reaper", settings)
            run_daemon(ledger, settings.recovery, stop, tallies=tallies)
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


def _web_door(common: Common, path: str, host: str | None, port: int | None) -> list[str]:
    """Give the command line of the web door; whether it can be run at all is found out before anything is started."""
    check_installed()
    arguments = [sys.executable, "-m", "unstuck.cli.main", "serve", path]
    for option, value in (("--url", common.url), ("--host", host), ("--port", port)):
        arguments += [option, str(value)] if value is not None else []
    return arguments


def _listen(host: str, port: int | None) -> Listen | None:
    return None if port is None else Listen(port, host)


def _metrics_of_place(host: str, port: int | None, number: int) -> list[str]:
    """Give each worker the port after the one before it; the first port is the supervisor's own."""
    if port is None:
        return []
    own = 0 if port == 0 else port + number
    return ["--metrics-port", str(own), "--metrics-host", host]


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
