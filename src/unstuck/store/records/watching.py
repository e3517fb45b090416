"""What the reaper sees of workers, and what it decides."""

import math
from typing import Any

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.liveness import Detector, Session, read_detector
from unstuck.domain.rules import RecoveryRules
from unstuck.domain.states import Door, WorkerState
from unstuck.domain.watch import Cause


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
    """The silence that counts: the time since its last heartbeat that watch periods cover."""
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
    since_beat_s: float = 0.0
    """Plain time since its last heartbeat, by the ledger's clock."""
    heartbeat_interval_s: float = 5.0
    suspected_by: Detector | None = None
    """What it is suspected by, or was given up for."""
    session_idle_s: float | None = None
    """How long ago its database session last did something; None if it is gone or cannot be seen."""
    rules: RecoveryRules | None = None
    """The recovery settings that it stored; None: those of whoever judges it."""
    sessions_doubted_s: float = math.inf
    """How long ago it was last in doubt why database sessions are missing; infinite: never."""
    session_id: str | None = None
    """The database session that it last had; None if none is known."""
    suspected_session: str | None = None
    """The session that was missing when it became suspect, if that is why."""


class Ticked(msgspec.Struct, frozen=True):
    """What the ledger answers to a reaper's tick."""

    won: bool = True
    """Whether the ticket that was asked for was free."""
    stale_s: float = 0.0
    """How long ago the watch was last extended."""
    watched_s: float = 0.0
    """How long the current watch period is."""
    began: Cause | None = None
    """Why this tick began a new period; None if it did not."""
    gap_s: float | None = None
    """How long no one watched before the new period; None if it is the first one."""
    set_back_s: float = 0.0
    """By how much the ledger's clock was set back since the last tick."""
    connected_s: float = math.inf
    """The age of the connection that carried the tick."""
    at: float | None = None
    """What the ledger's clock said."""


class GuardSilent(msgspec.Struct, frozen=True):
    """Repeat the evidence in the write: only while this much of the worker's silence counts."""

    silent_s: float


class GuardUnheard(msgspec.Struct, frozen=True):
    """An operator's threshold: only while nothing was heard of the worker for this long, watched or not."""

    silent_s: float


class GuardDead(msgspec.Struct, frozen=True):
    """Only while the worker stands as dead (or stopped) in the ledger."""


class GuardSuspect(msgspec.Struct, frozen=True):
    """Only while the worker is still SUSPECT: it did not beat since."""


class GuardNone(msgspec.Struct, frozen=True):
    """An operator's word, or the kernel's: the token alone is the fence."""


Guard = GuardSilent | GuardUnheard | GuardDead | GuardSuspect | GuardNone


class WorkerVerdict(msgspec.Struct, frozen=True):
    state: WorkerState
    detector: Detector
    evidence: str
    silent_s: float
    by: str
    """Who decided: a worker id, 'reaper', 'supervisor' or an operator."""
    autopsy: Autopsy | None = None
    """What is known of how its process ended."""
    session: str | None = None
    """The database session that was missing, of a suspicion for that reason."""


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
