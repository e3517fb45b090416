"""Name everything that can go wrong, each with what happened and what to do."""

from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """Why a job ended badly; kept with the job and shown at every door."""

    TASK_FAILED = "TASK_FAILED"
    WORKER_CRASHED = "WORKER_CRASHED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    STALLED = "STALLED"
    RESULT_NOT_STORABLE = "RESULT_NOT_STORABLE"
    CRASHED_TOO_OFTEN = "CRASHED_TOO_OFTEN"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"


WORKER_DIED = "Worker died unexpectedly"
RESULT_NOT_AVAILABLE = "RESULT_NOT_AVAILABLE"
"""The job succeeded and its result is not stored. Never kept with a job: a success has no error code."""


class UnstuckError(Exception):
    """The root of everything Unstuck raises."""


# What the caller or the operator can mend ---------------------------------------------------


class ConfigError(UnstuckError, ValueError):
    """A setting is wrong or unsafe."""


class PayloadError(UnstuckError, ValueError):
    """Arguments that cannot be stored: not JSON, or too large."""


class WrongArguments(UnstuckError, TypeError):
    """Arguments that do not fit the signature of the task."""


class UnknownName(UnstuckError, LookupError):
    """A queue, task, job or worker that does not exist."""


class UnknownQueue(UnknownName): ...


class UnknownTask(UnknownName): ...


class UnknownWorker(UnknownName): ...


class UnknownSchedule(UnknownName): ...


class JobNotFound(UnknownName): ...


class WorkflowNotFound(JobNotFound): ...


class NoWorkers(UnstuckError):
    """Nobody would take what was enqueued, and `no_workers="error"` is set. The jobs are stored: `job_ids`."""

    def __init__(self, message: str, job_ids: list[int] | None = None) -> None:
        super().__init__(message)
        self.job_ids = job_ids or []


class LedgerError(UnstuckError):
    """The database refused or could not be used."""


class LedgerUnavailable(LedgerError, ConnectionError):
    """The database is down, unreachable, locked or full; trying again later may help."""


class LedgerStandby(LedgerUnavailable):
    """Only a standby answers: what it knows may be old, and it cannot be written to."""


class LedgerBusy(LedgerUnavailable):
    """The database answered, and a lock or the statement itself took longer than this call may wait.

    Nothing was written. The work is deferred: try it again soon, and do not count it as an outage."""


class MigrationBlocked(LedgerBusy):
    """A migration could not get its locks in time. It changed nothing; run it again."""


class UncertainCommit(LedgerUnavailable):
    """The connection broke while a write was on its way: it may or may not have happened."""


class LedgerReplaced(LedgerUnavailable):
    """The ledger that this process works with is gone, or another one is in its place. It waits until it is back."""


class RefusedValue(LedgerError, ValueError):
    """The database will not store a value of this batch; the others are not to blame."""


class DuplicateJob(LedgerError):
    """Another job (`job_id`) has the unique key, and `on_duplicate="refuse"` was said: nothing was stored."""

    def __init__(self, job_id: int, key: str | None = None) -> None:
        named = "its unique key" if key is None else f"the unique key {key!r}"
        super().__init__(f"Job {job_id} has {named} already. Nothing was stored.")
        self.job_id = job_id


class SchemaMismatch(LedgerError):
    """The tables are older or newer than this code."""


class SchemaAhead(SchemaMismatch):
    """The tables are newer than this code, and no longer work with it."""


class SchemaForked(SchemaMismatch):
    """The tables were made by a version of Unstuck that was never released."""


class NoLedger(SchemaMismatch):
    """There are no tables yet."""


# What a job raises on its way, inside a worker --------------------------------------------------


class StepMismatch(UnstuckError):
    """The steps of a job are not those that an earlier attempt wrote down: its code changed meanwhile."""


class TooManySteps(UnstuckError):
    """A job wrote down more than it may."""


class SignalTimeout(UnstuckError, TimeoutError):
    """The signal that a job waited for did not come in time."""


class SignalRefused(UnstuckError):
    """A signal cannot be kept: the job has ended, or too many wait for it already."""


# What `job.result()` raises -----------------------------------------------------------------


class ResultTimeout(UnstuckError, TimeoutError):
    """Patience ran out; the job goes on."""


