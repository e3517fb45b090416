"""Take jobs in and tell how they ended: what a client asks of the ledger."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg.rows import tuple_row

from unstuck import failpoints
from unstuck.config import Settings
from unstuck.domain.errors import LedgerUnavailable, UncertainCommit
from unstuck.domain.payload import JSON
from unstuck.store.checks import check_ids, check_jobs
from unstuck.store.postgres import arrays, errors
from unstuck.store.postgres.holders import PATIENCE_S, HolderVerbs
from unstuck.store.postgres.jobids import JobIds
from unstuck.store.postgres.lanes import Row
from unstuck.store.postgres.rows import outcome
from unstuck.store.postgres.strangers import driver_connection, refuse_other_words
from unstuck.store.records import Enqueued, NewJob, Outcome

CHUNK_JOBS = 5_000
CHUNK_BYTES = 16 * 1024 * 1024
REPEAT_FOR_S = 15.0
"""How long an enqueue whose answer was lost tries to find out, and repeats itself."""
REPEAT_EVERY_S = 0.2
LOCK_TIMEOUT = "500ms"
"""How long one try of an enqueue may wait for a unique key that an open transaction holds."""

T = TypeVar("T")
Ask = Callable[[bytes, dict[str, Any]], list[Row]]


class ClientVerbs(HolderVerbs):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.job_ids = JobIds(self._reserve)

    def enqueue(self, jobs: Sequence[NewJob], patience_s: float = PATIENCE_S) -> list[Enqueued]:
        if not jobs:
            return []
        check_jobs(jobs)
        with self.client_lane.hold():
            ids = self.job_ids.take(len(jobs))
        batches = in_batches(ids, jobs, lock_timeout=LOCK_TIMEOUT)
        if failpoints.active:
            failpoints.reached("enqueue.before_commit")
        places = self.past_locks(self.client_lane, lambda: self._store(batches), patience_s)
        if failpoints.active:
            failpoints.reached("enqueue.after_commit")
        return answer_of(ids, places)

    def enqueue_on(self, connection: Any, jobs: Sequence[NewJob]) -> list[Enqueued]:
        theirs = driver_connection(connection)
        if not jobs:
            return []
        check_jobs(jobs)
        for job in jobs:
            refuse_other_words(theirs, (job.task, job.queue, job.unique_key, job.enqueued_by))
        with self.part_of(theirs, len(jobs)) as (ask, ids):
            return answer_of(ids, self._insert(ask, in_batches(ids, jobs, later=True)))

    @contextmanager
    def part_of(self, theirs: psycopg.Connection[Any], ids: int) -> Iterator[tuple[Ask, list[int]]]:
        """Give a way to write within the caller's transaction, and ids of jobs: all of it or none is written."""
        cursor = psycopg.Cursor(theirs, row_factory=tuple_row)
        arrays.teach(cursor.adapters)

        def ask(query: bytes, values: dict[str, Any]) -> list[Row]:
            return cursor.execute(query, values, binary=True).fetchall()

        try:
            reserved = [row[0] for row in ask(self.sql["reserve_job_ids"], {"count": ids})]
            # The statement above began the caller's transaction, if it had not begun. So this is a savepoint, and the
            # transaction goes on either way.
            with cursor, theirs.transaction():
                yield ask, reserved
        except psycopg.Error as error:
            where = "the database of the given connection"
            if theirs.closed:
                raise errors.lost_error(error, where, uncertain=False) from error
            raise errors.statement_error(error, where, self.schema) from error
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None

    def outcomes(self, job_ids: Collection[int]) -> list[Outcome]:
        check_ids(job_ids)
        return [outcome(row) for row in self.read("outcomes", ids=arrays.int8s(list(job_ids)))]

    def missing(self, job_ids: Collection[int]) -> set[int]:
        check_ids(job_ids)
        return set(job_ids) - {row[0] for row in self.read("existing", ids=arrays.int8s(list(job_ids)))}

    # ------------------------------------------------------------------------------------------

    def _reserve(self, count: int) -> list[int]:
        return [row[0] for row in self.client_lane.ask(self.sql["reserve_job_ids"], {"count": count})]

    def _store(self, batches: list[dict[str, Any]]) -> dict[int, int]:
        with self.client_lane.hold():
            # Repeated as it was: the ids are reserved, so that it cannot be stored twice.
            return self.repeat_uncertain(lambda: self._store_once(batches))

    def repeat_uncertain(self, store: Callable[[], T]) -> T:
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

    def _store_once(self, batches: list[dict[str, Any]]) -> dict[int, int]:
        if len(batches) == 1:
            return self._insert(self.client_lane.write, batches)
        with self.client_lane.transaction() as connection:
            return self._insert(lambda sql, values: connection.execute(sql, values, binary=True).fetchall(), batches)

    def _insert(self, ask: Ask, batches: list[dict[str, Any]]) -> dict[int, int]:
        """Give the jobs that were there already: their place in the whole, and whose id they have."""
        known: dict[int, int] = {}
        for batch in batches:
            for place, job_id in ask(self.sql["enqueue"], batch):
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
    if job.more is None or (job.more.line is None and job.more.on_duplicate != "replace"):
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
