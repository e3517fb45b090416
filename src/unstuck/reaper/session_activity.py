"""Remember when the database session of each worker last did something, and how quiet the worker was when it ended.

A worker that is killed ends its session in the middle of its work. A worker that is cut off falls silent first, and the
server ends its session later. So the end of a session proves something only if the session was active until then, and
only a reaper that saw it active can tell.
"""

from typing import NamedTuple

from unstuck import host
from unstuck.domain.liveness import Session
from unstuck.store.records import WorkerWatch


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
