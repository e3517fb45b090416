"""Remember what really happened, and say where that breaks a promise.

The ledger knows only what it was told. Here stands the truth: which process lives, which heartbeat was committed when,
when nobody could write, which code began. Each invariant is checked at the moment at which it can break.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.database import Call
from tests.simulation.scenario import JobPlan, Scenario
from tests.simulation.scheduler import Process

from unstuck.domain.endings import Ending, Outcome, Succeeded
from unstuck.domain.liveness import KERNEL, Detector
from unstuck.domain.policy import Policy
from unstuck.domain.states import FINAL_STATES, LIVE_STATES, WorkerState
from unstuck.domain.watch_clock import slack_s
from unstuck.ledger.contract.jobs import Enqueued, JobRecord, NewJob
from unstuck.ledger.contract.workers import Claimed, NewWorker, Turn, TurnAnswer, WorkerVerdict

if TYPE_CHECKING:
    from tests.simulation.runner import Runner

ROUNDING_S = 0.02
TICK_RUNS_S = 0.05
TOLD_AFTER_S = 5.0
"""How long after the end of its job a client may not know it, beside one call that no server answers: it asks several
times per second, and every half a second after a call that failed."""


@dataclass
class WorkerFacts:
    """What is true of one worker id."""

    process: Process
    suspect_after_s: float
    running_stale_after_s: float
    beats: list[float] = field(default_factory=list)
    """When its heartbeats were committed, in true time."""
    dead_s: float | None = None
    detector: Detector | None = None

    @property
    def beat_s(self) -> float | None:
        return self.beats[-1] if self.beats else None


@dataclass
class JobFacts:
    """What is true of one job, whatever its number in the ledger is just now."""

    plan: JobPlan
    policy: Policy
    acknowledged: int | None = None
    """The number under which its client knows it."""
    accounted: bool = False
    """A standby that lagged lost something of it: what is known of it may be told twice, or never."""
    begins: int = 0
    failures: int = 0
    successes: int = 0
    told: list[str] = field(default_factory=list)
    """The outcomes that those who waited for it were told."""
    runners: list["Runner"] = field(default_factory=list)
    changed_s: float = 0.0


@dataclass(frozen=True)
class Violation:
    at_s: float
    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:9.3f}s  {self.invariant}: {self.what}"


class Invariants:
    def __init__(self, scenario: Scenario, now: Callable[[], float], tell: Callable[[str], None]) -> None:
        self.scenario = scenario
        self.now = now
        self.tell = tell
        self.violations: list[Violation] = []
        self.workers: dict[str, WorkerFacts] = {}
        self.jobs: dict[str, JobFacts] = {
            str(number): JobFacts(plan, plan.policy) for number, plan in enumerate(scenario.jobs)
        }
        self.verdicts: Counter[str] = Counter()
        self._key_of: dict[int, str] = {}
        """By number in the ledger, which job that is or was: what a standby that lagged had lost keeps its number."""
        self._tokens: set[int] = set()
        self._ticks: Counter[str] = Counter()
        self._unwritable: list[tuple[float, float]] = []
        self._unwritable_since_s: float | None = None
        self._enqueued_s: dict[str, float] = {}
        self._small_steps: list[tuple[float, float]] = []
        """When the clock of the ledger was set forward by how much, if that is too little to be seen."""
        self._set_back_s: list[float] = []
        self._detours: list[tuple[float, float]] = []
        """From when to when the clock of the ledger was set back, if that is too short to be seen."""

    def violate(self, invariant: str, what: str) -> None:
        self.violations.append(Violation(self.now(), invariant, what))
        self.tell(f"VIOLATION of {invariant}: {what}")

    # Time in which nobody could write -------------------------------------------------------------

    def note_writable(self, writable: bool) -> None:
        if writable and self._unwritable_since_s is not None:
            self._unwritable.append((self._unwritable_since_s, self.now()))
            self._unwritable_since_s = None
        elif not writable and self._unwritable_since_s is None:
            self._unwritable_since_s = self.now()

    def silent_s(self, facts: WorkerFacts) -> float:
        """Return how long a worker has been silent, without the time in which nobody could write."""
        beat_s = self._counted_from_s(facts)
        if beat_s is None:
            return 0.0
        now_s = self.now()
        spans = list(self._unwritable)
        if self._unwritable_since_s is not None:
            spans.append((self._unwritable_since_s, now_s))
        lost_s = [min(end, now_s) - max(begin, beat_s) for begin, end in _merged(spans)]
        silent_s = now_s - beat_s - sum(span_s for span_s in lost_s if span_s > self.unseen_s)
        return silent_s + sum(step_s for at_s, step_s in self._small_steps if at_s >= beat_s)

    def _counted_from_s(self, facts: WorkerFacts) -> float | None:
        """Return from when the silence of a worker counts: its last heartbeat.

        One that came while the clock was set back, and forward again before a reaper saw it, counts from the last
        contact of a reaper before."""
        beat_s = facts.beat_s
        if beat_s is None:
            return None
        return min([beat_s, *(end - self.unseen_s for begin, end in self._detours if begin <= beat_s <= end)])

    def note_step(self, size_s: float) -> None:
        """Hear that the clock of the ledger was set.

        A step forward that is smaller than the slack of a tick looks like a tick that was late. One back and forward
        again stays unseen if it fits between two contacts of a reaper."""
        now_s = self.now()
        if size_s < 0.0:
            self._set_back_s.append(now_s)
            return
        if size_s <= slack_s(self.scenario.interval_s) + ROUNDING_S:
            self._small_steps.append((now_s, size_s))
        self._detours += [(begin, now_s) for begin in self._set_back_s if now_s - begin <= self.unseen_s]

    @property
    def unseen_s(self) -> float:
        """How long an outage may last and count as silence.

        A reaper claims at most half a heartbeat interval with each contact, and what fits between two contacts stays
        unseen. Of a longer one nothing counts."""
        interval_s = self.scenario.interval_s
        return interval_s / 2 + slack_s(interval_s) + ROUNDING_S

    @property
    def told_within_s(self) -> float:
        """How soon after the end of its job a client must know it.

        A call that was sent to a server that vanished stays without an answer until its deadline."""
        return self.scenario.deadline_s + TOLD_AFTER_S

    def expect(self, birth: NewWorker, process: Process) -> None:
        """Know who will be meant by this id."""
        self.workers[birth.id] = WorkerFacts(process, birth.suspect_after_s, birth.running_stale_after_s)

    # What the ledger did --------------------------------------------------------------------------

    def observe(self, call: Call, answer: Any) -> None:
        """Look at a call that was executed."""
        match call.verb:
            case "workers.register":
                # Repeated after a lost answer it changes nothing, and is no heartbeat.
                if self.workers[call.args[0].id].beat_s is None:
                    self._heard(call.args[0].id)
            case "workers.beat":
                if answer.state in LIVE_STATES:
                    self._heard(call.args[0].worker_id)
            case "jobs.enqueue":
                self._enqueued(call.args[0], answer)
            case "schedules.fire":
                self._fired(call.args[0].jobs, answer)
            case "workers.turn":
                self._turned(call.args[0], answer)
            case "recovery.declare_dead":
                self._condemned(call.args[0], call.args[1], answer)
            case "recovery.settle":
                self._settled(call.args[0], call.args[1], call.args[2], answer)
            case _:
                raise AssertionError(f"{call.verb} is observed and not understood")

    def _heard(self, worker_id: str) -> None:
        self.workers[worker_id].beats.append(self.now())

    def _enqueued(self, jobs: Sequence[NewJob], stored: Sequence[Enqueued]) -> None:
        for job, enqueued in zip(jobs, stored, strict=True):
            self._number(enqueued.job_id, job.payload.decode())

    def _fired(self, jobs: Sequence[NewJob], ids: list[int] | None) -> None:
        for job, job_id in zip(jobs, ids or (), strict=False):
            key = job.enqueued_by or ""
            self._ticks[key] += 1
            if self._ticks[key] > 1:
                self.violate("a tick is enqueued once", f"{key} was enqueued {self._ticks[key]} times")
            self._number(job_id, key)
            self.jobs[key] = JobFacts(JobPlan(self.now(), TICK_RUNS_S, "well", Policy()), Policy(), acknowledged=job_id)

    def _number(self, job_id: int, key: str) -> None:
        if self._key_of.setdefault(job_id, key) != key:
            self.violate("no number is given out twice", f"{job_id} was the number of job {self._key_of[job_id]}")
        self._key_of[job_id] = key
        self._enqueued_s[key] = self.now()

    def _turned(self, turn: Turn, answer: TurnAnswer) -> None:
        if not answer.alive:
            return
        for done in turn.done:
            if (done.job_id, done.token) not in answer.superseded:
                facts = self._job(done.job_id)
                facts.successes += 1
                facts.changed_s = self.now()
                if facts.successes > 1:
                    self.violate("at most one success", f"job {done.job_id} succeeded {facts.successes} times")
        for held in (*turn.endings, *turn.start, *turn.release):
            self._job(held.job_id).changed_s = self.now()
        self._count_failures(turn.endings, {(one.job_id, one.token) for one in turn.endings} - answer.superseded)
        for claimed in answer.claimed:
            self._job(claimed.job_id).changed_s = self.now()
            if claimed.token in self._tokens:
                self.violate("no number is given out twice", f"token {claimed.token} of job {claimed.job_id}")
            self._tokens.add(claimed.token)

    def _condemned(self, worker_id: str, verdict: WorkerVerdict, written: bool) -> None:
        if not written or verdict.state is not WorkerState.DEAD:
            return
        facts = self.workers[worker_id]
        facts.dead_s, facts.detector = self.now(), verdict.detector
        silent_s = self.silent_s(facts)
        self.verdicts[verdict.detector.value] += 1
        self.tell(
            f"{verdict.by} declares {worker_id} dead: {verdict.evidence} ({verdict.detector}); in truth its process "
            f"{'lives' if facts.process.alive else 'is gone'} and it was silent for {silent_s:.3f}s"
        )
        if not facts.process.alive:
            return
        if verdict.detector in KERNEL:
            self.violate("no living worker is declared dead", f"{worker_id} lives; {verdict.evidence}")
        elif silent_s < facts.suspect_after_s - ROUNDING_S:
            self.violate(
                "no worker that could write within its lease is declared dead",
                f"{worker_id} was silent for {silent_s:.3f}s of {facts.suspect_after_s:g}s ({verdict.evidence})",
            )

    def _settled(self, worker_id: str, endings: Any, releases: Any, written: set[tuple[int, int]]) -> None:
        for job_id, _token in written:
            self._job(job_id).changed_s = self.now()
        self._count_failures(endings, written)
        worker = self.workers[worker_id]
        if worker.dead_s is not None or not worker.process.alive:
            return
        silent_s = self.silent_s(worker)
        for ending in endings:
            facts = self._job(ending.job_id)
            if (ending.job_id, ending.token) not in written or facts.policy.timeout_s is not None:
                continue
            patience_s = facts.policy.heartbeat_timeout_s or worker.running_stale_after_s
            if silent_s < patience_s - ROUNDING_S:
                self.violate(
                    "no job is taken within its lease",
                    f"job {ending.job_id} was taken from {worker_id} after {silent_s:.3f}s of {patience_s:g}s",
                )

    def _count_failures(self, endings: Sequence[Ending], written: set[tuple[int, int]]) -> None:
        """Count what the rule for errors may try again: user code raised, or ran past its deadline."""
        for ending in endings:
            if ending.counter == "failure" and (ending.job_id, ending.token) in written:
                self._job(ending.job_id).failures += 1

    # What user code did ---------------------------------------------------------------------------

    def facts_of(self, job: Claimed) -> JobFacts:
        return self._job(job.job_id)

    def begins(self, runner: "Runner") -> None:
        facts = runner.facts
        facts.begins += 1
        facts.changed_s = self.now()
        self.tell(f"{runner.life.id} begins job {runner.hold.job.job_id} (token {runner.token})")
        if facts.policy.on_crash == "fail" and facts.begins > 1 + facts.failures and not facts.accounted:
            what = f"job {runner.hold.job.job_id} began {facts.begins} times, {facts.failures} of them failed"
            self.violate('on_crash="fail" code begins once', what)
        if facts.policy.overlap == "never" and not facts.accounted:
            for other in facts.runners:
                if other.process.well:
                    what = f"job {runner.hold.job.job_id} began while {other.life.id} still ran it"
                    self.violate('overlap="never" runs do not overlap', what)
        facts.runners.append(runner)

    def ends(self, runner: "Runner") -> None:
        if runner in runner.facts.runners:
            runner.facts.runners.remove(runner)

    def came_to(self, runner: "Runner", outcome: Outcome) -> None:
        if not isinstance(outcome, Succeeded):
            self.tell(f"{runner.life.id}: job {runner.hold.job.job_id} ended with {type(outcome).__name__}")

    # What clients were told -----------------------------------------------------------------------

    def acknowledge(self, key: str, job_id: int) -> None:
        if not self.jobs[key].accounted:
            self.jobs[key].acknowledged = job_id

    def told(self, key: str, state: str) -> None:
        facts = self.jobs[key]
        facts.told.append(state)
        if len(facts.told) > 1 and not facts.accounted:
            self.violate("waiters are told once", f"the client of job {key} was told {' and '.join(facts.told)}")

    def forget_ticks(self) -> None:
        """Let ticks come again: a clock was set, and shows the same times once more."""
        self._ticks.clear()

    # Failover -------------------------------------------------------------------------------------

    def lose(self, since_s: float, until_s: float) -> None:
        """Account for what a standby that lagged did not have: all that was written between these times."""
        self._unwritable.append((since_s, until_s))
        for worker in self.workers.values():
            worker.beats = [at_s for at_s in worker.beats if at_s <= since_s] or worker.beats[:1]
        for key, facts in self.jobs.items():
            if self._enqueued_s.get(key, -1.0) > since_s:
                facts.acknowledged, facts.accounted = None, True
            if facts.changed_s > since_s:
                facts.accounted = True
                facts.successes = 0
        self._ticks.clear()

    # At the end -----------------------------------------------------------------------------------

    def check_jobs(self, stored: dict[int, JobRecord], left: set[int], waiting: set[str]) -> None:
        """Check that every acknowledged job exists, has ended, and that its client knows.

        `left` are jobs that an operator must decide, `waiting` those whose client still waits."""
        told_before_s = self.now() - self.told_within_s
        for key, facts in self.jobs.items():
            if facts.acknowledged is None:
                continue
            job = stored.get(facts.acknowledged)
            if job is None:
                self.violate("an acknowledged job is never lost", f"job {facts.acknowledged} ({key}) is gone")
            elif job.state not in FINAL_STATES and facts.acknowledged not in left:
                self.violate(
                    "every job ends", f"job {facts.acknowledged} is {job.state.value} (worker {job.worker_id})"
                )
            elif (
                job.state in FINAL_STATES and key in waiting and facts.changed_s < told_before_s and not facts.accounted
            ):
                self.violate("waiters are told once", f"job {key} is {job.state.value}, and its client was never told")
            elif facts.told and facts.told[0] != job.state.value and not facts.accounted:
                self.violate("waiters are told once", f"job {key} was told {facts.told[0]} and is {job.state.value}")

    def is_delayed(self, job_id: int) -> bool:
        """Return whether the client said when to begin the job, and it has not begun yet."""
        facts = self._job(job_id)
        return facts.plan.delay_s > 0 and (facts.accounted or not facts.begins)

    def _job(self, job_id: int) -> JobFacts:
        return self.jobs[self._key_of[job_id]]


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same time in spans that do not overlap: a standby may have lagged into an outage."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
