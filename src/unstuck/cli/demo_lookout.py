"""Look at the ledger a few times a second, and say what there is to see of the demo."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from unstuck.cli.demo_fleet import Fleet
from unstuck.cli.demo_tasks import QUEUE
from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import JobFilter, JobRecord, WorkerRecord

BIN_S = 0.5
BINS = 240
MAX_SHOWN_JOBS = 500
OUTCOMES_BATCH = 500


@dataclass
class Sight:
    """What the last look showed."""

    seen_s: float = 0.0
    """Monotonic."""
    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    """By pid."""
    doing: dict[str, list[JobRecord]] = field(default_factory=dict)
    """What each worker holds, by its id."""
    waiting: int = 0
    running: int = 0


class Lookout:
    def __init__(self, ledger: Ledger, fleet: Fleet, ids: list[int]) -> None:
        self.sight = Sight()
        self.ended: Counter[JobState] = Counter()
        self.finished_per_bin: deque[int] = deque([0], maxlen=BINS)
        self.waiting_per_bin: deque[int] = deque([0], maxlen=BINS)
        self._missing = 0
        self._ledger = ledger
        self._fleet = fleet
        self._ids = ids
        self._known = 0
        self._open: set[int] = set()
        self._bin_s = time.monotonic()

    @property
    def enqueued(self) -> int:
        return len(self._ids)

    @property
    def rate(self) -> int:
        """Jobs that ended, per second, over the last two seconds."""
        whole = list(self.finished_per_bin)[-5:-1]
        return round(sum(whole) / (len(whole) * BIN_S)) if whole else 0

    @property
    def unfinished(self) -> int:
        return len(self._ids) - self.ended.total()

    @property
    def lost(self) -> int:
        """Gone without a trace, or ended in a way that no job of the demo may end."""
        return self._missing + self.ended[JobState.QUARANTINED] + self.ended[JobState.CANCELLED]

    @property
    def unfinished_ids(self) -> list[int]:
        return sorted(self._open)

    def look(self) -> None:
        workers = self._ledger.workers()
        self._fleet.recognise(workers)
        ours = self._fleet.pids
        held = self._ledger.jobs(JobFilter(states=(JobState.CLAIMED, JobState.RUNNING), limit=MAX_SHOWN_JOBS))
        doing: dict[str, list[JobRecord]] = {}
        for job in held:
            if job.worker_id is not None and job.queue == QUEUE:
                doing.setdefault(job.worker_id, []).append(job)
        queue = next((queue for queue in self._ledger.queues() if queue.name == QUEUE), None)
        now_s = time.monotonic()
        self.sight = Sight(
            seen_s=now_s,
            # Pids come round again: the youngest of a number is the one that lives.
            workers={w.pid: w for w in sorted(workers, key=lambda w: w.created_at) if w.pid in ours},
            doing=doing,
            waiting=queue.pending + queue.blocked + queue.scheduled if queue else 0,
            running=queue.claimed + queue.running if queue else 0,
        )
        self._count_ended()
        if self._advance(now_s):
            self._count_missing()

    def _count_ended(self) -> None:
        known = len(self._ids)
        self._open.update(self._ids[self._known : known])
        self._known = known
        waiting = list(self._open)
        for at in range(0, len(waiting), OUTCOMES_BATCH):
            for outcome in self._ledger.outcomes(waiting[at : at + OUTCOMES_BATCH]):
                self._open.discard(outcome.job_id)
                self.ended[outcome.state] += 1
                self.finished_per_bin[-1] += 1

    def _count_missing(self) -> None:
        waiting = list(self._open)
        batches = (waiting[at : at + OUTCOMES_BATCH] for at in range(0, len(waiting), OUTCOMES_BATCH))
        self._missing = sum(len(self._ledger.missing(batch)) for batch in batches)

    def _advance(self, now_s: float) -> bool:
        began_s = self._bin_s
        while now_s - self._bin_s >= BIN_S:
            self._bin_s += BIN_S
            self.finished_per_bin.append(0)
            self.waiting_per_bin.append(self.sight.waiting)
        return self._bin_s > began_s
