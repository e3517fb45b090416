"""Commands that start a process: `worker`, `up`, `serve`, `broker`, `reaper`, the desktop popups and the demo."""

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstuck import config
from unstuck.cli import context
from unstuck.cli.app_settings import settings_of
from unstuck.cli.context import Context, UsageError, command, log_ledger
from unstuck.cli.output import Output
from unstuck.config import IN_MEMORY, Recovery, Settings
from unstuck.config.urls import public_url
from unstuck.demo.record import VARIABLE
from unstuck.desktop import DESKTOP_INSTALL_HINT
from unstuck.domain.text import checked_name
from unstuck.errors import ConfigError
from unstuck.http import HTTP_INSTALL_HINT
from unstuck.ledger.contract import Ledger
from unstuck.mdp import MDP_INSTALL_HINT
from unstuck.notify.alerts.sender import sender_of, sending
from unstuck.notify.alerts.targets import usable_targets

if TYPE_CHECKING:
    from unstuck.demo.score import Score


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
    common: Context,
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
    _check_linux("worker")
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
    )
    raise typer.Exit(code)


@command(log_level="info")
def up(
    common: Context,
    target: Target = None,
    workers: Annotated[
        int, typer.Option("--workers", "-n", metavar="N", min=1, max=MAX_WORKERS, help="So many processes.")
    ] = 1,
    queues: Queues = None,
    concurrency: Concurrency = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Run the HTTP server too (`unstuck serve`).")] = False,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address of the HTTP server.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", min=0, max=65535, help="Port of the HTTP server; 8642 if none.")
    ] = None,
    migrate: Migrate = True,
) -> None:
    """Run supervised workers and a reaper in one command: whoever dies is replaced."""
    _check_linux("up")
    from unstuck.worker.sd_notify import take_sd_notifier
    from unstuck.worker.supervised import SupervisedDashboard
    from unstuck.worker.supervisor import Supervisor

    # First of all: what we start must not speak to systemd in our name, and the next thing is the app's own code.
    sd_notifier = take_sd_notifier()
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
    companions = [SupervisedDashboard("HTTP server", _serve_command(common, path, host, port))] if dashboard else []
    ledger = context.open_or_create(settings)
    try:
        # Longer than a worker's own grace: it ends by itself before anybody has to kill it.
        patience_s = settings.shutdown_grace_s + STOP_MARGIN_S
        supervisor = Supervisor(
            arguments,
            workers,
            ledger,
            settings.recovery,
            stop_grace_s=patience_s,
            sd_notifier=sd_notifier,
            companions=companions,
        )
        with sending(sender_of(ledger, settings)):
            log_ledger("The supervisor", settings)
            code = supervisor.run()
        raise typer.Exit(code)
    finally:
        ledger.close()


@command(log_level="info")
def reaper(
    common: Context,
    once: Annotated[bool, typer.Option("--once", help="One round, for cron; says what it did.")] = False,
) -> None:
    """Run only the reaper: detect dead workers and recover their jobs."""
    settings = common.settings()
    ledger = context.open_existing(settings)
    try:
        if once:
            _one_round(common.show, ledger, settings.recovery)
            return
        from unstuck.maintenance.service import run_daemon

        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        with sending(sender_of(ledger, settings)):
            log_ledger("The reaper", settings)
            run_daemon(ledger, settings.recovery, stop)
    finally:
        ledger.close()


def _one_round(show: Output, ledger: Ledger, recovery: Recovery) -> None:
    from unstuck.maintenance.service import run_once

    counts = run_once(ledger, recovery).counts()
    if show.as_json:
        show.json(counts)
    elif counts:
        show.say(", ".join(f"{name}: {number}" for name, number in counts.items()))
    else:
        show.say("All is well: nothing to do.", "green")


def _serve_command(common: Context, path: str, host: str | None, port: int | None) -> list[str]:
    """Return the command line of the HTTP server, or raise ConfigError if it could not start."""
    check_http_installed()
    arguments = [sys.executable, "-m", "unstuck.cli.main", "serve", path]
    for option, value in (("--url", common.url), ("--host", host), ("--port", port)):
        arguments += [option, str(value)] if value is not None else []
    return arguments


def _check_linux(command: str) -> None:
    """Raise ConfigError if this system cannot run workers."""
    if sys.platform != "linux":
        raise ConfigError(
            f"Workers run on Linux, and this system is {sys.platform}: use `unstuck {command}` on a Linux machine. "
            "Clients can enqueue jobs and read results from here."
        )


def _app_path(common: Context, target: str | None, command: str) -> str:
    path = target or common.app_path
    if path is None:
        raise UsageError(f"Name the app as module:attribute, for example `unstuck {command} app:app`.")
    return path


