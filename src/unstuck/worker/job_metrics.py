"""Count what becomes of the jobs in this worker's hands. Used in the floor's thread alone."""

from bisect import bisect_left
from collections.abc import Collection

from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.states import JobState
from unstuck.ledger.contract.workers import Turn
from unstuck.metrics.catalogue import (
    DEATHS,
    DETECTION,
    JOB_BOUNDS,
    JOB_RETRIES,
    JOB_RUN,
    JOB_WAIT,
    SUPERSEDED,
)
from unstuck.metrics.counters import Counters, HistogramSeries
from unstuck.metrics.endings import count_ended
from unstuck.worker.held_jobs import HeldJob


class _Kind:
    """What is counted of one task on one queue."""

    __slots__ = ("done", "queue", "run", "task", "wait")

    def __init__(self, queue: str, task: str, wait: HistogramSeries, run: HistogramSeries) -> None:
        self.queue = queue
        self.task = task
        self.wait = wait
        self.run = run
        self.done = 0
        """In the turn that is looked at."""


class JobMetrics:
    """A job counts as ended when the ledger has taken its end: what was superseded is counted as that.

    A no-op job takes a few ten microseconds of a worker, so what is done here for each is written out, and the rest is
    done once for each turn.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._ended: dict[int, _Kind] = {}
        """What ended and is not known to be written, by token."""
        self._latest: dict[str, _Kind] = {}
        """By task; as a rule it is always on the same queue."""
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def ran(self, held_job: HeldJob, began_s: float, ran_s: float) -> None:
        """Note how long an attempt waited and ran, however it ended."""
        job = held_job.job
        kind = self._latest.get(job.task)
        if kind is None or kind.queue != job.queue:
            kind = self._kind(job.queue, job.task)
        waited_s = job.waited_s
        if began_s > held_job.queued_s:
            waited_s += began_s - held_job.queued_s
        wait, run = kind.wait, kind.run
        wait.buckets[bisect_left(JOB_BOUNDS, waited_s)] += 1
        wait.sum += waited_s
        run.buckets[bisect_left(JOB_BOUNDS, ran_s)] += 1
        run.sum += ran_s
        self._ended[job.token] = kind

    def never_began(self, held_job: HeldJob) -> None:
        """Note that an attempt ends which no runner entered."""
        self._ended[held_job.token] = self._kind(held_job.job.queue, held_job.job.task)

    def runner_died(self, death: Autopsy, ended_by_us: DeathKind | None) -> None:
        """Note a runner that died with a job in it; where we ended it ourselves, why we did is the cause."""
        kind = death.kind if ended_by_us is None else ended_by_us
        self._counters.add(DEATHS, ("runner", kind.value, death.detector.value))
        if death.seen_after_s is not None:
            self._counters.observe(DETECTION, death.seen_after_s, ("runner", death.detector.value))

    def written(self, turn: Turn, superseded: Collection[tuple[int, int]]) -> None:
        """Note what a turn ended, now that it is committed."""
        if superseded:
            self._counters.add(SUPERSEDED, by=len(superseded))
            for _, token in superseded:
                self._ended.pop(token, None)
        take = self._ended.pop
        seen: list[_Kind] = []
        for item in turn.done:
            kind = take(item.token, None)
            if kind is not None:
                if not kind.done:
                    seen.append(kind)
                kind.done += 1
        for kind in seen:
            count_ended(self._counters, kind.queue, kind.task, JobState.SUCCEEDED, kind.done)
            kind.done = 0
        for ending in turn.endings:
            kind = take(ending.token, None)
            if kind is None:
                continue
            if ending.state is JobState.PENDING:
                self._counters.add(JOB_RETRIES, (kind.queue, ending.error.code if ending.error is not None else ""))
            elif ending.state is not JobState.WAITING:
                count_ended(self._counters, kind.queue, kind.task, ending.state)

    def written_or_lost(self, turn: Turn, held: Collection[int]) -> None:
        """Note an uncertain turn, compared with the ledger: what is not held any more was written, as a rule."""
        self.written(
            Turn(
                turn.worker_id,
                done=tuple(item for item in turn.done if item.token not in held),
                endings=tuple(item for item in turn.endings if item.token not in held),
            ),
            (),
        )

    def refused(self, turn: Turn) -> None:
        """Note that the ledger refused a whole turn: we are dead there."""
        self._ended.clear()
        if outcomes := len(turn.done) + len(turn.endings):
            self._counters.add(SUPERSEDED, by=outcomes)

    def keep_only(self, tokens: Collection[int]) -> None:
        """Forget what is not held any more, and was never told to have been written."""
        self._ended = {token: kind for token, kind in self._ended.items() if token in tokens}

    def _kind(self, queue: str, task: str) -> _Kind:
        kind = self._kinds.get((queue, task))
        if kind is None:
            labels = (queue, task)
            wait, run = self._counters.spread(JOB_WAIT, labels), self._counters.spread(JOB_RUN, labels)
            kind = self._kinds[labels] = _Kind(queue, task, wait, run)
        self._latest[task] = kind
        return kind
