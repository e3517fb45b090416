"""Recover by hand the jobs that silent workers hold: list, fail or requeue them.

The evidence is repeated in every write: a worker whose heartbeat arrives in between keeps its jobs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec

from unstuck import logs
from unstuck.client.operator.audit import AuditLog, counted, silence_named
from unstuck.domain.endings import Attempt, Died, Ending, Release, conclude
from unstuck.domain.policy import Policy, decode_policy
from unstuck.domain.states import LIVE_STATES, JobState, WorkerState
from unstuck.domain.units import brief
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import Guard, GuardDead, GuardNone, GuardSuspect, GuardUnheard
from unstuck.ledger.contract.workers import HeldRecord, WorkerRecord

# A worker that is late by less than this many of its own beats is healthy, whatever threshold is asked for.
MISSED_BEATS = 1.5

Action = Literal["none", "failed", "requeued", "cancelled", "quarantined"]

W = TypeVar("W", Ending, Release)

log = logs.logger("unstuck.operator")


class StaleAction(msgspec.Struct, frozen=True):
    """A job in the hands of a worker that is silent, suspect or dead; `action` is what was done about it."""

    job_id: int
    task: str
    queue: str
    state: JobState
    on_crash: str
    worker: str
    worker_name: str
    worker_state: str
    host: str
    silent_s: float
    held_s: float
    given_up_after_s: float | None
    """The silence after which the reaper acts; None: its hard deadline alone decides."""
    action: Action = "none"


class _StaleJob(msgspec.Struct, frozen=True):
    held: HeldRecord
    policy: Policy
    report: StaleAction
    guard: Guard
    past_own_timeout: bool


class StaleJobs:
    """Act on held jobs whose worker missed heartbeats, is suspect or is dead."""

    def __init__(self, ledger: Ledger, audit: AuditLog) -> None:
        self._ledger = ledger
        self._audit = audit

    def fail(self, older_than_s: float | None = None) -> list[StaleAction]:
        """Fail stale RUNNING jobs, whatever their `on_crash` says. Return those that were failed.

        Without `older_than_s` each is judged by its own timeout."""
        by = self._audit.by
        with self._audit.record("fail_stale", silence_named(older_than_s)) as entry:
            endings = []
            for found in _find(self._ledger, older_than_s):
                if found.held.state is JobState.RUNNING:
                    rule = msgspec.structs.replace(found.policy, on_crash="fail")
                    endings.append((found, conclude(_attempt(found, rule), Died(_cause(found, "failed", by)))))
            done = _settle(self._ledger, endings, [])
            if done:
                log.warning(f"Failed {len(done)} stale tasks", by=by)
            entry.outcome = counted(action.action for action in done)
        return done

    def requeue(self, older_than_s: float | None = None) -> list[StaleAction]:
        """Requeue stale CLAIMED jobs. Return those that were moved.

        User code of a claimed job never ran, so this is always safe and spends no attempt. A stale RUNNING job is
        requeued only if its policy says `on_crash="retry"` and its own timeout has passed."""
        by = self._audit.by
        with self._audit.record("requeue_stale", silence_named(older_than_s)) as entry:
            endings, releases = [], []
            for found in _find(self._ledger, older_than_s):
                if found.held.state is JobState.CLAIMED:
                    message = f"Task re-queued due to stale worker: {found.held.worker_id}"
                    releases.append((found, Release(found.held.job_id, found.held.token, "requeued", message)))
                elif found.policy.on_crash == "retry" and found.past_own_timeout:
                    death = Died(_cause(found, "re-queued", by))
                    endings.append((found, conclude(_attempt(found, found.policy), death)))
            done = _settle(self._ledger, endings, releases)
            if done:
                log.warning(f"Re-queued {len(done)} stale tasks", by=by)
            entry.outcome = counted(action.action for action in done)
        return done

    # The last method: below it, `list` in an annotation would mean this one.
    def list(self, older_than_s: float = 0.0) -> list[StaleAction]:
        """Return held jobs whose worker has been silent for at least this time, or is suspect or dead."""
        return [found.report for found in _find(self._ledger, older_than_s)]


def _find(ledger: Ledger, older_than_s: float | None) -> list[_StaleJob]:
    workers = {worker.id: worker for worker in ledger.workers.list()}
    found = (
        _judge(held, workers.get(held.worker_id), older_than_s) for held in ledger.recovery.stale(older_than_s or 0.0)
    )
    return sorted((item for item in found if item is not None), key=lambda item: -item.report.silent_s)


def _judge(held: HeldRecord, worker: WorkerRecord | None, older_than_s: float | None) -> _StaleJob | None:
    policy = decode_policy(held.policy)
    patience_s = _patience_s(held, worker)
    past = patience_s is not None and held.silent_s >= patience_s
    guard: Guard
    if worker is None:
        guard, past = GuardNone(), True
    elif worker.state not in LIVE_STATES:
        # Dead in the ledger is not always dead in the world: a task that must never overlap waits for its lease.
        guard, past = GuardDead(), past or policy.overlap != "never"
    else:
        threshold_s = patience_s if older_than_s is None else older_than_s
        if threshold_s is None:
            return None
        if worker.state is WorkerState.SUSPECT and held.silent_s < worker.suspect_after_s:
            # Suspect for another reason than silence; its next beat clears it.
            if older_than_s is None or held.silent_s < older_than_s:
                return None
            guard = GuardSuspect()
        else:
            floor_s = max(threshold_s, MISSED_BEATS * worker.heartbeat_interval_s)
            if held.silent_s < floor_s:
                return None
            guard = GuardUnheard(floor_s)
    report = StaleAction(
        job_id=held.job_id,
        task=held.task,
        queue=held.queue,
        state=held.state,
        on_crash=policy.on_crash,
        worker=held.worker_id,
        worker_name=worker.name if worker else "",
        worker_state=worker.state.value if worker else "missing",
        host=worker.host if worker else "",
        silent_s=round(held.silent_s, 3),
        held_s=round(held.held_s, 3),
        given_up_after_s=patience_s,
    )
    return _StaleJob(held, policy, report, guard, past)


def _patience_s(held: HeldRecord, worker: WorkerRecord | None) -> float | None:
    if held.state is JobState.RUNNING:
        return held.heartbeat_timeout_s
    return worker.suspect_after_s if worker else 0.0


def _attempt(found: _StaleJob, policy: Policy) -> Attempt:
    held = found.held
    return Attempt(
        held.job_id, held.token, policy, held.failures, held.crashes, held.cancel_requested, held.suspected_crashes
    )


def _cause(found: _StaleJob, done: str, by: str) -> str:
    report = found.report
    who = (
        f"worker {report.worker_name} ({report.worker}) on {report.host}" if report.host else f"worker {report.worker}"
    )
    state = "was silent" if report.worker_state in LIVE_STATES else f"was {report.worker_state}, silent"
    return f"{who} {state} for {brief(report.silent_s)}; {done} by operator {by}"


def _settle(
    ledger: Ledger, endings: Iterable[tuple[_StaleJob, Ending]], releases: Iterable[tuple[_StaleJob, Release]]
) -> list[StaleAction]:
    # One write per worker and guard: what one worker's beat saves must not hold up another's jobs.
    batches: dict[tuple[str, Guard], tuple[list[tuple[_StaleJob, Ending]], list[tuple[_StaleJob, Release]]]]
    batches = defaultdict(lambda: ([], []))
    for found, ending in endings:
        batches[found.held.worker_id, found.guard][0].append((found, ending))
    for found, release in releases:
        batches[found.held.worker_id, found.guard][1].append((found, release))
    done: list[StaleAction] = []
    for (worker_id, guard), (ends, gives) in batches.items():
        written = ledger.recovery.settle(worker_id, [end for _, end in ends], [give for _, give in gives], guard)
        done += _reports(ends, written, lambda ending: _ACTIONS.get(ending.state, "failed"))
        done += _reports(gives, written, lambda _: "requeued")
    if done:
        words = {f"queue:{report.queue}" for report in done if report.action == "requeued"}
        ledger.notify(words | {f"worker:{report.worker}" for report in done})
    return done


_ACTIONS: dict[JobState, Action] = {
    JobState.FAILED: "failed",
    JobState.PENDING: "requeued",
    JobState.CANCELLED: "cancelled",
    JobState.QUARANTINED: "quarantined",
}


def _reports(
    pairs: list[tuple[_StaleJob, W]], written: set[tuple[int, int]], action: Callable[[W], Action]
) -> list[StaleAction]:
    return [
        msgspec.structs.replace(found.report, action=action(write))
        for found, write in pairs
        if (write.job_id, write.token) in written
    ]
