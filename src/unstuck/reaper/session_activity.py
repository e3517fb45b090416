"""Remember when the database session of each worker last did something.

A worker that is killed ends its session in the middle of its work. A worker that is cut off falls silent first, and the
server ends its session later. So the end of a session proves something only if the session was active until then, and
only a reaper that saw it active can tell.
"""

from unstuck import host
from unstuck.store.records import WorkerWatch


class SessionActivity:
    """One reaper's memory of the sessions it saw, by its own clock."""

    def __init__(self) -> None:
        self._active_s: dict[str, float] = {}

    def quiet_s(self, worker: WorkerWatch) -> float:
        """Return how long ago anything was heard of a worker: its heartbeat, or a call over its session."""
        now_s = host.boottime_s()
        if worker.session_idle_s is not None:
            self._active_s[worker.id] = now_s - worker.session_idle_s
        active_s = self._active_s.get(worker.id)
        quiet_s = worker.since_beat_s if active_s is None else min(worker.since_beat_s, now_s - active_s)
        return max(0.0, quiet_s)

    def forget_all_but(self, worker_ids: set[str]) -> None:
        """Forget workers that no one watches any more."""
        self._active_s = {known: at_s for known, at_s in self._active_s.items() if known in worker_ids}
