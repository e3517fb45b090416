"""When a gap is believed, when it is looked into again, and for whom it counts."""

import threading
import time

import pytest

from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract.maintenance import Swept
from unstuck.ledger.contract.workers import ClaimRequest
from unstuck.ledger.gaps import LATEST_S, LOOK_AGAIN_AFTER_TIMES, MAX_GAPS, SOONEST_S, Gap, Gaps, look_again_after_s
from unstuck.ledger.postgres.connection import CallLock
from unstuck.maintenance.retention import (
    BATCH_S,
    LARGEST_BATCH,
    LONG_S,
    SMALLEST_BATCH,
    USUAL_BATCH,
    Chore,
    Housekeeping,
)

WISH = ClaimRequest(("a", "b"), ("add",), 10)
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
    assert gaps.of(ClaimRequest(("a",), ("add", "mul"), 10), 100.0) == ()
    assert gaps.of(ClaimRequest(("b",), ("add",), 10), 100.0) == ()
    assert gaps.of(ClaimRequest(("a", "a"), ("add",), 10), 100.0) == (GAP,)


def test_memory_is_bounded() -> None:
    gaps = Gaps()
    for number in range(MAX_GAPS + 1):
        gaps.note(("add",), Gap(str(number), 0, 0, 1), COST_S, now_s=0.0)
    assert len(gaps.of(ClaimRequest(tuple(map(str, range(MAX_GAPS + 1))), ("add",), 1), 0.0)) == 1


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


def test_whoever_waits_too_long_is_told_that_nothing_was_sent() -> None:
    lock = CallLock("service", 0.05)
    held, done = threading.Event(), threading.Event()

    def keep() -> None:
        with lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=keep)
    thread.start()
    assert held.wait(10)
    with pytest.raises(LedgerUnavailable, match="Nothing was sent"), lock:
        pass
    with pytest.raises(LedgerUnavailable):
        lock.acquire_urgently()
    assert not lock.try_acquire()
    done.set()
    thread.join()
    with lock, lock:
        assert lock.try_acquire()
        lock.release()


def test_an_urgent_call_goes_before_all_that_wait_already() -> None:
    lock = CallLock("service", 10.0)
    order: list[str] = []
    ended = threading.Event()

    def keep_busy() -> None:
        while not ended.is_set():
            with lock, lock:
                order.append("other")
                time.sleep(0.005)

    others = [threading.Thread(target=keep_busy) for _ in range(6)]
    for other in others:
        other.start()
    before = []
    for _ in range(20):
        began = len(order)
        lock.acquire_urgently()
        before.append(len(order) - began)
        lock.release()
    ended.set()
    for other in others:
        other.join()
    # The one that has it, and at most one that took it in the same moment.
    assert max(before) <= 2, before
