"""Pause, resume and empty queues."""

from unstuck.client.operator.audit import Verbs, queue_named
from unstuck.domain.limits import QueueLimit, check_key, check_limit, limit_in_words
from unstuck.domain.text import did_you_mean
from unstuck.errors import UnknownQueue
from unstuck.ledger.contract.queues import KeyRecord, QueueLimitRecord, QueueRecord


class QueueVerbs(Verbs):
    """A part of the operator's verbs."""

    def known_queue(self, name: str) -> QueueRecord:
        queues = self._ledger.queues()
        for queue in queues:
            if queue.name == name:
                return queue
        known = [queue.name for queue in queues]
        listed = f" Known: {', '.join(sorted(known)[:10])}." if known else " No queue has been used yet."
        raise UnknownQueue(f"There is no queue {name!r}.{did_you_mean(name, known)}{listed}")

    def pause(self, queue: str | None, by: str | None = None) -> list[str]:
        """Stop handing out jobs of one queue, or of all; give the queues that changed."""
        if queue is not None:
            self.known_queue(queue)
        by = by or self._by
        with self._audit.record(by, "pause", queue_named(queue)) as note:
            changed = self._ledger.pause(queue, by)
            note.outcome = f"{len(changed)} paused"
        return changed

    def resume(self, queue: str | None, by: str | None = None) -> list[str]:
        if queue is not None:
            self.known_queue(queue)
        by = by or self._by
        with self._audit.record(by, "resume", queue_named(queue)) as note:
            changed = self._ledger.resume(queue, by)
            note.outcome = f"{len(changed)} resumed"
        self._ring({f"queue:{name}" for name in changed})
        return changed

    def queue_limits(self) -> list[QueueLimitRecord]:
        """Give the queues that have a limit, with how much of it is in use."""
        return self._ledger.queue_limits()

    def limit_queue(self, queue: str, limit: QueueLimit | None, by: str | None = None) -> QueueLimitRecord | None:
        """Choose the limit of a queue over what its app declares (an empty one: no limit); None: the app's again."""
        self.known_queue(queue)
        by = by or self._by
        with self._audit.record(by, "limit", queue_named(queue)) as note:
            if limit is None:
                self._ledger.unlimit_queue(queue, by)
                note.outcome = "as its app says"
            else:
                self._ledger.limit_queue(queue, limit, by)
                note.outcome = limit_in_words(limit)
        return next((one for one in self._ledger.queue_limits() if one.name == queue), None)

    def concurrency_keys(self, key: str | None = None, limit: int = 100) -> list[KeyRecord]:
        """Give the lines in which somebody stands: who has their places, and how many wait."""
        return self._ledger.concurrency_keys(key, limit)

    def limit_key(self, key: str, places: int | None, by: str | None = None) -> KeyRecord | None:
        """Choose how many jobs of a key may be at work at once; None: as its jobs say again."""
        check_key(key, "concurrency_key")
        if places is not None:
            check_limit(places)
        by = by or self._by
        with self._audit.record(by, "limit_line", f"key {key!r}") as note:
            self._ledger.limit_key(key, places, by)
            note.outcome = "as its jobs say" if places is None else f"{places} at once"
        return next(iter(self._ledger.concurrency_keys(key)), None)

    def purge(self, queue: str, by: str | None = None) -> int:
        """Cancel the pending jobs of a queue that have not begun; return how many."""
        self.known_queue(queue)
        by = by or self._by
        with self._audit.record(by, "purge", queue_named(queue)) as note:
            cancelled = self._ledger.purge(queue, by)
            note.outcome = f"{cancelled} cancelled"
        return cancelled
