"""Visit a ledger that may not be there: for the command line, where nothing is open yet."""

from collections.abc import Callable

from unstuck import host
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import Facts, Thresholds, gather, trouble_of
from unstuck.client.doctor.findings import Finding
from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.errors import LedgerError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import open_ledger


def diagnose(settings: Settings, limits: Thresholds | None = None) -> list[Finding]:
    """Look at the whole system behind these settings; never makes or changes tables, never raises for a ledger."""
    return _diagnose(settings, lambda ledger: examine(gather(ledger, settings, limits), limits))


def diagnose_open(ledger: Ledger, settings: Settings) -> list[Finding]:
    """The same with a ledger that is open already."""
    try:
        return examine(gather(ledger, settings, None))
    except LedgerError as error:
        return examine(Facts(settings, host.hostname(), trouble=trouble_of(error)))


def diagnose_job(settings: Settings, job_id: int) -> list[Finding]:
    """Look at one job; raises JobNotFound where there is none."""

    def look(ledger: Ledger) -> list[Finding]:
        ledger.check_schema()
        return Operator(ledger, settings, via="cli").doctor_job(job_id)

    return _diagnose(settings, look)


def _diagnose(settings: Settings, look: Callable[[Ledger], list[Finding]]) -> list[Finding]:
    try:
        ledger = open_ledger(settings)
        try:
            return look(ledger)
        finally:
            ledger.close()
    except LedgerError as error:
        return examine(Facts(settings, host.hostname(), trouble=trouble_of(error)))
