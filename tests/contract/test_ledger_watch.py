"""Silence counts only while someone watches, on both databases alike."""

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import running, verdict
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck.domain.states import WorkerState
from unstuck.domain.watch import Cause, Tick
from unstuck.store.contract import Ledger
from unstuck.store.records import GuardSilent, GuardUnheard, Pulse, WorkerWatch

EVER_S = 1000.0
"""A claim that reaches back as far as anyone wants."""


def seen(ledger: Ledger, worker_id: str = "w1") -> WorkerWatch:
    return next(worker for worker in ledger.watch() if worker.id == worker_id)


def watch_for(ledger: Ledger, silent_s: float) -> None:
    """Keep watch without a break until the worker was silent for so long."""
    wait_for(lambda: ledger.tick(Tick(EVER_S, 0.0)) and seen(ledger).silent_s >= silent_s, "the silence")


def test_the_first_tick_begins_the_watch_and_the_next_ones_extend_it(ledger: Ledger) -> None:
    first = ledger.tick(Tick(None, 1.0, cause=Cause.START))
    assert (first.began, first.gap_s) == (Cause.START, None)
    watched_s = ledger.tick(Tick(EVER_S, 0.0)).watched_s
    assert 0 <= watched_s < ledger.tick(Tick(EVER_S, 0.0)).watched_s


