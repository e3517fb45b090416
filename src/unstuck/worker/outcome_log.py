"""Log every attempt that did not succeed: which job, what went wrong, and what happens next.

A task that fails a thousand times per second must not fill the disk or slow the worker down. So of each task and kind
of error only the first lines of a period are written, and then a line that says how many more there were.
"""

from dataclasses import dataclass
from typing import Any

from unstuck.domain.endings import Ending
from unstuck.domain.states import JobState
from unstuck.domain.text import one_line
from unstuck.domain.units import brief
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.workers import Claimed
from unstuck.logs import logger

MAX_LINES = 20
"""Lines for one task and one kind of error in one period."""
PERIOD_S = 10.0
MAX_KINDS = 1_000
"""Kinds of errors that are told apart in one period. Whatever comes on top counts as one more kind."""
MAX_ERROR_CHARS = 300
MAX_TEXT_CHARS = 1_000
"""How much of a text is looked at: an exception may bring megabytes."""
_LEVELS = {JobState.FAILED: "error", JobState.QUARANTINED: "error", JobState.PENDING: "warning"}
_OTHERS = ("", "")

log = logger("unstuck.worker")


@dataclass(slots=True)
class _Period:
    until_s: float
    lines: int = 0
    left_out: int = 0
    last_job_id: int = 0


class OutcomeLog:
    def __init__(self) -> None:
        self._periods: dict[tuple[str, str], _Period] = {}

    def ended(self, job: Claimed, ending: Ending, now_s: float) -> None:
        """Log how an attempt ended by itself, or was ended by us."""
        if ending.state is not JobState.WAITING and ending.error is not None:
            self._write(job, ending, _HEADLINES.get(ending.state, "Job ended"), {}, now_s)

    def runner_died(self, job: Claimed, ending: Ending, cause: str, pid: int | None, now_s: float) -> None:
        """Log that the process in which a job ran died, though nobody had asked it to. The worker lives on."""
        headline = f"Runner process died; {_FATES.get(ending.state, 'its job ended')}"
        self._write(job, ending, headline, {"cause": _line(cause), "pid": pid}, now_s)

    def tend(self, now_s: float) -> None:
        """Log how many lines were left out in the periods that are over."""
        for kind in [kind for kind, period in self._periods.items() if now_s >= period.until_s]:
            self._close(kind)

    def close(self) -> None:
        """Log what was left out, before the worker goes."""
        for kind in list(self._periods):
            self._close(kind)

    def _write(self, job: Claimed, ending: Ending, headline: str, facts: dict[str, Any], now_s: float) -> None:
        level = _LEVELS.get(ending.state, "info")
        kind = (job.task, facts.get("cause") or _kind_of(ending))
        if kind not in self._periods and len(self._periods) >= MAX_KINDS:
            kind = _OTHERS
        period = self._periods.get(kind)
        if period is None or now_s >= period.until_s:
            if period is not None:
                self._close(kind)
            period = self._periods[kind] = _Period(now_s + PERIOD_S)
        if period.lines >= MAX_LINES:
            period.left_out += 1
            period.last_job_id = job.job_id
            return
        period.lines += 1
        if not facts:
            facts = {"error": describe_error(ending)}
        if ending.state is JobState.PENDING and ending.delay_s > 0:
            facts["again_in"] = brief(ending.delay_s)
        getattr(log, level)(headline, job_id=job.job_id, task=job.task, attempt=job.attempt, **facts)

    def _close(self, kind: tuple[str, str]) -> None:
        period = self._periods.pop(kind)
        if period.left_out:
            task, error = kind
            log.error(
                "More attempts ended badly in the same way",
                attempts=period.left_out,
                task=task or "several",
                error=error or "several",
                last_job_id=period.last_job_id,
            )


_HEADLINES = {
    JobState.FAILED: "Job failed",
    JobState.PENDING: "Job failed and is tried again",
    JobState.QUARANTINED: "Job is quarantined: its process died too often",
    JobState.CANCELLED: "Job was cancelled",
}
_FATES = {
    JobState.FAILED: "its job failed",
    JobState.PENDING: "its job is tried again",
    JobState.QUARANTINED: "its job is quarantined, because that happened too often",
    JobState.CANCELLED: "its job was cancelled",
}


def describe_error(ending: Ending) -> str:
    """Return what went wrong in one line: the exception with its type, or our code with the cause."""
    error = ending.error
    if error is None:
        return ""
    text = error.message if error.code == ErrorCode.TASK_FAILED else error.cause or error.message
    return _line(f"{_kind_of(ending)}: {text[:MAX_TEXT_CHARS]}")


def _kind_of(ending: Ending) -> str:
    """Return the type of the exception, or our code."""
    error = ending.error
    if error is None:
        return ""
    return str(error.details.get("type") or "Exception") if error.code == ErrorCode.TASK_FAILED else error.code


def _line(text: str) -> str:
    return one_line(text[:MAX_TEXT_CHARS], MAX_ERROR_CHARS)
