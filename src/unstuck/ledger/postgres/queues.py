"""Keep order in queues: lines, limits, expiry, how long an ended job is kept."""

from collections.abc import Mapping

import msgspec

from unstuck.domain.limits import QueueLimit
from unstuck.ledger.contract.jobs import JobLinks
from unstuck.ledger.contract.maintenance import Expired, KeysChecked
from unstuck.ledger.contract.queues import KeyHolder, KeyRecord, QueueLimitRecord
from unstuck.ledger.postgres.locks import HolderVerbs


class OrderVerbs(HolderVerbs):
    def concurrency_keys(self, key: str | None = None, limit: int = 100) -> list[KeyRecord]:
        rows = self.read("lines", key=key, limit=limit)
        return [KeyRecord(*(*row[:4], tuple(map(KeyHolder, *row[4:7])))) for row in rows]

    def limit_key(self, key: str, places: int | None, by: str) -> None:
        values = {"key": key, "places": places, "by": by}
        rows = self.past_locks(self.read_connection, lambda: self.read_connection.write(self.sql["limit_line"], values))
        self.notify(f"queue:{queue}" for (queue,) in rows)

    def check_keys(self, after: str, limit: int) -> KeysChecked:
        next_after, repaired, removed, queues = self.serve_once("tend_lines", after=after, limit=limit)[0]
        if queues:
            self.notify(f"queue:{queue}" for queue in set(queues))
        return KeysChecked(next_after, repaired, removed, frozenset(queues))

    def queue_limits(self) -> list[QueueLimitRecord]:
        return [QueueLimitRecord(row[0], QueueLimit(*row[1:4]), *row[4:8]) for row in self.read("queue_limits")]

    def declare_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        if limits:
            told = [
                {"name": name, "concurrency": one.concurrency, "rate": one.rate, "rate_window_s": one.window_s}
                for name, one in sorted(limits.items())
            ]
            self.serve("declare_limit", limits=msgspec.json.encode(told).decode())

    def limit_queue(self, queue: str, limit: QueueLimit, by: str) -> None:
        word = "was limited" if limit else "has no limit any more"
        self._limit(queue, limit, by, f"Queue '{queue}' {word} ({by})")

    def unlimit_queue(self, queue: str, by: str) -> None:
        self._limit(queue, QueueLimit(), None, f"Queue '{queue}' takes its limit from its app again ({by})")

    def _limit(self, queue: str, limit: QueueLimit, by: str | None, message: str) -> None:
        values = {"queue": queue, "concurrency": limit.concurrency, "rate": limit.rate, "window_s": limit.window_s}
        self.read_connection.write(self.sql["limit_queue"], {**values, "by": by, "message": message})
        self.notify([f"queue:{queue}"])

    def links(self, job_id: int) -> JobLinks | None:
        rows = self.read("ties", job_id=job_id)
        return JobLinks(*rows[0]) if rows else None

    def expire_due(self, limit: int) -> Expired:
        count, queues, next_in_s = self.serve_once("expire_due", limit=limit)[0]
        if queues:
            self.notify(f"queue:{queue}" for queue in set(queues))
        return Expired(count, frozenset(queues), next_in_s)
