"""Keep order in queues: lines, limits, expiry, how long an ended job is kept."""

from collections.abc import Collection, Mapping

import msgspec

from unstuck.domain.limits import QueueLimit
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.queues import KeyHolder, KeyRecord, QueueLimitRecord, QueueRecord
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.locks import write_past_locks

PURGE_BATCH = 2_000
PURGE_LOOK = 100_000
"""How many ids of jobs to cancel are looked up at once."""


class Queues:
    """See `unstuck.ledger.contract.queues.Queues`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def pause(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused([record.name for record in self.list()] if queue is None else [queue], True, by)

    def resume(self, queue: str | None, by: str) -> list[str]:
        paused = [row[0] for row in self._db.read("paused_queues")]
        return self._set_paused([name for name in paused if queue in (None, name)], False, by)

    def purge(self, queue: str, by: str) -> int:
        count = 0
        cause = f"queue '{queue}' was purged by {by}"
        # Until a walk finds nothing more to cancel: jobs may have been locked by a client, or become ready meanwhile.
        while cancelled := self._purge_once(queue, cause):
            count += cancelled
        if count:
            message = f"{count} pending jobs of queue '{queue}' were cancelled by {by}"
            self._db.read_connection.write(self._db.sql["tell"], {"kind": "purged", "message": message})
        return count

    def tasks(self) -> list[TaskRecord]:
        return [TaskRecord(*row) for row in self._db.read("tasks")]

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        pairs = list(wanted)
        # Beside the enqueue, on the lane that whoever enqueues has open.
        values = {"queues": [queue for queue, _ in pairs], "tasks": [task for _, task in pairs]}
        return {(queue, task) for queue, task in self._db.client_connection.ask(self._db.sql["unserved"], values)}

    def limits(self) -> list[QueueLimitRecord]:
        return [QueueLimitRecord(row[0], QueueLimit(*row[1:4]), *row[4:8]) for row in self._db.read("queue_limits")]

    def declare_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        if limits:
            told = [
                {"name": name, "concurrency": one.concurrency, "rate": one.rate, "rate_window_s": one.window_s}
                for name, one in sorted(limits.items())
            ]
            self._db.serve("declare_limit", limits=msgspec.json.encode(told).decode())

    def limit(self, queue: str, limit: QueueLimit, by: str) -> None:
        word = "was limited" if limit else "has no limit any more"
        self._limit(queue, limit, by, f"Queue '{queue}' {word} ({by})")

    def unlimit(self, queue: str, by: str) -> None:
        self._limit(queue, QueueLimit(), None, f"Queue '{queue}' takes its limit from its app again ({by})")

    def concurrency_keys(self, key: str | None = None, limit: int = 100) -> list[KeyRecord]:
        rows = self._db.read("lines", key=key, limit=limit)
        return [KeyRecord(*(*row[:4], tuple(map(KeyHolder, *row[4:7])))) for row in rows]

    def limit_key(self, key: str, places: int | None, by: str) -> None:
        rows = write_past_locks(self._db, "limit_line", key=key, places=places, by=by)
        self._db.notify(f"queue:{queue}" for (queue,) in rows)

    def _purge_once(self, queue: str, cause: str) -> int:
        """Walk through the jobs of a queue once, and cancel those that have not begun."""
        count, after = 0, 0
        while ids := self._db.read("to_purge", queue=queue, after=after, limit=PURGE_LOOK)[0][0]:
            after = ids[-1]
            # In short transactions: purging a million jobs must not make anybody wait.
            for start in range(0, len(ids), PURGE_BATCH):
                batch = arrays.int8s(ids[start : start + PURGE_BATCH])
                count += int(write_past_locks(self._db, "purge", ids=batch, cause=cause)[0][0])
        return count

    def _set_paused(self, names: list[str], paused: bool, by: str) -> list[str]:
        if not names:
            return []
        values = {"names": arrays.texts(names), "paused": paused, "by": by, "word": "paused" if paused else "resumed"}
        return [row[0] for row in self._db.read_connection.write(self._db.sql["set_paused"], values)]

    def _limit(self, queue: str, limit: QueueLimit, by: str | None, message: str) -> None:
        values = {"queue": queue, "concurrency": limit.concurrency, "rate": limit.rate, "window_s": limit.window_s}
        self._db.read_connection.write(self._db.sql["limit_queue"], {**values, "by": by, "message": message})
        self._db.notify([f"queue:{queue}"])

    def list(self) -> list[QueueRecord]:
        return [QueueRecord(*(*row[:6], row[6] if row[10] else None, *row[7:10])) for row in self._db.read("queues")]
