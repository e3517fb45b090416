"""Answer a probe: does a worker of this machine and pid namespace beat in the ledger? `alive`."""

from contextlib import closing
from typing import Annotated, NoReturn

import typer

from unstuck import host
from unstuck.cli import ledgers
from unstuck.cli.common import Common, command
from unstuck.cli.show import Show, coarse, count
from unstuck.config import ledger_name
from unstuck.domain.errors import LedgerUnavailable
from unstuck.domain.states import LIVING
from unstuck.reaper.evidence import Witness, patience_s
from unstuck.store.records import WorkerWatch

ALIVE = 0
NOT_ALIVE = 1


@command()
def alive(
    common: Common,
    workers: Annotated[int, typer.Option("--workers", "-n", metavar="N", min=1, help="At least so many.")] = 1,
    forgive_outage: Annotated[
        bool, typer.Option("--forgive-outage", help="Exit 0 where the ledger cannot be reached: for liveness probes.")
    ] = False,
) -> None:
    """Exit 0 if a worker of this host (and container) beats within its timeout, else 1 with a sentence: for probes."""
    try:
        settings = common.settings()
        ledger = ledgers.open_existing(settings)
        with closing(ledger):
            watched = ledger.watch(host.hostname())
    except LedgerUnavailable as error:
        if not forgive_outage:
            raise
        # To restart a worker does not bring its database back; it only kills what still runs.
        _answer(common.show, ALIVE, f"The ledger cannot be reached, which is no reason to restart: {error}", [])
    witness = Witness(one_host=ledger.one_host)
    here = [worker for worker in watched if worker.state in LIVING and witness.is_neighbour(worker)]
    beating = [worker for worker in here if worker.silent_s < patience_s(worker)]
    sentence = _sentence(here, beating, workers)
    if not here:
        sentence += f" Ledger: {ledger_name(settings)}"
    _answer(common.show, ALIVE if len(beating) >= workers else NOT_ALIVE, sentence, beating)


def _sentence(here: list[WorkerWatch], beating: list[WorkerWatch], wanted: int) -> str:
    place = f"on {host.hostname()}"
    if len(beating) >= wanted:
        last_s = min(worker.silent_s for worker in beating)
        return f"{count(len(beating), 'worker')} alive {place}; last beat {coarse(last_s)} ago."
    if not here:
        return f"No worker {place} (in this pid namespace) is registered in the ledger."
    silent = [f"{worker.id} is silent for {coarse(worker.silent_s)}" for worker in here if worker not in beating]
    return f"Only {len(beating)} of {count(wanted, 'worker')} beat {place}. {'; '.join(silent)}".rstrip(". ") + "."


def _answer(show: Show, code: int, sentence: str, beating: list[WorkerWatch]) -> NoReturn:
    if show.as_json:
        show.json({"alive": code == ALIVE, "workers": [worker.id for worker in beating], "message": sentence})
    else:
        show.say(sentence, "green" if code == ALIVE else "red")
    raise typer.Exit(code)
