"""Follow single jobs: what goes well is not written down as an event, so whoever follows a job looks at it."""

from collections.abc import Collection

from unstuck.domain.events import Event, EventKind
from unstuck.domain.states import FINAL, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import Glance, Progress

_KINDS = {
    JobState.PENDING: EventKind.ENQUEUED,
    JobState.CLAIMED: EventKind.CLAIMED,
    JobState.RUNNING: EventKind.RUNNING,
    JobState.SUCCEEDED: EventKind.SUCCEEDED,
}
"""What else becomes of a job is written in the ledger, with their causes."""


class Follower:
    """Sees the changes of some jobs from look to look; may miss a state that lasted shorter than that."""

    def __init__(self, job_ids: Collection[int]) -> None:
        self._job_ids = frozenset(job_ids)
        self._seen: dict[int, tuple[JobState, int]] = {}
        self._told: dict[int, tuple[float | None, float | None, str]] = {}

    def look(self, ledger: Ledger, now: float) -> list[Event]:
        """Give what changed since the last look; at first, where the jobs stand."""
        glances = ledger.glance(self._job_ids)
        running = [glance.job_id for glance in glances if glance.state is JobState.RUNNING]
        progress = ledger.progress(running) if running else {}
        events = []
        for glance in glances:
            event = self._change(glance, now)
            if event is not None:
                events.append(event)
            note = progress.get(glance.job_id)
            if note is not None and note.token == glance.token:
                events += self._progress(note, glance)
        return events

    @property
    def over(self) -> bool:
        """Every job that exists has ended."""
        return bool(self._seen) and all(state in FINAL for state, _ in self._seen.values())

    def _change(self, glance: Glance, now: float) -> Event | None:
        standing = (glance.state, glance.attempt)
        before = self._seen.get(glance.job_id)
        if before == standing:
            return None
        self._seen[glance.job_id] = standing
        kind = _KINDS.get(glance.state)
        if kind is None or (before is not None and glance.state is JobState.PENDING):
            return None  # Back in the queue, or ended badly: the ledger's own event says why.
        return Event(kind, now, _MESSAGES[kind].format(glance.attempt), None, glance.job_id, glance.worker_id)

    def _progress(self, note: Progress, glance: Glance) -> list[Event]:
        said = (note.done, note.total, note.message)
        if (note.done is None and not note.message) or self._told.get(note.job_id) == said:
            return []
        self._told[note.job_id] = said
        text = note.message or _share(note)
        return [
            Event(
                EventKind.PROGRESS,
                note.at,
                text,
                None,
                note.job_id,
                glance.worker_id,
                done=note.done,
                total=note.total,
            )
        ]


def _share(note: Progress) -> str:
    return f"{note.done:g}" if note.total is None else f"{note.done:g} of {note.total:g}"


_MESSAGES = {
    EventKind.ENQUEUED: "It waits to be taken",
    EventKind.CLAIMED: "Claimed for try {}",
    EventKind.RUNNING: "Try {} began",
    EventKind.SUCCEEDED: "Succeeded on try {}",
}
