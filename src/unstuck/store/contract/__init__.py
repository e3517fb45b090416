"""The ledger's contract: few verbs, shaped for batches, the same on every database.

Every write that concerns an attempt carries its token and matches the state. A write that matches no row
is *superseded*, which is an answer and not an error. Errors of a driver are translated once, into
`LedgerUnavailable` (try again), `UncertainCommit` (try again, the write may have happened),
`RefusedValue` (split the batch), `SchemaMismatch` and `LedgerError`.

A ledger may be used by several threads at once. It opens its connections on first use, and refuses to
use them after a fork.
"""

from typing import Protocol

from unstuck.store.contract.access import AccessVerbs
from unstuck.store.contract.alerting import AlertVerbs
from unstuck.store.contract.bell import Bell as Bell
from unstuck.store.contract.clients import ClientVerbs
from unstuck.store.contract.counting import CountingVerbs
from unstuck.store.contract.exchanging import ExchangeVerbs
from unstuck.store.contract.foreign import BeatsInFlight as BeatsInFlight
from unstuck.store.contract.foreign import ForeignVerbs
from unstuck.store.contract.health import HealthVerbs
from unstuck.store.contract.journal import JournalVerbs
from unstuck.store.contract.keeping import KeepingVerbs
from unstuck.store.contract.operators import OperatorVerbs
from unstuck.store.contract.ordering import OrderVerbs
from unstuck.store.contract.people import ReadingVerbs
from unstuck.store.contract.reaper import ReaperVerbs
from unstuck.store.contract.scheduling import ScheduleVerbs
from unstuck.store.contract.telling import TellingVerbs
from unstuck.store.contract.upkeep import UpkeepVerbs
from unstuck.store.contract.workers import WorkerVerbs
from unstuck.store.contract.workflows import WorkflowVerbs


class Ledger(
    KeepingVerbs,
    ClientVerbs,
    WorkerVerbs,
    ForeignVerbs,
    ExchangeVerbs,
    ReaperVerbs,
    UpkeepVerbs,
    HealthVerbs,
    TellingVerbs,
    CountingVerbs,
    ReadingVerbs,
    OperatorVerbs,
    OrderVerbs,
    AccessVerbs,
    AlertVerbs,
    JournalVerbs,
    ScheduleVerbs,
    WorkflowVerbs,
    Protocol,
):
    """All of it; each part stands in the file that is named for it."""
