"""Write the end of an attempt: fenced by its token and its holder, whoever makes it."""

import time
from collections.abc import Iterable

import apsw
import msgspec

from unstuck.domain.autopsy import encode_autopsy
from unstuck.domain.endings import Ending, JobError, Release
from unstuck.domain.errors import ErrorCode
from unstuck.domain.states import AttemptState, JobState, may_move
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.journal import has_signal
from unstuck.store.sqlite.rows import encode_details
from unstuck.store.sqlite.ties import Ended
from unstuck.store.sqlite.verbs import SQL, write_event

CANCELLED_UNRUN = "cancelled by request before it ran"
CANCELLED_ENDED = "cancelled by request while it ran"


def write_endings(
    cursor: apsw.Cursor, worker_id: str, endings: Iterable[Ending], tied: list[Ended]
) -> set[tuple[int, int]]:
    """Write those whose attempt this worker still runs, and give them as (job_id, token).

    Where others are concerned (`tied`) it is noted how it ended: whoever calls tells them, once for all."""
    return {(ending.job_id, ending.token) for ending in endings if _end(cursor, worker_id, ending, tied)}


def write_releases(
    cursor: apsw.Cursor, worker_id: str, releases: Iterable[Release], tied: list[Ended]
) -> set[tuple[int, int]]:
    """Give back those that this worker still holds; give them as (job_id, token)."""
    return {(release.job_id, release.token) for release in releases if _release(cursor, worker_id, release, tied)}


def _end(cursor: apsw.Cursor, worker_id: str, ending: Ending, tied: list[Ended]) -> bool:
    error = ending.error
    if error is not None:
        refuse_nul(error.code, error.message, error.cause)
    refuse_nul(ending.message)
    fence = (ending.job_id, ending.token, worker_id)
    found = cursor.execute(SQL["attempt_in_hand"], fence).fetchone()
    if found is None or not may_move(JobState(found[0]), ending.state):
        return False
    if ending.state in (JobState.PENDING, JobState.WAITING) and found[1]:
        ending = _as_cancelled(ending)
    elif ending.state is JobState.CANCELLED and found[3]:
        ending = _as_unstopped(ending)
    match ending.state:
        case JobState.PENDING:
            _requeue(cursor, fence, ending, ran=found[0] == JobState.RUNNING)
        case JobState.WAITING:
            _suspend(cursor, fence, ending)
        case _:
            _finish(cursor, fence, ending)
    if found[2]:
        tied.append((ending.job_id, ending.attempt))
    if ending.autopsy is not None:
        cursor.execute(SQL["store_autopsy"], (*fence[:2], encode_autopsy(ending.autopsy)))
    if ending.event is not None:
        write_event(cursor, ending.event, ending.message, job_id=ending.job_id, worker_id=worker_id)
    return True


def _as_cancelled(ending: Ending) -> Ending:
    """Somebody asked to cancel it after its worker had decided to try again: their word wins."""
    cause = ending.error.cause or ending.error.message if ending.error is not None else None
    error = JobError(
        ErrorCode.CANCELLED, "Job was cancelled", f"{CANCELLED_ENDED} ({cause})" if cause else CANCELLED_ENDED
    )
    return Ending(
        ending.job_id,
        ending.token,
        JobState.CANCELLED,
        AttemptState.CANCELLED,
        error=error,
        counter=ending.counter,
        event=JobState.CANCELLED.value,
        message=f"{error.code}: {error.cause}"[:500],
        autopsy=ending.autopsy,
    )


def _as_unstopped(ending: Ending) -> Ending:
    """It was asked to stop, and that was taken back before it had: it is tried again."""
    message = "Stopped, though that was taken back: it is tried again"
    return msgspec.structs.replace(ending, state=JobState.PENDING, delay_s=0.0, event="retried", message=message)


def _suspend(cursor: apsw.Cursor, fence: tuple[int, int, str], ending: Ending) -> None:
    if ending.awaits is not None and has_signal(cursor, ending.job_id, ending.awaits):
        # It came while the job ran: there is nothing to wait for.
        _requeue(cursor, fence, msgspec.structs.replace(ending, delay_s=0.0), ran=True)
        return
    now = time.time()
    cursor.execute(SQL["archive_attempt"], (*fence[:2], ending.attempt.value, now, None, None))
    wakes_at = now + max(ending.delay_s, 0.0) if ending.wakes else None
    cursor.execute(SQL["suspend_job"], (*fence, wakes_at, ending.awaits))


def _requeue(cursor: apsw.Cursor, fence: tuple[int, int, str], ending: Ending, *, ran: bool) -> None:
    now = time.time()
    error = ending.error
    code = None if error is None else error.code
    cause = None if error is None else error.cause or error.message
    if ran:
        cursor.execute(SQL["archive_attempt"], (*fence[:2], ending.attempt.value, now, code, cause))
    cursor.execute(
        SQL["requeue_job"],
        (
            *fence,
            ending.delay_s <= 0,
            now + max(ending.delay_s, 0.0),
            ending.counter == "failure",
            ending.counter == "crash",
            ending.counter in ("suspicion", "company"),
            ending.counter == "suspicion",
            *_error_columns(error),
        ),
    )


def _finish(cursor: apsw.Cursor, fence: tuple[int, int, str], ending: Ending) -> None:
    said_by_state = ending.attempt.value == ending.state.value
    cursor.execute(
        SQL["end_job"],
        (
            *fence,
            ending.state.value,
            None if said_by_state else ending.attempt.value,
            time.time(),
            ending.counter == "failure",
            ending.counter == "crash",
            ending.counter in ("suspicion", "company"),
            ending.counter == "suspicion",
            *_error_columns(ending.error),
            ending.result,
        ),
    )


def _error_columns(error: JobError | None) -> tuple[str | None, ...]:
    if error is None:
        return (None, None, None, None)
    return (str(error.code), error.message, error.cause, encode_details(error))


def _release(cursor: apsw.Cursor, worker_id: str, release: Release, tied: list[Ended]) -> bool:
    refuse_nul(release.message)
    fence = (release.job_id, release.token, worker_id)
    found = cursor.execute(SQL["attempt_in_hand"], fence).fetchone()
    if found is None:
        return False
    if found[1]:
        cursor.execute(SQL["cancel_released_job"], (*fence, time.time(), CANCELLED_UNRUN))
        write_event(cursor, "cancelled", f"Job was {CANCELLED_UNRUN}", job_id=release.job_id, worker_id=worker_id)
        if found[2]:
            tied.append((release.job_id, AttemptState.CANCELLED))
        return True
    cursor.execute(SQL["release_job"], fence)
    if release.event is not None:
        write_event(cursor, release.event, release.message, job_id=release.job_id, worker_id=worker_id)
    return True