def test_time_that_no_one_watched_does_not_count(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ledger.tick(Tick(None, 1.0))
    meddler.move_watch(-40.0)
    meddler.move_beats(-40.0)
    ticked = ledger.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert ticked.began is Cause.OUTAGE
    assert ticked.gap_s == pytest.approx(40.0, abs=5.0)
    assert seen(ledger).silent_s < 1.0
    assert seen(ledger).since_beat_s >= 40.0
    assert not ledger.condemn("w1", verdict(), GuardSilent(1.0))


def test_a_worker_that_was_silent_before_an_outage_stays_silent(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    meddler.age_beat("w1", 25.0)
    ledger.beat(Pulse("w1", 0, 0))
    meddler.age_beat("w1", 25.0)
    meddler.move_watch(-60.0)
    meddler.move_beats(-60.0)
    ledger.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert seen(ledger).silent_s == pytest.approx(25.0, abs=1.0)


def test_a_clock_that_is_set_forward_adds_nothing_to_the_silence(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ledger.tick(Tick(None, 1.0))
    # Seen from a clock that is an hour ahead, everything happened an hour earlier.
    meddler.move_watch(-3600.0)
    meddler.move_beats(-3600.0)
    ticked = ledger.tick(Tick(1.0, 1.0))
    assert ticked.began is Cause.CLOCK
    assert seen(ledger).silent_s < 2.5


def test_a_clock_that_is_set_back_adds_nothing_and_forgives_nothing(
    ledger: Ledger, w1: str, w2: str, meddler: Meddler
) -> None:
    meddler.age_beat("w1", 25.0)
    meddler.move_watch(3600.0)
    meddler.move_beats(3600.0)
    ticked = ledger.tick(Tick(1.0, 1.0))
    assert ticked.began is None
    assert ticked.set_back_s == pytest.approx(3600.0, abs=5.0)
    assert seen(ledger).silent_s == pytest.approx(25.0, abs=5.0)
    assert seen(ledger, "w2").silent_s < 5.0
    # And time goes on from here.
    counted_s = seen(ledger).silent_s
    watch_for(ledger, counted_s + 0.05)


def test_a_clock_that_is_set_back_across_an_outage_counts_no_moment_twice(
    ledger: Ledger, w1: str, meddler: Meddler
) -> None:
    """After the step the worker's heartbeat has a time at which the ledger was watched before the outage, too."""
    meddler.age_beat("w1", 5.0)
    meddler.move_watch(-30.0)
    meddler.move_beats(-30.0)
    began = ledger.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert began.gap_s is not None
    ledger.beat(Pulse("w1", 0, 0))
    watch_for(ledger, 0.5)
    step_s = began.gap_s + ledger.tick(Tick(EVER_S, 0.0)).watched_s + 2.0 - 0.1
    meddler.move_watch(-2.0)
    meddler.move_beats(-2.0)
    ledger.tick(Tick(None, 0.1, cause=Cause.OUTAGE))
    silent_s = seen(ledger).silent_s
    meddler.move_watch(step_s)
    meddler.move_beats(step_s)
    assert ledger.tick(Tick(1.0, 1.0)).set_back_s > 0
    assert seen(ledger).silent_s == pytest.approx(silent_s, abs=0.1)


def test_an_outage_with_a_clock_that_is_set_back_gives_time_to_reconnect(
    ledger: Ledger, w1: str, meddler: Meddler
) -> None:
    meddler.age_beat("w1", 25.0)
    meddler.move_watch(20.0)
    meddler.move_beats(20.0)
    ticked = ledger.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert (ticked.began, ticked.watched_s) == (Cause.OUTAGE, pytest.approx(0.0, abs=0.1))
    assert ticked.set_back_s == pytest.approx(20.0, abs=5.0)
    assert seen(ledger).silent_s < 26.0


@pytest.mark.parametrize("watched_until_s", [-60.0, 10.0])
def test_heartbeats_of_a_clock_that_was_ahead_for_a_while_hide_no_death(
    ledger: Ledger, w1: str, meddler: Meddler, watched_until_s: float
) -> None:
    ledger.tick(Tick(None, 1.0))
    meddler.move_watch(watched_until_s)
    meddler.move_beats(3600.0)
    ledger.tick(Tick(None, 1.0))
    assert seen(ledger).since_beat_s >= 0.0
    watch_for(ledger, 0.05)


def test_a_reaper_that_just_started_does_not_break_the_watch_of_others(ledger: Ledger, open_again: OpenLedger) -> None:
    ledger.tick(Tick(None, 60.0))
    other = open_again().tick(Tick(None, 60.0, cause=Cause.START))
    assert other.began is None
    assert ledger.tick(Tick(60.0, 60.0)).began is None


def test_of_many_reapers_one_wins_the_ticket_and_all_keep_the_watch(ledger: Ledger, open_again: OpenLedger) -> None:
    other = open_again()
    assert ledger.tick(Tick(None, 1.0), "sweep", 60.0).won
    lost = other.tick(Tick(None, 60.0), "sweep", 60.0)
    assert not lost.won
    assert lost.stale_s < 5.0
    # Whoever keeps losing still extends it as soon as no one else does.
    wait_for(lambda: other.tick(Tick(EVER_S, 0.01), "sweep", 60.0).watched_s > 0.05, "the watch")


def test_an_operator_may_act_on_silence_that_no_one_watched(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ledger.tick(Tick(None, 1.0))
    meddler.move_beats(-3600.0)
    meddler.move_watch(-3600.0)
    assert ledger.stale(3000.0) == []
    assert ledger.condemn("w1", verdict(), GuardUnheard(3000.0))
    assert ledger.workers()[0].state is WorkerState.DEAD


def test_only_the_last_periods_are_kept(ledger: Ledger, meddler: Meddler) -> None:
    for _ in range(210):
        meddler.move_watch(-10.0)
        ledger.tick(Tick(None, 0.01, cause=Cause.OUTAGE))
    assert meddler.count("watch_periods") == 200


def test_silence_counts_through_any_number_of_periods(ledger: Ledger, w1: str, w2: str, meddler: Meddler) -> None:
    # A database that fails every ten seconds for half an hour.
    for _ in range(210):
        meddler.move_watch(-10.0)
        meddler.move_beats(-10.0)
        ledger.beat(Pulse("w2", 0, 0))
        ledger.tick(Tick(2.5, 0.01, cause=Cause.OUTAGE))
    assert seen(ledger).silent_s == pytest.approx(210 * 2.5, abs=5.0)
    # Those that concern no one any more are removed.
    ledger.beat(Pulse("w1", 0, 0))
    meddler.move_watch(-10.0)
    ledger.tick(Tick(2.5, 0.01, cause=Cause.OUTAGE))
    assert meddler.count("watch_periods") == 200


def test_a_watch_grows_no_table(ledger: Ledger, meddler: Meddler) -> None:
    for _ in range(50):
        ledger.tick(Tick(EVER_S, 0.0))
    assert meddler.count("watch_periods") == 1


def test_a_clock_that_is_set_forward_ends_no_job_by_its_deadline(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ledger.tick(Tick(None, 1.0))
    job = running(ledger, timeout_s=5.0)
    meddler.age_job(job.job_id, 3600.0)
    assert [late.job_id for late in ledger.overdue(10)] == [job.job_id]
    meddler.forget_watch()
    ledger.tick(Tick(1.0, 1.0))
    assert ledger.overdue(10) == []


def test_a_tick_that_was_late_vouches_for_none_of_the_time_before_it(ledger: Ledger) -> None:
    """It may have waited through an outage, so the next one of the same reaper must not reach back beyond it."""
    ledger.tick(Tick(None, 100.0))
    late = ledger.tick(Tick(0.0, 100.0, slack_s=0.0))
    assert late.began is None
    assert late.stale_s == 0.0
    # Whoever has just started is told, and claims nothing of it either: it knows when it started.
    assert ledger.tick(Tick(None, 100.0)).stale_s > 0.0


def test_a_database_that_stood_still_adds_nothing_though_a_tick_waited_for_it(ledger: Ledger, meddler: Meddler) -> None:
    ledger.tick(Tick(None, 1.0))
    ledger.tick(Tick(1.0, 1.0))
    meddler.move_watch(-60.0)
    began = ledger.tick(Tick(20.0, 1.0))
    assert began.began is Cause.CLOCK
    assert began.watched_s < 1.0


STEP_S = 40.0


def set_forward(meddler: Meddler, seen_at: float | None) -> float:
    """Let everything have happened earlier, as seen from a clock that was set forward; return when the contact was."""
    assert seen_at is not None
    meddler.move_watch(-STEP_S)
    meddler.move_beats(-STEP_S)
    return seen_at - STEP_S


def test_a_tick_says_what_the_clock_of_the_ledger_was(ledger: Ledger, open_again: OpenLedger) -> None:
    first = ledger.tick(Tick(None, 60.0), "sweep", 60.0)
    lost = open_again().tick(Tick(None, 60.0), "sweep", 60.0)
    assert first.at is not None
    assert lost.at is not None
    assert 0.0 <= lost.at - first.at < 30.0


@pytest.mark.parametrize("cause", [None, Cause.PAUSE])
def test_a_claim_made_by_a_clock_that_was_set_forward_since_counts_nothing(
    ledger: Ledger, w1: str, meddler: Meddler, cause: Cause | None
) -> None:
    seen_at = set_forward(meddler, ledger.tick(Tick(None, 1.0)).at)
    # The claim reaches back to the last tick by the clock of now, and half of it was counted by the clock before.
    ticked = ledger.tick(Tick(2 * STEP_S, 1.0, cause=cause, since_s=20.0, seen_at=seen_at))
    assert ticked.began is (cause or Cause.CLOCK)
    assert ticked.gap_s == pytest.approx(STEP_S, abs=15.0)
    assert seen(ledger).silent_s < 15.0


def test_a_claim_counts_if_no_clock_was_set(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    seen_at = set_forward(meddler, ledger.tick(Tick(None, 1.0)).at)
    ticked = ledger.tick(Tick(STEP_S, 1.0, 20.0, since_s=STEP_S, seen_at=seen_at))
    assert ticked.began is None
    assert seen(ledger).silent_s >= STEP_S


def test_a_reaper_that_loses_the_ticket_does_not_claim_a_step_of_the_clock_with_its_next_tick(
    ledger: Ledger, open_again: OpenLedger, meddler: Meddler
) -> None:
    seen_at = set_forward(meddler, ledger.tick(Tick(None, 1.0), "sweep", 600.0).at)
    other = open_again()
    calm = other.tick(Tick(1.0, 100.0, since_s=STEP_S + 30.0, seen_at=seen_at), "sweep", 600.0)
    stepped = other.tick(Tick(1.0, 100.0, since_s=1.0, seen_at=seen_at), "sweep", 600.0)
    assert (calm.won, stepped.won) == (False, False)
    assert calm.stale_s >= STEP_S
    assert stepped.stale_s == 0.0
