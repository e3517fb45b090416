"""The HTTP server: an API for workers and clients in any language, the dashboard, metrics.

`create_app` returns an ASGI app to mount into another; `unstuck serve` runs it by itself.
"""

from typing import TYPE_CHECKING, Any

from unstuck.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from unstuck.app import App

HTTP_INSTALL_HINT = "The HTTP server needs more packages: pip install 'unstuck[http]'."


def create_app(app: "App | str | None" = None, *, open: bool = False, **http: Any) -> "FastAPI":
    """Return an ASGI app for the ledger of an app, of a URL, or of the settings.

    `http` are settings of the HTTP server (see `unstuck.config.HttpSettings`): list in `allowed_hosts` the names that
    clients use. It cannot know who can reach it, so every request needs a token. With `open`, none does until the first
    token is created: only for an app that authenticates its users itself."""
    try:
        from unstuck.http.app import create_app
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("unstuck"):
            raise
        raise ConfigError(f"{HTTP_INSTALL_HINT} ({error})") from error
    return create_app(app, open=open, **http)
