"""A reaper that slept, or was cut off, vouches for nothing it did not see."""

import math

from unstuck.domain.watch import Cause
from unstuck.reaper.attention import Attention

INTERVAL_S = 5.0


def in_touch(at_s: float) -> Attention:
    attention = Attention(every_s=1.0)
    attention.tick(at_s, INTERVAL_S)
    attention.reached(at_s, at_s, stale_s=0.0, connected_s=math.inf)
    attention.rest(at_s, 1.0)
    return attention


def test_a_reaper_that_just_started_claims_nothing() -> None:
    attention = Attention(every_s=1.0)
    tick = attention.tick(100.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (None, Cause.START)
    assert attention.awake


def test_a_reaper_on_time_claims_the_time_since_its_last_contact() -> None:
    attention = in_touch(100.0)
    tick = attention.tick(101.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (1.0, None)
    assert attention.awake


def test_what_others_had_not_watched_at_its_last_contact_is_claimed_too() -> None:
    attention = in_touch(100.0)
    attention.reached(101.0, 101.0, stale_s=0.4, connected_s=math.inf)
    assert attention.tick(102.0, INTERVAL_S).claim_s == 1.4


def test_a_frozen_reaper_claims_only_what_it_planned_and_accuses_no_one() -> None:
    attention = in_touch(100.0)
    tick = attention.tick(160.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (2.0, Cause.PAUSE)
    assert not attention.awake
    attention.reached(160.0, 160.0, stale_s=0.0, connected_s=math.inf)
    attention.rest(160.0, 1.0)
    assert attention.tick(161.0, INTERVAL_S).cause is None
    assert attention.awake


def test_no_claim_is_longer_than_every_living_worker_may_be_late() -> None:
    attention = Attention(every_s=0.5)
    attention.reached(100.0, 100.0, stale_s=0.0, connected_s=math.inf)
    attention.rest(100.0, 30.0)
    assert attention.tick(130.0, INTERVAL_S).claim_s == INTERVAL_S / 2


def test_a_long_round_is_not_claimed_as_a_whole() -> None:
    attention = in_touch(100.0)
    attention.rest(120.0, 1.0)
    assert attention.tick(121.0, 60.0).claim_s == 3.0


def test_a_reaper_that_was_cut_off_claims_nothing() -> None:
    attention = in_touch(100.0)
    attention.lost()
    tick = attention.tick(101.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (None, Cause.OUTAGE)
    assert not attention.awake


def test_it_is_steady_since_its_last_pause_outage_or_lost_connection() -> None:
    attention = in_touch(100.0)
    assert attention.steady_s(100.0) == math.inf
    attention.reached(110.0, 110.0, stale_s=0.0, connected_s=2.0)
    assert attention.steady_s(115.0) == 5.0
    attention.reached(116.0, 116.0, stale_s=0.0, connected_s=8.0)
    assert attention.steady_s(116.0) == 6.0
    attention.lost()
    assert attention.steady_s(120.0) == 0.0
    attention.reached(121.0, 121.0, stale_s=0.0, connected_s=0.5)
    assert attention.steady_s(124.0) == 3.0


def test_a_pause_is_no_lost_connection() -> None:
    attention = in_touch(100.0)
    assert attention.connected_s(100.0) == math.inf
    attention.tick(160.0, INTERVAL_S)
    attention.reached(160.0, 160.0, stale_s=0.0, connected_s=math.inf)
    assert (attention.steady_s(162.0), attention.connected_s(162.0)) == (2.0, math.inf)
    attention.reached(163.0, 163.0, stale_s=0.0, connected_s=0.5)
    assert attention.connected_s(165.0) == 2.0
    attention.lost()
    assert attention.connected_s(166.0) == 0.0
    attention.reached(167.0, 167.0, stale_s=0.0, connected_s=math.inf)
    assert attention.connected_s(170.0) == 3.0


def test_a_fleet_with_a_quick_worker_is_watched_as_closely_as_that_one_needs() -> None:
    attention = Attention(every_s=10.0)
    attention.reached(100.0, 100.0, stale_s=0.0, connected_s=math.inf)
    attention.rest(100.0, 10.0)
    tick = attention.tick(110.0, 3.0)
    assert (tick.claim_s, tick.every_s) == (1.5, 1.5)


def test_a_reaper_vouches_for_no_time_before_its_own_first_contact() -> None:
    # The watch was last extended 12 s before: others may have kept it, or the ledger was away until just now.
    attention = Attention(every_s=6.0)
    attention.tick(100.0, 12.0)
    attention.reached(100.0, 100.0, stale_s=12.0, connected_s=math.inf)
    attention.rest(100.0, 6.0)
    assert attention.tick(106.0, 12.0).claim_s == 6.0


def test_a_contact_in_the_middle_of_a_long_round_claims_the_work_since_the_last_one() -> None:
    attention = in_touch(100.0)
    attention.tick(101.0, INTERVAL_S)
    attention.reached(101.0, 101.0, stale_s=0.0, connected_s=math.inf)
    tick = attention.tick_amid(102.8, INTERVAL_S)
    assert (round(tick.claim_s or 0.0, 6), tick.cause) == (1.8, None)
    # One part of the round took longer than any pause may.
    attention.reached(102.8, 102.8, stale_s=0.0, connected_s=math.inf)
    assert attention.tick_amid(140.0, INTERVAL_S).claim_s == 2.0
    assert attention.awake
    assert attention.steady_s(140.0) == math.inf


def test_a_contact_in_the_middle_of_a_round_that_came_late_leaves_it_late() -> None:
    attention = in_touch(100.0)
    attention.tick(160.0, INTERVAL_S)
    attention.reached(160.0, 160.0, stale_s=0.0, connected_s=math.inf)
    attention.tick_amid(162.5, INTERVAL_S)
    assert not attention.awake
    assert attention.steady_s(162.5) == 2.5


def test_a_tick_says_what_both_clocks_showed_since_the_last_contact() -> None:
    attention = in_touch(100.0)
    attention.reached(101.0, 101.2, stale_s=0.0, connected_s=math.inf, at=5000.0)
    tick = attention.tick(103.0, INTERVAL_S)
    assert (tick.since_s, tick.seen_at) == (2.0, 5000.0)
    attention.lost()
    tick = attention.tick(104.0, INTERVAL_S)
    assert (tick.claim_s, tick.since_s, tick.seen_at) == (None, None, None)
