"""Open the web door: `serve`."""

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from unstuck.cli import ledgers
from unstuck.cli.common import Common, command
from unstuck.domain.errors import ConfigError
from unstuck.http import CURE


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
) -> None:
    """Serve the API, the page and the metrics over HTTP."""
    common = replace(common, app=target) if target is not None else common
    try:
        from unstuck.http import server
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("unstuck"):
            raise
        raise ConfigError(f"{CURE} ({error})") from error
    settings = common.settings()
    given: dict[str, Any] = {"host": host, "port": port}
    web = replace(settings.web, **{name: value for name, value in given.items() if value is not None})
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

    server.serve(settings, web, listener, ready)
