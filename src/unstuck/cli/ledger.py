"""Look after the ledger itself: `migrate` makes or updates its tables, `version` says what this is."""

import platform
from typing import Annotated

import typer

import unstuck
from unstuck.cli.common import Common, command
from unstuck.cli.show import Cell, count
from unstuck.client.operator import Operator
from unstuck.config import public_url
from unstuck.store.opening import open_ledger


@command()
def migrate(
    common: Common,
    after_restore: Annotated[
        bool,
        typer.Option(
            "--after-restore",
            help="The database was restored from a backup: every worker in it is dead, every token is void, and no "
            "number of a job is given out twice.",
        ),
    ] = False,
) -> None:
    """Make the ledger's tables or bring them up to date; safe to run twice, also at once."""
    settings = common.settings()
    ledger = open_ledger(settings)
    try:
        applied = ledger.migrate()
        voided = Operator(ledger, settings, door="cli").void_attempt_tokens() if after_restore else None
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


@command()
def version(common: Common) -> None:
    """Say which version this is."""
    if common.as_json:
        common.show.json({"version": unstuck.__version__, "python": platform.python_version()})
    else:
        common.show.line(f"unstuck {unstuck.__version__}")
