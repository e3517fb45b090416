"""Find jobs that may be claimed, within the limits of their queues, on SQLite."""

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import apsw
import msgspec

from unstuck.domain.limits import UNLIMITED, QueueLimit, Room, available
from unstuck.ledger.contract.workers import ClaimRequest
from unstuck.ledger.gaps import Gap, Gaps
from unstuck.ledger.sqlite.database import SQL, Database, fetch


class QueueLimits:
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
            self._rooms[queue] = queue_room(self._cursor, queue, self._limited[queue])
        return self._rooms[queue]


def queue_room(cursor: apsw.Cursor, queue: str, row: Sequence[Any]) -> Room:
    """Say how much may be taken of a queue with these columns: concurrency, rate, window, tokens, refilled_at."""
    concurrency, rate, window_s, tokens, refilled_at = row
    held = 0 if concurrency is None else cursor.execute(SQL["count_held_of_queue"], (queue,)).get
    since_s = 0.0 if refilled_at is None else time.time() - refilled_at
    return available(QueueLimit(concurrency, rate, window_s), held, tokens, since_s)


def write_limits(cursor: apsw.Cursor, limits: Mapping[str, QueueLimit]) -> None:
    """Write down what an app says; what an operator chose stands."""
    for queue, limit in limits.items():
        cursor.execute(SQL["declare_limit"], (queue, limit.concurrency, limit.rate, limit.window_s))


Place = tuple[int, int]
"""Where a job stands in its queue: rank and id."""

LONG_LOOK_S = 0.001
LONG_LOOK_S_PER_JOB = 20e-6
"""A look that took less read past nothing worth remembering; most do, and pay nothing for all this."""
MANY = 2_000
"""So many ready jobs that we may not take are worth a gap."""
MARGIN = 500
"""A few at both ends do not count: strays of other ranks must not make a gap longer than it is."""

_BEFORE_ALL_RANKS = -(2**31)
_AFTER_ALL_RANKS = 2**31


def was_long(look_cpu_s: float, jobs: int) -> bool:
    """Say whether a look that gave so many jobs was long, by CPU time: a busy host does not stretch it."""
    return look_cpu_s > LONG_LOOK_S + jobs * LONG_LOOK_S_PER_JOB


class Look:
    """How one turn looks for what it wishes: around which gaps, and which others it came upon."""

    def __init__(self, claim_request: ClaimRequest, around: Sequence[Gap]) -> None:
        self.claim_request = claim_request
        self.found: list[tuple[Gap, float]] = []
        """With what it cost to find them, in seconds. To be remembered after the commit."""
        self._tasks = msgspec.json.encode(claim_request.tasks).decode()
        self._around = {gap.queue: gap for gap in around}

    def read(self, connection: apsw.Connection, queue: str, limit: int) -> Generator[tuple[Any, ...], None, None]:
        """Give what is ready in a queue, in order, read only as far as it is wanted."""
        cursor = connection.cursor()
        try:
            gap = self._around.get(queue)
            if gap is None:
                yield from cursor.execute(SQL["peek_ready"], (queue, self._tasks, limit))
                return
            values = (queue, self._tasks, limit)
            yield from cursor.execute(SQL["peek_ready_of_ranks"], (*values, _BEFORE_ALL_RANKS, gap.from_rank))
            yield from _after(cursor, values, (gap.to_rank, gap.to_id))
        finally:
            cursor.close(force=True)

    def any(self, connection: apsw.Connection, queue: str) -> bool:
        lane = self.read(connection, queue, 1)
        found = next(lane, None) is not None
        lane.close()
        return found

    def find_gaps(
        self, cursor: apsw.Cursor, queues: Sequence[str], last: Mapping[str, Place], *, drained: bool, begun_s: float
    ) -> None:
        """Say where this look read past many, if it did.

        Called after what was found is taken (`last` is the last of each queue): all before the first that is left, or
        where the look was not cut short by its limit (`drained`) all that is there, is not for us.
        """
        for queue in queues:
            end = self._end_of_gap(cursor, queue, last.get(queue, (_BEFORE_ALL_RANKS, 0)), drained=drained)
            if end is not None and _nth_ready(cursor, queue, end, MANY) is not None:
                from_rank = _nth_ready(cursor, queue, end, MARGIN)
                assert from_rank is not None
                self.found.append((Gap(queue, from_rank, *end), time.monotonic() - begun_s))

    def _end_of_gap(self, cursor: apsw.Cursor, queue: str, last: Place, *, drained: bool) -> Place | None:
        if not drained:
            # A cursor of its own: whoever leaves a row unread closes it.
            left = next(_after(cursor.connection.cursor(), (queue, self._tasks, 1), last), None)
            if left is not None:
                return left[0], left[1] - 1
        found: Place | None = cursor.execute(SQL["nth_ready_from_behind"], (queue, MARGIN)).fetchone()
        return found


def is_still_a_gap(cursor: apsw.Cursor, tasks: tuple[str, ...], gap: Gap) -> bool:
    """Look into a gap: False where it holds something for us by now, or too little to be worth going around."""
    if _nth_ready(cursor, gap.queue, (gap.to_rank, gap.to_id), MANY) is None:
        return False
    values = (gap.queue, msgspec.json.encode(tasks).decode(), gap.from_rank, gap.to_rank, gap.to_id)
    return not cursor.execute(SQL["ready_inside"], values).fetchall()


def _after(cursor: apsw.Cursor, values: tuple[str, str, int], place: Place) -> Generator[tuple[Any, ...], None, None]:
    """Give what stands behind a place: first in its rank, then in the ranks after it."""
    yield from cursor.execute(SQL["peek_ready_of_rank"], (*values, *place))
    yield from cursor.execute(SQL["peek_ready_of_ranks"], (*values, place[0], _AFTER_ALL_RANKS))


def _nth_ready(cursor: apsw.Cursor, queue: str, end: Place, n: int) -> int | None:
    """Give the rank of the nth ready job of a queue, if there are so many up to that place."""
    found = cursor.execute(SQL["nth_ready"], (queue, *end, n)).fetchone()
    return None if found is None else int(found[0])


def look_for(db: Database, gaps: Gaps, claim_request: ClaimRequest) -> Look:
    """Return how to look for what is wanted. Gaps whose time is over are looked into first, beside those who write."""
    over = gaps.due(claim_request, time.monotonic())
    if over:
        with db.read() as cursor:
            begun_s = time.monotonic()
            for gap in over:
                if is_still_a_gap(cursor, claim_request.tasks, gap):
                    now_s = time.monotonic()
                    gaps.note(claim_request.tasks, gap, now_s - begun_s, now_s)
    return Look(claim_request, gaps.of(claim_request, time.monotonic()))


def note_gaps(gaps: Gaps, look: Look) -> None:
    """Remember the gaps that a look came upon, after its commit."""
    for gap, cost_s in look.found:
        gaps.note(look.claim_request.tasks, gap, cost_s, time.monotonic())
