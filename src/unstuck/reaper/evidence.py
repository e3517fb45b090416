"""Gather what can be known of a worker from here: the ledger's word, and the kernel's where it is our neighbour."""

import sys
from typing import assert_never

from unstuck import host
from unstuck.domain.liveness import Detector, Process, Verdict, Vitals
from unstuck.domain.states import Door, WorkerState
from unstuck.domain.watch import grace_s
from unstuck.reaper.session_activity import SessionActivity
from unstuck.store.records import Guard, GuardNone, GuardSilent, GuardSuspect, WorkerWatch

ROUNDING_S = 0.01
BOOT_SLACK_S = 1.0
"""How far the clock may be corrected while a machine starts."""


class Witness:
    """One observer on one host. It looks, and decides nothing."""

    def __init__(self, *, one_host: bool) -> None:
        self._one_host = one_host
        self._host = host.hostname()
        self._boot_id = host.boot_id()
        self._pid_namespace = host.pid_namespace()
        self._activity = SessionActivity()

    def is_neighbour(self, worker: WorkerWatch) -> bool:
        """Say whether the worker's pid means something here: same machine, same boot, same pid namespace.

        Never of one that comes over a network: the host that it names may be any, and its pid another's."""
        if worker.door is not Door.PYTHON:
            return False
        if worker.host != self._host:
            return False
        if worker.boot_id != self._boot_id or worker.pid_namespace != self._pid_namespace:
            return False
        # Two containers in which neither can be read look alike, and a wrong "no such process" costs a live job.
        return bool(self._boot_id and self._pid_namespace) or sys.platform != "linux"

    def rebooted(self, worker: WorkerWatch) -> bool:
        """Return whether its machine was restarted after it was last heard.

        Another boot id alone does not say so: containers may have one each. It must name the same host, and it must
        have been silent since before this machine started. That alone would not do either: a clock that is set forward
        makes the last heartbeat of every container look that old. On a shared server it may be another machine of the
        same name, and a worker that comes over a network has not died with this machine."""
        return (
            worker.door is Door.PYTHON
            and self._one_host
            and worker.host == self._host
            and bool(self._boot_id and worker.boot_id)
            and worker.boot_id != self._boot_id
            and worker.since_beat_s > host.boottime_s() + BOOT_SLACK_S
        )

    def process_of(self, worker: WorkerWatch) -> Process:
        return host.look(worker.pid, worker.process_started) if self.is_neighbour(worker) else Process.UNKNOWN

    def vitals(self, worker: WorkerWatch, watched_s: float, *, connected: bool) -> Vitals:
        """Gather what is known of a worker; `watched_s` is the length of the present watch period.

        `connected` says whether this reaper kept its own connection for long enough to tell whose sessions ended."""
        return Vitals(
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
        case Detector.RUNNER | Detector.NEIGHBOUR | Detector.SUPERVISOR | Detector.BOOT:
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
