"""Pause, resume and empty queues."""

from unstuck.client.auditing import queue_named
from unstuck.client.operator.base import Verbs
from unstuck.domain.errors import UnknownQueue
from unstuck.domain.names import did_you_mean
from unstuck.store.records import QueueRecord


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
        with self._audit.note(by, "pause", queue_named(queue)) as note:
            changed = self._ledger.pause(queue, by)
            note.outcome = f"{len(changed)} paused"
        return changed

    def resume(self, queue: str | None, by: str | None = None) -> list[str]:
        if queue is not None:
            self.known_queue(queue)
        by = by or self._by
        with self._audit.note(by, "resume", queue_named(queue)) as note:
            changed = self._ledger.resume(queue, by)
            note.outcome = f"{len(changed)} resumed"
        self._ring({f"queue:{name}" for name in changed})
        return changed

    def purge(self, queue: str, by: str | None = None) -> int:
        """Cancel every pending job of a queue; give how many."""
        self.known_queue(queue)
        by = by or self._by
        with self._audit.note(by, "purge", queue_named(queue)) as note:
            cancelled = self._ledger.purge(queue, by)
            note.outcome = f"{cancelled} cancelled"
        return cancelled
