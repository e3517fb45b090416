"""Enqueue on PostgreSQL: reserved ids, batches, the caller's own connection, idempotent requests."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from unstuck.domain.payload import JSON
from unstuck.errors import LedgerError, LedgerUnavailable, UncertainCommit
from unstuck.ledger.contract.jobs import Enqueued, NewJob
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.connection import Row
from unstuck.ledger.postgres.database import Database

FRESH_S = 0.1
"""Ids in hand for longer are dropped: ids should go with time, also between clients."""
MAX_AHEAD = 64


class JobIds:
    """Not safe by itself: use it under the lock of the lane that fetches."""

    def __init__(self, fetch: Callable[[int], list[int]]) -> None:
        self._fetch = fetch
        self._ids: list[int] = []
        self._ahead = 0
        self._until_s = 0.0

    def forget(self) -> None:
        self._until_s = 0.0

    def take(self, count: int) -> list[int]:
        now = time.monotonic()
        if now > self._until_s:
            # Too slow to profit: fetch no more than needed until callers come quickly again.
            self._ids, self._ahead = [], 0
        if len(self._ids) < count:
            needed = count - len(self._ids)
            self._ids += self._fetch(needed + self._ahead)
            self._until_s = time.monotonic() + FRESH_S
            self._ahead = min(MAX_AHEAD, 2 * self._ahead + 1)
        taken, self._ids = self._ids[:count], self._ids[count:]
        return taken


_TAKES = "connection= takes a psycopg.Connection, or a SQLAlchemy Connection or Session on postgresql+psycopg"
_NOT_ASYNC = (
    "asyncio connections are not supported yet, not even through run_sync. Run the transaction with a sync Session "
    "in a thread (await asyncio.to_thread(…)), or enqueue after your own commit (await task.enqueue_async(…))."
)
_SAME_BYTES = ("utf-8", "ascii")


def driver_connection(connection: Any) -> psycopg.Connection[Any]:
    """Give the driver's connection with a transaction open that the caller will commit."""
    found = connection
    if not isinstance(found, psycopg.Connection):
        found = _of_sqlalchemy(connection)
    if found.closed:
        raise LedgerError("The given connection is closed. Open it, or leave connection= out.")
    if found.autocommit and found.info.transaction_status == TransactionStatus.IDLE:
        raise LedgerError(
            "The given connection is in autocommit and has no transaction open, so there is nothing for the job to be "
            "part of. Begin one first (`with connection.transaction():`), or leave connection= out."
        )
    return found


def refuse_other_words(connection: psycopg.Connection[Any], texts: Iterable[str | None]) -> None:
    """Refuse text that the server would take for something else: we send UTF-8, whatever the caller chose."""
    encoding = connection.info.encoding
    if encoding in _SAME_BYTES or all(text is None or text.isascii() for text in texts):
        return
    raise LedgerError(
        f"The given connection speaks {encoding}, in which this job's text would be stored as other words. Open it "
        "with client_encoding=UTF8, or leave connection= out."
    )


def _of_sqlalchemy(given: Any) -> psycopg.Connection[Any]:
    kind = type(given)
    if isinstance(given, psycopg.AsyncConnection):
        raise LedgerError(f"{_TAKES}; {_NOT_ASYNC}")
    if kind.__module__.partition(".")[0] != "sqlalchemy":
        raise LedgerError(f"{_TAKES}; not {kind.__module__}.{kind.__qualname__}.")
    if hasattr(given, "sync_session") or hasattr(given, "sync_connection"):
        raise LedgerError(f"{_TAKES}; {_NOT_ASYNC}")
    if not hasattr(given, "in_transaction"):
        raise LedgerError(f"{_TAKES}; not {kind.__module__}.{kind.__qualname__}.")
    engine = given.get_bind() if callable(getattr(given, "get_bind", None)) else given
    if getattr(engine.dialect, "is_async", False):
        raise LedgerError(f"{_TAKES}; {_NOT_ASYNC}")
    # A Session knows its Connection, and asking for it begins the Session's transaction.
    connection = given.connection() if callable(getattr(given, "connection", None)) else given
    if not connection.in_transaction():
        # SQLAlchemy begins by itself when it executes; we go past it, so it must be told, or its commit does nothing.
        connection.begin()
    found = connection.connection.driver_connection
    if not isinstance(found, psycopg.Connection):
        module = type(found).__module__.partition(".")[0]
        raise LedgerError(f"{_TAKES}; this one is on {module}. Use a postgresql+psycopg:// engine.")
    return found


