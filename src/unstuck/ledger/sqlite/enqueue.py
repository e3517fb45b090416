"""Enqueue on SQLite: unique keys, batches, the caller's own connection, idempotent requests."""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import msgspec

from unstuck.domain.states import AttemptState
from unstuck.errors import DuplicateJob, LedgerError
from unstuck.ledger.contract.jobs import Enqueued, JobExtras, NewJob, OnceAnswer, Request
from unstuck.ledger.sqlite.concurrency import line_up
from unstuck.ledger.sqlite.database import SQL, Database, write_event
from unstuck.ledger.sqlite.errors import refuse_nul, translate

PERIOD = "period"
_PLAIN = JobExtras()


def unique_for(job: NewJob) -> str | None:
    """Say what its key is good for; None: until it ends."""
    if job.unique_key is None or job.more is None:
        return None
    return PERIOD if job.more.unique_for_s is not None else job.more.unique


def owner_of(cursor: apsw.Cursor, job: NewJob) -> int | None:
    """Give who has the key, if anybody."""
    if unique_for(job) == PERIOD:
        found = cursor.execute(SQL["find_kept_key"], (job.unique_key, time.time())).get
    else:
        found = cursor.execute(SQL["find_live_key"], (job.unique_key,)).get
    return None if found is None else int(found)


def replaces(cursor: apsw.Cursor, job: NewJob, job_id: int, owner: int) -> bool:
    """Say whether this job goes in although another has its key: that one is cancelled, if it is still pending."""
    match (job.more or _PLAIN).on_duplicate:
        case "refuse":
            # Without the key: that of a token is stored with the token's id before it.
            raise DuplicateJob(owner)
        case "replace":
            return _displace(cursor, owner, job_id)
        case None:
            return False


def reserve_unique_key(cursor: apsw.Cursor, job: NewJob, job_id: int) -> None:
    if job.more is not None and job.more.unique_for_s is not None:
        cursor.execute(SQL["keep_key"], (job.unique_key, job_id, time.time() + job.more.unique_for_s))


def _displace(cursor: apsw.Cursor, owner: int, by: int) -> bool:
    from unstuck.ledger.sqlite.endings import after_end

    found = cursor.execute(SQL["displace_job"], (owner, time.time(), f"replaced by job {by}")).fetchall()
    if not found:
        return False
    message = f"Replaced by job {by}, which has the same unique key"
    write_event(cursor, "cancelled", message, job_id=owner)
    if found[0][0]:
        after_end(cursor, [(owner, AttemptState.CANCELLED)])
    return True


SLOWEST_INSERT_S = 0.001


@contextmanager
def part_of(db: Database, connection: Any) -> Iterator[apsw.Cursor]:
    """Give a cursor in a savepoint of the caller's transaction: all of it or none, and the transaction goes on."""
    _check_connection(connection, db.path)
    # Not by the caller's cursor factory: what it makes of rows is for the caller.
    cursor = apsw.Cursor(connection)
    try:
        with connection:
            yield cursor
    except (apsw.Error, UnicodeEncodeError, OverflowError) as error:
        raise translate(error, str(db.path), system_errno=connection.system_errno) from error
    finally:
        cursor.close()


