"""Weights fade, the sick claim later and less, and whoever is the last to serve a queue is never switched off."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstuck.domain import worker_health
from unstuck.domain.retry import EXCUSED_MAX_S
from unstuck.domain.states import WorkerState
from unstuck.domain.worker_health import (
    DISABLE_AT,
    FIRST_PROBE_S,
    HALF_LIFE_S,
    LONGEST_DELAY_S,
    LONGEST_PROBE_S,
    Disabled,
    Health,
    Standing,
    blame,
    delay_s,
    faded,
    read_health,
    score,
    should_disable,
    should_enable,
    usable_slots,
)
from unstuck.ledger.contract.workers import Claimed, HeartbeatAnswer
from unstuck.worker.health import MemoryReport, WorkerHealth

weights = st.floats(0, 1e6)
SICK = Health(weight=9.0, deaths=9, jobs=9)


def worker(name: str, sick: Health | float = 0.0, **changes: Any) -> Standing:
    facts: dict[str, Any] = {
        "id": name,
        "name": name,
        "host": f"host-of-{name}",
        "state": WorkerState.ACTIVE,
        "queues": ("default",),
        "tasks": ("t",),
        "health": Health(weight=sick, deaths=9, jobs=9) if isinstance(sick, float) else sick,
        "disabled": None,
        "leaving": False,
        "well": True,
    }
    return Standing(**{**facts, **changes})


# Weights and claims -------------------------------------------------------------------------------


@given(weights, st.floats(0, 1e5), st.integers(0, 1000))
def test_a_weight_only_ever_fades(weight: float, elapsed_s: float, jobs: int) -> None:
    assert 0 <= faded(weight, elapsed_s + 1, jobs + 1) <= faded(weight, elapsed_s, jobs) <= weight


def test_half_of_a_weight_is_gone_after_its_half_life_and_all_of_it_after_a_while() -> None:
    assert faded(4.0, HALF_LIFE_S) == pytest.approx(2.0)
    assert faded(100.0, 20 * HALF_LIFE_S) == 0.0
    # A clock that went back heals nobody, and harms nobody.
    assert faded(4.0, -5.0) == 4.0


def test_work_done_well_heals_what_time_alone_would_not() -> None:
    assert faded(9.0, 0.0, jobs=300) == 0.0


def test_a_job_that_died_before_says_little_of_the_worker_that_it_kills_next() -> None:
    assert blame(0, 0) > 5 * blame(1, 0) > 0
    assert blame(0, 1) == blame(3, 0)


@given(weights)
def test_a_sick_worker_claims_later_and_less_but_never_stops(weight: float) -> None:
    assert 0 <= delay_s(weight) <= LONGEST_DELAY_S
    assert 0 < score(weight) <= 1
    assert 1 <= usable_slots(weight, 8) <= 8
    assert delay_s(weight + 1) >= delay_s(weight)
    assert usable_slots(weight + 1, 8) <= usable_slots(weight, 8)


def test_one_death_is_bad_luck_and_changes_nothing() -> None:
    assert delay_s(1.0) == 0.0
    assert usable_slots(1.0, 8) == 8
    assert delay_s(DISABLE_AT) > 0.5
    assert usable_slots(DISABLE_AT, 8) == 4


@pytest.mark.parametrize("said", [None, {}, "fine", 3, {"weight": "heavy"}, {"weight": None}])
def test_whoever_says_nothing_sensible_of_its_health_is_taken_for_well(said: Any) -> None:
    assert read_health(said) == Health()


# Switching off ------------------------------------------------------------------------------------


def test_a_worker_whose_runners_keep_dying_is_switched_off_where_another_is_well() -> None:
    sick = worker("a", SICK)
    reason = should_disable(sick, [sick, worker("b")])
    assert reason is not None
    assert "9 different jobs" in reason


@pytest.mark.parametrize(
    "other",
    [
        worker("b", queues=("other",)),
        worker("b", tasks=("another",)),
        worker("b", state=WorkerState.DRAINING),
        worker("b", state=WorkerState.SUSPECT),
        worker("b", state=WorkerState.DEAD),
        worker("b", leaving=True),
        worker("b", well=False),
        worker("b", disabled=Disabled("x", "ops", 0.0)),
    ],
)
def test_the_last_one_that_serves_a_queue_is_never_switched_off(other: Standing) -> None:
    sick = worker("a", SICK)
    assert should_disable(sick, [sick, other]) is None


def test_every_queue_must_have_somebody_left() -> None:
    sick = worker("a", SICK, queues=("default", "bulk"))
    default, bulk = worker("b"), worker("c", queues=("bulk",))
    assert should_disable(sick, [sick, default]) is None
    assert should_disable(sick, [sick, default, bulk]) is not None


def test_where_everybodys_runners_die_it_is_the_jobs_and_nobody_is_switched_off() -> None:
    fleet = [worker("a", 9.0), worker("b", 8.0), worker("c", 6.0)]
    assert [should_disable(one, fleet) for one in fleet] == [None] * 3


def test_one_poisonous_job_is_not_enough() -> None:
    sick = worker("a", Health(weight=9.0, deaths=20, jobs=2))
    assert should_disable(sick, [sick, worker("b")]) is None


@given(st.lists(st.tuples(weights, st.booleans()), min_size=1, max_size=6))
def test_however_many_are_switched_off_one_by_one_somebody_is_left(found: list[tuple[float, bool]]) -> None:
    fleet = [worker(f"w{n}", weight, well=well) for n, (weight, well) in enumerate(found)]
    for n, one in enumerate(fleet):
        if should_disable(one, fleet) is not None:
            fleet[n] = worker(one.id, one.health, disabled=Disabled("sick", "reaper", 0.0, auto=True))
    had_somebody = any(well for _, well in found)
    assert any(one.serving for one in fleet) == had_somebody


def test_what_the_reaper_switched_off_comes_back_when_nobody_else_is_left() -> None:
    off = worker("a", SICK, disabled=Disabled("sick", "reaper", 0.0, auto=True))
    assert should_enable(off, [off, worker("b")]) is None
    assert should_enable(off, [off, worker("b", state=WorkerState.SUSPECT)]) is None
    assert should_enable(off, [off, worker("b", queues=("other",))]) == "nobody else is left to serve queue 'default'"
    by_hand = worker("a", SICK, disabled=Disabled("maintenance", "ops", 0.0))
    assert should_enable(by_hand, [by_hand]) is None


def test_a_silent_suspect_does_not_keep_the_only_one_that_is_left_switched_off() -> None:
    """With a job that asked for hours of patience in its hands it is a suspect for hours, and serves nobody."""
    off = worker("a", SICK, disabled=Disabled("sick", "reaper", 0.0, auto=True))
    silent = worker("b", state=WorkerState.SUSPECT, well=False)
    assert should_enable(off, [off, silent]) == "nobody else is left to serve queue 'default'"


# A worker's own record ----------------------------------------------------------------------------


def job(job_id: int, crashes: int = 0) -> Claimed:
    return Claimed(job_id, job_id, "t", "default", True, b"", "json", b"", 0, crashes, 1)


def a_sick_worker(deaths: int = 6) -> WorkerHealth:
    own = WorkerHealth({"zone": "a"})
    for n in range(deaths):
        own.saw_death(job(n), now_s=float(n))
    return own


def test_what_dies_in_one_moment_is_one_death() -> None:
    own = WorkerHealth()
    for n in range(40):
        own.saw_death(job(n), now_s=100.0 + n * 0.001)
    now = own.now(100.1)
    assert (now.deaths, now.jobs) == (1, 40)
    assert now.weight == pytest.approx(worker_health.FIRST_DEATH, abs=0.01)


def test_the_beat_tells_of_health_only_when_it_changed_and_keeps_the_rest_of_what_was_told() -> None:
    own = a_sick_worker()
    news = own.news(now_s=6.0)
    assert news is not None
    assert news["zone"] == "a"
    assert news["health"]["jobs"] == 6
    # Until the ledger has answered, it may not have heard.
    assert own.news(now_s=6.0) is not None
    own.after_beat(HeartbeatAnswer(WorkerState.ACTIVE))
    assert own.news(now_s=7.0) is None
    assert own.news(now_s=7.0 + HALF_LIFE_S) is not None
    assert own.news(now_s=1e6) == {"zone": "a"}


def test_a_healthy_worker_has_no_news_and_never_waits() -> None:
    own = WorkerHealth({"zone": "a"})
    assert own.news(now_s=1.0) is None
    assert not own.hold_back(1.0, busy=False)
    assert own.withheld(8, 1.0) == 0


def test_a_sick_worker_lets_others_go_first_and_then_claims() -> None:
    own = a_sick_worker()
    assert own.hold_back(20.0, busy=False)
    wait_s = own.wait_s(20.0, at_most_s=60.0)
    assert 0 < wait_s <= LONGEST_DELAY_S
    assert own.hold_back(20.0 + wait_s / 2, busy=False)
    assert not own.hold_back(20.0 + wait_s + 0.001, busy=False)
    # Where it is at work anyway, it goes on.
    assert not own.hold_back(30.0, busy=True)
    assert 0 < own.withheld(8, 30.0) < 8


def test_a_worker_does_not_take_the_next_job_in_the_breath_in_which_it_hands_in_a_death() -> None:
    own = a_sick_worker(deaths=6)
    assert own.hold_back(5.01, busy=True)
    assert not own.hold_back(5.0 + LONGEST_PROBE_S + 0.01, busy=True)


def test_a_worker_under_which_everything_dies_tries_one_job_at_a_time_until_one_ends_otherwise() -> None:
    own = WorkerHealth()
    own.born({}, disabled=False)
    assert [own.saw_death(job(n), float(n)) for n in range(5)] == [False, False, True, True, True]
    assert (own.at_fault, own.in_a_row, own.now(4.0).in_a_row) == (True, 5, 5)
    assert own.withheld(8, 4.0) == 7
    assert own.hold_back(4.0 + FIRST_PROBE_S, busy=True)
    # The same job again says nothing new; the pauses grow.
    assert own.saw_death(job(4, crashes=1), 9.0)
    assert (own.in_a_row, own.now(9.0).weight > 5.5) == (5, True)
    own.saw_processed(1, 9.1)
    assert (own.at_fault, own.in_a_row, own.withheld(8, 9.1)) == (False, 0, 8 - usable_slots(own.now(9.1).weight, 8))
    assert not own.hold_back(9.1 + LONGEST_DELAY_S + 0.01, busy=True)


def test_deaths_beside_a_job_that_runs_well_are_not_the_workers() -> None:
    own = WorkerHealth()
    own.born({}, disabled=False)
    for n in range(5):
        own.saw_death(job(n), 10.0 + n, beside_since_s=1.0)
    assert (own.at_fault, own.in_a_row) == (False, 0)
    # One that began together with those that died has shown nothing yet.
    other = WorkerHealth()
    other.born({}, disabled=False)
    for n in range(5):
        other.saw_death(job(n), 10.0 + n / 10, beside_since_s=9.9)
    assert other.at_fault


def test_a_job_that_dies_again_after_another_one_ended_well_is_to_blame_itself() -> None:
    own = WorkerHealth()
    own.born({}, disabled=False)
    for n in range(4):
        assert own.died_here(n) == 0
        own.saw_death(job(n), float(n))
    assert (own.at_fault, own.died_here(0)) == (True, 1)
    own.saw_processed(1, 5.0)
    for n in range(4):
        own.saw_death(job(n, crashes=1), 6.0 + n)
    assert (own.at_fault, own.in_a_row, own.died_here(0)) == (False, 0, 0)
    # Others that begin to die are a new row.
    for n in range(10, 13):
        own.saw_death(job(n), float(n))
    assert (own.at_fault, own.in_a_row) == (True, 3)


def test_a_row_is_told_for_as_long_as_the_jobs_in_it_may_wait() -> None:
    own = WorkerHealth({"zone": "a"})
    own.born({"zone": "a"}, disabled=False)
    for n in range(3):
        own.saw_death(job(n), float(n))
    later = own.now(2.0 + EXCUSED_MAX_S)
    assert (later.weight, later.in_a_row) == (0.0, 3)
    assert own.saw_death(job(0, crashes=1), 2.0 + EXCUSED_MAX_S)
    assert (own.at_fault, own.died_here(0)) == (True, 2)
    # After a long time without any death, it begins anew.
    own.saw_death(job(1, crashes=1), 4 * EXCUSED_MAX_S)
    assert (own.at_fault, own.died_here(0)) == (False, 0)


def test_a_worker_under_which_everything_dies_is_switched_off_sooner() -> None:
    dying = Health(weight=2.0, deaths=2, jobs=4, in_a_row=4)
    reason = should_disable(worker("sick", dying), [worker("sick", dying), worker("well")])
    assert reason is not None
    assert "all in a row" in reason
    # One moment may have one cause; and where another is as sick, it is the jobs.
    for sick, other in ((msgspec.structs.replace(dying, deaths=1), 0.0), (dying, 1.5)):
        assert should_disable(worker("sick", sick), [worker("sick", sick), worker("well", other)]) is None


def test_jobs_that_end_well_bring_a_worker_back() -> None:
    own = a_sick_worker()
    own.saw_processed(6, 6.0)
    own.saw_processed(300, 7.0)
    assert not own.hold_back(8.0, busy=False)
    assert own.now(8.0) == Health()


def test_a_disabled_worker_claims_nothing_and_an_enabled_one_starts_afresh() -> None:
    own = a_sick_worker()
    own.after_beat(HeartbeatAnswer(WorkerState.ACTIVE, disabled=True))
    assert own.hold_back(1e6, busy=True)
    own.after_beat(HeartbeatAnswer(WorkerState.ACTIVE, disabled=False))
    assert not own.hold_back(6.0, busy=False)
    assert own.now(6.0) == Health()
    assert own.news(6.0) is None


def test_the_beat_tells_of_memory_when_it_changed_much() -> None:
    used = [100_000_000]
    own = WorkerHealth(memory_report=MemoryReport(lambda: used[0]))
    own.born({"zone": "a", "memory_bytes": 100_000_000}, disabled=False)
    assert own.news(now_s=0.0) is None
    used[0] = 105_000_000
    assert own.news(now_s=20.0) is None
    used[0] = 150_000_000
    # Weighed now and then, not with every beat.
    assert own.news(now_s=21.0) is None
    assert own.news(now_s=40.0) == {"zone": "a", "memory_bytes": 150_000_000}
    assert own.news(now_s=41.0) is not None
    own.after_beat(HeartbeatAnswer(WorkerState.ACTIVE))
    assert own.news(now_s=42.0) is None
    # Where it cannot be read any more, what was known stays.
    used[0] = 0
    assert own.news(now_s=60.0) is None