CHUNK_JOBS = 5_000
CHUNK_BYTES = 16 * 1024 * 1024
REPEAT_FOR_S = 15.0
"""How long an enqueue whose answer was lost tries to find out, and repeats itself."""
REPEAT_EVERY_S = 0.2
LOCK_TIMEOUT = "500ms"
"""How long one try of an enqueue may wait for a unique key that an open transaction holds."""

T = TypeVar("T")
Ask = Callable[[bytes, dict[str, Any]], list[Row]]


def reserve_ids(db: Database, count: int) -> list[int]:
    return [row[0] for row in db.client_connection.ask(db.sql["reserve_job_ids"], {"count": count})]


@contextmanager
def part_of(db: Database, theirs: psycopg.Connection[Any], ids: int) -> Iterator[tuple[Ask, list[int]]]:
    """Give a way to write within the caller's transaction, and ids of jobs: all of it or none is written."""
    cursor = psycopg.Cursor(theirs, row_factory=tuple_row)
    arrays.teach(cursor.adapters)

    def ask(query: bytes, values: dict[str, Any]) -> list[Row]:
        return cursor.execute(query, values, binary=True).fetchall()

    try:
        reserved = [row[0] for row in ask(db.sql["reserve_job_ids"], {"count": ids})]
        # The statement above began the caller's transaction, if it had not begun. So this is a savepoint, and the
        # transaction goes on either way.
        with cursor, theirs.transaction():
            yield ask, reserved
    except psycopg.Error as error:
        where = "the database of the given connection"
        if theirs.closed:
            raise errors.lost_error(error, where, uncertain=False) from error
        raise errors.statement_error(error, where, db.schema) from error
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None


def store(db: Database, batches: list[dict[str, Any]]) -> dict[int, int]:
    with db.client_connection.hold():
        # Repeated as it was: the ids are reserved, so that it cannot be stored twice.
        return repeat_uncertain(lambda: _store_once(db, batches))


def repeat_uncertain(store: Callable[[], T]) -> T:
    """Store, and store again where nobody knows whether it happened: for what is the same when done twice."""
    deadline = time.monotonic() + REPEAT_FOR_S
    uncertain: UncertainCommit | None = None
    while True:
        try:
            return store()
        except UncertainCommit as error:
            uncertain = error
        except LedgerUnavailable:
            if uncertain is None:
                raise
        if time.monotonic() + REPEAT_EVERY_S > deadline:
            raise uncertain
        time.sleep(REPEAT_EVERY_S)


def _store_once(db: Database, batches: list[dict[str, Any]]) -> dict[int, int]:
    if len(batches) == 1:
        return insert(db, db.client_connection.write, batches)
    with db.client_connection.transaction() as connection:
        return insert(db, lambda sql, values: connection.execute(sql, values, binary=True).fetchall(), batches)


def insert(db: Database, ask: Ask, batches: list[dict[str, Any]]) -> dict[int, int]:
    """Give the jobs that were there already: their place in the whole, and whose id they have."""
    known: dict[int, int] = {}
    for batch in batches:
        for place, job_id in ask(db.sql["enqueue"], batch):
            known[batch["places"][place - 1]] = job_id
    return known


