"""Jobs on PostgreSQL: enqueue, read, cancel, retry, signal."""

from collections.abc import Collection, Sequence
from typing import Any

from unstuck import failpoints
from unstuck.domain.journal import MAX_SIGNALS
from unstuck.domain.states import HELD_STATES, UNSUCCESSFUL_STATES, JobState
from unstuck.errors import RefusedValue
from unstuck.ledger.checks import check_ids, check_jobs
from unstuck.ledger.contract.jobs import (
    AttemptRecord,
    DeferredRecord,
    Enqueued,
    Fate,
    JobFilter,
    JobLinks,
    JobPosition,
    JobRecord,
    JournalRecord,
    NewJob,
    OnceAnswer,
    Outcome,
    OutputRecord,
    Progress,
    Request,
    SignalRecord,
    read_fate,
)
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.enqueue import (
    LOCK_TIMEOUT,
    JobIds,
    answer_of,
    columns,
    driver_connection,
    in_batches,
    insert,
    part_of,
    refuse_other_words,
    repeat_uncertain,
    store,
)
from unstuck.ledger.postgres.locks import PATIENCE_S, past_locks, write_past_locks
from unstuck.ledger.postgres.rows import attempt_record, job_record, outcome
from unstuck.ledger.postgres.workflows import cancel_withdrawn

CANCEL_BATCH = 1_000
BUSY = "busy"
"""It was locked when many were cancelled at once: asked for again, alone."""


