"""The size of the next batch of retention follows the time that the last one took."""

import pytest

from unstuck.reaper.retention import (
    BATCH_S,
    LARGEST_BATCH,
    LONG_S,
    SMALLEST_BATCH,
    USUAL_BATCH,
    Chore,
    Housekeeping,
)
from unstuck.store.records import Swept


def chore(limit: int = USUAL_BATCH) -> Chore:
    found = Chore(lambda ledger, kept, limit: Swept())
    found.limit = limit
    return found


@pytest.mark.parametrize(
    ("limit", "took_s", "then"),
    [
        (USUAL_BATCH, BATCH_S / 3, 2 * USUAL_BATCH),
        (USUAL_BATCH, BATCH_S * 0.8, USUAL_BATCH),
        (8_000, BATCH_S * 2, 4_000),
        (USUAL_BATCH, BATCH_S * 5, USUAL_BATCH),
        (USUAL_BATCH, LONG_S * 2, USUAL_BATCH // 4),
        (SMALLEST_BATCH, 10.0, SMALLEST_BATCH),
        (SMALLEST_BATCH, BATCH_S * 5, 2 * SMALLEST_BATCH),
        (LARGEST_BATCH, 0.0, LARGEST_BATCH),
    ],
)
def test_a_batch_grows_while_it_is_quick_and_shrinks_where_it_is_slow(limit: int, took_s: float, then: int) -> None:
    one = chore(limit)
    one.adapt(took_s, BATCH_S)
    assert one.limit == then


def test_batches_are_shorter_where_heartbeats_are_frequent() -> None:
    assert Housekeeping(5.0)._batch_s == BATCH_S
    assert Housekeeping(0.05)._batch_s == pytest.approx(0.005)
