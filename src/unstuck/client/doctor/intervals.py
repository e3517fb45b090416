"""Find heartbeat intervals that are more than a third of a timeout: one late heartbeat brings a healthy worker near its
death."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts
from unstuck.client.doctor.finding import Finding, named, warning
from unstuck.client.doctor.metadata import told
from unstuck.config import Recovery
from unstuck.domain.durations import brief
from unstuck.domain.policy import decode_policy
from unstuck.store.records import TaskRecord, WorkerRecord

BEATS_PER_TIMEOUT = 3.0
HERE = "the settings that this command reads"
MAX_TASKS = 5
"""How many tasks are told of for one interval and timeout."""


@dataclass(frozen=True)
class Pair:
    """A heartbeat interval and a timeout that applies to it."""

    interval_s: float
    timeout_s: float
    timeout: str
    """The setting that it comes from."""
    task: str | None = None

    @property
    def is_risky(self) -> bool:
        # A little more is the noise of numbers that were divided.
        return self.interval_s * BEATS_PER_TIMEOUT > self.timeout_s * 1.001


@dataclass
class _Whose:
    workers: list[WorkerRecord] = field(default_factory=list)
    here: bool = False


def check_intervals(facts: Facts) -> Iterator[Finding]:
    """Compare the intervals of living workers, and of the settings here, with every timeout that applies to them."""
    timeouts_s = dict(_task_timeouts_s(facts.tasks))
    risky: dict[Pair, _Whose] = {}
    for worker in facts.living:
        for pair in {*pairs_of(worker), *_task_pairs(worker, timeouts_s)}:
            if pair.is_risky:
                risky.setdefault(pair, _Whose()).workers.append(worker)
    for pair in {*_pairs_here(facts.settings.recovery)}:
        if pair.is_risky:
            risky.setdefault(pair, _Whose()).here = True
    for pair in sorted(risky, key=lambda pair: (pair.task or "", pair.timeout_s)):
        yield _risky(pair, risky[pair])


def pairs_of(worker: WorkerRecord) -> Iterator[Pair]:
    """Return the timeouts of a worker itself; others decide by them whether it is dead."""
    interval_s = worker.heartbeat_interval_s
    usual_s = told(worker, "heartbeat_timeout_s", float)
    running_s = told(worker, "running_stale_after_s", float)
    own = usual_s is not None and worker.suspect_after_s != usual_s
    yield Pair(interval_s, worker.suspect_after_s, "claimed_stale_after" if own else "heartbeat_timeout")
    if running_s is not None and running_s != worker.suspect_after_s:
        yield Pair(interval_s, running_s, "heartbeat_timeout" if running_s == usual_s else "running_stale_after")


def _pairs_here(recovery: Recovery) -> Iterator[Pair]:
    interval_s = recovery.heartbeat_interval_s
    yield Pair(interval_s, recovery.heartbeat_timeout_s, "heartbeat_timeout")
    if recovery.claimed_stale_after is not None:
        yield Pair(interval_s, recovery.claimed_stale_after_s, "claimed_stale_after")
    if recovery.running_stale_after is not None:
        yield Pair(interval_s, recovery.running_stale_after_s, "running_stale_after")


def _task_timeouts_s(tasks: tuple[TaskRecord, ...]) -> Iterator[tuple[str, float]]:
    for task in tasks:
        policy = decode_policy(task.policy)
        if policy.heartbeat and policy.heartbeat_timeout_s is not None:
            yield task.name, policy.heartbeat_timeout_s


def _task_pairs(worker: WorkerRecord, timeouts_s: dict[str, float]) -> list[Pair]:
    found = [
        Pair(worker.heartbeat_interval_s, timeouts_s[task], "heartbeat_timeout", task)
        for task in worker.tasks
        if task in timeouts_s
    ]
    return sorted((pair for pair in found if pair.is_risky), key=lambda pair: pair.timeout_s)[:MAX_TASKS]


def _risky(pair: Pair, whose: _Whose) -> Finding:
    names = named([worker.name for worker in whose.workers])
    who = " and ".join(part for part in (names, HERE if whose.here else "") if part)
    of_task = "" if pair.task is None else f" of task {pair.task!r}"
    return warning(
        Code.TIMEOUT_TOO_TIGHT,
        f"The heartbeat interval of {who} ({brief(pair.interval_s)}) is more than a third of {pair.timeout} "
        f"({brief(pair.timeout_s)}){of_task}",
        "One heartbeat that comes late, because the host, the network or the database is slow for a moment, and a "
        "healthy worker may lose its jobs.",
        f"Set heartbeat_interval to {brief(pair.timeout_s / BEATS_PER_TIMEOUT)} or less, or {pair.timeout}{of_task} to "
        f"{brief(pair.interval_s * BEATS_PER_TIMEOUT)} or more.",
        workers=[worker.id for worker in whose.workers],
        here=whose.here,
        task=pair.task,
        timeout=pair.timeout,
        timeout_s=pair.timeout_s,
        heartbeat_interval_s=pair.interval_s,
    )
