"""Leases age only while someone watches: the rule of watch periods."""

import pytest

from unstuck.domain.watch import (
    Begin,
    Cause,
    Change,
    Extend,
    Keep,
    Period,
    SetBack,
    Tick,
    advance,
    grace_s,
    slack_s,
    watched_s,
)

LAST = Period(100.0, 200.0)


def ticks(now: float, claim_s: float | None, cause: Cause | None = None) -> Change:
    return advance(LAST, now, Tick(claim_s, every_s=1.0, cause=cause))


def test_the_first_tick_of_a_ledger_begins_the_watch() -> None:
    assert advance(None, 50.0, Tick(None, 1.0)) == Begin(50.0, Cause.START)


def test_a_reaper_that_was_in_touch_all_along_extends_the_watch() -> None:
    assert ticks(201.0, 1.0) == Extend()


def test_a_tick_that_was_a_little_late_on_its_way_still_extends_it() -> None:
    assert ticks(201.9, 1.0) == Extend()


def test_a_reaper_that_knows_nothing_of_before_leaves_the_watch_to_others() -> None:
    assert ticks(201.5, None, Cause.START) == Keep()


@pytest.mark.parametrize("cause", [Cause.START, Cause.OUTAGE])
def test_a_hole_that_no_one_can_vouch_for_is_left_out(cause: Cause) -> None:
    assert ticks(240.0, None, cause) == Begin(240.0, cause)


def test_a_clock_that_was_set_forward_by_an_hour_adds_nothing() -> None:
    assert ticks(3801.0, 1.0) == Begin(3801.0, Cause.CLOCK)


def test_a_database_that_stood_still_adds_nothing_for_a_tick_that_waited_for_it() -> None:
    assert ticks(221.0, 1.0) == Begin(221.0, Cause.CLOCK)


def test_a_second_look_at_the_silent_vouches_for_all_that_it_claims() -> None:
    assert ticks(260.0, 50.0, Cause.START) == Begin(210.0, Cause.START)


def test_a_reaper_that_was_frozen_vouches_only_for_what_it_planned() -> None:
    assert ticks(260.0, 2.0, Cause.PAUSE) == Begin(258.0, Cause.PAUSE)


def test_another_run_of_the_server_begins_a_new_period() -> None:
    assert advance(LAST, 201.0, Tick(1.0, 1.0), same_server=False) == Begin(201.0, Cause.FAILOVER)


def test_a_clock_that_was_set_back_is_followed() -> None:
    assert ticks(100.0, 1.0) == SetBack(100.0)


def test_the_noise_of_clocks_is_no_step_back() -> None:
    assert ticks(199.95, 1.0) == Extend()


def test_silence_counts_only_within_watch_periods() -> None:
    periods = [Period(0.0, 100.0), Period(140.0, 150.0)]
    assert watched_s(periods, 95.0) == 15.0
    assert watched_s(periods, 120.0) == 10.0
    assert watched_s(periods, 145.0) == 5.0
    assert watched_s(periods, 160.0) == 0.0
    assert watched_s([], 0.0) == 0.0


def test_a_worker_that_was_silent_before_an_outage_stays_silent() -> None:
    before = watched_s([Period(0.0, 100.0)], 75.0)
    after = watched_s([Period(0.0, 100.0), Period(200.0, 205.0)], 75.0)
    assert (before, after) == (25.0, 30.0)


def test_everyone_gets_a_moment_to_reconnect_but_never_more_than_a_timeout() -> None:
    assert grace_s(30.0, 5.0) == 9.5
    assert grace_s(1.0, 0.5) == 1.0


def test_a_quick_fleet_allows_less_delay() -> None:
    assert slack_s(5.0) == 1.0
    assert slack_s(1.0) == 0.5
    assert slack_s(0.1) == 0.2


def test_a_frozen_reaper_does_not_count_again_what_others_counted_before_the_clock_was_set_forward() -> None:
    # Others watched until a second ago. The clock was set forward by 32 s since then, while it was frozen for 20 s.
    tick = Tick(7.5, every_s=7.5, cause=Cause.PAUSE, since_s=20.0, seen_at=181.0)
    assert advance(LAST, 233.0, tick) == Begin(233.0, Cause.PAUSE)


def test_a_starved_reaper_claims_its_part_if_the_clock_was_not_set() -> None:
    tick = Tick(7.5, every_s=7.5, cause=Cause.PAUSE, since_s=20.0, seen_at=200.0)
    assert advance(LAST, 220.5, tick) == Begin(213.0, Cause.PAUSE)


def test_a_claim_does_not_reach_over_a_step_of_the_clock_to_the_last_tick_of_another_reaper() -> None:
    # Another reaper was in touch a second ago. This one was 4.5 s ago, and the clock was set forward by 3.9 s since.
    tick = Tick(4.5, every_s=1.0, since_s=4.5, seen_at=196.5)
    assert advance(LAST, 201.0, tick) == Extend()
    assert advance(LAST, 204.9, tick) == Begin(204.9, Cause.CLOCK)


def test_a_clock_that_was_set_back_takes_nothing_from_a_claim() -> None:
    assert advance(LAST, 201.0, Tick(4.5, every_s=1.0, since_s=4.5, seen_at=300.0)) == Extend()
