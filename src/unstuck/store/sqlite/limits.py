"""Hold back what may not be taken from queues that have a limit."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import apsw
import msgspec

from unstuck.domain.limits import UNLIMITED, QueueLimit, Room, room
from unstuck.store.sqlite.verbs import SQL, fetch


class Gates:
    """Which of the wished queues are open, and how much may be taken of each, as of one moment under the lock."""

    def __init__(self, cursor: apsw.Cursor, wished: Sequence[str]) -> None:
        self._cursor = cursor
        closed: dict[str, tuple[Any, ...]] = {row[0]: row[1:] for row in fetch(cursor, "queue_gates")}
        self.open = [name for name in dict.fromkeys(wished) if name not in closed or not closed[name][0]]
        """Those that are not paused."""
        self._limited = {name: closed[name][1:] for name in self.open if name in closed}
        self._rooms: dict[str, Room] = {}

    def room(self, queue: str) -> int:
        """Say how many may be taken now."""
        return self._room(queue).jobs if queue in self._limited else UNLIMITED

    def wait_s(self, queue: str) -> float | None:
        """Say when the rate of a queue allows the next job; None where that is not what is missing."""
        return self._room(queue).in_s if queue in self._limited else None

    def filled_in_future(self, queue: str) -> bool:
        """Return whether the bucket of a queue was last filled in the future: the clock was set back."""
        refilled_at = self._limited[queue][4] if queue in self._limited else None
        return refilled_at is not None and refilled_at > time.time()

    def reset_future(self) -> None:
        """Fill such buckets from now on, or their queues would stand still until the clock catches up."""
        for queue in [name for name in self._limited if self.filled_in_future(name)]:
            self._spend(queue, self._limited[queue][3])

    def take(self, chosen: Sequence[tuple[int, str]]) -> None:
        """Note that jobs (with their queues) are being taken."""
        if not self._limited:
            return
        ids = [job_id for job_id, queue in chosen if queue in self._limited]
        if not ids:
            return
        self._cursor.execute(SQL["tie_to_limit"], (msgspec.json.encode(ids).decode(),))
        for queue in self._limited:
            tokens = self._room(queue).tokens
            count = sum(1 for _, of in chosen if of == queue)
            if tokens is not None and count:
                self._spend(queue, tokens - count)

    def _spend(self, queue: str, left: float | None) -> None:
        now = time.time()
        self._cursor.execute(SQL["spend_tokens"], (queue, left, now))
        self._rooms.pop(queue, None)
        self._limited[queue] = (*self._limited[queue][:3], left, now)

    def _room(self, queue: str) -> Room:
        if queue not in self._rooms:
            self._rooms[queue] = room_of(self._cursor, queue, self._limited[queue])
        return self._rooms[queue]


def room_of(cursor: apsw.Cursor, queue: str, row: Sequence[Any]) -> Room:
    """Say how much may be taken of a queue with these columns: concurrency, rate, window, tokens, refilled_at."""
    concurrency, rate, window_s, tokens, refilled_at = row
    held = 0 if concurrency is None else cursor.execute(SQL["count_held_of_queue"], (queue,)).get
    since_s = 0.0 if refilled_at is None else time.time() - refilled_at
    return room(QueueLimit(concurrency, rate, window_s), held, tokens, since_s)


def write_limits(cursor: apsw.Cursor, limits: Mapping[str, QueueLimit]) -> None:
    """Write down what an app says; what an operator chose stands."""
    for queue, limit in limits.items():
        cursor.execute(SQL["declare_limit"], (queue, limit.concurrency, limit.rate, limit.window_s))
