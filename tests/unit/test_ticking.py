"""When schedules tick: time zones, clocks that are set, and what becomes of ticks that nobody was there for."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unstuck.domain import catching_up
from unstuck.domain.catching_up import CATCH_UPS, ON_TIME_S, CatchUp, plan
from unstuck.domain.errors import ConfigError
from unstuck.domain.payload import decode_call, encode_call, with_tick
from unstuck.domain.ticking import Timing, checked_timing, in_words, last_until, next_after

BERLIN = ZoneInfo("Europe/Berlin")


def ticks(cron: str, start: str, count: int, zone: str = "Europe/Berlin") -> list[str]:
    """Give the next ticks after a moment on the wall, as that wall shows them with its offset."""
    timing = checked_timing(cron, None, zone, "It")
    at: float | None = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone)).timestamp()
    found = []
    for _ in range(count):
        assert at is not None
        at = next_after(timing, at)
        assert at is not None
        found.append(datetime.fromtimestamp(at, ZoneInfo(zone)).isoformat(timespec="minutes"))
    return found


def test_a_named_time_in_the_skipped_hour_of_spring_ticks_once_right_after_it() -> None:
    expected = ["2026-03-28T02:30+01:00", "2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]
    assert ticks("30 2 * * *", "2026-03-28T01:00", 3) == expected
    assert ticks("0 30 2 * * *", "2026-03-28T01:00", 3) == expected
    assert ticks("15,30,45 2 * * *", "2026-03-29T00:00", 2) == ["2026-03-29T03:00+02:00", "2026-03-30T02:15+02:00"]


def test_a_named_time_in_the_repeated_hour_of_autumn_ticks_once() -> None:
    expected = ["2026-10-24T02:30+02:00", "2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]
    assert ticks("30 2 * * *", "2026-10-24T01:00", 3) == expected


def test_asked_within_the_repeated_hour_it_does_not_look_back() -> None:
    timing = checked_timing("30 2 * * *", None, "Europe/Berlin", "It")
    second = datetime(2026, 10, 25, 2, 15, fold=1, tzinfo=BERLIN).timestamp()
    tick = next_after(timing, second)
    assert tick == datetime(2026, 10, 26, 2, 30, tzinfo=BERLIN).timestamp()
    # And before the first of the two it is today's.
    first = datetime(2026, 10, 25, 2, 15, fold=0, tzinfo=BERLIN).timestamp()
    assert next_after(timing, first) == datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN).timestamp()


def test_what_goes_by_real_time_ticks_in_both_equal_hours_and_not_in_the_skipped_one() -> None:
    assert ticks("*/30 * * * *", "2026-10-25T01:45", 5) == [
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:30+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T02:30+01:00",
        "2026-10-25T03:00+01:00",
    ]
    assert ticks("*/30 * * * *", "2026-03-29T01:15", 3) == [
        "2026-03-29T01:30+01:00",
        "2026-03-29T03:00+02:00",
        "2026-03-29T03:30+02:00",
    ]


def test_a_day_that_a_zone_skipped_ticks_when_the_next_begins() -> None:
    # Samoa went from the 29th to the 31st of December 2011.
    assert ticks("0 12 * * *", "2011-12-29T13:00", 2, "Pacific/Apia") == [
        "2011-12-31T00:00+14:00",
        "2011-12-31T12:00+14:00",
    ]


def test_an_interval_ticks_at_the_same_moments_everywhere() -> None:
    assert next_after(Timing(every_s=30.0), 1000.0) == 1020.0
    assert next_after(Timing(every_s=30.0), 1020.0) == 1050.0
    assert next_after(Timing(every_s=1.5), 1.0e9) == 1000000000.5


@pytest.mark.parametrize(
    ("cron", "every_s", "zone", "words"),
    [
        ("* * * *", None, "UTC", "five fields"),
        ("61 * * * *", None, "UTC", "not a cron expression"),
        ("0 0 31 2 *", None, "UTC", "day-of-month"),
        ("x" * 300, None, "UTC", "text like"),
        ("* * * * *", None, "Europe/Berlln", "Did you mean 'Europe/Berlin'"),
        ("* * * * *", None, "../../etc/passwd", "no time zone"),
        (None, None, "UTC", "either"),
        ("* * * * *", 5.0, "UTC", "not both"),
        (None, 0.2, "UTC", "at least 1s"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_cure(
    cron: str | None, every_s: float | None, zone: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        checked_timing(cron, every_s, zone, "Schedule 'x'")


CRONS = ("* * * * *", "*/7 3 * * *", "30 2 * * *", "0 0 1 * *", "15,45 1-3 * * SUN", "0 12 29 2 *", "*/20 * * * * *")
MOMENTS = st.integers(1_700_000_000, 1_800_000_000).map(float)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CRONS), st.sampled_from(("UTC", "Europe/Berlin", "America/New_York")), MOMENTS)
def test_ticks_are_in_order_and_the_last_one_is_found_from_behind(cron: str, zone: str, start: float) -> None:
    timing = checked_timing(cron, None, zone, "It")
    found = [start]
    for _ in range(6):
        tick = next_after(timing, found[-1])
        assert tick is not None
        assert tick > found[-1]
        # Asking from anywhere before it gives the same one.
        assert next_after(timing, (found[-1] + tick) / 2) == tick or (found[-1] + tick) / 2 >= tick
        found.append(tick)
    assert last_until(timing, start, found[-1]) == found[-1]
    assert last_until(timing, start, found[-1] - 0.5) == found[-2]
    assert last_until(timing, found[-2], found[-1] - 0.5) is None


def slow_model(due: list[float], catch_up: CatchUp, now: float, bound: int) -> list[float]:
    """The rule in the plainest words: of all the ticks that are due, which are enqueued."""
    if not due:
        return []
    if now - due[0] <= ON_TIME_S:
        return due
    if catch_up == "all":
        return due[-bound:]
    if catch_up == "latest":
        return due[-1:]
    return [tick for tick in due[-1:] if now - tick <= ON_TIME_S]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([Timing(every_s=1.0), Timing(every_s=7.0), Timing(every_s=3600.0), Timing(cron="*/5 * * * *")]),
    st.sampled_from(CATCH_UPS),
    MOMENTS,
    st.lists(st.floats(0.01, 4000.0), min_size=1, max_size=8),
)
def test_catching_up_is_what_a_slow_model_says(
    timing: Timing, catch_up: CatchUp, start: float, pauses: list[float]
) -> None:
    bound, catching_up.MAX_CAUGHT_UP = catching_up.MAX_CAUGHT_UP, 40
    try:
        now = start
        next_at: float | None = plan(timing, catch_up, None, None, now).next_at
        last_at: float | None = None
        enqueued: list[float] = []
        for pause in pauses:
            now += pause
            assert next_at is not None
            due, tick = [], next_at
            while tick <= now:
                due.append(tick)
                following = next_after(timing, tick)
                assert following is not None
                tick = following
            decided = plan(timing, catch_up, next_at, last_at, now)
            assert list(decided.ticks) == slow_model(due, catch_up, now, 40)
            assert decided.next_at == tick
            assert bool(decided.missed) == (len(due) > len(decided.ticks))
            if not decided.many:
                assert decided.missed == len(due) - len(decided.ticks)
            enqueued += decided.ticks
            next_at, last_at = decided.next_at, decided.ticks[-1] if decided.ticks else last_at
        assert enqueued == sorted(set(enqueued))
    finally:
        catching_up.MAX_CAUGHT_UP = bound


def test_a_clock_set_back_a_little_repeats_no_tick() -> None:
    timing = Timing(every_s=60.0)
    first = plan(timing, "latest", 6000.0, None, 6000.1)
    assert first.ticks == (6000.0,)
    assert plan(timing, "latest", first.next_at, 6000.0, 5700.0).ticks == ()
    # Also where it begins anew meanwhile: no tick that was.
    assert plan(timing, "latest", None, 6000.0, 5700.0).next_at == 6060.0


def test_a_clock_that_was_a_year_ahead_does_not_silence_a_schedule_for_a_year() -> None:
    timing = Timing(every_s=60.0)
    decided = plan(timing, "latest", 33_000_000.0, 32_999_940.0, 1000.0)
    assert (decided.set_back, decided.ticks, decided.next_at) == (True, (), 1020.0)


def test_a_clock_set_back_by_an_hour_does_not_silence_an_interval_for_an_hour() -> None:
    decided = plan(Timing(every_s=30.0), "latest", 9030.0, 9000.0, 5405.0)
    assert (decided.set_back, decided.next_at) == (True, 5430.0)
    # Times of day have all come already.
    assert plan(Timing(cron="*/5 * * * *"), "latest", 9300.0, 9000.0, 5405.0).next_at == 9300.0


def test_a_tick_is_added_to_arguments_without_reading_them() -> None:
    packed = with_tick(encode_call((1, "a"), {"b": [2]}, "t", 1000), 1_700_000_000.0)
    call = decode_call(packed)
    assert (call.args, call.kwargs, call.scheduled_for) == ([1, "a"], {"b": [2]}, 1_700_000_000.0)
    assert decode_call(with_tick(b"{}", 5.5)).scheduled_for == 5.5


def test_utc_is_known_without_a_database_of_zones() -> None:
    tick = next_after(Timing(cron="0 12 * * *"), 0.0)
    assert tick is not None
    assert datetime.fromtimestamp(tick, UTC).hour == 12


@pytest.mark.parametrize(
    ("timing", "said"),
    [
        (Timing(cron="30 3 * * 1"), "at 03:30 on Monday"),
        (Timing(cron="*/5 * * * *", zone="Europe/Berlin"), "every fifth minute of every hour"),
        (Timing(every_s=90.0), "every 90s"),
    ],
)
def test_timings_are_said_in_words(timing: Timing, said: str) -> None:
    assert in_words(timing) == said
