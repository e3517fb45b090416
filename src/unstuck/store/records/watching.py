"""What the reaper sees of workers, and what it decides."""

from typing import Any

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.liveness import Detector, Session, read_detector
from unstuck.domain.states import Door, WorkerState


class WorkerWatch(msgspec.Struct, frozen=True):
    """A worker as the watchman sees it."""

    id: str
    name: str
    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    process_started: str
    trace: str
    state: WorkerState
    silent_s: float
    """Since max(last beat, last outage that silenced everyone, start of the database server)."""
    suspect_after_s: float
    waits_for_s: float | None
    """The longest heartbeat timeout among its RUNNING jobs (infinite where one has `heartbeat=False`)."""
    held: int
    session: Session
    suspect_s: float
    """For how long it has been SUSPECT; 0 where it is not."""
    shortest_s: float | None = None
    """The shortest heartbeat timeout among its RUNNING jobs (those with `heartbeat=False` left out)."""
    door: Door = Door.PYTHON


class GuardSilent(msgspec.Struct, frozen=True):
    """Repeat the evidence in the write: only while the worker has been silent for at least so long."""

    silent_s: float


class GuardDead(msgspec.Struct, frozen=True):
    """Only while the worker stands as dead (or stopped) in the ledger."""


class GuardSuspect(msgspec.Struct, frozen=True):
    """Only while the worker is still SUSPECT: it did not beat since."""


class GuardNone(msgspec.Struct, frozen=True):
    """An operator's word, or the kernel's: the token alone is the fence."""


Guard = GuardSilent | GuardDead | GuardSuspect | GuardNone


class WorkerVerdict(msgspec.Struct, frozen=True):
    state: WorkerState
    detector: Detector
    evidence: str
    silent_s: float
    by: str
    """Who decided: a worker id, 'reaper', 'supervisor' or an operator."""
    autopsy: Autopsy | None = None
    """What is known of how its process ended."""


def read_verdict(stored: dict[str, Any] | None) -> WorkerVerdict | None:
    """Understand a stored verdict. What a newer version wrote must not stop us: what we do not know is left out."""
    if stored is None:
        return None
    try:
        return msgspec.convert(stored, WorkerVerdict)
    except msgspec.ValidationError:
        pass
    known = {name: value for name, value in stored.items() if name != "autopsy"}
    if read_detector(stored.get("detector")) is None:
        # Of all that we know this one proves the least.
        known["detector"] = Detector.OPERATOR.value
        known["evidence"] = (
            f"{stored.get('evidence', '')} (seen by {stored.get('detector')!r}, unknown to this version)"
        )
    try:
        return msgspec.convert(known, WorkerVerdict)
    except msgspec.ValidationError:
        return None


class Promoted(msgspec.Struct, frozen=True):
    count: int
    queues: frozenset[str]
    next_due_in_s: float | None


class Swept(msgspec.Struct, frozen=True):
    """What one batch of retention removed."""

    jobs: int = 0
    events: int = 0
    workers: int = 0
    keys: int = 0
    """Unique keys whose period is over."""
    more: bool = False
    """There may be more to remove at once."""
    took_s: float = 0.0
    """How long the batch kept others from the database."""

    @property
    def total(self) -> int:
        return self.jobs + self.events + self.workers + self.keys
