"""Verdicts and sweeps: the evidence is looked at again inside the write, and only one side wins."""

import time

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import (
    birth,
    claim_jobs,
    crash,
    done,
    failure_retry,
    new_job,
    put,
    release,
    run,
    running,
    state_of,
    turn,
    verdict,
)
from tests.support.fleet import wait_for

from unstuck.config import Recovery
from unstuck.domain.liveness import Detector
from unstuck.domain.schedules import ScheduleDefinition, Timing
from unstuck.domain.states import JobState, WorkerState
from unstuck.domain.watch_clock import Cause, Tick
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import ConditionChange
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.recovery import (
    Guard,
    GuardDead,
    GuardNone,
    GuardSilent,
    GuardSuspect,
    GuardUnheard,
    WorkerWatch,
)
from unstuck.ledger.contract.schedules import pack_job
from unstuck.ledger.contract.workers import Heartbeat, WorkerRecord
from unstuck.maintenance.scheduler import Scheduler
from unstuck.recovery.reap import Reaper
from unstuck.recovery.result import SweepResult

SILENT = GuardSilent(0.3)


def the_worker(ledger: Ledger, worker_id: str = "w1") -> WorkerRecord:
    return next(worker for worker in ledger.workers.list() if worker.id == worker_id)


@pytest.fixture
def silent_w1(ledger: Ledger, w1: str, meddler: Backdoor) -> str:
    """A worker that has not beaten for a long time."""
    meddler.age_beat(w1, 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    return w1


def test_a_verdict_is_written_with_its_evidence_and_told(ledger: Ledger, silent_w1: str) -> None:
    word = verdict(detector=Detector.PEER, evidence="its process no longer exists", by="w2")
    assert ledger.recovery.declare_dead("w1", word, SILENT)
    worker = the_worker(ledger)
    assert (worker.state, worker.verdict) == (WorkerState.DEAD, word)
    assert worker.stopped_at is not None
    event = ledger.events.list(worker_id="w1")[-1]
    assert event.kind == "worker_dead"
    assert "w1" in event.message
    assert "its process no longer exists" in event.message


def test_suspicion_is_written_and_its_length_is_known(ledger: Ledger, silent_w1: str) -> None:
    assert ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.events.list(worker_id="w1")[-1].kind == "worker_suspect"
    wait_for(
        lambda: ledger.recovery.tick(Tick(60.0, 0.0)) and ledger.recovery.watch()[0].suspect_s > 0.05, "the suspicion"
    )
    assert ledger.recovery.watch()[0].state is WorkerState.SUSPECT


def test_a_verdict_is_given_once(ledger: Ledger, silent_w1: str, open_again: OpenLedger) -> None:
    assert ledger.recovery.declare_dead("w1", verdict(), SILENT)
    events = len(ledger.events.list())
    assert not open_again().recovery.declare_dead("w1", verdict(by="another"), SILENT)
    assert not ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert len(ledger.events.list()) == events
    worker = the_worker(ledger)
    assert worker.verdict is not None
    assert worker.verdict.by == "reaper"


def test_a_suspect_is_not_suspected_again(ledger: Ledger, silent_w1: str) -> None:
    assert ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert not ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.recovery.declare_dead("w1", verdict(), GuardSuspect())


@pytest.mark.parametrize("guard", [SILENT, GuardSuspect()], ids=["silent", "suspect"])
def test_a_beat_between_the_evidence_and_the_verdict_wins(ledger: Ledger, silent_w1: str, guard: Guard) -> None:
    ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.workers.beat(Heartbeat("w1", 0, 0)).state is WorkerState.ACTIVE
    assert not ledger.recovery.declare_dead("w1", verdict(), guard)
    assert the_worker(ledger).state is WorkerState.ACTIVE


@pytest.mark.parametrize("guard", [SILENT, GuardSuspect(), GuardDead()], ids=["silent", "suspect", "dead"])
def test_a_beat_between_the_evidence_and_the_sweep_wins(
    ledger: Ledger, w1: str, meddler: Backdoor, guard: Guard
) -> None:
    job = running(ledger)
    meddler.age_beat("w1", 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), SILENT)
    ledger.workers.beat(Heartbeat("w1", 1, 0))
    assert ledger.recovery.settle("w1", [crash(job)], [], guard) == set()
    assert state_of(ledger, job.job_id) is JobState.RUNNING
    assert turn(ledger, done=[done(job)]).superseded == frozenset()


