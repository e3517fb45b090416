"""The web door: an API for workers and clients in any language, a live page for people, metrics.

`create_app` gives an ASGI app to mount into another; `unstuck serve` runs it by itself.
"""

from typing import TYPE_CHECKING, Any

from unstuck.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from unstuck.app import App

HTTP_INSTALL_HINT = "The web door needs more packages: pip install 'unstuck[http]'."


def create_app(app: "App | str | None" = None, *, open: bool = False, **web: Any) -> "FastAPI":
    """Give the web door of an app, or of the ledger that a URL or the settings name, as an ASGI app.

    `web` are settings of the HTTP API (see `unstuck.config.HttpSettings`): name in `allowed_hosts` under what it will
    be asked for.
    It cannot know who can reach it, so it asks everybody for a token. With `open` it asks nobody, for as long as no
    token was ever made: only for an app that asks for itself."""
    try:
        from unstuck.http.app import create_app
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("unstuck"):
            raise
        raise ConfigError(f"{HTTP_INSTALL_HINT} ({error})") from error
    return create_app(app, open=open, **web)
