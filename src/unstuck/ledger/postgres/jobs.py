"""Read jobs on PostgreSQL, cancel, retry and purge them, and keep their journals."""

from collections.abc import Collection
from typing import Any

from unstuck.domain.event_cursor import Cursor
from unstuck.domain.journal import MAX_SIGNALS, PendingSignal, RecordedEntry, pack_journal
from unstuck.domain.states import HELD_STATES, UNSUCCESSFUL_STATES, JobState
from unstuck.errors import RefusedValue
from unstuck.ledger.checks import check_ids
from unstuck.ledger.contract.events import EventPage, EventRecord
from unstuck.ledger.contract.jobs import (
    AttemptRecord,
    JobFilter,
    JobRecord,
    JournalRecord,
    OutputRecord,
    SignalRecord,
    TaskRecord,
)
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import DeferredRecord, Progress, WorkerRecord
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.connection import Row
from unstuck.ledger.postgres.database import Verbs
from unstuck.ledger.postgres.events import cursor_values, newest_cursor_of
from unstuck.ledger.postgres.locks import HolderVerbs
from unstuck.ledger.postgres.rows import attempt_record, job_record, worker_record
from unstuck.ledger.postgres.workflows import cancel_withdrawn


class JournalVerbs(HolderVerbs):
    def signal(self, job_id: int, name: str, value: bytes, by: str) -> str:
        check_ids((job_id,))
        if "\0" in name:
            raise RefusedValue("The name of a signal must not hold a NUL character.")
        values = {"job_id": job_id, "name": name, "value": value, "by": by, "limit": MAX_SIGNALS}
        answer, queue = self.past_locks(
            self.read_connection, lambda: self.read_connection.write(self.sql["signal"], values)
        )[0]
        if queue is not None:
            self.notify((f"queue:{queue}",))
        return str(answer)

    def journal(self, job_id: int, within_bytes: int | None = None) -> list[JournalRecord]:
        check_ids((job_id,))
        if within_bytes is None:
            return [JournalRecord(*row) for row in self.read("journal", job_id=job_id)]
        return [JournalRecord(*row) for row in self.read("journal_within", job_id=job_id, within_bytes=within_bytes)]

    def signals(self, job_id: int, within_bytes: int | None = None) -> list[SignalRecord]:
        check_ids((job_id,))
        if within_bytes is None:
            return [SignalRecord(*row) for row in self.read("signals", job_id=job_id)]
        return [SignalRecord(*row) for row in self.read("signals_within", job_id=job_id, within_bytes=within_bytes)]

    def _journals(self, job_ids: list[int]) -> dict[int, bytes]:
        """Give what these jobs wrote down and the signals that are kept for them, packed for a new attempt."""
        if not job_ids:
            return {}
        values = {"ids": arrays.int8s(job_ids)}
        lines: dict[int, list[RecordedEntry]] = {job_id: [] for job_id in job_ids}
        for job_id, *line in self.turn_connection.ask(self.sql["journal_lines"], values):
            lines[job_id].append(RecordedEntry(*line))
        kept: dict[int, list[PendingSignal]] = {job_id: [] for job_id in job_ids}
        for job_id, *signal in self.turn_connection.ask(self.sql["kept_signals"], values):
            kept[job_id].append(PendingSignal(*signal))
        return {job_id: pack_journal(lines[job_id], kept[job_id]) for job_id in job_ids}


