"""A watchman that slept, or was cut off, accuses nobody before they had time to be heard."""

from unstuck.reaper.attention import Attention, Since

TIMEOUT_S = 30.0
TOLERANCE_S = 5.0


def may(attention: Attention, now_s: float, *, most: bool = False) -> bool:
    return attention.may_accuse(now_s, timeout_s=TIMEOUT_S, most=most)


def test_a_watchman_who_just_started_may_accuse_one_silent_worker() -> None:
    assert may(Attention(100.0), 100.0)


def test_at_the_start_the_silence_of_most_is_believed_only_after_half_a_timeout() -> None:
    attention = Attention(100.0)
    assert not may(attention, 114.9, most=True)
    assert may(attention, 115.0, most=True)


def test_who_looked_twice_believes_the_silence_of_most() -> None:
    attention = Attention(100.0)
    attention.confirm()
    assert may(attention, 100.0, most=True)


def test_the_first_late_round_accuses_nobody_and_then_everyone_gets_half_a_timeout() -> None:
    attention = Attention(100.0)
    attention.tick(110.0, 104.0, TOLERANCE_S)
    assert attention.late
    assert not may(attention, 110.0)
    assert not attention.may_miss_sessions(110.0, grace_s=0.0)
    attention.tick(111.0, 111.0, TOLERANCE_S)
    assert not attention.late
    assert not may(attention, 124.9)
    assert not attention.may_miss_sessions(114.9, grace_s=5.0)
    assert attention.may_miss_sessions(115.0, grace_s=5.0)
    assert may(attention, 125.0)


def test_a_round_that_is_a_little_late_is_an_ordinary_round() -> None:
    attention = Attention(100.0)
    attention.tick(104.9, 100.0, TOLERANCE_S)
    assert not attention.late
    assert may(attention, 105.0)


def test_after_an_outage_of_our_own_everyone_gets_a_full_timeout() -> None:
    attention = Attention(0.0)
    attention.lost(100.0)
    attention.lost(130.0)
    assert not attention.awake
    assert not may(attention, 160.0)
    attention.reached(160.0, TOLERANCE_S)
    assert attention.since is Since.OUTAGE
    assert not may(attention, 189.9)
    assert may(attention, 190.0)


def test_a_hiccup_costs_one_round_and_no_amnesty() -> None:
    attention = Attention(0.0)
    attention.lost(100.0)
    assert not may(attention, 101.0)
    attention.reached(101.0, TOLERANCE_S)
    assert may(attention, 101.0)


def test_a_pause_inside_an_amnesty_does_not_shorten_it() -> None:
    attention = Attention(0.0)
    attention.lost(100.0)
    attention.reached(160.0, TOLERANCE_S)
    attention.tick(180.0, 161.0, TOLERANCE_S)
    attention.tick(181.0, 181.0, TOLERANCE_S)
    assert not may(attention, 200.0)
    assert may(attention, 210.0)
