"""What this process can know of a worker (session, process, host), and the guard of each verdict.

A worker that is killed ends its session in the middle of its work. A worker that is cut off falls silent first, and the
server ends its session later. So the end of a session proves something only if the session was active until then, and
only a reaper that saw it active can tell.
"""

from typing import NamedTuple, assert_never

from unstuck import host
from unstuck.domain.liveness import Detector, Evidence, Process, Session, Verdict
from unstuck.domain.states import Transport, WorkerState
from unstuck.domain.watch_clock import grace_s
from unstuck.ledger.contract.recovery import Guard, GuardNone, GuardSilent, GuardSuspect, WorkerWatch


class _Ended(NamedTuple):
    session_id: str | None
    quiet_s: float


class SessionActivity:
    """One reaper's memory of the sessions it saw, by its own clock."""

    def __init__(self) -> None:
        self._active_s: dict[str, float] = {}
        self._ended: dict[str, _Ended] = {}
        """By worker, the first look at which its session was missing."""

    def quiet_s(self, worker: WorkerWatch, *, remember: bool) -> float:
        """Return how long nothing was heard of a worker, neither a heartbeat nor a call over its session.

        If its session is missing, that is until the first look that found it missing. A reaper that comes late to later
        looks may judge the worker later, but by the same evidence. With `remember` false it is until now: a reaper that
        lost its own connection cannot tell when that session ended, or why."""
        quiet_s = self._until_now_s(worker)
        if worker.session is not Session.MISSING or not remember:
            self._ended.pop(worker.id, None)
            return quiet_s
        ended = self._ended.get(worker.id)
        if ended is None or ended.session_id != worker.session_id:
            ended = self._ended[worker.id] = _Ended(worker.session_id, quiet_s)
        return ended.quiet_s

    def forget_all_but(self, worker_ids: set[str]) -> None:
        """Forget workers that no one watches any more."""
        self._active_s = {known: at_s for known, at_s in self._active_s.items() if known in worker_ids}
        self._ended = {known: ended for known, ended in self._ended.items() if known in worker_ids}

    def _until_now_s(self, worker: WorkerWatch) -> float:
        now_s = host.boottime_s()
        if worker.session_idle_s is not None:
            self._active_s[worker.id] = now_s - worker.session_idle_s
        active_s = self._active_s.get(worker.id)
        quiet_s = worker.since_beat_s if active_s is None else min(worker.since_beat_s, now_s - active_s)
        return max(0.0, quiet_s)


ROUNDING_S = 0.01
BOOT_SLACK_S = 1.0
"""How far the clock may be corrected while a machine starts."""


class Observer:
    """One observer on one host. It looks, and decides nothing."""

    def __init__(self, *, single_host: bool) -> None:
        self._single_host = single_host
        self._host = host.hostname()
        self._boot_id = host.boot_id()
        self._pid_namespace = host.pid_namespace()
        self._activity = SessionActivity()

    def on_this_host(self, worker: WorkerWatch) -> bool:
        """Say whether the worker's pid means something here: same machine, same boot, same pid namespace.

        Never of one that comes over a network: the host that it names may be any, and its pid another's."""
        if worker.transport is not Transport.PYTHON:
            return False
        if worker.host != self._host:
            return False
        if worker.boot_id != self._boot_id or worker.pid_namespace != self._pid_namespace:
            return False
        # Two containers in which neither can be read look alike, and a wrong "no such process" costs a live job.
        return bool(self._boot_id and self._pid_namespace)

    def rebooted(self, worker: WorkerWatch) -> bool:
        """Return whether its machine was restarted after it was last heard.

        Another boot id alone does not say so: containers may have one each. It must name the same host, and it must
        have been silent since before this machine started. That alone would not do either: a clock that is set forward
        makes the last heartbeat of every container look that old. On a shared server it may be another machine of the
        same name, and a worker that comes over a network has not died with this machine."""
        return (
            worker.transport is Transport.PYTHON
            and self._single_host
            and worker.host == self._host
            and bool(self._boot_id and worker.boot_id)
            and worker.boot_id != self._boot_id
            and worker.since_beat_s > host.boottime_s() + BOOT_SLACK_S
        )

    def process_of(self, worker: WorkerWatch) -> Process:
        return host.process_state(worker.pid, worker.process_started) if self.on_this_host(worker) else Process.UNKNOWN

    def evidence(self, worker: WorkerWatch, watched_s: float, *, connected: bool) -> Evidence:
        """Gather what is known of a worker; `watched_s` is the length of the present watch period.

        `connected` says whether this reaper kept its own connection for long enough to tell whose sessions ended."""
        return Evidence(
            state=worker.state,
            silent_s=worker.silent_s,
            suspect_after_s=worker.suspect_after_s,
            session=worker.session,
            session_missing_s=worker.suspect_s,
            process=self.process_of(worker),
            rebooted=self.rebooted(worker),
            waits_for_s=worker.waits_for_s,
            shortest_s=worker.shortest_s,
            interval_s=worker.heartbeat_interval_s,
            watched_s=watched_s,
            quiet_s=self._activity.quiet_s(worker, remember=connected),
            suspected_by=_still_suspected_by(worker),
            since_beat_s=worker.since_beat_s,
            sessions_doubted_s=worker.sessions_doubted_s,
        )

    def forget_all_but(self, worker_ids: set[str]) -> None:
        """Forget the sessions of workers that no one watches any more."""
        self._activity.forget_all_but(worker_ids)


def _still_suspected_by(worker: WorkerWatch) -> Detector | None:
    """Return what a worker is suspected by. The loss of a session says nothing of the next one, which it has by now."""
    of_another = worker.suspected_by is Detector.SESSION and worker.suspected_session != worker.session_id
    return None if of_another else worker.suspected_by


def guard_for(worker: WorkerWatch, verdict: Verdict) -> Guard:
    """Repeat the evidence in the write, so that a worker that beat since we looked is left alone."""
    match verdict.detector:
        case Detector.RUNNER | Detector.PEER | Detector.SUPERVISOR | Detector.BOOT:
            return GuardNone()
        case Detector.WATCHDOG | Detector.OPERATOR | Detector.CONNECTION:
            return GuardNone()
        case Detector.SESSION if verdict.state is WorkerState.DEAD:
            return GuardSuspect()
        case Detector.SESSION:
            # It has not beaten since we looked; a little is left for the rounding of clocks.
            return GuardSilent(max(0.0, worker.silent_s - ROUNDING_S))
        case Detector.LEASE if verdict.state is WorkerState.DEAD:
            return GuardSilent(max(worker.suspect_after_s, worker.waits_for_s or 0.0))
        case Detector.LEASE:
            return GuardSilent(patience_s(worker))
        case _:
            assert_never(verdict.detector)


def patience_s(worker: WorkerWatch) -> float:
    """Give the silence after which this worker loses something."""
    return worker.suspect_after_s if worker.shortest_s is None else min(worker.suspect_after_s, worker.shortest_s)


def silent_unwatched(worker: WorkerWatch) -> bool:
    """Return whether silence that no one watched would decide something."""
    short_s, long_s = patience_s(worker), max(worker.suspect_after_s, worker.waits_for_s or 0.0)
    if worker.silent_s < short_s <= worker.since_beat_s:
        return True
    # It lost something already, and holds a job that asked for more time.
    uncounted_s = worker.since_beat_s - worker.silent_s
    return short_s <= worker.silent_s < long_s and uncounted_s >= grace_s(short_s, worker.heartbeat_interval_s)
