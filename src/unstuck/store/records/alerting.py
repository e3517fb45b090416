"""What alerts are made of: events worth telling, conditions that hold, and who was told up to where."""

from typing import Literal

import msgspec

from unstuck.domain.cursor import Cursor, stamp_of
from unstuck.domain.states import WorkerState
from unstuck.store.diagnosis import QueueLook
from unstuck.store.records.watching import WorkerVerdict

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
    queues: tuple[QueueLook, ...] = ()
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
