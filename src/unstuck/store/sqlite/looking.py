"""Look through queues for what a worker may take, around the gaps that it knows, and find new ones."""

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import apsw
import msgspec

from unstuck.store.gaps import Gap
from unstuck.store.records import Wish
from unstuck.store.sqlite.verbs import SQL

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

    def __init__(self, wish: Wish, around: Sequence[Gap]) -> None:
        self.wish = wish
        self.found: list[tuple[Gap, float]] = []
        """With what it cost to find them, in seconds. To be remembered after the commit."""
        self._tasks = msgspec.json.encode(wish.tasks).decode()
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