class JobFailed(UnstuckError):
    """A job ended badly. `code`, `cause`, `job_id` say how; subclasses say it by type."""

    def __init__(self, message: str, *, job_id: int, code: str, cause: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.job_id = job_id
        self.code = code
        self.cause = cause
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} (job {self.job_id}{f': {self.cause}' if self.cause else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        # So that it survives the way out of a process pool, which would otherwise break on it.
        return _rebuilt, (type(self), self.message, self.job_id, self.code, self.cause, self.details)


def type_in_cause(cause: str | None, message: str) -> str | None:
    """Return the type of an exception from a cause that names it, as that of a workflow does, or None."""
    if not cause or cause == message:
        return None
    named = cause.removesuffix(f": {message}") if message else cause
    return named if named != cause or not message else None


class TaskFailed(JobFailed):
    """User code raised: `remote_type`, `remote_message`, `remote_traceback` say what."""

    @property
    def remote_type(self) -> str:
        return str(self.details.get("type") or type_in_cause(self.cause, self.message) or "Exception")

    @property
    def remote_message(self) -> str:
        return self.message

    @property
    def remote_traceback(self) -> str:
        return str(self.details.get("traceback") or "")

    def __str__(self) -> str:
        return f"{self.remote_type}: {self.message} (job {self.job_id})"


class WorkerCrashed(JobFailed):
    """The process that ran the job died; `cause` says of what."""


class OutOfMemory(WorkerCrashed): ...


class DeadlineExceeded(JobFailed): ...


class Stalled(JobFailed): ...


class ResultNotStorable(JobFailed): ...


class ResultNotAvailable(JobFailed):
    """The job succeeded, and its result is not stored: its row was edited by hand, or restored in part."""


class JobQuarantined(JobFailed):
    """The job killed its workers too often and waits for an operator."""


class JobCancelled(JobFailed): ...


class JobExpired(JobCancelled): ...


# What clients and workers of the ZeroMQ door raise ------------------------------------------


class ReplyTimeout(UnstuckError, TimeoutError):
    """No reply came in time. The request may still be carried out."""


class ClientClosed(UnstuckError, ConnectionError):
    """The client was closed, or it was opened by another process than this one."""


class NameTaken(ConfigError):
    """Another living worker has the name of this one."""


class CallFailed(UnstuckError):
    """There will be no reply. `error` says why (`WORKER_CRASHED`, `NO_WORKERS`, …), `service` of whom."""

    def __init__(
        self,
        message: str,
        *,
        service: str,
        error: str,
        job_id: Any = None,
        ledger_id: Any = None,
        attempt: Any = None,
        cause: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.service = service
        self.error = error
        self.job_id = job_id
        self.ledger_id = ledger_id
        self.attempt = attempt
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.message} ({self.service}: {self.error})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The same as for `JobFailed`.
        return _rebuilt_call, (type(self), self.message, {k: v for k, v in vars(self).items() if k != "message"})


_EXCEPTIONS: dict[ErrorCode, type[JobFailed]] = {
    ErrorCode.TASK_FAILED: TaskFailed,
    ErrorCode.WORKER_CRASHED: WorkerCrashed,
    ErrorCode.OUT_OF_MEMORY: OutOfMemory,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    ErrorCode.STALLED: Stalled,
    ErrorCode.RESULT_NOT_STORABLE: ResultNotStorable,
    ErrorCode.CRASHED_TOO_OFTEN: JobQuarantined,
    ErrorCode.CANCELLED: JobCancelled,
    ErrorCode.EXPIRED: JobExpired,
}


def exception_for(code: str, message: str, *, job_id: int, cause: str | None, details: dict[str, Any]) -> JobFailed:
    """Give the exception that a stored error becomes for whoever waits for the job."""
    return exception_type(code)(message, job_id=job_id, code=code, cause=cause, **details)


def exception_type(code: str) -> type[JobFailed]:
    """Give the class of that exception; the root of them for a code that a version we do not know wrote."""
    if code == RESULT_NOT_AVAILABLE:
        return ResultNotAvailable
    return _EXCEPTIONS[ErrorCode(code)] if code in ErrorCode.__members__ else JobFailed


def _rebuilt(
    kind: type[JobFailed], message: str, job_id: int, code: str, cause: str | None, details: dict[str, Any]
) -> JobFailed:
    return kind(message, job_id=job_id, code=code, cause=cause, **details)


def _rebuilt_call(kind: type[CallFailed], message: str, facts: dict[str, Any]) -> CallFailed:
    return kind(message, **facts)
