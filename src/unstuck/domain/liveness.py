"""Decide, from evidence alone, whether a worker is alive, suspect or dead."""

from enum import StrEnum

import msgspec

from unstuck.domain.durations import brief
from unstuck.domain.states import WorkerState


class Detector(StrEnum):
    """Who saw the death: the tier that fired, kept with every verdict."""

    RUNNER = "runner"
    """The kernel told the worker or the nursery that a runner is gone."""
    NEIGHBOUR = "neighbour"
    """Another process on the same host holds a pidfd on it, or finds no such process."""
    SUPERVISOR = "supervisor"
    """Its parent (`unstuck up`) reaped it."""
    SESSION = "session"
    """Its PostgreSQL session is gone and did not come back within the grace."""
    LEASE = "lease"
    """No beat for the whole timeout."""
    BOOT = "boot"
    """The machine was restarted since it was born."""
    OPERATOR = "operator"


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


class Vitals(msgspec.Struct, frozen=True):
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
    """The boot id of its host differs from ours on a ledger that has one host only."""
    waits_for_s: float | None
    """The longest timeout among the jobs that it runs; None when it runs nothing."""


def judge(vitals: Vitals, *, session_grace_s: float, neighbours: bool, session: bool) -> Verdict | None:
    """Give the verdict that the evidence carries, or None to leave the worker as it is."""
    if vitals.rebooted:
        return Verdict(
            WorkerState.DEAD, Detector.BOOT, "the machine was restarted since this worker was born", vitals.silent_s
        )
    if neighbours and vitals.process is Process.GONE:
        return Verdict(WorkerState.DEAD, Detector.NEIGHBOUR, "its process no longer exists", vitals.silent_s)
    # A process that we can see running is not dead because its session is: it is reconnecting.
    if session and vitals.session is Session.MISSING and vitals.process is not Process.ALIVE:
        if vitals.session_missing_s >= session_grace_s:
            return Verdict(
                WorkerState.DEAD,
                Detector.SESSION,
                f"its database session was lost and did not come back within {brief(session_grace_s)}",
                vitals.silent_s,
            )
        if vitals.state in (WorkerState.ACTIVE, WorkerState.DRAINING):
            return Verdict(WorkerState.SUSPECT, Detector.SESSION, "its database session is gone", vitals.silent_s)
        return None
    if vitals.silent_s >= vitals.suspect_after_s:
        return _by_lease(vitals)
    return None


def _by_lease(vitals: Vitals) -> Verdict | None:
    if vitals.waits_for_s is None or vitals.silent_s >= vitals.waits_for_s:
        return Verdict(WorkerState.DEAD, Detector.LEASE, f"no heartbeat for {brief(vitals.silent_s)}", vitals.silent_s)
    if vitals.state is not WorkerState.SUSPECT:
        return Verdict(
            WorkerState.SUSPECT, Detector.LEASE, f"no heartbeat for {brief(vitals.silent_s)}", vitals.silent_s
        )
    return None
