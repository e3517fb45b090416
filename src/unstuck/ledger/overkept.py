"""Estimate how far retention is behind, in a bounded number of looks: the order of ids is the order of time."""

from collections.abc import Sequence
from typing import Protocol

from unstuck.ledger.contract.diagnosis import RetentionKind, RetentionLag

SEGMENTS = 20
ROWS_PER_SEGMENT = 50
MAX_STEPS = 64
"""A search by halves through all ids that a ledger can have."""
RUN_OF_IDS = 1_000_000_000
"""Ids jump by this much at least after a restore and after a failover (see `first_after_restore` and
`skip_lost_numbers_v1`): a run of ids has no such jump in it."""
MAX_RUNS = 20

Row = tuple[int, float, float | None]
"""The id of a row, its age, and how long it is past its retention (None: it is not to be removed)."""


class Looks(Protocol):
    """The looks at one table that an estimate needs."""

    def rows_from(self, first_id: int, limit: int) -> Sequence[Row]:
        """Return the first rows from an id on."""
        ...

    def last_before(self, end_id: int) -> int | None:
        """Return the highest id below this one."""
        ...


def estimate(kind: RetentionKind, looks: Looks, kept_s: float) -> RetentionLag | None:
    """Return about how many rows are past their retention, and by how much the oldest is; None if there are none."""
    first = looks.rows_from(0, 1)
    last_id = looks.last_before(2**63 - 1)
    if not first or last_id is None:
        return None
    end = _first_young(looks, first[0][0], last_id, kept_s)
    count, past_s = 0.0, 0.0
    for _ in range(MAX_RUNS):
        if not first or first[0][0] >= end:
            break
        first_id = first[0][0]
        last = looks.last_before(min(end, first_id + RUN_OF_IDS))
        late, late_s = _look_through(looks, first_id, first_id if last is None else last)
        count, past_s = count + late, max(past_s, late_s)
        first = looks.rows_from(first_id + RUN_OF_IDS, 1)
    return RetentionLag(kind, max(1, round(count)), past_s) if past_s > 0 else None


def _look_through(looks: Looks, first_id: int, last_id: int) -> tuple[float, float]:
    """Look at the first few rows of each of twenty stretches, which stand for the whole stretch."""
    length = (last_id - first_id + 1) / SEGMENTS
    count, past_s = 0.0, 0.0
    start = first_id
    for number in range(SEGMENTS):
        start = max(start, int(first_id + number * length))
        rows = [row for row in looks.rows_from(start, ROWS_PER_SEGMENT) if row[0] <= last_id]
        if not rows:
            break
        late = [past for _, _, past in rows if past is not None and past > 0]
        count += len(late) * max(length / (rows[-1][0] - start + 1), 1.0)
        past_s = max([past_s, *late])
        start = rows[-1][0] + 1
    return count, past_s


def _first_young(looks: Looks, first_id: int, last_id: int, kept_s: float) -> int:
    """Return the id from which on rows are younger than the retention, found by halves."""
    low, high = first_id, last_id + 1
    for _ in range(MAX_STEPS):
        if low >= high:
            break
        middle = (low + high) // 2
        rows = looks.rows_from(middle, 1)
        if rows and rows[0][0] < high and rows[0][1] > kept_s:
            low = rows[0][0] + 1
        else:
            high = middle
    return low
