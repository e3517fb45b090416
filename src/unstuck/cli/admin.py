"""Commands that look after the ledger: `migrate`, `tokens`, `alerts`, `audit`, `keygen`."""

import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from unstuck.cli import context
from unstuck.cli.context import Context, command, duration_s
from unstuck.cli.output import Cell, Column, ago, count
from unstuck.cli.run import check_broker_installed
from unstuck.client import views
from unstuck.client.operator import Operator
from unstuck.config import Settings, public_url
from unstuck.domain.api_tokens import ALL, Scope
from unstuck.domain.units import brief
from unstuck.errors import ConfigError
from unstuck.ledger.contract.admin import ApiTokenRecord
from unstuck.ledger.migrate import WAIT_S
from unstuck.ledger.open import open_ledger
from unstuck.notify.alerts.delivery import TargetStatus, target_status
from unstuck.notify.alerts.sender import AlertSender, sending
from unstuck.notify.alerts.targets import send_test


@command()
def keygen(
    common: Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose keys these are: a broker, a client, a worker.")],
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIRECTORY", help="Where to write them.", show_default=True)
    ] = Path(),
) -> None:
    """Make a pair of CURVE keys: NAME.key to give away, NAME.key_secret to keep."""
    check_broker_installed()
    from unstuck.mdp.curve import write_keys

    public, secret = write_keys(directory, name)
    if common.show.as_json:
        common.show.json({"public": str(public), "secret": str(secret)})
    else:
        common.show.say(f"Wrote {public} to give away and {secret} to keep.")


@command()
def migrate(
    common: Context,
    after_restore: Annotated[
        bool,
        typer.Option(
            "--after-restore",
            help="The database was restored from a backup: every worker in it is dead, every token is void, and no "
            "number of a job is given out twice.",
        ),
    ] = False,
    wait: Annotated[
        str,
        typer.Option(help="How long to wait in all for locks that other sessions hold, such as 10m."),
    ] = brief(WAIT_S),
) -> None:
    """Make the ledger's tables or bring them up to date; safe to run twice, even at once."""
    settings = common.settings()
    wait_s = duration_s(wait, "--wait")
    ledger = open_ledger(settings)
    try:
        applied = ledger.migrate(wait_s=WAIT_S if wait_s is None else wait_s)
        voided = Operator(ledger, settings, via="cli").workers.void_attempt_tokens() if after_restore else None
    finally:
        ledger.close()
    show = common.show
    if show.as_json:
        show.json({"url": public_url(settings.url), "applied": applied, "voided_workers": voided})
        return
    for name in applied:
        show.rich("applied ", Cell(name, "bold"))
    show.say(f"The ledger at {public_url(settings.url)} is up to date.", "green")
    if voided is not None:
        show.say(
            f"Void are the tokens of {count(voided, 'worker')}; what they held goes back or is settled by the reaper."
        )


SCOPES = ", ".join([*Scope, ALL])


@command()
def tokens(common: Context, ctx: typer.Context) -> None:
    """List, create and revoke tokens of the HTTP server."""
    if ctx.invoked_subcommand is None:
        _list_tokens(common)


@command()
def create_token(
    common: Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what will use it, for people and the audit log.")],
    scope: Annotated[list[str], typer.Option("--scope", metavar="SCOPE", help=f"{SCOPES}; repeat it or use commas.")],
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="End it after so long, e.g. 30d. Default: never.")
    ] = None,
) -> None:
    """Make a token and print it: this once, and never again."""
    expires_in_s = duration_s(expires, "--expires")
    with common.ledger() as (ledger, settings):
        text, kept = Operator(ledger, settings, via="cli").access.create_token(name, scope, expires_in_s)
    if common.as_json:
        common.show.json({"id": kept.id, "name": kept.name, "scopes": kept.scopes, "token": text})
        return
    common.show.note(f"Token {kept.id} for {name}. It is shown only now, and stored nowhere:")
    common.show.line(text)


@command()
def list_tokens(common: Context) -> None:
    """List tokens: those that stand, and those that are over."""
    _list_tokens(common)


