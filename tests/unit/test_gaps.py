"""When a gap is believed, when it is looked into again, and for whom it counts."""

import pytest

from unstuck.store.gaps import LATEST_S, LOOK_AGAIN_AFTER_TIMES, MAX_GAPS, SOONEST_S, Gap, Gaps, look_again_after_s
from unstuck.store.records import Wish

WISH = Wish(("a", "b"), ("add",), 10)
GAP = Gap("a", 0, 0, 5000)
COST_S = 0.1


@pytest.mark.parametrize(
    ("cost_s", "expected_s"),
    [(0.0, SOONEST_S), (0.1, 0.1 * LOOK_AGAIN_AFTER_TIMES), (1000.0, LATEST_S)],
)
def test_a_costly_look_is_made_more_seldom_within_bounds(cost_s: float, expected_s: float) -> None:
    assert look_again_after_s(cost_s) == pytest.approx(expected_s)


def test_a_gap_is_gone_around_until_its_time_is_over() -> None:
    gaps = Gaps()
    gaps.note(("add",), GAP, COST_S, now_s=100.0)
    assert gaps.of(WISH, 101.9) == (GAP,)
    assert gaps.of(WISH, 102.1) == ()
    assert gaps.of(WISH, 100.0) == ()


def test_a_gap_that_grows_is_not_believed_for_longer() -> None:
    gaps = Gaps()
    gaps.note(("add",), GAP, COST_S, now_s=100.0)
    longer = Gap("a", 0, 0, 9000)
    gaps.note(("add",), longer, COST_S, now_s=101.9)
    assert gaps.of(WISH, 101.9) == (longer,)
    assert gaps.of(WISH, 102.1) == ()


def test_a_gap_is_given_once_to_who_looks_into_it() -> None:
    gaps = Gaps()
    gaps.note(("add",), GAP, COST_S, now_s=100.0)
    assert gaps.due(WISH, 101.0) == []
    assert gaps.due(WISH, 103.0) == [GAP]
    assert gaps.due(WISH, 103.0) == []


def test_a_gap_counts_only_for_the_same_tasks_and_its_own_queue() -> None:
    gaps = Gaps()
    gaps.note(("add",), GAP, COST_S, now_s=100.0)
    assert gaps.of(Wish(("a",), ("add", "mul"), 10), 100.0) == ()
    assert gaps.of(Wish(("b",), ("add",), 10), 100.0) == ()
    assert gaps.of(Wish(("a", "a"), ("add",), 10), 100.0) == (GAP,)


def test_memory_is_bounded() -> None:
    gaps = Gaps()
    for number in range(MAX_GAPS + 1):
        gaps.note(("add",), Gap(str(number), 0, 0, 1), COST_S, now_s=0.0)
    assert len(gaps.of(Wish(tuple(map(str, range(MAX_GAPS + 1))), ("add",), 1), 0.0)) == 1
