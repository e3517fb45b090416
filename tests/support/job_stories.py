"""A job that died of memory, was tried again, hung, and was quarantined: its deaths, and its records at fixed times."""

from typing import Any

import msgspec
from tests.support.builders import worker_record

from unstuck.client.reasons import JobContext
from unstuck.client.why.story import JobFacts, Step, StepKind, Story
from unstuck.config import Recovery
from unstuck.domain.autopsy import Autopsy, DeathKind, ProgressMark
from unstuck.domain.endings import JobError
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import AttemptState, JobState
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import AttemptRecord, JobRecord, OutputRecord
from unstuck.ledger.contract.workers import WorkerRecord

POLICY = Policy(retry=RetryRule(max_attempts=2), on_crash="retry", max_crash_retries=1, stall_timeout_s=30.0)
NOON = 1_794_830_400.0
"""2026-11-16 12:00:00 UTC."""

OUT_OF_MEMORY = Autopsy(
    kind=DeathKind.OUT_OF_MEMORY,
    summary="killed by the kernel for want of memory (SIGKILL)",
    detector=Detector.RUNNER,
    seen_after_s=0.006,
    signal="SIGKILL",
    pid=4120,
    host="crunch-1",
    memory_bytes=1_920_000_000,
    max_memory_bytes=1_970_000_000,
    cpu_s=38.2,
    ran_s=42.0,
    stderr="loading matrix 3 of 10\nloading matrix 4 of 10",
    progress=ProgressMark(3, 10, "third matrix", NOON + 40.0),
)
HUNG = Autopsy(
    kind=DeathKind.STALL,
    summary="gave no sign for 30s, its stall_timeout",
    detector=Detector.RUNNER,
    pid=4133,
    host="crunch-1",
    memory_bytes=310_000_000,
    max_memory_bytes=1_100_000_000,
    cpu_s=0.8,
    ran_s=51.3,
    stack=(
        "Current thread 0x00007f2a (most recent call first):\n"
        '  File "/srv/shop/locks.py", line 21 in acquire\n'
        '  File "/srv/shop/reports.py", line 57 in crunch'
    ),
    signals=("SIGTERM", "SIGKILL"),
)
AGAIN = msgspec.structs.replace(
    OUT_OF_MEMORY,
    sure=False,
    doubt="the kernel's counter is shared with other processes of this container",
    seen_after_s=0.011,
    pid=4207,
    ran_s=40.5,
    progress=None,
    stderr="",
)


def records() -> JobFacts:
    """The whole tale with fixed times, as a ledger would give it at a quarter past noon."""
    job = JobRecord(
        id=42,
        task="crunch",
        queue="reports",
        state=JobState.QUARANTINED,
        priority=5,
        payload=b'{"args":[2026]}',
        payload_type="json",
        result=None,
        error=JobError(ErrorCode.CRASHED_TOO_OFTEN, "Job killed its process 2 times and is quarantined", AGAIN.summary),
        policy=encode_policy(POLICY),
        failures=1,
        crash_count=2,
        attempt=3,
        unique_key="report-2026",
        cancel_requested=False,
        enqueued_at=NOON - 2.0,
        enqueued_by="web.py@shop-1:311",
        run_at=NOON + 95.0,
        claimed_at=NOON + 95.2,
        started_at=NOON + 95.2,
        finished_at=NOON + 135.7,
        worker_id="w7",
        token=903,
    )
    rules = (
        'on_crash="retry": crash 1 of 1 allowed; tried again in 100ms',
        "retry: failure 1 of 2; tried again in 950ms",
        'on_crash="retry" with max_crash_retries=1: death 2 ends it',
    )
    attempts = [
        attempt(901, "w3", AttemptState.CRASHED, 0.0, 42.0, ErrorCode.OUT_OF_MEMORY, ruled(OUT_OF_MEMORY, rules[0])),
        attempt(902, "w3", AttemptState.FAILED, 42.2, 93.5, ErrorCode.STALLED, ruled(HUNG, rules[1])),
        attempt(903, "w7", AttemptState.CRASHED, 95.2, 135.7, ErrorCode.CRASHED_TOO_OFTEN, ruled(AGAIN, rules[2])),
    ]
    events = [
        EventRecord(1, NOON + 42.0, "requeued", 42, "w3", f"Task re-queued: {OUT_OF_MEMORY.summary}"),
        EventRecord(3, NOON + 93.5, "retrying", 42, "w3", "Try 1 of 2 failed; next in 0.9s"),
        EventRecord(4, NOON + 135.7, "quarantined", 42, "w7", "CRASHED_TOO_OFTEN"),
    ]
    outputs = [OutputRecord(901, b"", b"loading matrix 3 of 10\nloading matrix 4 of 10\n")]
    around = JobContext(None, [worker("w3", "ada", "crunch-1")], Recovery().rules, NOON + 900.0)
    return JobFacts(job, attempts, events, outputs, None, around)


