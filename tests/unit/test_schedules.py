"""Schedules as apps write them: what is refused when the app is built, and what a definition is known by."""

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.doctor import NOW_AT  # isort: skip
from tests.support.doctor import facts  # isort: skip
from tests.support.doctor import found  # isort: skip
from tests.support.doctor import told  # isort: skip
from tests.support.doctor import with_  # isort: skip
from tests.support.doctor import worker  # isort: skip
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from unstuck import App, ConfigError, Context
from unstuck.client.doctor.examine import examine
from unstuck.domain import schedules
from unstuck.domain.payload import decode_call, encode_call, with_fire_time
from unstuck.domain.schedules import (
    CATCH_UPS,
    ON_TIME_S,
    CatchUp,
    Timing,
    checked_timing,
    due_runs,
    in_words,
    last_until,
    next_after,
)
from unstuck.ledger.contract.schedules import ScheduleRecord, unpack_job


def an_app(**schedule: Any) -> App:
    app = App("sqlite:///none.db", queues=["slow"])

    @app.schedule(**schedule)
    @app.task(on_crash="retry")
    def clean(folder: str = "/tmp", ctx: Context | None = None) -> str:
        return folder

    assert clean("/x") == "/x", "a task stays a function"
    return app


def test_a_schedule_takes_the_name_queue_and_policy_of_its_task() -> None:
    [one] = an_app(every="30s", kwargs={"folder": "/a"}, queue="slow", priority=5).definition().schedules
    assert (one.name, one.task, one.queue, one.timing) == ("clean", "clean", "slow", Timing(every_s=30))
    job = unpack_job(one.job)
    assert (job.on_crash, job.priority, job.enqueued_by, decode_call(job.payload).kwargs) == (
        "retry",
        5,
        None,
        {"folder": "/a"},
    )


