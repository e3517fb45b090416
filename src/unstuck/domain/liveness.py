"""Decide, from evidence alone, whether a worker is alive, suspect or dead."""

import math
from enum import StrEnum

import msgspec

from unstuck.domain.states import WorkerState
from unstuck.domain.units import MAX_DURATION_S, brief
from unstuck.domain.watch_clock import grace_s


class Detector(StrEnum):
    """Who saw the death: the tier that fired, kept with every verdict."""

    RUNNER = "runner"
    """The kernel told the worker or the fork server that a runner is gone."""
    PEER = "neighbour"
    """Another process on the same host holds a pidfd on it, or finds no such process."""
    SUPERVISOR = "supervisor"
    """Its parent (`unstuck up`) reaped it."""
    SESSION = "session"
    """Its PostgreSQL session is gone and did not come back within the grace."""
    LEASE = "lease"
    """No beat for the whole timeout."""
    BOOT = "boot"
    """The machine was restarted after it was last heard."""
    WATCHDOG = "watchdog"
    """Its own: it was alive and did nothing. Written in the moment before it ends itself."""
    CONNECTION = "connection"
    """Its connection to the broker ended, or it broke the protocol."""
    OPERATOR = "operator"


def read_detector(stored: str | None) -> Detector | None:
    """Understand who saw a death; None also for one that only a newer version knows."""
    try:
        return None if stored is None else Detector(stored)
    except ValueError:
        return None


class Session(StrEnum):
    PRESENT = "present"
    MISSING = "missing"
    UNKNOWN = "unknown"


class Process(StrEnum):
    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"
    """Another host, another pid namespace, or "not permitted": proves nothing."""


class Verdict(msgspec.Struct, frozen=True):
    """What was decided of a worker, and on which evidence."""

    state: WorkerState
    detector: Detector
    evidence: str
    silent_s: float = 0.0
    """How long it had been silent when it was decided."""


class Evidence(msgspec.Struct, frozen=True):
    """Everything known of a living worker at one instant of the ledger's clock."""

    state: WorkerState
    silent_s: float
    """Since its last beat, not counting time in which nobody could write."""
    suspect_after_s: float
    session: Session
    session_missing_s: float
    """For how long the session has been seen missing; 0 where it is present."""
    process: Process
    rebooted: bool
    """Its machine was restarted after it was last heard, on a ledger that has one host only."""
    waits_for_s: float | None
    """The longest timeout among the jobs that it runs; None when it runs nothing."""
    shortest_s: float | None = None
    """The shortest timeout among the jobs that it runs; None when none of them has one."""
    interval_s: float = 5.0
    """How often it beats."""
    watched_s: float = math.inf
    """For how long the present watch period has lasted."""
    quiet_s: float = 0.0
    """Since anything at all was heard of it: a heartbeat, or a call over its session."""
    suspected_by: Detector | None = None
    """What it is suspected by, if it is."""
    since_beat_s: float = 0.0
    """Plain time since its last heartbeat, by the ledger's clock."""
    sessions_doubted_s: float = math.inf
    """How long ago a session could last be missing though its worker lives: someone terminated sessions at the server,
    or no connection was free. Infinite: never."""

    @property
    def patience_s(self) -> float:
        """The silence after which it loses something: what it only claimed, or a job that asked for less."""
        return self.suspect_after_s if self.shortest_s is None else min(self.suspect_after_s, self.shortest_s)

    @property
    def overdue(self) -> bool:
        """Silent longer than its lease, and a reaper has watched long enough that it could have been heard.

        After an outage, a failover or a step of the clock, every living worker needs a moment to reconnect."""
        had_a_chance = self.watched_s >= grace_s(self.patience_s, self.interval_s) or self.long_overdue
        return self.silent_s >= self.patience_s and had_a_chance

    @property
    def long_overdue(self) -> bool:
        """Its silence is longer than its lease by the moment that everyone is given: no need to wait for anything."""
        return self.silent_s >= self.patience_s + grace_s(self.patience_s, self.interval_s)

    @property
    def cut_off(self) -> bool:
        """It was silent before its session ended, so the network may have ended both."""
        return self.quiet_s >= min(NOT_CUT_OFF_S, 1.5 * self.interval_s + 1.0)

    @property
    def session_lost(self) -> bool:
        """Its session is missing, and since its last heartbeat there was no other reason for that than its own end.

        A worker whose session was terminated, or which found no free connection, may be kept from coming back by
        something else later: by a cut, by a freeze, by a call that hangs. Only its next heartbeat ends the doubt."""
        return self.session is Session.MISSING and max(0.0, self.since_beat_s) < self.sessions_doubted_s

    @property
    def well(self) -> bool:
        """Nothing at all speaks against it: what is true of nearly everybody in nearly every round."""
        return (
            self.silent_s < self.patience_s
            and not self.session_lost
            and self.process is not Process.GONE
            and not self.rebooted
        )