def ruled(autopsy: Autopsy, rule: str) -> Autopsy:
    return msgspec.structs.replace(autopsy, rule=rule)


def attempt(
    token: int,
    worker_id: str,
    state: AttemptState,
    began_s: float | None,
    ended_s: float | None,
    code: str | None = None,
    autopsy: Autopsy | None = None,
    cause: str | None = None,
) -> AttemptRecord:
    """One try that began and ended so many seconds after noon."""
    began = None if began_s is None else NOON + began_s
    ended = None if ended_s is None else NOON + ended_s
    said = cause or (autopsy.summary if autopsy is not None else None)
    return AttemptRecord(token, worker_id, state, began, began, ended, code, said, None, None, None, autopsy)


def worker(worker_id: str, name: str, host: str, **changes: object) -> WorkerRecord:
    facts: dict[str, Any] = {
        "id": worker_id,
        "host": host,
        "pid": 100,
        "queues": ("reports",),
        "tasks": ("crunch",),
        "created_at": NOON - 3600,
        "last_seen_at": NOON,
        "silent_s": 0.1,
        "processed": 9,
        "version": "1",
        "heartbeat_interval_s": 15.0,
        "suspect_after_s": 60.0,
    }
    return worker_record(name, **{**facts, **changes})


DIED = Autopsy(DeathKind.SIGNAL, "killed by SIGSEGV (signal 11)", Detector.RUNNER)


def of(job: dict[str, Any], attempts: list[Any] = [], **more: Any) -> JobFacts:  # noqa: B006 - never changed
    """The tale's job with changes: fresh, never tried, unless told otherwise."""
    fresh = {
        "state": JobState.PENDING,
        "error": None,
        "failures": 0,
        "crash_count": 0,
        "run_at": NOON - 2.0,
        "claimed_at": None,
        "started_at": None,
        "finished_at": None,
        "worker_id": None,
        "token": None,
        "unique_key": None,
        "priority": 0,
    }
    tale = records()
    around = JobContext(
        more.pop("queue", None),
        more.pop("workers", tale.context.workers),
        Recovery().rules,
        more.pop("now_s", NOON + 900.0),
    )
    facts = {"events": [], "outputs": [], "progress": None, **more}
    return JobFacts(msgspec.structs.replace(tale.job, **{**fresh, **job}), attempts, context=around, **facts)


def ended(state: JobState, token: int = 1, at_s: float = 10.0, **more: Any) -> dict[str, Any]:
    """A job that ended with the try of this token."""
    return {
        "state": state,
        "token": token,
        "worker_id": "w3",
        "started_at": NOON,
        "finished_at": NOON + at_s,
        **more,
    }


def texts(story: Story, kind: StepKind | None = None) -> list[str]:
    return [step.text for step in story.steps if kind is None or step.kind is kind]


def step_of(story: Story, kind: StepKind) -> Step:
    return next(step for step in story.steps if step.kind is kind)


def failed(token: int, began_s: float, code: str = ErrorCode.TASK_FAILED) -> Any:
    return attempt(token, "w3", AttemptState.FAILED, began_s, began_s + 1.0, code, cause="boom")