class Jobs:
    """See `unstuck.ledger.contract.jobs.Jobs`."""

    def __init__(self, db: Database, job_ids: JobIds) -> None:
        self._db = db
        self._job_ids = job_ids

    def enqueue(self, jobs: Sequence[NewJob], patience_s: float = PATIENCE_S) -> list[Enqueued]:
        if not jobs:
            return []
        check_jobs(jobs)
        with self._db.client_connection.hold():
            ids = self._job_ids.take(len(jobs))
        batches = in_batches(ids, jobs, lock_timeout=LOCK_TIMEOUT)
        if failpoints.active:
            failpoints.reached("enqueue.before_commit")
        places = past_locks(self._db, self._db.client_connection, lambda: store(self._db, batches), patience_s)
        if failpoints.active:
            failpoints.reached("enqueue.after_commit")
        return answer_of(ids, places)

    def enqueue_once(self, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
        check_jobs(jobs)
        with self._db.client_connection.hold():
            ids = self._job_ids.take(len(jobs))
        values = {
            **columns(range(len(jobs)), ids, jobs),
            "key": request.key,
            "fingerprint": request.fingerprint,
            "keep_s": request.keep_s,
        }
        first, fingerprint, job_ids, fresh = past_locks(
            self._db,
            self._db.client_connection,
            lambda: repeat_uncertain(lambda: self._db.client_connection.write(self._db.sql["enqueue_once"], values)),
        )[0]
        if fingerprint != request.fingerprint:
            return OnceAnswer((), repeated=True)
        stored = tuple(Enqueued(job_id, new) for job_id, new in zip(job_ids, fresh, strict=True))
        # Where our own ids are there it was us, in a try whose answer was lost.
        return OnceAnswer(stored, repeated=not first and not set(ids) & set(job_ids))

    def enqueue_on(self, connection: Any, jobs: Sequence[NewJob]) -> list[Enqueued]:
        theirs = driver_connection(connection)
        if not jobs:
            return []
        check_jobs(jobs)
        for job in jobs:
            refuse_other_words(theirs, (job.task, job.queue, job.unique_key, job.enqueued_by))
        with part_of(self._db, theirs, len(jobs)) as (ask, ids):
            return answer_of(ids, insert(self._db, ask, in_batches(ids, jobs, later=True)))

    def outcomes(self, job_ids: Collection[int]) -> list[Outcome]:
        check_ids(job_ids)
        return [outcome(row) for row in self._db.read("outcomes", ids=arrays.int8s(list(job_ids)))]

    def missing(self, job_ids: Collection[int]) -> set[int]:
        check_ids(job_ids)
        return set(job_ids) - {row[0] for row in self._db.read("existing", ids=arrays.int8s(list(job_ids)))}

    def get(self, job_id: int) -> JobRecord | None:
        rows = self._db.read("job", job_id=job_id)
        return job_record(rows[0]) if rows else None

    def attempts(self, job_id: int) -> list[AttemptRecord]:
        return [attempt_record(row) for row in self._db.read("attempts", job_id=job_id)]

    def progress(self, job_ids: Collection[int]) -> dict[int, Progress]:
        rows = self._db.read("progress", ids=arrays.int8s(list(job_ids)))
        return {row[0]: Progress(*row) for row in rows}

    def deferred_outcome(self, job_id: int) -> DeferredRecord | None:
        rows = self._db.read("deferred_outcome", job_id=job_id)
        return DeferredRecord(*rows[0]) if rows else None

    def outputs(self, job_id: int) -> list[OutputRecord]:
        return [OutputRecord(*row) for row in self._db.read("outputs", job_id=job_id)]

    def links(self, job_id: int) -> JobLinks | None:
        rows = self._db.read("ties", job_id=job_id)
        return JobLinks(*rows[0]) if rows else None

    def positions(self, job_ids: Collection[int]) -> list[JobPosition]:
        rows = self._db.read("glance", ids=list(job_ids)) if job_ids else []
        return [JobPosition(row[0], JobState(row[1]), *row[2:]) for row in rows]

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        rows = self._db.read(
            "fates",
            job_ids=arrays.int8s([job_id for job_id, _ in attempts]),
            tokens=arrays.int8s([token for _, token in attempts]),
        )
        return [read_fate(row) for row in rows]

    def count(self) -> dict[str, int]:
        return dict(self._db.read("count_jobs"))

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        check_ids(job_ids)
        answers: dict[int, str] = {}
        ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(ids), CANCEL_BATCH):
            answers.update(self._cancel(ids[start : start + CANCEL_BATCH], by))
        for job_id in [job_id for job_id, answer in answers.items() if answer == BUSY]:
            answers.update(self._cancel([job_id], by))
        stopped = [job_id for job_id, answer in answers.items() if answer == "cancelled"]
        for (job_id,) in self._db.read("nodes_to_stop", ids=arrays.int8s(stopped)) if stopped else ():
            # It was in hand when its workflow was cancelled. Each alone, for the same reason.
            write_past_locks(self._db, "stop_node", id=job_id, by=by)
        return {job_id: answers[job_id] for job_id in ids}

    def cancel_untaken(self, job_ids: Collection[int], waited_s: float, by: str) -> list[int]:
        check_ids(job_ids)
        found: list[int] = []
        ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(ids), CANCEL_BATCH):
            batch = arrays.int8s(ids[start : start + CANCEL_BATCH])
            found += [
                row[0] for row in write_past_locks(self._db, "cancel_untaken", ids=batch, waited_s=waited_s, by=by)
            ]
        return found

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        check_ids(job_ids)
        # One at a time: a unique key in use stops one job and not the others.
        answers = {
            job_id: str(write_past_locks(self._db, "retry", job_id=job_id, by=by)[0][0])
            for job_id in dict.fromkeys(job_ids)
        }
        cancel_withdrawn(self._db, [job_id for job_id, answer in answers.items() if answer == "queued"])
        return answers

    def signal(self, job_id: int, name: str, value: bytes, by: str) -> str:
        check_ids((job_id,))
        if "\0" in name:
            raise RefusedValue("The name of a signal must not hold a NUL character.")
        values = {"job_id": job_id, "name": name, "value": value, "by": by, "limit": MAX_SIGNALS}
        answer, queue = write_past_locks(self._db, "signal", **values)[0]
        if queue is not None:
            self._db.notify((f"queue:{queue}",))
        return str(answer)

    def journal(self, job_id: int, within_bytes: int | None = None) -> list[JournalRecord]:
        check_ids((job_id,))
        if within_bytes is None:
            return [JournalRecord(*row) for row in self._db.read("journal", job_id=job_id)]
        return [
            JournalRecord(*row) for row in self._db.read("journal_within", job_id=job_id, within_bytes=within_bytes)
        ]

    def signals(self, job_id: int, within_bytes: int | None = None) -> list[SignalRecord]:
        check_ids((job_id,))
        if within_bytes is None:
            return [SignalRecord(*row) for row in self._db.read("signals", job_id=job_id)]
        return [SignalRecord(*row) for row in self._db.read("signals_within", job_id=job_id, within_bytes=within_bytes)]

    def _cancel(self, ids: list[int], by: str) -> dict[int, str]:
        return {
            job_id: answer for job_id, answer, _ in write_past_locks(self._db, "cancel", ids=arrays.int8s(ids), by=by)
        }

    def list(self, where: JobFilter) -> list[JobRecord]:
        rows = self._db.read(
            "jobs",
            before_id=where.before_id,
            from_id=where.from_id,
            states=arrays.texts(where.states) if where.states else None,
            held=bool(where.states) and HELD_STATES.issuperset(where.states),
            pending=set(where.states) == {JobState.PENDING},
            wrong=bool(where.states) and UNSUCCESSFUL_STATES.issuperset(where.states),
            queue=where.queue,
            task=where.task,
            error=where.error,
            worker_id=where.worker_id,
            older_than_s=where.older_than_s,
            newer_than_s=where.newer_than_s,
            limit=where.limit,
        )
        return [job_record(row, is_whole=False) for row in rows]
