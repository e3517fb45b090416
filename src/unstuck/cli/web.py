"""Open the web door: `serve`."""

import importlib.util
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from unstuck.cli import ledgers
from unstuck.cli.common import Common, command, log_ledger
from unstuck.domain.errors import ConfigError
from unstuck.http import CURE
from unstuck.notify.alerts.checking import usable_targets

MAX_PROCESSES = 64
PACKAGES = ("fastapi", "uvicorn", "jinja2", "python_multipart")


@command(log_level="info")
def serve(
    common: Common,
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
    check_installed()
    from unstuck.http import server

    settings = common.settings()
    given: dict[str, Any] = {"host": host, "port": port}
    web = replace(settings.web, **{name: value for name, value in given.items() if value is not None})
    # What can never be sent is said before anything is served.
    usable_targets(settings.alerts)
    ledger = ledgers.open_or_create(settings)
    try:
        listener = server.listening_socket(web)
        try:
            server.check_address(web, listener, ledger)
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

    raise typer.Exit(server.serve(settings, web, listener, ready, processes))


def check_installed() -> None:
    """Raise ConfigError, with the cure, where the packages of the web door are missing."""
    if missing := _missing():
        raise ConfigError(f"{CURE} Missing: {', '.join(missing)}.")


def is_installed() -> bool:
    return not _missing()


def _missing() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
