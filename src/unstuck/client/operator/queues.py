"""Pause, resume and empty queues; limit queues and concurrency keys."""

from unstuck.client.operator.audit import AuditLog, queue_named
from unstuck.domain.limits import QueueLimit, check_key, check_limit, limit_in_words
from unstuck.domain.text import did_you_mean
from unstuck.errors import UnknownQueue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.queues import KeyRecord, QueueLimitRecord, QueueRecord


class Queues:
    """Act on queues, and on the concurrency keys of the jobs in them."""

    def __init__(self, ledger: Ledger, audit: AuditLog) -> None:
        self._ledger = ledger
        self._audit = audit

    def get(self, name: str) -> QueueRecord:
        """Return a queue; raise UnknownQueue if it was never used."""
        queues = self._ledger.queues.list()
        for queue in queues:
            if queue.name == name:
                return queue
        known = [queue.name for queue in queues]
        listed = f" Known: {', '.join(sorted(known)[:10])}." if known else " No queue has been used yet."
        raise UnknownQueue(f"There is no queue {name!r}.{did_you_mean(name, known)}{listed}")

    def pause(self, queue: str | None) -> list[str]:
        """Stop handing out jobs of one queue, or of all with None. Return the queues that changed."""
        if queue is not None:
            self.get(queue)
        with self._audit.record("pause", queue_named(queue)) as entry:
            changed = self._ledger.queues.pause(queue, self._audit.by)
            entry.outcome = f"{len(changed)} paused"
        return changed

    def resume(self, queue: str | None) -> list[str]:
        """Hand out jobs of one queue again, or of all with None. Return the queues that changed."""
        if queue is not None:
            self.get(queue)
        with self._audit.record("resume", queue_named(queue)) as entry:
            changed = self._ledger.queues.resume(queue, self._audit.by)
            entry.outcome = f"{len(changed)} resumed"
        self._ledger.notify({f"queue:{name}" for name in changed})
        return changed

    def purge(self, queue: str) -> int:
        """Cancel the pending jobs of a queue that have not begun. Return how many."""
        self.get(queue)
        with self._audit.record("purge", queue_named(queue)) as entry:
            cancelled = self._ledger.queues.purge(queue, self._audit.by)
            entry.outcome = f"{cancelled} cancelled"
        return cancelled

    def limit(self, queue: str, limit: QueueLimit | None) -> QueueLimitRecord | None:
        """Set the limit of a queue over what its app declares. An empty limit: none; None: the app's again."""
        self.get(queue)
        with self._audit.record("limit", queue_named(queue)) as entry:
            if limit is None:
                self._ledger.queues.unlimit(queue, self._audit.by)
                entry.outcome = "as its app says"
            else:
                self._ledger.queues.limit(queue, limit, self._audit.by)
                entry.outcome = limit_in_words(limit)
        return next((one for one in self._ledger.queues.limits() if one.name == queue), None)

    def limit_key(self, key: str, places: int | None) -> KeyRecord | None:
        """Set how many jobs with a concurrency key may run at once. None: as its jobs say again."""
        check_key(key, "concurrency_key")
        if places is not None:
            check_limit(places)
        with self._audit.record("limit_line", f"key {key!r}") as entry:
            self._ledger.queues.limit_key(key, places, self._audit.by)
            entry.outcome = "as its jobs say" if places is None else f"{places} at once"
        return next(iter(self._ledger.queues.concurrency_keys(key)), None)
