"""Events, alerts and conditions: records and protocol."""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

import msgspec

from unstuck.domain.event_cursor import Cursor, stamp_of
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract.diagnosis import QueueBacklog
from unstuck.ledger.contract.workers import WorkerVerdict


class EventRecord(msgspec.Struct, frozen=True):
    id: int
    at: float
    kind: str
    job_id: int | None
    worker_id: str | None
    message: str
    transaction: int = 0
    """What wrote it, in the order in which transactions began; on SQLite the id itself."""


class EventPage(msgspec.Struct, frozen=True):
    """The next events behind a cursor, and what the ledger knows of that cursor. All of it is one look."""

    events: list[EventRecord]
    """In the order of their transactions and ids."""
    running: frozenset[int]
    """Transactions that were open: they may still bring events."""
    is_known: bool
    """The event of the cursor is still there, and the same."""
    oldest_id: int | None
    """The lowest id that is left of all events."""

    def contradicts(self, cursor: Cursor) -> bool:
        """Return whether the event of the cursor was replaced, as by a failover that lost it. What retention removed
        contradicts nothing: it begins with the oldest."""
        return not self.is_known and self.oldest_id is not None and self.oldest_id <= cursor.id


EventKey = tuple[int, int, int]
"""Transaction, id and stamp of an event."""


class AlertEvent(msgspec.Struct, frozen=True):
    """An event with the names of what it is about, as far as they are still known."""

    id: int
    at: float
    kind: str
    message: str
    about: str | None = None
    """A queue or a host, where it is neither a job nor a worker."""
    job_id: int | None = None
    task: str | None = None
    queue: str | None = None
    worker_id: str | None = None
    worker_name: str | None = None
    host: str | None = None
    verdict: WorkerVerdict | None = None
    """What is known of a dead worker by now; more than when the event was written."""
    transaction: int = 0

    @property
    def key(self) -> EventKey:
        return (self.transaction, self.id, stamp_of(self.at))


class AlertPage(msgspec.Struct, frozen=True):
    """Events that a target was not told of, and what the ledger knows of the position behind which they were read."""

    events: list[AlertEvent]
    is_known: bool
    """The event of that position is still there, and the same."""


class AlertTarget(msgspec.Struct, frozen=True):
    """How far one target was told. Only its sender understands `state`."""

    position: str
    """A cursor: everything up to it was told, or is not to be told."""
    version: int
    state: str
    now_at: float
    """The ledger's clock."""
    newest: Cursor
    """The position behind everything that could be seen when this was read."""


ConditionStep = Literal["seen", "begun", "lasting", "over"]


class ConditionChange(msgspec.Struct, frozen=True):
    """One step in the life of a condition; all but the first write an event, once."""

    step: ConditionStep
    kind: str
    about: str
    message: str
    worker_id: str | None = None


class ConditionRecord(msgspec.Struct, frozen=True):
    """Something that is not as it should be, and lasts."""

    kind: str
    about: str
    message: str
    seen_at: float
    begun_at: float | None
    """None: not for long enough yet to be worth a word."""
    reminded_at: float | None


class LateWorker(msgspec.Struct, frozen=True):
    """A living worker that has been silent for longer than it should be."""

    id: str
    name: str
    host: str
    state: WorkerState
    silent_s: float


class ConditionLook(msgspec.Struct, frozen=True):
    """All that conditions are found by, in bounded looks."""

    now_at: float
    queues: tuple[QueueBacklog, ...] = ()
    living: int = 0
    """Workers, in numbers."""
    able: int = 0
    """Those of them that are not switched off."""
    served: frozenset[str] = frozenset()
    """Queues that those serve."""
    eldest_s: float | None = None
    """How long the eldest of the living has lived."""
    check_interval_s: float | None = None
    """The longest time between two looks for the dead that one of them told of."""
    late: tuple[LateWorker, ...] = ()
    unswept_s: float | None = None
    """As in a Diagnosis."""
    held: bool = False
    """Somebody, living or not, holds a job."""


class Events(Protocol):
    """Write and read events, alerts and conditions."""

    def write(
        self,
        kind: str,
        message: str,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        about: str | None = None,
    ) -> int:
        """Write an event that belongs to no other verb; give its id. `about` names what is neither job nor worker."""
        ...

    def newest_cursor(self) -> Cursor:
        """Return the position behind all events that can be seen now."""
        ...

    def since(
        self, cursor: Cursor, *, job_id: int | None = None, worker_id: str | None = None, limit: int = 100
    ) -> EventPage:
        """Return the next events behind this position, whatever the order of their ids; of one job or of one worker,
        if one is given."""
        ...

    def for_alerts(self, kinds: Collection[str], after: Cursor, but: Collection[int], limit: int) -> AlertPage:
        """Return events of these kinds behind a position, in the order of their transactions, without those whose ids
        are in `but`. Of events about jobs only 'quarantined' and 'workflow_paused' are there to be told."""
        ...

    def add_alert_target(self, target: str) -> None:
        """Write down, unless it is there, that this target (a fingerprint) is told of what happens from now on."""
        ...

    def alert_target(self, target: str) -> AlertTarget | None: ...

    def save_alert_target(self, target: str, version: int, position: str, state: str) -> bool:
        """Write how far it was told, if nobody did since this version was read; else False."""
        ...

    def look_for_conditions(self, late_s: float | None = None) -> ConditionLook:
        """Look, in bounded looks, at what conditions are found by. Late is who has been silent for so long; None: for
        so long that it is suspect."""
        ...

    def conditions(self) -> list[ConditionRecord]: ...

    def change_conditions(self, changes: Sequence[ConditionChange], remind_s: float) -> int:
        """Write what began, lasts (with an event `KIND_still`, at most once in `remind_s`) or is over (`KIND_over`).
        Each step has one event, however many take it at once; gives how many were written."""
        ...

    def list(
        self,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        after_id: int | None = None,
        limit: int = 100,
    ) -> list[EventRecord]:
        """Oldest first; with `after_id` those that follow, else the newest `limit`."""
        ...
