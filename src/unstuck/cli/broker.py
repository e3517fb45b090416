"""Open the ZeroMQ door: `broker`, and make keys for it: `keygen`."""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from unstuck import config
from unstuck.cli import ledgers
from unstuck.cli.common import Common, command, log_ledger
from unstuck.config import IN_MEMORY, Settings
from unstuck.domain.errors import ConfigError
from unstuck.mdp import CURE

PACKAGES = ("zmq", "cbor2")


@command(log_level="info")
def broker(
    common: Common,
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
    check_installed()
    from unstuck.mdp.broker import serving

    settings = _settings(common)
    given: dict[str, Any] = {"bind": bind, "insecure": insecure or None}
    mdp = replace(settings.mdp, **{name: value for name, value in given.items() if value is not None})
    if settings.url != IN_MEMORY:
        ledgers.open_or_create(settings).close()
    show = common.show

    def ready(endpoint: str) -> None:
        show.json({"endpoint": endpoint}) if show.as_json else show.say(f"Serving {endpoint}")
        # Whoever started us reads it through a pipe, and nothing more is printed.
        sys.stdout.flush()
        log_ledger("The broker", settings)

    serving.serve(replace(settings, mdp=mdp), ready)


@command()
def keygen(
    common: Common,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose keys these are: a broker, a client, a worker.")],
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIRECTORY", help="Where to write them.", show_default=True)
    ] = Path(),
) -> None:
    """Make a pair of CURVE keys: NAME.key to give away, NAME.key_secret to keep."""
    check_installed()
    from unstuck.mdp.security import write_keys

    public, secret = write_keys(directory, name)
    if common.show.as_json:
        common.show.json({"public": str(public), "secret": str(secret)})
    else:
        common.show.say(f"Wrote {public} to give away and {secret} to keep.")


def _settings(common: Common) -> Settings:
    """Give the settings; here, and only here, the ledger may be in memory: it is gone with the broker."""
    if common.app is None and (common.url or os.environ.get("UNSTUCK_URL")) == IN_MEMORY:
        return replace(config.load({"url": config.DEFAULT_URL}), url=IN_MEMORY)
    return common.settings()


def check_installed() -> None:
    """Raise ConfigError, with the cure, where the packages of the ZeroMQ door are missing."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{CURE} Missing: {', '.join(missing)}.")