def _queues(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise UsageError("--queues names no queue. Write --queues a,b, or leave it out to serve all.")
    return tuple(checked_name(name, "Queue") for name in names)


def _before(common: Context, migrate: bool) -> None:
    """Check what can be checked without the app, and hand down what the app's process must know."""
    if common.url is not None:
        config.check_url(common.url)
    if not migrate:
        os.environ["UNSTUCK_AUTO_MIGRATE"] = "false"


MAX_PROCESSES = 64
HTTP_PACKAGES = ("fastapi", "uvicorn", "jinja2", "python_multipart")


@command(log_level="info")
def serve(
    common: Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:APP", help="Take the settings from this app.", show_default=False),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", min=0, max=65535, help="Default: 8642; 0: a free one.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=1, max=MAX_PROCESSES, help="Serve from N processes.")
    ] = 1,
) -> None:
    """Serve the API, the page and the metrics over HTTP."""
    common = replace(common, app=target) if target is not None else common
    check_http_installed()
    from unstuck.http import server

    settings = common.settings()
    given: dict[str, Any] = {"host": host, "port": port}
    http = replace(settings.http, **{name: value for name, value in given.items() if value is not None})
    # What can never be sent is said before anything is served.
    usable_targets(settings.alerts)
    ledger = context.open_or_create(settings)
    try:
        listener = server.listening_socket(http)
        try:
            server.check_address(http, listener, ledger)
        except BaseException:
            listener.close()
            raise
    finally:
        ledger.close()
    show = common.show

    def ready(url: str) -> None:
        show.json({"url": url}) if show.as_json else show.say(f"Serving {url}")
        # Whoever started us reads it through a pipe, and nothing more is printed.
        sys.stdout.flush()
        log_ledger("The HTTP server", settings)

    raise typer.Exit(server.serve(settings, http, listener, ready, processes))


def check_http_installed() -> None:
    """Raise ConfigError, with the cure, if packages of the HTTP server are missing."""
    if missing := _missing():
        raise ConfigError(f"{HTTP_INSTALL_HINT} Missing: {', '.join(missing)}.")


def is_http_installed() -> bool:
    return not _missing()


def _missing() -> list[str]:
    return [name for name in HTTP_PACKAGES if importlib.util.find_spec(name) is None]


BROKER_PACKAGES = ("zmq", "cbor2")


@command(log_level="info")
def broker(
    common: Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:APP", help="Take the settings from this app.", show_default=False),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option("--bind", metavar="ENDPOINT", help="Default: tcp://127.0.0.1:5555; port 0: a free one."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without CURVE: everybody may call and serve.")
    ] = False,
) -> None:
    """Speak Majordomo over ZeroMQ: every request is a job."""
    common = replace(common, app=target) if target is not None else common
    check_broker_installed()
    from unstuck.mdp.broker import server

    settings = _settings(common)
    given: dict[str, Any] = {"bind": bind, "insecure": insecure or None}
    mdp = replace(settings.mdp, **{name: value for name, value in given.items() if value is not None})
    if settings.url != IN_MEMORY:
        context.open_or_create(settings).close()
    show = common.show

    def ready(endpoint: str) -> None:
        show.json({"endpoint": endpoint}) if show.as_json else show.say(f"Serving {endpoint}")
        # Whoever started us reads it through a pipe, and nothing more is printed.
        sys.stdout.flush()
        log_ledger("The broker", settings)

    server.run_broker(replace(settings, mdp=mdp), ready)


def _settings(common: Context) -> Settings:
    """Give the settings; here, and only here, the ledger may be in memory: it is gone with the broker."""
    if common.app is None and (common.url or os.environ.get("UNSTUCK_URL")) == IN_MEMORY:
        return replace(config.load({"url": config.DEFAULT_URL}), url=IN_MEMORY)
    return common.settings()


def check_broker_installed() -> None:
    """Raise ConfigError, with the cure, where the packages of the ZeroMQ door are missing."""
    if missing := [name for name in BROKER_PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{MDP_INSTALL_HINT} Missing: {', '.join(missing)}.")


@command()
def popups(
    common: Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:APP", help="Take the settings from this app.", show_default=False),
    ] = None,
    dialogs: Annotated[
        bool,
        typer.Option("--dialogs/--no-dialogs", help="Open a dialog for bad news, or show it at the tray icon alone."),
    ] = True,
) -> None:
    """Show what happens on your desktop: a tray icon, and a popup when workers die or are missing."""
    common = replace(common, app=target) if target is not None else common
    try:
        from unstuck.desktop.app import run
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("PySide6"):
            raise
        raise ConfigError(DESKTOP_INSTALL_HINT) from error
    except ImportError as error:
        # It is there, and a library of the system that it needs is not.
        raise ConfigError(f"Qt cannot be loaded: {error}. Install that library of your system.") from error
    # Who looks never makes a ledger, and never changes its tables.
    settings = replace(common.settings(), auto_migrate=False)
    context.open_existing(settings).close()
    where, show = public_url(settings.url), common.show

    def began() -> None:
        show.json({"following": where}) if show.as_json else show.say(f"Following {where}")
        sys.stdout.flush()

    run(settings, dialogs, began)


SCHEMA = "unstuck_demo"


@command()
def demo(
    common: Context,
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
    _check_linux("demo")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="unstuck-demo-"))
    keep = False
    try:
        ledger = _settle_in(common.url, folder)
        # Imported here: the app inside reads the settings that were made just now.
        from unstuck.demo.run import run_demo

        stream = sys.stderr if common.as_json else sys.stdout
        summary = run_demo(
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


def _print(show: Output, summary: "Score", url: str | None, folder: Path) -> None:
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
