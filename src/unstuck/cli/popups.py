"""Tell people at a screen: `popups`, a tray icon with the list of events, and a dialog when workers die."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from unstuck.cli import ledgers
from unstuck.cli.common import Common, command
from unstuck.config.public_url import public_url
from unstuck.desktop import CURE
from unstuck.domain.errors import ConfigError


@command()
def popups(
    common: Common,
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:APP", help="Take the settings from this app.", show_default=False),
    ] = None,
    dialogs: Annotated[
        bool,
        typer.Option("--dialogs/--no-dialogs", help="Open a dialog for bad news, or show it at the tray icon alone."),
    ] = True,
) -> None:
    """Show what happens on your desktop: a tray icon, the list of events, a popup when workers die or are missing."""
    common = replace(common, app=target) if target is not None else common
    try:
        from unstuck.desktop.running import run
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("PySide6"):
            raise
        raise ConfigError(CURE) from error
    except ImportError as error:
        # It is there, and a library of the system that it needs is not.
        raise ConfigError(f"Qt cannot be loaded: {error}. Install that library of your system.") from error
    # Who looks never makes a ledger, and never changes its tables.
    settings = replace(common.settings(), auto_migrate=False)
    ledgers.open_existing(settings).close()
    where, show = public_url(settings.url), common.show

    def began() -> None:
        show.json({"following": where}) if show.as_json else show.say(f"Following {where}")
        sys.stdout.flush()

    run(settings, dialogs, began)
