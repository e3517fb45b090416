"""Look after those who are alerted: `alerts list`, `alerts test`, `alerts run`."""

import signal
import threading
import time

import typer

from unstuck.cli import ledgers
from unstuck.cli.common import Common, command
from unstuck.cli.show import Cell, Column, ago
from unstuck.config import Settings
from unstuck.domain.errors import ConfigError
from unstuck.notify.alerts.roster import TargetView, look_at_targets
from unstuck.notify.alerts.sender import AlertSender, sending
from unstuck.notify.alerts.trying import try_targets

NOT_ARRIVED = 1
CURE = (
    "No alert target is set. Set alerts.targets in unstuck.toml, or $UNSTUCK_ALERTS_TARGETS, to https://… (a signed "
    "webhook) or an Apprise URL."
)


@command()
def alerts(common: Common, ctx: typer.Context) -> None:
    """Whom to tell when something is wrong: list them, try them, or run the sender alone."""
    if ctx.invoked_subcommand is None:
        _list(common)


@command()
def list_targets(common: Common) -> None:
    """List the targets: when each was told last, what waits for it, since when it fails."""
    _list(common)


@command()
def test(common: Common) -> None:
    """Send a trial message to each target. Exits 1 if one did not arrive."""
    settings = _with_targets(common.settings())
    trials = try_targets(settings.alerts)
    show = common.show
    if show.as_json:
        show.json(trials)
    else:
        rows = [
            [Cell(one.target), Cell("arrived", "green") if one.arrived else Cell("failed", "bold red"), Cell(one.why)]
            for one in trials
        ]
        show.table([Column("target"), Column("result"), Column("why", wide=True)], rows, wrap=True)
    if not all(one.arrived for one in trials):
        raise typer.Exit(NOT_ARRIVED)


@command(log_level="info")
def run(common: Common) -> None:
    """Run the sender alone, until a signal ends it."""
    settings = _with_targets(common.settings())
    ledger = ledgers.open_existing(settings)
    try:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        with sending(AlertSender(ledger, settings)):
            stop.wait()
    finally:
        ledger.close()


def _list(common: Common) -> None:
    settings = common.settings()
    if not settings.alerts.targets:
        common.show.json([]) if common.show.as_json else common.show.note(CURE)
        return
    ledger = ledgers.open_existing(settings)
    try:
        views = look_at_targets(ledger, settings.alerts)
    finally:
        ledger.close()
    if common.show.as_json:
        common.show.json(views)
        return
    columns = [
        *(Column("target"), Column("kind", spare=True), Column("messages", right=True), Column("told")),
        *(Column("waiting", right=True), Column("state", wide=True)),
    ]
    now_s = time.time()
    common.show.table(columns, [_row(view, now_s) for view in views], wrap=True)


def _row(view: TargetView, now_s: float) -> list[Cell | str]:
    told = ago(view.told_at, now_s) or "never"
    return [view.target, view.kind, str(view.messages), told, str(view.waiting), _state(view, now_s)]


def _state(view: TargetView, now_s: float) -> Cell:
    if not view.known:
        return Cell("no sender has met it yet", "yellow")
    if view.failing_since is None:
        return Cell("well", "green")
    times = "once" if view.failures == 1 else f"{view.failures} times in a row"
    return Cell(f"failing since {ago(view.failing_since, now_s)}, {times}: {view.error}", "bold red")


def _with_targets(settings: Settings) -> Settings:
    if not settings.alerts.targets:
        raise ConfigError(CURE)
    return settings