def answer_of(ids: list[int], known: dict[int, int]) -> list[Enqueued]:
    """Answer an enqueue; `known` has the places of those that were there already, with whose ids they have."""
    answer = [Enqueued(job_id) for job_id in ids]
    for place, job_id in known.items():
        answer[place] = Enqueued(job_id, fresh=False)
    return answer


def in_batches(
    ids: list[int], jobs: Sequence[NewJob], *, later: bool = False, lock_timeout: str | None = None
) -> list[dict[str, Any]]:
    """Give the values of one statement each, with the places that these jobs have in the whole.

    `later`: the transaction goes on after them. They join their concurrency keys when it has ended, and so is the next
    job admitted where they replace one: whoever ends a job of the same key would wait for the transaction."""
    chunks = list(_chunks(jobs))
    if later or len(chunks) > 1:
        jobs = [_standing_later(job) for job in jobs]
    places: Sequence[int] = range(len(jobs))
    if len(chunks) > 1 and any(job.unique_key is not None for job in jobs):
        # In the order of keys over all pieces: two such batches cannot wait for each other.
        places = sorted(places, key=lambda place: jobs[place].unique_key or "")
        chunks = list(_chunks([jobs[place] for place in places]))
    return [{**columns(places[start:end], ids, jobs), "lock_timeout": lock_timeout} for start, end in chunks]


def _standing_later(job: NewJob) -> NewJob:
    if job.more is None or (job.more.concurrency_key is None and job.more.on_duplicate != "replace"):
        return job
    return msgspec.structs.replace(job, more=msgspec.structs.replace(job.more, later=True))


def _chunks(jobs: Sequence[NewJob]) -> Iterable[tuple[int, int]]:
    """Cut a large enqueue into pieces that fit into a message; they are one transaction all the same."""
    start = size = 0
    for place, job in enumerate(jobs):
        size += len(job.payload)
        if place - start >= CHUNK_JOBS or (size > CHUNK_BYTES and place > start):
            yield start, place
            start, size = place, len(job.payload)
    yield start, len(jobs)


def columns(places: Sequence[int], all_ids: list[int], all_jobs: Sequence[NewJob]) -> dict[str, Any]:
    """Give the jobs at these places by column. A column of defaults alone is left out."""
    ids, jobs = [all_ids[place] for place in places], [all_jobs[place] for place in places]
    payload_types = [None if job.payload_type == JSON else job.payload_type for job in jobs]
    on_crash = [None if job.on_crash == "fail" else job.on_crash for job in jobs]
    return {
        "places": places,
        "ids": arrays.int8s(ids),
        "queues": arrays.texts([job.queue for job in jobs]),
        "tasks": arrays.texts([job.task for job in jobs]),
        "payloads": arrays.byteas([job.payload for job in jobs]),
        "payload_types": optional(arrays.texts, payload_types),
        "policies": optional(arrays.byteas, [job.policy or None for job in jobs]),
        "on_crash": optional(arrays.texts, on_crash),
        "heartbeats": optional(arrays.bools, [None if job.heartbeat else False for job in jobs]),
        "heartbeat_timeouts_s": optional(arrays.float8s, [job.heartbeat_timeout_s for job in jobs]),
        "timeouts_s": optional(arrays.float8s, [job.timeout_s for job in jobs]),
        "ranks": arrays.int4s([-job.priority for job in jobs]) if any(job.priority for job in jobs) else None,
        "delays_s": optional(arrays.float8s, [job.delay_s or None for job in jobs]),
        "runs_at": optional(arrays.float8s, [job.run_at for job in jobs]),
        "unique_keys": optional(arrays.texts, [job.unique_key for job in jobs]),
        "enqueued_by": optional(arrays.texts, [job.enqueued_by for job in jobs]),
        "more": optional(arrays.jsonbs, [job.more for job in jobs]),
    }


def optional(pack: Callable[[Any], bytes], values: list[Any]) -> bytes | None:
    """Pack a column; None where there is nothing in it."""
    return None if values.count(None) == len(values) else pack(values)
