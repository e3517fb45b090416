"""Play a random game against the ledger and a model of twenty lines: they must never disagree about any job."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.support.builders import birth, crash, crash_retry, done, failure_retry, new_job, release, turn, verdict, wish

from unstuck.domain.endings import Ending
from unstuck.domain.states import FINAL_STATES, HELD_STATES, JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.recovery import GuardDead, GuardNone
from unstuck.ledger.contract.workers import AttemptRef, Claimed

GAMES = 12
STEPS = 40
picks = st.integers(0, 10**6)
_numbers = itertools.count()


@dataclass
class Model:
    """A job as it ought to be."""

    id: int
    rank: int
    queue: str
    key: str | None
    state: JobState = JobState.PENDING
    worker: str | None = None
    token: int | None = None
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    cancel: bool = False

    def go_back(self) -> None:
        """To the queue, or, where somebody asked for it, to its end."""
        self.state = JobState.CANCELLED if self.cancel else JobState.PENDING
        if not self.cancel:
            self.worker = self.token = None


class Game(RuleBasedStateMachine):
    ledger: Ledger

    def __init__(self) -> None:
        super().__init__()
        self.game = next(_numbers)
        self.jobs: dict[int, Model] = {}
        self.living: list[str] = []
        self.dead: list[str] = []
        self.stale_hands: list[tuple[str, Claimed]] = []
        self.hands: dict[int, Claimed] = {}
        self.queues = [f"{letter}{self.game}" for letter in "ab"]
        self.born = itertools.count()

    # Moves ------------------------------------------------------------------------------------

    @rule(priority=st.sampled_from([-1, 0, 1]), queue=st.integers(0, 1), key=st.sampled_from([None, None, "x", "y"]))
    def enqueue(self, priority: int, queue: int, key: str | None) -> None:
        full_key = None if key is None else f"{key}{self.game}"
        [answer] = self.ledger.jobs.enqueue(
            [new_job(priority=priority, queue=self.queues[queue], unique_key=full_key, on_crash="retry")]
        )
        holder = next(
            (j for j in self.jobs.values() if full_key and j.key == full_key and j.state not in FINAL_STATES), None
        )
        assert answer.fresh == (holder is None)
        if holder is not None:
            assert answer.job_id == holder.id
        else:
            self.jobs[answer.job_id] = Model(answer.job_id, -priority, self.queues[queue], full_key)

    @precondition(lambda self: len(self.living) < 3)
    @rule()
    def be_born(self) -> None:
        worker_id = f"worker-{self.game}-{next(self.born)}"
        self.ledger.workers.register(birth(worker_id))
        self.living.append(worker_id)

    @precondition(lambda self: self.living)
    @rule(pick=picks, limit=st.integers(1, 4), run_ahead=st.booleans(), which=st.sampled_from(["a", "b", "ab", "ba"]))
    def claim(self, pick: int, limit: int, run_ahead: bool, which: str) -> None:
        worker_id = self._one(self.living, pick)
        queues = [f"{letter}{self.game}" for letter in which]
        ready = [j for j in self.jobs.values() if j.state is JobState.PENDING and j.queue in queues]
        expected = sorted(ready, key=lambda j: (j.rank, j.id))[:limit]
        answer = wish(self.ledger, worker_id, limit, queues=queues, run_ahead=run_ahead)
        assert {job.job_id for job in answer.claimed} == {j.id for j in expected}
        for job in answer.claimed:
            mine = self.jobs[job.job_id]
            mine.state = JobState.RUNNING if run_ahead else JobState.CLAIMED
            mine.attempt += run_ahead
            mine.worker, mine.token = worker_id, job.token
            self.hands[job.job_id] = job

    @precondition(lambda self: self._in(JobState.CLAIMED))
    @rule(pick=picks)
    def start(self, pick: int) -> None:
        mine = self._one(self._in(JobState.CLAIMED), pick)
        job = self.hands[mine.id]
        answer = turn(self.ledger, self._holder(mine), start=[AttemptRef(job.job_id, job.token)])
        if self._obeyed(answer, mine):
            mine.state = JobState.RUNNING
            mine.attempt += 1

    @precondition(lambda self: self._in(JobState.RUNNING))
    @rule(pick=picks, how=st.sampled_from(["done", "crash", "crash_retry", "failure_retry"]))
    def end(self, pick: int, how: str) -> None:
        mine = self._one(self._in(JobState.RUNNING), pick)
        job = self.hands[mine.id]
        if how == "done":
            if self._obeyed(turn(self.ledger, self._holder(mine), done=[done(job)]), mine):
                mine.state = JobState.SUCCEEDED
            return
        ending = {"crash": crash, "crash_retry": crash_retry, "failure_retry": failure_retry}[how](job)
        if self._obeyed(turn(self.ledger, self._holder(mine), endings=[ending]), mine):
            self._apply(mine, ending)

    @precondition(lambda self: self._held())
    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        mine = self._one(self._held(), pick)
        if self._obeyed(turn(self.ledger, self._holder(mine), release=[release(self.hands[mine.id])]), mine):
            self._release(mine)

    @precondition(lambda self: self.living)
    @rule(pick=picks)
    def die(self, pick: int) -> None:
        worker_id = self._one(self.living, pick)
        assert self.ledger.recovery.declare_dead(worker_id, verdict(), GuardNone())
        self.living.remove(worker_id)
        self.dead.append(worker_id)

    @precondition(lambda self: self.dead)
    @rule(pick=picks)
    def sweep(self, pick: int) -> None:
        worker_id = self._one(self.dead, pick)
        held = self.ledger.recovery.held_jobs(worker_id, 100)
        assert {job.job_id for job in held} == {j.id for j in self._held() if j.worker == worker_id}
        jobs = [self.hands[job.job_id] for job in held]
        ran = [crash_retry(job) for job in jobs if self.jobs[job.job_id].state is JobState.RUNNING]
        unrun = [release(job) for job in jobs if self.jobs[job.job_id].state is JobState.CLAIMED]
        written = self.ledger.recovery.settle(worker_id, ran, unrun, GuardDead())
        assert written == {(job.job_id, job.token) for job in jobs}
        for job in jobs:
            self.stale_hands.append((worker_id, job))
        for ending in ran:
            self._apply(self.jobs[ending.job_id], ending)
        for one in unrun:
            self._release(self.jobs[one.job_id])

    @precondition(lambda self: self.stale_hands and self.living)
    @rule(pick=picks, how=st.sampled_from(["done", "endings", "start", "release", "settle"]))
    def write_as_a_zombie(self, pick: int, how: str) -> None:
        worker_id, job = self._one(self.stale_hands, pick)
        writes: dict[str, Callable[[], Any]] = {
            "done": lambda: done(job),
            "endings": lambda: crash(job),
            "start": lambda: AttemptRef(job.job_id, job.token),
            "release": lambda: release(job),
        }
        if how == "settle":
            assert self.ledger.recovery.settle(worker_id, [crash(job)], [release(job)], GuardNone()) == set()
        else:
            # Under its own dead name, and under the name of somebody alive.
            assert not turn(self.ledger, worker_id, **{how: [writes[how]()]}).alive
            answer = turn(self.ledger, self._one(self.living, pick), **{how: [writes[how]()]})
            assert answer.superseded == {(job.job_id, job.token)}

    @precondition(lambda self: self.jobs)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        mine = self._one(list(self.jobs.values()), pick)
        [answer] = self.ledger.jobs.cancel([mine.id], "player").values()
        if mine.state in (JobState.PENDING, JobState.CLAIMED):
            assert answer == "cancelled"
            mine.state, mine.worker, mine.token = JobState.CANCELLED, None, None
        elif mine.state is JobState.RUNNING:
            assert answer == "requested"
            mine.cancel = True
        else:
            assert answer == "finished"

    @precondition(lambda self: self.jobs)
    @rule(pick=picks)
    def retry(self, pick: int) -> None:
        mine = self._one(list(self.jobs.values()), pick)
        [answer] = self.ledger.jobs.retry([mine.id], "player").values()
        taken = any(
            j.key == mine.key and j.state not in FINAL_STATES for j in self.jobs.values() if j.key and j is not mine
        )
        if mine.state is JobState.SUCCEEDED:
            assert answer == "succeeded"
        elif mine.state not in FINAL_STATES:
            assert answer == "live"
        elif taken:
            assert answer == "duplicate"
        else:
            assert answer == "queued"
            mine.state, mine.worker, mine.token, mine.cancel = JobState.PENDING, None, None, False
            mine.failures = mine.crashes = 0

    # What must hold after every move ----------------------------------------------------------

    @invariant()
    def ledger_and_model_agree(self) -> None:
        seen = {job.id: job for job in self.ledger.jobs.list(JobFilter(limit=1000)) if job.queue in self.queues}
        assert seen.keys() == self.jobs.keys()
        for mine in self.jobs.values():
            job = seen[mine.id]
            assert (job.state, job.attempt, job.failures, job.crash_count) == (
                mine.state,
                mine.attempt,
                mine.failures,
                mine.crashes,
            ), mine
            if mine.state in HELD_STATES:
                assert (job.worker_id, job.token) == (mine.worker, mine.token)
            if mine.state is JobState.PENDING:
                assert (job.worker_id, job.token) == (None, None)
            assert (job.finished_at is not None) == (mine.state in FINAL_STATES)

    # ------------------------------------------------------------------------------------------

    def _one(self, things: list[Any], pick: int) -> Any:
        return things[pick % len(things)]

    def _in(self, state: JobState) -> list[Model]:
        return [job for job in self.jobs.values() if job.state is state]

    def _held(self) -> list[Model]:
        return [job for job in self.jobs.values() if job.state in HELD_STATES]

    def _holder(self, mine: Model) -> str:
        assert mine.worker is not None
        return mine.worker

    def _obeyed(self, answer: Any, mine: Model) -> bool:
        """A living holder is obeyed, and a dead one is told so."""
        assert answer.alive == (mine.worker in self.living)
        assert answer.superseded == frozenset()
        return bool(answer.alive)

    def _apply(self, mine: Model, ending: Ending) -> None:
        mine.failures += ending.counter == "failure"
        mine.crashes += ending.counter == "crash"
        if ending.state is JobState.PENDING:
            mine.go_back()
        else:
            mine.state = ending.state

    def _release(self, mine: Model) -> None:
        mine.attempt -= mine.state is JobState.RUNNING
        mine.go_back()


def test_no_game_makes_ledger_and_model_disagree(ledger: Ledger) -> None:
    class ThisGame(Game):
        pass

    ThisGame.ledger = ledger
    run_state_machine_as_test(
        ThisGame,
        settings=settings(
            max_examples=GAMES,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