def insert_jobs(cursor: apsw.Cursor, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Insert jobs under the write lock that the caller holds."""
    now = time.time()
    last = cursor.execute(SQL["reserve_job_ids"], (len(jobs),)).get
    next_id = last - len(jobs) + 1
    answer: list[Enqueued] = []
    rows: list[tuple[Any, ...]] = []
    tied: list[tuple[Any, ...]] = []
    places: dict[str, int | None] = {}
    for job in jobs:
        refuse_nul(job.task, job.queue, job.unique_key, job.enqueued_by, job.payload_type)
        if job.unique_key is not None:
            # One that came before in this batch may have the key.
            _insert(cursor, rows, tied)
            known = owner_of(cursor, job)
            if known is not None and not replaces(cursor, job, next_id, known):
                answer.append(Enqueued(known, fresh=False))
                continue
            reserve_unique_key(cursor, job, next_id)
        if job.more is None:
            rows.append(_row(next_id, job, now))
        else:
            tied.append((*_row(next_id, job, now), *_extras_row(job, job.more, now)))
            if job.more.concurrency_key is not None:
                places[job.more.concurrency_key] = job.more.concurrency_limit or places.get(job.more.concurrency_key)
        answer.append(Enqueued(next_id))
        next_id += 1
    _insert(cursor, rows, tied)
    if places:
        line_up(cursor, places)
    cursor.executemany(SQL["know_queue"], [(queue,) for queue in sorted({job.queue for job in jobs})])
    return answer


def _insert(cursor: apsw.Cursor, rows: list[tuple[Any, ...]], tied: list[tuple[Any, ...]]) -> None:
    if rows:
        cursor.executemany(SQL["insert_job"], rows)
        rows.clear()
    if tied:
        cursor.executemany(SQL["insert_tied_job"], tied)
        tied.clear()


def _row(job_id: int, job: NewJob, now: float) -> tuple[Any, ...]:
    run_at = job.run_at if job.run_at is not None else now + job.delay_s
    return (
        job_id,
        run_at <= now,
        -job.priority,
        job.queue,
        job.task,
        run_at,
        "retry" if job.on_crash == "retry" else None,
        job.heartbeat,
        job.heartbeat_timeout_s,
        job.timeout_s,
        now,
        job.unique_key,
        job.enqueued_by,
        None if job.payload_type == "json" else job.payload_type,
        job.policy or None,
        job.payload,
        None if unique_for(job) == PERIOD else job.unique_key,
    )


def _extras_row(job: NewJob, more: JobExtras, now: float) -> tuple[Any, ...]:
    refuse_nul(more.concurrency_key)
    due_at = max(now, job.run_at if job.run_at is not None else now + job.delay_s)
    hooks = hooks_text(more)
    return (
        not (more.concurrency_key is None and more.workflow_id is None and hooks is None),
        more.concurrency_key,
        more.workflow_id,
        more.place,
        hooks,
        None if more.expires_in_s is None else due_at + more.expires_in_s,
        more.retain_s,
        more.concurrency_limit,
        unique_for(job),
        more.needs_inputs,
    )


def hooks_text(more: JobExtras) -> str | None:
    """Give what follows the ends of a job as it is stored."""
    return None if more.hooks is None else msgspec.json.encode(more.hooks).decode()


def _check_connection(connection: Any, path: Path) -> None:
    if isinstance(connection, sqlite3.Connection):
        raise LedgerError(
            "connection= takes an apsw.Connection, not the interpreter's sqlite3.Connection: one process must never "
            "open the same file with two copies of SQLite, because closing one drops the other's locks and the file "
            "can be corrupted. Open your file with apsw, or enqueue after your own commit."
        )
    if not isinstance(connection, apsw.Connection):
        raise LedgerError(
            f"connection= takes an apsw.Connection on SQLite, not {type(connection).__name__}. Open your file with "
            "apsw, or enqueue after your own commit."
        )
    try:
        theirs = connection.db_filename("main")
    except apsw.ConnectionClosedError:
        raise LedgerError("The given connection is closed. Open it, or leave connection= out.") from None
    if not theirs or not path.exists() or not Path(theirs).exists() or not path.samefile(theirs):
        raise LedgerError(
            f"The connection is open on {theirs or 'a database in memory'}, and the ledger is {path}. Both must be the "
            "same file: open the connection on the ledger's file, or leave connection= out."
        )
    if not connection.in_transaction:
        raise LedgerError(
            "The connection has no transaction open, so there is nothing for the job to be part of. Begin one first "
            "(`with connection:` or BEGIN IMMEDIATE), or leave connection= out."
        )


CLEARED = 20

_decode = msgspec.json.Decoder(list[tuple[int, bool]]).decode


def insert_once(cursor: apsw.Cursor, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
    """Insert jobs under the write lock that the caller holds, unless this request did so before."""
    return once(cursor, request, lambda: insert_jobs(cursor, jobs))


def once(cursor: apsw.Cursor, request: Request, store: Callable[[], Sequence[Enqueued]]) -> OnceAnswer:
    """Store something under the write lock that the caller holds, unless this request did so before."""
    now = time.time()
    before = now - request.keep_s
    cursor.execute(SQL["clear_requests"], (before, CLEARED))
    found = cursor.execute(SQL["find_request"], (request.key, before)).fetchone()
    if found is not None:
        same = found[0] == request.fingerprint
        stored = tuple(Enqueued(*pair) for pair in _decode(found[1])) if same else ()
        return OnceAnswer(stored, repeated=True)
    answer = store()
    pairs = msgspec.json.encode([(item.job_id, item.fresh) for item in answer]).decode()
    cursor.execute(SQL["remember_request"], (request.key, request.fingerprint, now, pairs))
    return OnceAnswer(tuple(answer), repeated=False)
