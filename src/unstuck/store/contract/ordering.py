"""What keeps order in queues: lines, limits, expiry, the guard against starvation, how long an ended job is kept."""

from collections.abc import Mapping
from typing import Protocol

from unstuck.domain.limits import QueueLimit
from unstuck.store.records import Expired, LineRecord, QueueLimitRecord, Tended, TiesRecord


class OrderVerbs(Protocol):
    def lines(self, key: str | None = None, limit: int = 100) -> list[LineRecord]:
        """Give the lines in which somebody stands (or one of them), by their keys."""
        ...

    def limit_line(self, key: str, places: int | None, by: str) -> None:
        """Choose how many of a line may be at work at once; None: as its jobs say again."""
        ...

    def tend_lines(self, after: str, limit: int) -> Tended:
        """Look after some lines: let in who waits at a free place, close lines in which nobody stands."""
        ...

    def queue_limits(self) -> list[QueueLimitRecord]:
        """Give the queues that have a limit, or of which an operator said that they have none."""
        ...

    def declare_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        """Write down what an app says of its queues; what an operator chose stands."""
        ...

    def limit_queue(self, queue: str, limit: QueueLimit, by: str) -> None:
        """Choose the limit of a queue, or that it has none, over what apps declare."""
        ...

    def unlimit_queue(self, queue: str, by: str) -> None:
        """Take back what an operator chose: apps decide again, from the next worker that starts."""
        ...

    def ties(self, job_id: int) -> TiesRecord | None: ...

    def expire_due(self, limit: int) -> Expired:
        """Cancel jobs that were not begun in time."""
        ...

    def lift_starving(self, waited_s: float, at_once: int) -> dict[str, int]:
        """Bring jobs that waited too long behind more urgent ones to the front of their queues, so many at a time in
        each; give how many, by queue."""
        ...