class ReadingVerbs(Verbs):
    def job(self, job_id: int) -> JobRecord | None:
        rows = self.read("job", job_id=job_id)
        return job_record(rows[0]) if rows else None

    def jobs(self, where: JobFilter) -> list[JobRecord]:
        rows = self.read(
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

    def count_jobs(self) -> dict[str, int]:
        return dict(self.read("count_jobs"))

    def attempts(self, job_id: int) -> list[AttemptRecord]:
        return [attempt_record(row) for row in self.read("attempts", job_id=job_id)]

    def deferred_outcome(self, job_id: int) -> DeferredRecord | None:
        rows = self.read("deferred_outcome", job_id=job_id)
        return DeferredRecord(*rows[0]) if rows else None

    def progress(self, job_ids: Collection[int]) -> dict[int, Progress]:
        rows = self.read("progress", ids=arrays.int8s(list(job_ids)))
        return {row[0]: Progress(*row) for row in rows}

    def events(
        self,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        after_id: int | None = None,
        limit: int = 100,
    ) -> list[EventRecord]:
        if after_id is None:
            rows = self.read("last_events", job_id=job_id, worker_id=worker_id, limit=limit)[::-1]
        else:
            rows = self.read("events_after", job_id=job_id, worker_id=worker_id, after_id=after_id, limit=limit)
        return [EventRecord(*row) for row in rows]

    def newest_cursor(self) -> Cursor:
        return newest_cursor_of(*self.read("newest_event")[0])

    def events_since(
        self, cursor: Cursor, *, job_id: int | None = None, worker_id: str | None = None, limit: int = 100
    ) -> EventPage:
        values = cursor_values(cursor)
        if job_id is None:
            rows = self.read("events_since", worker_id=worker_id, limit=limit, **values)
        else:
            rows = self.read("events_of_job_since", job_id=job_id, limit=limit, **values)
        running, origin, origin_at, oldest_id = rows[0][:4]
        return EventPage(
            [EventRecord(*row[4:]) for row in rows if row[4] is not None],
            frozenset(running),
            cursor.names(origin, origin_at),
            oldest_id,
        )

    def outputs(self, job_id: int) -> list[OutputRecord]:
        return [OutputRecord(*row) for row in self.read("outputs", job_id=job_id)]

    def workers(self, living_only: bool = False) -> list[WorkerRecord]:
        return [worker_record(row) for row in self.read("workers", living_only=living_only)]

    def queues(self) -> list[QueueRecord]:
        return [QueueRecord(*(*row[:6], row[6] if row[10] else None, *row[7:10])) for row in self.read("queues")]

    def tasks(self) -> list[TaskRecord]:
        return [TaskRecord(*row) for row in self.read("tasks")]


PURGE_BATCH = 2_000
PURGE_LOOK = 100_000
"""How many ids of jobs to cancel are looked up at once."""
CANCEL_BATCH = 1_000
BUSY = "busy"
"""Somebody had it in hand when many were cancelled at once: asked for again, alone."""


class OperatorVerbs(ReadingVerbs, HolderVerbs):
    def pause(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused([record.name for record in self.queues()] if queue is None else [queue], True, by)

    def resume(self, queue: str | None, by: str) -> list[str]:
        paused = [row[0] for row in self.read("paused_queues")]
        return self._set_paused([name for name in paused if queue in (None, name)], False, by)

    def request(self, worker_id: str, what: str, by: str) -> bool:
        return bool(self.read("request", worker_id=worker_id, what=what, by=by))

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        check_ids(job_ids)
        answers: dict[int, str] = {}
        ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(ids), CANCEL_BATCH):
            answers.update(self._cancel(ids[start : start + CANCEL_BATCH], by))
        for job_id in [job_id for job_id, answer in answers.items() if answer == BUSY]:
            answers.update(self._cancel([job_id], by))
        stopped = [job_id for job_id, answer in answers.items() if answer == "cancelled"]
        for (job_id,) in self.read("nodes_to_stop", ids=arrays.int8s(stopped)) if stopped else ():
            # It was in hand when its workflow was cancelled. Each alone, for the same reason.
            self._write("stop_node", id=job_id, by=by)
        return {job_id: answers[job_id] for job_id in ids}

    def cancel_untaken(self, job_ids: Collection[int], waited_s: float, by: str) -> list[int]:
        check_ids(job_ids)
        found: list[int] = []
        ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(ids), CANCEL_BATCH):
            batch = arrays.int8s(ids[start : start + CANCEL_BATCH])
            found += [row[0] for row in self._write("cancel_untaken", ids=batch, waited_s=waited_s, by=by)]
        return found

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        check_ids(job_ids)
        # One at a time: a unique key in use stops one job and not the others.
        answers = {job_id: str(self._write("retry", job_id=job_id, by=by)[0][0]) for job_id in dict.fromkeys(job_ids)}
        cancel_withdrawn(self, [job_id for job_id, answer in answers.items() if answer == "queued"])
        return answers

    def purge(self, queue: str, by: str) -> int:
        count = 0
        cause = f"queue '{queue}' was purged by {by}"
        # Until a walk finds nothing more to cancel: jobs may have been locked by a client, or become ready meanwhile.
        while cancelled := self._purge_once(queue, cause):
            count += cancelled
        if count:
            message = f"{count} pending jobs of queue '{queue}' were cancelled by {by}"
            self.read_connection.write(self.sql["tell"], {"kind": "purged", "message": message})
        return count

    def _purge_once(self, queue: str, cause: str) -> int:
        """Walk through the jobs of a queue once, and cancel those that have not begun."""
        count, after = 0, 0
        while ids := self.read("to_purge", queue=queue, after=after, limit=PURGE_LOOK)[0][0]:
            after = ids[-1]
            # In short transactions: purging a million jobs must not make anybody wait.
            for start in range(0, len(ids), PURGE_BATCH):
                batch = arrays.int8s(ids[start : start + PURGE_BATCH])
                count += int(self._write("purge", ids=batch, cause=cause)[0][0])
        return count

    def _cancel(self, ids: list[int], by: str) -> dict[int, str]:
        return {job_id: answer for job_id, answer, _ in self._write("cancel", ids=arrays.int8s(ids), by=by)}

    def _write(self, query: str, /, **values: Any) -> list[Row]:
        """Write what rows of jobs are needed for: an operator waits for other sessions, though not for ever."""
        return self.past_locks(self.read_connection, lambda: self.read_connection.write(self.sql[query], values))

    def _set_paused(self, names: list[str], paused: bool, by: str) -> list[str]:
        if not names:
            return []
        values = {"names": arrays.texts(names), "paused": paused, "by": by, "word": "paused" if paused else "resumed"}
        return [row[0] for row in self.read_connection.write(self.sql["set_paused"], values)]
