"""Count what becomes of the jobs in this worker's hands. Used in the floor's thread alone."""

from collections import Counter
from collections.abc import Collection

from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.states import JobState
from unstuck.metrics.catalogue import DEATHS, DETECTION, JOB_RETRIES, JOB_RUN, JOB_WAIT, JOBS_ENDED, SUPERSEDED
from unstuck.metrics.tallies import Spread, Tallies
from unstuck.store.records import Claimed, Turn
from unstuck.worker.holds import Hold


class JobCounts:
    """A job counts as ended when the ledger has taken its end: what was superseded is counted as that."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._queues: dict[int, str] = {}
        """Of what we hold, by token."""
        self._spreads: dict[tuple[str, str], tuple[Spread, Spread]] = {}

    def took(self, job: Claimed) -> None:
        self._queues[job.token] = job.queue

    def ran(self, hold: Hold, began_s: float, ran_s: float) -> None:
        """Note how long an attempt waited and ran, however it ended."""
        job = hold.job
        spreads = self._spreads.get((job.queue, job.task))
        if spreads is None:
            labels = (job.queue, job.task)
            spreads = self._tallies.spread(JOB_WAIT, labels), self._tallies.spread(JOB_RUN, labels)
            self._spreads[labels] = spreads
        spreads[0].observe(job.waited_s + max(0.0, began_s - hold.taken_s))
        spreads[1].observe(ran_s)

    def runner_died(self, death: Autopsy, ended_by_us: DeathKind | None) -> None:
        """Note a runner that died with a job in it; where we ended it ourselves, why we did is the cause."""
        kind = death.kind if ended_by_us is None else ended_by_us
        self._tallies.add(DEATHS, ("runner", kind.value, death.detector.value))
        if death.seen_after_s is not None:
            self._tallies.observe(DETECTION, death.seen_after_s, ("runner", death.detector.value))

    def written(self, turn: Turn, superseded: Collection[tuple[int, int]]) -> None:
        """Note what a turn ended, now that it is committed."""
        queues = self._queues
        ended: Counter[tuple[str, str]] = Counter()
        for done in turn.done:
            queue = queues.pop(done.token, None)
            if queue is not None and not (superseded and (done.job_id, done.token) in superseded):
                ended[queue, JobState.SUCCEEDED.value] += 1
        for ending in turn.endings:
            queue = queues.pop(ending.token, None)
            if queue is None or (ending.job_id, ending.token) in superseded:
                continue
            if ending.state is JobState.PENDING:
                code = ending.error.code if ending.error is not None else ""
                self._tallies.add(JOB_RETRIES, (queue, code))
            else:
                ended[queue, ending.state.value] += 1
        for release in turn.release:
            queues.pop(release.token, None)
        for labels, count in ended.items():
            self._tallies.add(JOBS_ENDED, labels, count)
        if superseded:
            self._tallies.add(SUPERSEDED, by=len(superseded))

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
        self._queues.clear()
        if outcomes := len(turn.done) + len(turn.endings):
            self._tallies.add(SUPERSEDED, by=outcomes)

    def keep_only(self, tokens: Collection[int]) -> None:
        """Forget what is in nobody's hands any more, and what was never told to have ended."""
        self._queues = {token: queue for token, queue in self._queues.items() if token in tokens}
