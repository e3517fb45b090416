"""Count what the demo did: live from the ledger, and in a final audit against the files of its tasks."""

import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from unstuck.cli.output import Cell, count
from unstuck.demo.fleet import Fleet
from unstuck.demo.killer import Death, Kind
from unstuck.demo.record import Tries, read_record
from unstuck.demo.tasks import QUEUE
from unstuck.domain.payload import decode
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState
from unstuck.errors import ErrorCode
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter, JobRecord
from unstuck.ledger.contract.workers import WorkerRecord

BIN_S = 0.5
BINS = 240
MAX_SHOWN_JOBS = 500
OUTCOMES_BATCH = 500


@dataclass
class Snapshot:
    """What the last look showed."""

    seen_s: float = 0.0
    """Monotonic."""
    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    """By pid."""
    doing: dict[str, list[JobRecord]] = field(default_factory=dict)
    """What each worker holds, by its id."""
    waiting: int = 0
    running: int = 0


class SnapshotReader:
    def __init__(self, ledger: Ledger, fleet: Fleet, ids: list[int]) -> None:
        self.sight = Snapshot()
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
        workers = self._ledger.workers.list()
        self._fleet.recognise(workers)
        ours = self._fleet.pids
        held = self._ledger.jobs.list(JobFilter(states=(JobState.CLAIMED, JobState.RUNNING), limit=MAX_SHOWN_JOBS))
        doing: dict[str, list[JobRecord]] = {}
        for job in held:
            if job.worker_id is not None and job.queue == QUEUE:
                doing.setdefault(job.worker_id, []).append(job)
        queue = next((queue for queue in self._ledger.queues.list() if queue.name == QUEUE), None)
        now_s = time.monotonic()
        self.sight = Snapshot(
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
            for outcome in self._ledger.jobs.outcomes(waiting[at : at + OUTCOMES_BATCH]):
                self._open.discard(outcome.job_id)
                self.ended[outcome.state] += 1
                self.finished_per_bin[-1] += 1

    def _count_missing(self) -> None:
        waiting = list(self._open)
        batches = (waiting[at : at + OUTCOMES_BATCH] for at in range(0, len(waiting), OUTCOMES_BATCH))
        self._missing = sum(len(self._ledger.jobs.missing(batch)) for batch in batches)

    def _advance(self, now_s: float) -> bool:
        began_s = self._bin_s
        while now_s - self._bin_s >= BIN_S:
            self._bin_s += BIN_S
            self.finished_per_bin.append(0)
            self.waiting_per_bin.append(self.sight.waiting)
        return self._bin_s > began_s


PAGE = 1_000
BY_DESIGN = {("parse", ErrorCode.TASK_FAILED), ("charge", ErrorCode.WORKER_CRASHED)}
"""What may fail, and how: bad input, and work that must not be repeated after a crash."""


@dataclass
class Audit:
    enqueued: int = 0
    succeeded: int = 0
    raised_by_design: int = 0
    crashed_by_design: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    """Job id → what is wrong with it."""
    twice: dict[int, str] = field(default_factory=dict)
    retried_after_error: int = 0
    rerun_after_crash: int = 0
    """Tries that were made because the one before was killed."""
    jobs_rerun: int = 0
    ran_to_the_end_again: int = 0
    """Killed between their last line and the ledger's commit: side effects happened twice, the success once."""


def audit(ledger: Ledger, ids: Collection[int], record: Path) -> Audit:
    """Check every job of the demo, one by one."""
    result = Audit(enqueued=len(ids))
    jobs = _read_jobs(ledger, ids)
    tries = read_record(record)
    results = _read_results(ledger, ids)
    for job_id in ids:
        job = jobs.get(job_id)
        if job is None:
            result.lost[job_id] = "is not in the ledger"
        elif job.state not in FINAL_STATES:
            result.lost[job_id] = f"{job.task} is still {job.state}"
        else:
            _check(ledger, job, tries[job_id], results.get(job_id), result)
    return result


def _check(ledger: Ledger, job: JobRecord, tries: Tries, mark: str | None, result: Audit) -> None:
    result.retried_after_error += max(0, job.failures - (job.state is JobState.FAILED))
    # Those that were lost with a whole worker are counted as suspected_crashes: whose doing it was is not known.
    deaths = job.crash_count + job.suspected_crashes
    if deaths and job.state is JobState.SUCCEEDED:
        result.rerun_after_crash += deaths
        result.jobs_rerun += 1
    if job.state is not JobState.SUCCEEDED:
        code = job.error.code if job.error else ""
        if (job.task, code) not in BY_DESIGN or job.state is not JobState.FAILED:
            result.lost[job.id] = f"{job.task} ended as {job.state} ({code}), which its rules do not allow"
        elif code == ErrorCode.TASK_FAILED:
            result.raised_by_design += 1
        else:
            result.crashed_by_design += 1
        return
    result.succeeded += 1
    if mark not in tries.ended:
        result.lost[job.id] = f"{job.task} is a success in the ledger, and never ran to its end"
        return
    result.ran_to_the_end_again += len(tries.ended) > 1
    if wrong := _second_success(ledger, job, tries, mark):
        result.twice[job.id] = wrong


def _second_success(ledger: Ledger, job: JobRecord, tries: Tries, mark: str) -> str | None:
    """Find signs of a job that was finished, and then given out or finished again."""
    # Both times are from the same host: once the try that counts has ended, nobody else can have the job.
    if any(at > tries.ended[mark] for at in tries.begun.values()):
        return f"{job.task} was begun again after its success"
    if len(tries.begun) == 1:
        return None
    attempts = ledger.jobs.attempts(job.id)
    successes = sum(attempt.state is AttemptState.SUCCEEDED for attempt in attempts)
    if successes != 1:
        return f"{job.task} has {successes} successful attempts"
    crashed = sum(attempt.state in (AttemptState.CRASHED, AttemptState.DRAINED) for attempt in attempts)
    if len(tries.ended) - 1 > crashed:
        return f"{job.task} ran to its end {len(tries.ended)} times, with {crashed} crashes to explain it"
    return None


def _read_jobs(ledger: Ledger, ids: Collection[int]) -> dict[int, JobRecord]:
    wanted = set(ids)
    found: dict[int, JobRecord] = {}
    before = max(wanted, default=0) + 1
    while wanted and before > min(wanted):
        page = ledger.jobs.list(JobFilter(before_id=before, limit=PAGE))
        if not page:
            break
        found.update({job.id: job for job in page if job.id in wanted})
        before = page[-1].id
    return found


def _read_results(ledger: Ledger, ids: Collection[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    ordered = list(ids)
    for at in range(0, len(ordered), OUTCOMES_BATCH):
        for outcome in ledger.jobs.outcomes(ordered[at : at + OUTCOMES_BATCH]):
            if outcome.state is JobState.SUCCEEDED:
                found[outcome.job_id] = str(decode(outcome.result))
    return found


MAX_NAMED = 10


@dataclass(frozen=True)
class Score:
    seconds: float
    workers: int
    ledger: str
    audit: Audit
    deaths: list[Death]
    unexpected: list[str]
    trouble: str | None
    """Why some jobs could not be enqueued, if so."""

    @property
    def ok(self) -> bool:
        given_up = any(death.given_up for death in self.deaths)
        return not (self.audit.lost or self.audit.twice or self.unexpected or given_up)

    def as_json(self) -> dict[str, Any]:
        audit = self.audit
        return {
            "ok": self.ok,
            "ledger": self.ledger,
            "seconds": self.seconds,
            "workers": self.workers,
            "enqueued": audit.enqueued,
            "succeeded": audit.succeeded,
            "failed_by_design": {
                "total": audit.raised_by_design + audit.crashed_by_design,
                "task_failed": audit.raised_by_design,
                "worker_crashed": audit.crashed_by_design,
            },
            "lost": len(audit.lost),
            "lost_jobs": {str(job_id): why for job_id, why in audit.lost.items()},
            "finished_twice": len(audit.twice),
            "finished_twice_jobs": {str(job_id): why for job_id, why in audit.twice.items()},
            "retried_after_error": audit.retried_after_error,
            "rerun_after_crash": audit.rerun_after_crash,
            "jobs_saved": audit.jobs_rerun,
            "ran_to_the_end_again": audit.ran_to_the_end_again,
            "deaths": {"workers": len(self._of("worker")), "runners": len(self._of("runner"))},
            "detection_ms": {
                "all": _times(self.deaths),
                "worker": _times(self._of("worker")),
                "runner": _times(self._of("runner")),
            },
            "detectors": dict(Counter(death.detector for death in self.deaths if death.detector)),
            "kills": [_kill(death) for death in self.deaths],
            "unexpected_exits": self.unexpected,
            "enqueue_trouble": self.trouble,
        }

    def lines(self) -> list[list[Cell]]:
        """Give the summary for people, line by line: a label, and what there is to say."""
        audit = self.audit
        by_design = audit.raised_by_design + audit.crashed_by_design
        lines = [
            _line("enqueued", f"{audit.enqueued:,}", "bold"),
            _line("succeeded", f"{audit.succeeded:,}", "green"),
            _line(
                "failed by design",
                f"{by_design:,}",
                "",
                f"{audit.raised_by_design} bad input, {audit.crashed_by_design} killed with on_crash=fail",
            ),
            _line("lost", f"{len(audit.lost):,}", "bold red" if audit.lost else "bold green"),
            _line("finished twice", f"{len(audit.twice):,}", "bold red" if audit.twice else "bold green"),
            _line("re-run after a crash", f"{audit.rerun_after_crash:,}", "", f"{audit.jobs_rerun:,} jobs saved"),
            _line("retried after error", f"{audit.retried_after_error:,}"),
            [],
        ]
        if self.deaths:
            lines.append([Cell(f"  {'killed with kill -9':<22}      n    median     worst   seen by", "bright_black")])
            lines += [_deaths_line("workers", self._of("worker")), _deaths_line("runners", self._of("runner"))]
        return lines + self._complaints()

    def _of(self, kind: Kind) -> list[Death]:
        return [death for death in self.deaths if death.kind == kind]

    def _complaints(self) -> list[list[Cell]]:
        wrong = [f"job {job_id} {why}" for job_id, why in list(self.audit.lost.items())[:MAX_NAMED]]
        wrong += [f"job {job_id}: {why}" for job_id, why in list(self.audit.twice.items())[:MAX_NAMED]]
        wrong += self.unexpected[:MAX_NAMED]
        wrong += [
            f"the {d.kind} killed in {d.name} (pid {d.pid}) was not settled in time" for d in self.deaths if d.given_up
        ]
        if self.trouble:
            wrong.append(f"some jobs were refused at the door: {self.trouble}")
        return [[], *([Cell(f"  {sentence}", "red")] for sentence in wrong)] if wrong else []

    def verdict(self) -> Cell:
        if self.ok:
            killed = len(self.deaths)
            return Cell(
                f"{killed} killed, nothing lost." if killed else "Nobody was killed, nothing lost.", "bold green"
            )
        return Cell("The demo found something wrong; see above.", "bold red")


def _line(label: str, value: str, style: str = "", note: str = "") -> list[Cell]:
    return [Cell(f"  {label:<22}"), Cell(f"{value:>7}", style), Cell(f"   {note}" if note else "", "bright_black")]


def _deaths_line(who: str, deaths: list[Death]) -> list[Cell]:
    times = _times(deaths)
    seen = Counter(death.detector for death in deaths if death.detector)
    fast = ("-", "-") if times["median"] is None else (f"{times['median']:,.0f} ms", f"{times['worst']:,.0f} ms")
    by = ", ".join(f"{name} {number}" for name, number in seen.most_common())
    return [
        Cell(f"  {who:<22}"),
        Cell(f"{len(deaths):>7,}", "bold"),
        Cell(f"{fast[0]:>10}{fast[1]:>10}", "green"),
        Cell(f"   {by}", "bright_black"),
    ]


def _times(deaths: list[Death]) -> dict[str, Any]:
    times = [death.settled_ms for death in deaths if death.settled_ms is not None]
    return {
        "count": len(times),
        "median": round(median(times), 1) if times else None,
        "worst": round(max(times), 1) if times else None,
    }


def _kill(death: Death) -> dict[str, Any]:
    return {
        "kind": death.kind,
        "worker": death.name,
        "pid": death.pid,
        "detector": death.detector or None,
        "cause": death.cause or None,
        "settled_ms": None if death.settled_ms is None else round(death.settled_ms, 1),
        "requeued": death.requeued,
        "failed": death.failed,
        "returned": death.returned,
    }


def became(death: Death) -> str:
    """Say in a few words what became of the jobs in the dead hands."""
    if len(death.held) == 1 and death.requeued + death.failed == 1:
        hand = next(iter(death.held.values()))
        return f"{hand.task} {hand.job_id} {'requeued' if death.requeued else 'failed by its rule'}"
    parts = []
    if death.requeued:
        parts.append(f"{count(death.requeued, 'job')} requeued")
    if death.failed:
        parts.append(f"{death.failed} failed by rule")
    if death.returned:
        parts.append(f"{death.returned} given back")
    if death.given_up:
        parts.append("NOT SETTLED")
    return ", ".join(parts) or "held nothing"
