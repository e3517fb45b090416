"""End attempts on SQLite, with hooks, workflows and waiting clients, in one transaction."""

import time
from collections.abc import Collection, Iterable, Sequence

import apsw
import msgspec

from unstuck.domain.autopsy import encode_autopsy
from unstuck.domain.endings import Ending, JobError, Release
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState, may_move
from unstuck.errors import ErrorCode
from unstuck.ledger.sqlite.advance import advance
from unstuck.ledger.sqlite.concurrency import admit, leave_lines
from unstuck.ledger.sqlite.database import SQL, fetch, write_event
from unstuck.ledger.sqlite.enqueue import PERIOD
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.hooks import fire_hooks
from unstuck.ledger.sqlite.journal import has_signal
from unstuck.ledger.sqlite.rows import encode_details

Ended = tuple[int, AttemptState]
"""A job, and how an attempt at it ended."""


def after_end(cursor: apsw.Cursor, ended: Sequence[Ended]) -> set[str]:
    """Tell all who are concerned; give the queues in which jobs became ready by it."""
    if not ended:
        return set()
    return leave_lines(cursor, ended) | advance(cursor, ended) | fire_hooks(cursor, ended)


def linked_among(cursor: apsw.Cursor, job_ids: Sequence[int]) -> list[int]:
    """Give those whose end concerns others."""
    return [job_id for (job_id,) in fetch(cursor, "tied_among", (msgspec.json.encode(job_ids).decode(),))]


def expire(cursor: apsw.Cursor, job_ids: Collection[int]) -> set[str]:
    """Cancel those of these that are still pending and too old; give the queues in which others became ready by it."""
    tied: list[Ended] = []
    now = time.time()
    for job_id in job_ids:
        found = cursor.execute(SQL["expire_job"], (job_id, now)).fetchall()
        if found:
            write_event(cursor, "expired", f"EXPIRED: {found[0][1]}", job_id=job_id)
            if found[0][0]:
                tied.append((job_id, AttemptState.CANCELLED))
    return after_end(cursor, tied)


def requeue(cursor: apsw.Cursor, job_id: int, by: str) -> str:
    """Say what became of it: `queued`, or why not."""
    found = cursor.execute(SQL["job_brief"], (job_id,)).fetchone()
    if found is None:
        return "missing"
    state, _, token, unique_key, ended_as, code, cause, finished_at, _, line = found[:10]
    if state == JobState.SUCCEEDED:
        return "succeeded"
    if state not in FINAL_STATES:
        return "live"
    lives = unique_key is not None and found[11] != PERIOD
    if lives and cursor.execute(SQL["find_live_key"], (unique_key,)).get is not None:
        return "duplicate"
    if token is not None:
        cursor.execute(SQL["archive_attempt"], (job_id, token, ended_as or state, finished_at, code, cause))
    cursor.execute(SQL["retry_job"], (job_id, time.time()))
    write_event(cursor, "retried", f"Queued again by {by} (it was {state})", job_id=job_id)
    if line is not None:
        admit(cursor, {line})
    return "queued"


CANCELLED_UNRUN = "cancelled by request before it ran"
CANCELLED_ENDED = "cancelled by request while it ran"


def end_attempts(
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
    if ending.awaits_signal is not None and has_signal(cursor, ending.job_id, ending.awaits_signal):
        # It came while the job ran: there is nothing to wait for.
        _requeue(cursor, fence, msgspec.structs.replace(ending, delay_s=0.0), ran=True)
        return
    now = time.time()
    cursor.execute(SQL["archive_attempt"], (*fence[:2], ending.attempt.value, now, None, None))
    wakes_at = now + max(ending.delay_s, 0.0) if ending.wakes else None
    cursor.execute(SQL["suspend_job"], (*fence, wakes_at, ending.awaits_signal))


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