def test_a_guard_that_holds_lets_the_sweep_through(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    put(ledger), put(ledger), put(ledger)
    first, second, third = run(ledger)
    meddler.age_beat("w1", 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    assert ledger.recovery.settle("w1", [crash(first)], [], SILENT) == {(first.job_id, first.token)}
    ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.recovery.settle("w1", [crash(second)], [], GuardSuspect()) == {(second.job_id, second.token)}
    ledger.recovery.declare_dead("w1", verdict(), SILENT)
    assert ledger.recovery.settle("w1", [crash(third)], [], GuardDead()) == {(third.job_id, third.token)}


def test_nobody_can_be_condemned_who_does_not_exist(ledger: Ledger) -> None:
    assert not ledger.recovery.declare_dead("nobody", verdict(), GuardNone())


def test_after_the_verdict_no_turn_of_the_dead_commits(ledger: Ledger, silent_w1: str) -> None:
    put(ledger)
    assert ledger.recovery.declare_dead("w1", verdict(), SILENT)
    assert not turn(ledger, "w1").alive
    assert ledger.recovery.held_jobs("w1", 10) == []


def test_what_the_dead_held_is_given_oldest_first_and_bounded(ledger: Ledger, w1: str) -> None:
    ids = [running(ledger).job_id for _ in range(5)]
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert [held.job_id for held in ledger.recovery.held_jobs("w1", 3)] == ids[:3]


def test_a_sweep_that_settled_nothing_new_says_so(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert ledger.recovery.settle("w1", [crash(job)], [], GuardDead()) == {(job.job_id, job.token)}
    assert ledger.recovery.settle("w1", [crash(job)], [], GuardDead()) == set()
    assert ledger.recovery.settle("w1", [], [], GuardDead()) == set()


def test_a_stale_claim_goes_back_without_spending_an_attempt(ledger: Ledger, w1: str, w2: str) -> None:
    put(ledger)
    [job] = claim_jobs(ledger)
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    ledger.recovery.settle(
        "w1", [], [release(job, event="requeued", message="Task re-queued due to stale worker: w1")], GuardDead()
    )
    [again] = claim_jobs(ledger, "w2")
    assert (again.job_id, again.attempt, again.crashes) == (job.job_id, 1, 0)
    assert [event.kind for event in ledger.events.list(job_id=job.job_id)] == ["requeued"]


def test_stale_gives_what_the_silent_and_the_dead_hold(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    # Patient ones, whose own lateness on a slow machine forgives nobody.
    ledger.workers.register(birth("w2", suspect_after_s=1000.0))
    ledger.workers.register(birth("w3", suspect_after_s=1000.0))
    silent_job, well_job, dead_job = running(ledger), running(ledger, "w2"), running(ledger, "w3")
    meddler.age_beat("w1", 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    ledger.workers.beat(Heartbeat("w2", 1, 0))
    ledger.recovery.declare_dead("w3", verdict(), GuardNone())
    assert {job.job_id for job in ledger.recovery.stale(0.3)} == {silent_job.job_id, dead_job.job_id}
    assert {job.job_id for job in ledger.recovery.stale(1e9)} == {dead_job.job_id}
    assert {job.job_id for job in ledger.recovery.stale(0.0)} == {silent_job.job_id, well_job.job_id, dead_job.job_id}


def test_a_job_past_its_deadline_is_left_to_a_worker_that_is_well_for_a_while(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    job = running(ledger, timeout_s=5.0)
    running(ledger)
    assert ledger.recovery.overdue(10) == []
    meddler.age_job(job.job_id, 25)
    assert ledger.recovery.overdue(10) == []
    meddler.age_job(job.job_id, 25)
    [overdue] = ledger.recovery.overdue(10)
    assert (overdue.job_id, overdue.token) == (job.job_id, job.token)
    assert overdue.running_s == pytest.approx(50, abs=5)


@pytest.mark.parametrize("state", [WorkerState.SUSPECT, WorkerState.DEAD])
def test_a_job_past_its_deadline_is_not_left_to_the_lost(
    ledger: Ledger, w1: str, meddler: Backdoor, state: WorkerState
) -> None:
    job = running(ledger, timeout_s=5.0)
    meddler.age_job(job.job_id, 25)
    ledger.recovery.declare_dead("w1", verdict(state), GuardNone())
    assert [overdue.job_id for overdue in ledger.recovery.overdue(10)] == [job.job_id]
    assert ledger.recovery.overdue(0) == []


def test_of_many_watchmen_one_wins_the_round(ledger: Ledger, open_again: OpenLedger) -> None:
    handles = [ledger, open_again(), open_again()]
    assert sum(handle.maintenance.take_ticket("sweep", 60.0) for handle in handles) == 1
    assert ledger.maintenance.take_ticket("another", 60.0)


def test_a_ticket_expires_by_itself(ledger: Ledger, open_again: OpenLedger, meddler: Backdoor) -> None:
    assert ledger.maintenance.take_ticket("sweep", 3600.0)
    assert not open_again().maintenance.take_ticket("sweep", 3600.0)
    meddler.expire_ticket("sweep")
    assert open_again().maintenance.take_ticket("sweep", 0.01)
    wait_for(lambda: ledger.maintenance.take_ticket("sweep", 3600.0), "the end of a ticket")


def numbers_after_restore(ledger: Ledger, name: str) -> dict[str, int]:
    """Void the tokens of a ledger that was just restored, and return the first numbers that it gives out then."""
    ledger.void_tokens()
    last = ledger.events.list(limit=1)[-1].id
    audit_id = ledger.admin.begin_audit("ops", "cli", "prune", "jobs")
    ledger.workers.register(birth(name))
    job_id = put(ledger)
    claimed = max(claim_jobs(ledger, name), key=lambda job: job.token)
    return {"job": job_id, "token": claimed.token, "event": last, "audit": audit_id}


def test_numbers_given_out_since_the_backup_are_never_given_out_again(
    ledger: Ledger, w1: str, open_again: OpenLedger, meddler: Backdoor
) -> None:
    audit_id = ledger.admin.begin_audit("ops", "cli", "prune", "jobs")
    ran = running(ledger)
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    backup = meddler.numbers()
    # A day at 600 jobs per second, after the backup was taken.
    day = 24 * 3600 * 600
    event_id = ledger.events.list(limit=1)[-1].id
    issued = {"job": ran.job_id, "token": ran.token, "event": event_id, "audit": audit_id}
    ledger.workers.register(birth("w2"))
    first = numbers_after_restore(open_again(), "w3")
    assert all(first[kind] > issued[kind] + day for kind in issued), f"{first} must be beyond {issued} + {day}"
    # The same backup is restored once more: it knows nothing of the first restore.
    meddler.set_numbers(backup)
    second = numbers_after_restore(open_again(), "w4")
    assert all(second[kind] > first[kind] for kind in first), f"{second} must be beyond {first}"
    # JSON numbers are exact up to here, in JavaScript too.
    assert max(second.values()) < 2**53


def test_after_a_restore_every_token_is_void(ledger: Ledger, w1: str, w2: str, open_again: OpenLedger) -> None:
    ran = running(ledger)
    put(ledger)
    [claimed] = claim_jobs(ledger, "w2")
    assert ledger.void_tokens() == 2
    assert ledger.workers.list(living_only=True) == []
    assert state_of(ledger, claimed.job_id) is JobState.PENDING
    assert state_of(ledger, ran.job_id) is JobState.RUNNING
    assert ledger.recovery.settle("w1", [crash(ran)], [], GuardNone()) == set()
    [held] = ledger.recovery.held_jobs("w1", 10)
    assert held.token != ran.token
    # A restored server knows no old sessions: whoever goes on has connected afresh.
    fresh = open_again()
    fresh.workers.register(birth("w3"))
    [again] = claim_jobs(fresh, "w3")
    assert again.token > max(ran.token, claimed.token) + 1000
    assert put(fresh) > again.job_id + 1000
    assert fresh.void_tokens() == 1


EVER_S = 1000.0
"""A claim that reaches back as far as anyone wants."""


def seen(ledger: Ledger, worker_id: str = "w1") -> WorkerWatch:
    return next(worker for worker in ledger.recovery.watch() if worker.id == worker_id)


def watch_for(ledger: Ledger, silent_s: float) -> None:
    """Keep watch without a break until the worker was silent for so long."""
    wait_for(lambda: ledger.recovery.tick(Tick(EVER_S, 0.0)) and seen(ledger).silent_s >= silent_s, "the silence")


def test_the_first_tick_begins_the_watch_and_the_next_ones_extend_it(ledger: Ledger) -> None:
    first = ledger.recovery.tick(Tick(None, 1.0, cause=Cause.START))
    assert (first.began, first.gap_s) == (Cause.START, None)
    watched_s = ledger.recovery.tick(Tick(EVER_S, 0.0)).watched_s
    assert 0 <= watched_s < ledger.recovery.tick(Tick(EVER_S, 0.0)).watched_s


def test_time_that_no_one_watched_does_not_count(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ledger.recovery.tick(Tick(None, 1.0))
    meddler.move_watch(-40.0)
    meddler.move_beats(-40.0)
    ticked = ledger.recovery.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert ticked.began is Cause.OUTAGE
    assert ticked.gap_s == pytest.approx(40.0, abs=5.0)
    assert seen(ledger).silent_s < 1.0
    assert seen(ledger).since_beat_s >= 40.0
    assert not ledger.recovery.declare_dead("w1", verdict(), GuardSilent(1.0))


def test_a_worker_that_was_silent_before_an_outage_stays_silent(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    meddler.age_beat("w1", 25.0)
    ledger.workers.beat(Heartbeat("w1", 0, 0))
    meddler.age_beat("w1", 25.0)
    meddler.move_watch(-60.0)
    meddler.move_beats(-60.0)
    ledger.recovery.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert seen(ledger).silent_s == pytest.approx(25.0, abs=1.0)


def test_a_clock_that_is_set_forward_adds_nothing_to_the_silence(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ledger.recovery.tick(Tick(None, 1.0))
    # Seen from a clock that is an hour ahead, everything happened an hour earlier.
    meddler.move_watch(-3600.0)
    meddler.move_beats(-3600.0)
    ticked = ledger.recovery.tick(Tick(1.0, 1.0))
    assert ticked.began is Cause.CLOCK
    assert seen(ledger).silent_s < 2.5


def test_a_clock_that_is_set_back_adds_nothing_and_forgives_nothing(
    ledger: Ledger, w1: str, w2: str, meddler: Backdoor
) -> None:
    meddler.age_beat("w1", 25.0)
    meddler.move_watch(3600.0)
    meddler.move_beats(3600.0)
    ticked = ledger.recovery.tick(Tick(1.0, 1.0))
    assert ticked.began is None
    assert ticked.set_back_s == pytest.approx(3600.0, abs=5.0)
    assert seen(ledger).silent_s == pytest.approx(25.0, abs=5.0)
    assert seen(ledger, "w2").silent_s < 5.0
    # And time goes on from here.
    counted_s = seen(ledger).silent_s
    watch_for(ledger, counted_s + 0.05)


def test_a_clock_that_is_set_back_across_an_outage_counts_no_moment_twice(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    """After the step the worker's heartbeat has a time at which the ledger was watched before the outage, too."""
    meddler.age_beat("w1", 5.0)
    meddler.move_watch(-30.0)
    meddler.move_beats(-30.0)
    began = ledger.recovery.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert began.gap_s is not None
    ledger.workers.beat(Heartbeat("w1", 0, 0))
    watch_for(ledger, 0.5)
    step_s = began.gap_s + ledger.recovery.tick(Tick(EVER_S, 0.0)).watched_s + 2.0 - 0.1
    meddler.move_watch(-2.0)
    meddler.move_beats(-2.0)
    ledger.recovery.tick(Tick(None, 0.1, cause=Cause.OUTAGE))
    silent_s = seen(ledger).silent_s
    meddler.move_watch(step_s)
    meddler.move_beats(step_s)
    assert ledger.recovery.tick(Tick(1.0, 1.0)).set_back_s > 0
    assert seen(ledger).silent_s == pytest.approx(silent_s, abs=0.1)


def test_an_outage_with_a_clock_that_is_set_back_gives_time_to_reconnect(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    meddler.age_beat("w1", 25.0)
    meddler.move_watch(20.0)
    meddler.move_beats(20.0)
    ticked = ledger.recovery.tick(Tick(None, 1.0, cause=Cause.OUTAGE))
    assert (ticked.began, ticked.watched_s) == (Cause.OUTAGE, pytest.approx(0.0, abs=0.1))
    assert ticked.set_back_s == pytest.approx(20.0, abs=5.0)
    assert seen(ledger).silent_s < 26.0


@pytest.mark.parametrize("watched_until_s", [-60.0, 10.0])
def test_heartbeats_of_a_clock_that_was_ahead_for_a_while_hide_no_death(
    ledger: Ledger, w1: str, meddler: Backdoor, watched_until_s: float
) -> None:
    ledger.recovery.tick(Tick(None, 1.0))
    meddler.move_watch(watched_until_s)
    meddler.move_beats(3600.0)
    ledger.recovery.tick(Tick(None, 1.0))
    assert seen(ledger).since_beat_s >= 0.0
    watch_for(ledger, 0.05)


def test_a_reaper_that_just_started_does_not_break_the_watch_of_others(ledger: Ledger, open_again: OpenLedger) -> None:
    ledger.recovery.tick(Tick(None, 60.0))
    other = open_again().recovery.tick(Tick(None, 60.0, cause=Cause.START))
    assert other.began is None
    assert ledger.recovery.tick(Tick(60.0, 60.0)).began is None


def test_of_many_reapers_one_wins_the_ticket_and_all_keep_the_watch(ledger: Ledger, open_again: OpenLedger) -> None:
    other = open_again()
    assert ledger.recovery.tick(Tick(None, 1.0), "sweep", 60.0).won
    lost = other.recovery.tick(Tick(None, 60.0), "sweep", 60.0)
    assert not lost.won
    assert lost.stale_s < 5.0
    # Whoever keeps losing still extends it as soon as no one else does.
    wait_for(lambda: other.recovery.tick(Tick(EVER_S, 0.01), "sweep", 60.0).watched_s > 0.05, "the watch")


def test_an_operator_may_act_on_silence_that_no_one_watched(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ledger.recovery.tick(Tick(None, 1.0))
    meddler.move_beats(-3600.0)
    meddler.move_watch(-3600.0)
    assert ledger.recovery.stale(3000.0) == []
    assert ledger.recovery.declare_dead("w1", verdict(), GuardUnheard(3000.0))
    assert ledger.workers.list()[0].state is WorkerState.DEAD


def test_only_the_last_periods_are_kept(ledger: Ledger, meddler: Backdoor) -> None:
    for _ in range(210):
        meddler.move_watch(-10.0)
        ledger.recovery.tick(Tick(None, 0.01, cause=Cause.OUTAGE))
    assert meddler.count("watch_periods") == 200


def test_silence_counts_through_any_number_of_periods(ledger: Ledger, w1: str, w2: str, meddler: Backdoor) -> None:
    # A database that fails every ten seconds for half an hour.
    for _ in range(210):
        meddler.move_watch(-10.0)
        meddler.move_beats(-10.0)
        ledger.workers.beat(Heartbeat("w2", 0, 0))
        ledger.recovery.tick(Tick(2.5, 0.01, cause=Cause.OUTAGE))
    assert seen(ledger).silent_s == pytest.approx(210 * 2.5, abs=5.0)
    # Those that concern no one any more are removed.
    ledger.workers.beat(Heartbeat("w1", 0, 0))
    meddler.move_watch(-10.0)
    ledger.recovery.tick(Tick(2.5, 0.01, cause=Cause.OUTAGE))
    assert meddler.count("watch_periods") == 200


def test_a_watch_grows_no_table(ledger: Ledger, meddler: Backdoor) -> None:
    for _ in range(50):
        ledger.recovery.tick(Tick(EVER_S, 0.0))
    assert meddler.count("watch_periods") == 1


def test_a_clock_that_is_set_forward_ends_no_job_by_its_deadline(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ledger.recovery.tick(Tick(None, 1.0))
    job = running(ledger, timeout_s=5.0)
    meddler.age_job(job.job_id, 3600.0)
    assert [late.job_id for late in ledger.recovery.overdue(10)] == [job.job_id]
    meddler.forget_watch()
    ledger.recovery.tick(Tick(1.0, 1.0))
    assert ledger.recovery.overdue(10) == []


def test_a_tick_that_was_late_vouches_for_none_of_the_time_before_it(ledger: Ledger) -> None:
    """It may have waited through an outage, so the next one of the same reaper must not reach back beyond it."""
    ledger.recovery.tick(Tick(None, 100.0))
    late = ledger.recovery.tick(Tick(0.0, 100.0, slack_s=0.0))
    assert late.began is None
    assert late.stale_s == 0.0
    # Whoever has just started is told, and claims nothing of it either: it knows when it started.
    assert ledger.recovery.tick(Tick(None, 100.0)).stale_s > 0.0


def test_a_database_that_stood_still_adds_nothing_though_a_tick_waited_for_it(
    ledger: Ledger, meddler: Backdoor
) -> None:
    ledger.recovery.tick(Tick(None, 1.0))
    ledger.recovery.tick(Tick(1.0, 1.0))
    meddler.move_watch(-60.0)
    began = ledger.recovery.tick(Tick(20.0, 1.0))
    assert began.began is Cause.CLOCK
    assert began.watched_s < 1.0


STEP_S = 40.0


def set_forward(meddler: Backdoor, seen_at: float | None) -> float:
    """Let everything have happened earlier, as seen from a clock that was set forward; return when the contact was."""
    assert seen_at is not None
    meddler.move_watch(-STEP_S)
    meddler.move_beats(-STEP_S)
    return seen_at - STEP_S


def test_a_tick_says_what_the_clock_of_the_ledger_was(ledger: Ledger, open_again: OpenLedger) -> None:
    first = ledger.recovery.tick(Tick(None, 60.0), "sweep", 60.0)
    lost = open_again().recovery.tick(Tick(None, 60.0), "sweep", 60.0)
    assert first.at is not None
    assert lost.at is not None
    assert 0.0 <= lost.at - first.at < 30.0


@pytest.mark.parametrize("cause", [None, Cause.PAUSE])
def test_a_claim_made_by_a_clock_that_was_set_forward_since_counts_nothing(
    ledger: Ledger, w1: str, meddler: Backdoor, cause: Cause | None
) -> None:
    seen_at = set_forward(meddler, ledger.recovery.tick(Tick(None, 1.0)).at)
    # The claim reaches back to the last tick by the clock of now, and half of it was counted by the clock before.
    ticked = ledger.recovery.tick(Tick(2 * STEP_S, 1.0, cause=cause, since_s=20.0, seen_at=seen_at))
    assert ticked.began is (cause or Cause.CLOCK)
    assert ticked.gap_s == pytest.approx(STEP_S, abs=15.0)
    assert seen(ledger).silent_s < 15.0


def test_a_claim_counts_if_no_clock_was_set(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    seen_at = set_forward(meddler, ledger.recovery.tick(Tick(None, 1.0)).at)
    ticked = ledger.recovery.tick(Tick(STEP_S, 1.0, 20.0, since_s=STEP_S, seen_at=seen_at))
    assert ticked.began is None
    assert seen(ledger).silent_s >= STEP_S


def test_a_reaper_that_loses_the_ticket_does_not_claim_a_step_of_the_clock_with_its_next_tick(
    ledger: Ledger, open_again: OpenLedger, meddler: Backdoor
) -> None:
    seen_at = set_forward(meddler, ledger.recovery.tick(Tick(None, 1.0), "sweep", 600.0).at)
    other = open_again()
    calm = other.recovery.tick(Tick(1.0, 100.0, since_s=STEP_S + 30.0, seen_at=seen_at), "sweep", 600.0)
    stepped = other.recovery.tick(Tick(1.0, 100.0, since_s=1.0, seen_at=seen_at), "sweep", 600.0)
    assert (calm.won, stepped.won) == (False, False)
    assert calm.stale_s >= STEP_S
    assert stepped.stale_s == 0.0


HOUR_S = 3600.0


def round_of(ledger: Ledger, meddler: Backdoor) -> SweepResult:
    """A round that looks after everything, as one does every few seconds."""
    for ticket in ("sweep", "order"):
        meddler.expire_ticket(ticket)
    return Reaper(ledger, Recovery(), by="reaper").sweep()


def test_a_retry_waits_for_its_backoff_and_not_until_the_clock_has_caught_up(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    put(ledger)
    [job] = run(ledger)
    turn(ledger, endings=[failure_retry(job, delay_s=60.0)])
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    due_in_s = ledger.maintenance.promote_due(10).next_due_in_s
    assert due_in_s is not None
    assert due_in_s == pytest.approx(60.0, abs=30.0), "not an hour and a minute"
    # Once is enough: the same step is not seen again.
    round_of(ledger, meddler)
    again_in_s = ledger.maintenance.promote_due(10).next_due_in_s
    assert again_in_s == pytest.approx(due_in_s, abs=10.0)


def test_a_retry_waits_for_its_backoff_though_no_reaper_saw_the_clock_set_back(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    """The clock was ahead and was set back again while no reaper ran: what it noted before and after is the same."""
    put(ledger)
    [job] = run(ledger)
    turn(ledger, endings=[failure_retry(job, delay_s=60.0)])
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    meddler.note_clock()
    for _ in range(2):
        round_of(ledger, meddler)
        assert ledger.maintenance.promote_due(10).next_due_in_s == pytest.approx(60.0, abs=30.0)


def test_a_heartbeat_is_not_of_long_ago_though_the_clock_was_set_back_for_a_moment(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    ledger.recovery.tick(Tick(None, 1.0))
    meddler.move_watch(HOUR_S)
    ledger.workers.beat(Heartbeat("w1", 0, 0))
    ledger.workers.register(birth("w2"))
    meddler.move_watch(-HOUR_S)
    meddler.move_beats(-HOUR_S)
    ledger.recovery.tick(Tick(1000.0, 1.0))
    assert [worker.silent_s < 60.0 for worker in ledger.recovery.watch()] == [True, True]
    assert [worker.since_beat_s < 60.0 for worker in ledger.recovery.watch()] == [True, True]


def test_a_time_that_a_caller_named_stays(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    put(ledger, delay_s=60.0)
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    assert ledger.maintenance.promote_due(10).next_due_in_s == pytest.approx(HOUR_S + 60.0, abs=30.0)


def test_a_job_that_runs_began_before_now(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    """Otherwise its deadline comes an hour late if its worker dies."""
    put(ledger)
    [job] = run(ledger)
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    [held] = ledger.jobs.list(JobFilter(states=(JobState.RUNNING,)))
    assert held.id == job.job_id
    assert held.started_at is not None
    assert held.claimed_at is not None
    assert held.started_at == pytest.approx(time.time(), abs=30.0), "the step is taken from it"
    assert held.claimed_at <= held.started_at <= time.time()


def test_reminders_of_a_condition_go_on(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ledger.events.change_conditions([ConditionChange("begun", "queue_stuck", "queue:mail", "It is stuck")], 0.0)
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    assert ledger.events.change_conditions([ConditionChange("lasting", "queue_stuck", "queue:mail", "Still")], 0.0) == 1


def test_a_clock_that_goes_on_is_left_alone(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    put(ledger)
    [job] = run(ledger)
    turn(ledger, endings=[failure_retry(job, delay_s=7200.0)])
    for _ in range(3):
        round_of(ledger, meddler)
    assert ledger.maintenance.promote_due(10).next_due_in_s == pytest.approx(7200.0, abs=30.0)


def test_a_ticket_from_the_future_can_be_taken(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    assert ledger.maintenance.take_ticket("sweep", 10.0)
    meddler.set_clock_back(HOUR_S)
    assert ledger.maintenance.take_ticket("sweep", 10.0) == (meddler.dialect == "postgresql"), (
        "SQLite goes by the boot clock"
    )


def test_an_interval_goes_on(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    job = pack_job(new_job())
    every = ScheduleDefinition("often", "add", "default", Timing(every_s=1.0), job)
    ledger.schedules.know([every], "app")
    keeper = Scheduler(ledger, [every])
    keeper.step()
    wait_for(lambda: keeper.step() == 0.0, "the first tick")
    meddler.set_clock_back(HOUR_S)
    keeper.step()
    before = ledger.jobs.count()["pending"]
    wait_for(lambda: keeper.step() == 0.0 and ledger.jobs.count()["pending"] > before, "the next tick")
