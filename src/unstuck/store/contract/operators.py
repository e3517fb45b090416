"""What operators do to queues, workers and jobs."""

from collections.abc import Collection
from typing import Protocol


class OperatorVerbs(Protocol):
    def pause(self, queue: str | None, by: str) -> list[str]:
        """Stop handing out jobs of one queue, or of all; give the queues that changed."""
        ...

    def resume(self, queue: str | None, by: str) -> list[str]: ...

    def request(self, worker_id: str, what: str, by: str) -> bool:
        """Ask a worker to 'drain' or 'stop'; False when it is not living."""
        ...

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        """Cancel: 'cancelled' (it waited or was only claimed), 'requested' (it runs; its worker is told),
        'finished' (too late), 'missing'."""
        ...

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        """Queue finished jobs again with fresh counters: 'queued', 'live' (not finished), 'succeeded', 'missing',
        'duplicate' (its unique key is in use by another live job)."""
        ...

    def purge(self, queue: str, by: str) -> int:
        """Cancel the pending jobs of a queue that have not begun; return how many.

        Spared are jobs that were tried before, and nodes of workflows of which something has begun."""
        ...
