"""Say who may come in through the web door: `tokens create`, `tokens list`, `tokens revoke`."""

from typing import Annotated

import typer

from unstuck.cli.common import Common, command, duration_s
from unstuck.cli.show import Cell, Column, ago
from unstuck.client import views
from unstuck.client.operator import Operator
from unstuck.domain.api_tokens import ALL, Scope
from unstuck.store.records import ApiTokenRecord

SCOPES = ", ".join([*Scope, ALL])


@command()
def tokens(common: Common, ctx: typer.Context) -> None:
    """List, create and revoke tokens of the web door."""
    if ctx.invoked_subcommand is None:
        _list(common)


@command()
def create(
    common: Common,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what will use it, for people and the audit log.")],
    scope: Annotated[list[str], typer.Option("--scope", metavar="SCOPE", help=f"{SCOPES}; repeat it or use commas.")],
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="End it after so long, e.g. 30d. Default: never.")
    ] = None,
) -> None:
    """Make a token and print it: this once, and never again."""
    expires_in_s = duration_s(expires, "--expires")
    with common.writing() as (ledger, settings):
        text, kept = Operator(ledger, settings, door="cli").create_token(name, scope, expires_in_s)
    if common.as_json:
        common.show.json({"id": kept.id, "name": kept.name, "scopes": kept.scopes, "token": text})
        return
    common.show.note(f"Token {kept.id} for {name}. It is shown only now, and stored nowhere:")
    common.show.line(text)


@command()
def list_tokens(common: Common) -> None:
    """List tokens: those that stand, and those that are over."""
    _list(common)


@command()
def revoke(common: Common, token: Annotated[str, typer.Argument(metavar="ID|NAME", help="The token.")]) -> None:
    """End a token, with every login that was made with it, within a second."""
    with common.reading() as operator:
        record, changed = operator.revoke_token(token)
    if common.as_json:
        common.show.json({"id": record.id, "name": record.name, "revoked": changed})
    elif changed:
        common.show.say(f"Token {record.id} ({record.name}) is revoked.", "green")
    else:
        common.show.say(f"Token {record.id} ({record.name}) was revoked already.", "yellow")


def _list(common: Common) -> None:
    with common.reading() as operator:
        found = operator.tokens()
    if common.as_json:
        common.show.json([views.token_view(token) for token in found])
        return
    if not found:
        common.show.empty("No token has been made: the web door is open to this machine alone.")
        return
    columns = [Column("id"), Column("name", wide=True), Column("state"), Column("scopes"), Column("created")]
    columns += [Column("by", spare=True), Column("expires")]
    common.show.table(columns, [_row(token) for token in found])


def _row(token: ApiTokenRecord) -> list[Cell | str]:
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
