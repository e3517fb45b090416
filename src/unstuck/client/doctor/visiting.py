"""Visit a ledger that may not be there: for the command line, where nothing is open yet."""

from collections.abc import Callable

from unstuck.client.doctor.examining import examine
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding
from unstuck.client.doctor.gathering import gather, look_at_host, trouble_of
from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.domain.errors import LedgerError
from unstuck.store.contract import Ledger
from unstuck.store.opening import open_ledger


def visit(settings: Settings, limits: Limits | None = None) -> list[Finding]:
    """Look at the whole system behind these settings; never makes or changes tables, never raises for a ledger."""
    return _visit(settings, lambda ledger: examine(gather(ledger, settings, limits), limits))


def visit_open(ledger: Ledger, settings: Settings) -> list[Finding]:
    """The same with a ledger that is open already."""
    try:
        return examine(gather(ledger, settings, None))
    except LedgerError as error:
        return examine(Facts(settings, look_at_host(()), trouble=trouble_of(error)))


def visit_job(settings: Settings, job_id: int) -> list[Finding]:
    """Look at one job; raises JobNotFound where there is none."""

    def look(ledger: Ledger) -> list[Finding]:
        ledger.check_schema()
        return Operator(ledger, settings, door="cli").doctor_job(job_id)

    return _visit(settings, look)


def _visit(settings: Settings, look: Callable[[Ledger], list[Finding]]) -> list[Finding]:
    try:
        ledger = open_ledger(settings)
        try:
            return look(ledger)
        finally:
            ledger.close()
    except LedgerError as error:
        return examine(Facts(settings, look_at_host(()), trouble=trouble_of(error)))