@command()
def revoke_token(common: Context, token: Annotated[str, typer.Argument(metavar="ID|NAME", help="The token.")]) -> None:
    """End a token, with every login that was made with it, within a second."""
    with common.operator() as operator:
        record, changed = operator.access.revoke_token(token)
    if common.as_json:
        common.show.json({"id": record.id, "name": record.name, "revoked": changed})
    elif changed:
        common.show.say(f"Token {record.id} ({record.name}) is revoked.", "green")
    else:
        common.show.say(f"Token {record.id} ({record.name}) was revoked already.", "yellow")


def _list_tokens(common: Context) -> None:
    with common.operator() as operator:
        found = operator.ledger.admin.api_tokens()
    if common.as_json:
        common.show.json([views.token_view(token) for token in found])
        return
    if not found:
        common.show.empty("No token has been made: the HTTP server is open to this machine alone.")
        return
    columns = [Column("id"), Column("name", wide=True), Column("state"), Column("scopes"), Column("created")]
    columns += [Column("by", spare=True), Column("expires")]
    common.show.table(columns, [_token_row(token) for token in found])


def _token_row(token: ApiTokenRecord) -> list[Cell | str]:
    state = "revoked" if token.revoked_at is not None else "valid" if token.valid else "expired"
    return [
        Cell(token.id, "bold"),
        token.name,
        Cell(state, "green" if token.valid else "bright_black"),
        ",".join(token.scopes),
        ago(token.created_at),
        token.created_by,
        "never" if token.expires_at is None else ago(token.expires_at),
    ]


NOT_ARRIVED = 1
CURE = (
    "No alert target is set. Set alerts.targets in unstuck.toml, or $UNSTUCK_ALERTS_TARGETS, to https://… (a signed "
    "webhook) or an Apprise URL."
)


@command()
def alerts(common: Context, ctx: typer.Context) -> None:
    """Whom to tell when something is wrong: list them, try them, or run the sender alone."""
    if ctx.invoked_subcommand is None:
        _list_alerts(common)


@command()
def list_targets(common: Context) -> None:
    """List the targets: when each was told last, what waits for it, since when it fails."""
    _list_alerts(common)


@command()
def send_test_alerts(common: Context) -> None:
    """Send a trial message to each target. Exits 1 if one did not arrive."""
    settings = _with_targets(common.settings())
    trials = send_test(settings.alerts)
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
def run_alerts(common: Context) -> None:
    """Run the sender alone, until a signal ends it."""
    settings = _with_targets(common.settings())
    ledger = context.open_existing(settings)
    try:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        with sending(AlertSender(ledger, settings)):
            stop.wait()
    finally:
        ledger.close()


def _list_alerts(common: Context) -> None:
    settings = common.settings()
    if not settings.alerts.targets:
        common.show.json([]) if common.show.as_json else common.show.note(CURE)
        return
    ledger = context.open_existing(settings)
    try:
        views = target_status(ledger, settings.alerts)
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
    common.show.table(columns, [_alert_row(view, now_s) for view in views], wrap=True)


def _alert_row(view: TargetStatus, now_s: float) -> list[Cell | str]:
    told = ago(view.told_at, now_s) or "never"
    return [view.target, view.kind, str(view.messages), told, str(view.waiting), _state(view, now_s)]


def _state(view: TargetStatus, now_s: float) -> Cell:
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


@command()
def audit(
    common: Context,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="At most so many.")] = 100,
) -> None:
    """List what operators did, newest first."""
    with common.operator() as operator:
        found = operator.ledger.admin.audit(limit=limit)
    if common.as_json:
        common.show.json([views.audit_view(note) for note in found])
        return
    if not found:
        common.show.empty("Nobody has done anything yet.")
        return
    columns = [Column("when"), Column("by"), Column("door"), Column("verb"), Column("target", wide=True), Column("end")]
    rows: list[list[Cell | str]] = [
        [
            Cell(ago(note.at), "bright_black"),
            note.by,
            note.via,
            Cell(note.verb, "bold"),
            note.target,
            Cell("unknown: it never said", "yellow") if note.outcome is None else note.outcome,
        ]
        for note in found
    ]
    common.show.table(columns, rows)