NOT_CUT_OFF_S = 10.0
"""A worker of which nothing was heard for longer when its session ended may only be cut off: the server ends such a
session by itself, after 13 s at the earliest (the TCP keepalives in `ledger/postgres/connect.py`). A proxy or a
load balancer in between may end it sooner, so a worker that has missed a heartbeat counts as cut off as well."""

KERNEL = frozenset({Detector.RUNNER, Detector.PEER, Detector.SUPERVISOR, Detector.BOOT})
"""Detectors that prove the end of a process; the others may be wrong about it."""


BY_SILENCE = frozenset({Detector.LEASE, Detector.SESSION})
"""Detectors that conclude a death from silence. An operator may want to decide about jobs of such workers."""


def judge(
    observed: Evidence, *, session_grace_s: float, peers: bool, session: bool, lease: bool = True
) -> Verdict | None:
    """Give the verdict that the evidence carries, or None to leave the worker as it is.

    `peers`, `session` and `lease` say which kinds of evidence count. The surest comes first."""
    if observed.rebooted:
        return _verdict(
            observed, WorkerState.DEAD, Detector.BOOT, "the machine was restarted after this worker was last heard"
        )
    if peers and observed.process is Process.GONE:
        return _verdict(observed, WorkerState.DEAD, Detector.PEER, "its process no longer exists")
    # A process that we can see running is not dead because its session is: it is reconnecting.
    missing = session and observed.session_lost and observed.process is not Process.ALIVE
    # Suspected first, always: the grace runs from there, and a beat in between clears it. A worker that is suspect
    # because it was silent may be cut off, and its session ended for that reason: only its lease decides.
    by_session = observed.state is WorkerState.SUSPECT and observed.suspected_by is Detector.SESSION
    if missing and by_session and observed.session_missing_s >= session_grace_s:
        evidence = f"its database session was lost and did not come back within {brief(session_grace_s)}"
        return _verdict(observed, WorkerState.DEAD, Detector.SESSION, evidence)
    if lease and observed.overdue:
        return _by_lease(observed)
    if missing and observed.state is not WorkerState.SUSPECT and not observed.cut_off:
        return _verdict(observed, WorkerState.SUSPECT, Detector.SESSION, "its database session is gone")
    return None


def _by_lease(observed: Evidence) -> Verdict | None:
    evidence = silence(observed.silent_s)
    # Dead when nothing is left to wait for: neither what it claimed nor any job that asked for more time.
    if observed.silent_s >= max(observed.suspect_after_s, observed.waits_for_s or 0.0):
        return _verdict(observed, WorkerState.DEAD, Detector.LEASE, evidence)
    if observed.state is not WorkerState.SUSPECT:
        return _verdict(observed, WorkerState.SUSPECT, Detector.LEASE, evidence)
    return None


def silence(silent_s: float) -> str:
    """Say for how long nothing was heard of a worker."""
    return f"no heartbeat for {brief(silent_s)}" if silent_s < MAX_DURATION_S else "no heartbeat at all"


def _verdict(observed: Evidence, state: WorkerState, detector: Detector, evidence: str) -> Verdict:
    # A worker without any beat has been silent for ever, and no database has a number for that.
    return Verdict(state, detector, evidence, min(observed.silent_s, MAX_DURATION_S))


OVERDUE_GRACE_S = 30.0
"""How long past the deadline a worker that seems well may take to end its job itself."""
OVERDUE_LOST_GRACE_S = 2.0
"""The same for a worker that is suspect or dead."""