def test_the_same_definition_has_the_same_fingerprint_in_every_process() -> None:
    [one] = an_app(every="30s").definition().schedules
    [same] = an_app(every=30).definition().schedules
    [other] = an_app(every="30s", priority=1).definition().schedules
    assert one.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({}, "either a cron expression or every"),
        ({"every": "1s", "cron": "* * * * *"}, "not both"),
        ({"cron": "* * *"}, "five fields"),
        ({"cron": "* * * * *", "tz": "Berlin"}, "no time zone 'Berlin'"),
        ({"every": "soon"}, "a duration like"),
        ({"every": "1s", "catch_up": "none"}, "'skip', 'latest' or 'all'"),
        ({"every": "1s", "args": [1, 2, 3]}, "Give what the task needs"),
        ({"every": "1s", "kwargs": {"folder": object()}}, "cannot be written as JSON"),
        ({"every": "1s", "delay": "5s"}, "delay has no place here"),
        ({"every": "1s", "prioritty": 5}, "Did you mean 'priority'"),
        ({"every": "1s", "name": "a b"}, "not a usable name"),
        ({"every": "1s", "unique_key": "k", "on_duplicate": "refuse"}, "nobody would hear of it"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_app_is_built(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        an_app(**schedule)


def test_an_unknown_queue_is_refused() -> None:
    from unstuck import UnknownQueue

    with pytest.raises(UnknownQueue, match="slwo"):
        an_app(every="1s", queue="slwo")


def test_two_schedules_need_two_names_and_a_task_of_this_app() -> None:
    app = an_app(every="1s")
    task = app.task_by_name("clean")
    with pytest.raises(ConfigError, match="two schedules named 'clean'"):
        app.schedule(task, every="2s")
    assert app.schedule(task, cron="* * * * *", name="other") is task
    with pytest.raises(ConfigError, match="another app"):
        App("sqlite:///none.db").schedule(task, every="2s")
    with pytest.raises(ConfigError, match=r"above @app\.task"):
        app.schedule("* * * * *")(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="once"):
        app.schedule("* * * * *", cron="* * * * *")  # type: ignore[call-overload]


def record(**changes: Any) -> ScheduleRecord:
    [one] = an_app(every="1s").definition().schedules
    fields: dict[str, Any] = {
        "name": "nightly",
        "source": "app",
        "fingerprint": "f",
        "task": "add",
        "queue": "default",
        "timing": Timing(every_s=60.0),
        "catch_up": "latest",
        "job": one.job,
        "paused": False,
        "paused_by": None,
        "next_at": NOW_AT + 10,
        "last_at": None,
        "fired_at": None,
        "last_job_id": None,
        "version": 1,
    }
    return ScheduleRecord(**{**fields, "changed_at": NOW_AT, **changes})


KNOWS = worker(metadata={"containment": "cgroup v2", "schedules": ["f"]})


@pytest.mark.parametrize(
    ("schedule", "workers", "code"),
    [
        (record(), (KNOWS,), None),
        (record(), (worker(),), "schedule-unknown"),
        (record(source="operator"), (worker(),), None),
        (record(task="gone"), (KNOWS,), "schedule-task-unknown"),
        (record(next_at=NOW_AT - 100), (KNOWS,), "schedule-overdue"),
    ],
)
def test_the_doctor_finds_schedules_that_do_not_tick(
    schedule: ScheduleRecord, workers: tuple[Any, ...], code: str | None
) -> None:
    seen = found(with_(facts(*workers), schedules=(schedule,)))
    assert {name for name in seen if name.startswith("schedule-")} == ({code} if code else set())


def test_a_paused_schedule_is_good_to_know() -> None:
    paused = with_(facts(KNOWS), schedules=(record(paused=True, paused_by="ada"),))
    assert "schedule-paused" in told(paused)
    assert any("ada" in finding.why for finding in examine(paused))


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
    bound, schedules.MAX_CAUGHT_UP = schedules.MAX_CAUGHT_UP, 40
    try:
        now = start
        next_at: float | None = due_runs(timing, catch_up, None, None, now).next_at
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
            decided = due_runs(timing, catch_up, next_at, last_at, now)
            assert list(decided.ticks) == slow_model(due, catch_up, now, 40)
            assert decided.next_at == tick
            assert bool(decided.missed) == (len(due) > len(decided.ticks))
            if not decided.many:
                assert decided.missed == len(due) - len(decided.ticks)
            enqueued += decided.ticks
            next_at, last_at = decided.next_at, decided.ticks[-1] if decided.ticks else last_at
        assert enqueued == sorted(set(enqueued))
    finally:
        schedules.MAX_CAUGHT_UP = bound


def test_a_clock_set_back_a_little_repeats_no_tick() -> None:
    timing = Timing(every_s=60.0)
    first = due_runs(timing, "latest", 6000.0, None, 6000.1)
    assert first.ticks == (6000.0,)
    assert due_runs(timing, "latest", first.next_at, 6000.0, 5700.0).ticks == ()
    # Also where it begins anew meanwhile: no tick that was.
    assert due_runs(timing, "latest", None, 6000.0, 5700.0).next_at == 6060.0


def test_a_clock_that_was_a_year_ahead_does_not_silence_a_schedule_for_a_year() -> None:
    timing = Timing(every_s=60.0)
    decided = due_runs(timing, "latest", 33_000_000.0, 32_999_940.0, 1000.0)
    assert (decided.set_back, decided.ticks, decided.next_at) == (True, (), 1020.0)


def test_a_clock_set_back_by_an_hour_does_not_silence_an_interval_for_an_hour() -> None:
    decided = due_runs(Timing(every_s=30.0), "latest", 9030.0, 9000.0, 5405.0)
    assert (decided.set_back, decided.next_at) == (True, 5430.0)
    # Times of day have all come already.
    assert due_runs(Timing(cron="*/5 * * * *"), "latest", 9300.0, 9000.0, 5405.0).next_at == 9300.0


def test_a_tick_is_added_to_arguments_without_reading_them() -> None:
    packed = with_fire_time(encode_call((1, "a"), {"b": [2]}, "t", 1000), 1_700_000_000.0)
    call = decode_call(packed)
    assert (call.args, call.kwargs, call.scheduled_for) == ([1, "a"], {"b": [2]}, 1_700_000_000.0)
    assert decode_call(with_fire_time(b"{}", 5.5)).scheduled_for == 5.5


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
