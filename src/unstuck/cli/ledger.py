"""Look after the ledger itself: `migrate` makes or updates its tables, `version` says what this is."""

import platform
from typing import Annotated

import typer

import unstuck
from unstuck.cli.common import Common, command, duration_s
from unstuck.cli.show import Cell, count
from unstuck.client.operator import Operator
from unstuck.config import public_url
from unstuck.domain.durations import brief
from unstuck.store.migrations import WAIT_S
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
