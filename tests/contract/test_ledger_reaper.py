"""Verdicts and sweeps: the evidence is looked at again inside the write, and only one side wins."""

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth, claim, crash, done, put, release, run, running, state_of, turn, verdict
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.domain.watch import Tick
from unstuck.store.contract import Ledger
from unstuck.store.records import Guard, GuardDead, GuardNone, GuardSilent, GuardSuspect, Pulse, WorkerRecord

SILENT = GuardSilent(0.3)


def the_worker(ledger: Ledger, worker_id: str = "w1") -> WorkerRecord:
    return next(worker for worker in ledger.workers() if worker.id == worker_id)


@pytest.fixture
def silent_w1(ledger: Ledger, w1: str, meddler: Meddler) -> str:
    """A worker that has not beaten for a long time."""
    meddler.age_beat(w1, 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    return w1


def test_a_verdict_is_written_with_its_evidence_and_told(ledger: Ledger, silent_w1: str) -> None:
    word = verdict(detector=Detector.NEIGHBOUR, evidence="its process no longer exists", by="w2")
    assert ledger.condemn("w1", word, SILENT)
    worker = the_worker(ledger)
    assert (worker.state, worker.verdict) == (WorkerState.DEAD, word)
    assert worker.stopped_at is not None
    event = ledger.events(worker_id="w1")[-1]
    assert event.kind == "worker_dead"
    assert "w1" in event.message
    assert "its process no longer exists" in event.message


def test_suspicion_is_written_and_its_length_is_known(ledger: Ledger, silent_w1: str) -> None:
    assert ledger.condemn("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.events(worker_id="w1")[-1].kind == "worker_suspect"
    wait_for(lambda: ledger.tick(Tick(60.0, 0.0)) and ledger.watch()[0].suspect_s > 0.05, "the suspicion")
    assert ledger.watch()[0].state is WorkerState.SUSPECT


def test_a_verdict_is_given_once(ledger: Ledger, silent_w1: str, open_again: OpenLedger) -> None:
    assert ledger.condemn("w1", verdict(), SILENT)
    events = len(ledger.events())
    assert not open_again().condemn("w1", verdict(by="another"), SILENT)
    assert not ledger.condemn("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert len(ledger.events()) == events
    worker = the_worker(ledger)
    assert worker.verdict is not None
    assert worker.verdict.by == "reaper"


def test_a_suspect_is_not_suspected_again(ledger: Ledger, silent_w1: str) -> None:
    assert ledger.condemn("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert not ledger.condemn("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.condemn("w1", verdict(), GuardSuspect())


@pytest.mark.parametrize("guard", [SILENT, GuardSuspect()], ids=["silent", "suspect"])
def test_a_beat_between_the_evidence_and_the_verdict_wins(ledger: Ledger, silent_w1: str, guard: Guard) -> None:
    ledger.condemn("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.beat(Pulse("w1", 0, 0)).state is WorkerState.ACTIVE
    assert not ledger.condemn("w1", verdict(), guard)
    assert the_worker(ledger).state is WorkerState.ACTIVE


@pytest.mark.parametrize("guard", [SILENT, GuardSuspect(), GuardDead()], ids=["silent", "suspect", "dead"])
def test_a_beat_between_the_evidence_and_the_sweep_wins(
    ledger: Ledger, w1: str, meddler: Meddler, guard: Guard
) -> None:
    job = running(ledger)
    meddler.age_beat("w1", 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    ledger.condemn("w1", verdict(WorkerState.SUSPECT), SILENT)
    ledger.beat(Pulse("w1", 1, 0))
    assert ledger.settle("w1", [crash(job)], [], guard) == set()
    assert state_of(ledger, job.job_id) is JobState.RUNNING
    assert turn(ledger, done=[done(job)]).superseded == frozenset()


def test_a_guard_that_holds_lets_the_sweep_through(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    put(ledger), put(ledger), put(ledger)
    first, second, third = run(ledger)
    meddler.age_beat("w1", 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    assert ledger.settle("w1", [crash(first)], [], SILENT) == {(first.job_id, first.token)}
    ledger.condemn("w1", verdict(WorkerState.SUSPECT), SILENT)
    assert ledger.settle("w1", [crash(second)], [], GuardSuspect()) == {(second.job_id, second.token)}
    ledger.condemn("w1", verdict(), SILENT)
    assert ledger.settle("w1", [crash(third)], [], GuardDead()) == {(third.job_id, third.token)}


def test_nobody_can_be_condemned_who_does_not_exist(ledger: Ledger) -> None:
    assert not ledger.condemn("nobody", verdict(), GuardNone())


def test_after_the_verdict_no_turn_of_the_dead_commits(ledger: Ledger, silent_w1: str) -> None:
    put(ledger)
    assert ledger.condemn("w1", verdict(), SILENT)
    assert not turn(ledger, "w1").alive
    assert ledger.held_by("w1", 10) == []


def test_what_the_dead_held_is_given_oldest_first_and_bounded(ledger: Ledger, w1: str) -> None:
    ids = [running(ledger).job_id for _ in range(5)]
    ledger.condemn("w1", verdict(), GuardNone())
    assert [held.job_id for held in ledger.held_by("w1", 3)] == ids[:3]


def test_a_sweep_that_settled_nothing_new_says_so(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.condemn("w1", verdict(), GuardNone())
    assert ledger.settle("w1", [crash(job)], [], GuardDead()) == {(job.job_id, job.token)}
    assert ledger.settle("w1", [crash(job)], [], GuardDead()) == set()
    assert ledger.settle("w1", [], [], GuardDead()) == set()


def test_a_stale_claim_goes_back_without_spending_an_attempt(ledger: Ledger, w1: str, w2: str) -> None:
    put(ledger)
    [job] = claim(ledger)
    ledger.condemn("w1", verdict(), GuardNone())
    ledger.settle(
        "w1", [], [release(job, event="requeued", message="Task re-queued due to stale worker: w1")], GuardDead()
    )
    [again] = claim(ledger, "w2")
    assert (again.job_id, again.attempt, again.crashes) == (job.job_id, 1, 0)
    assert [event.kind for event in ledger.events(job_id=job.job_id)] == ["requeued"]


def test_stale_gives_what_the_silent_and_the_dead_hold(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    # Patient ones, whose own lateness on a slow machine forgives nobody.
    ledger.register(birth("w2", suspect_after_s=1000.0))
    ledger.register(birth("w3", suspect_after_s=1000.0))
    silent_job, well_job, dead_job = running(ledger), running(ledger, "w2"), running(ledger, "w3")
    meddler.age_beat("w1", 3600)
    wait_for(lambda: the_worker(ledger).silent_s >= 0.5, "the silence")
    ledger.beat(Pulse("w2", 1, 0))
    ledger.condemn("w3", verdict(), GuardNone())
    assert {job.job_id for job in ledger.stale(0.3)} == {silent_job.job_id, dead_job.job_id}
    assert {job.job_id for job in ledger.stale(1e9)} == {dead_job.job_id}
    assert {job.job_id for job in ledger.stale(0.0)} == {silent_job.job_id, well_job.job_id, dead_job.job_id}


def test_a_job_past_its_deadline_is_left_to_a_worker_that_is_well_for_a_while(
    ledger: Ledger, w1: str, meddler: Meddler
) -> None:
    job = running(ledger, timeout_s=5.0)
    running(ledger)
    assert ledger.overdue(10) == []
    meddler.age_job(job.job_id, 25)
    assert ledger.overdue(10) == []
    meddler.age_job(job.job_id, 25)
    [overdue] = ledger.overdue(10)
    assert (overdue.job_id, overdue.token) == (job.job_id, job.token)
    assert overdue.running_s == pytest.approx(50, abs=5)


@pytest.mark.parametrize("state", [WorkerState.SUSPECT, WorkerState.DEAD])
def test_a_job_past_its_deadline_is_not_left_to_the_lost(
    ledger: Ledger, w1: str, meddler: Meddler, state: WorkerState
) -> None:
    job = running(ledger, timeout_s=5.0)
    meddler.age_job(job.job_id, 25)
    ledger.condemn("w1", verdict(state), GuardNone())
    assert [overdue.job_id for overdue in ledger.overdue(10)] == [job.job_id]
    assert ledger.overdue(0) == []


def test_of_many_watchmen_one_wins_the_round(ledger: Ledger, open_again: OpenLedger) -> None:
    handles = [ledger, open_again(), open_again()]
    assert sum(handle.take_ticket("sweep", 60.0) for handle in handles) == 1
    assert ledger.take_ticket("another", 60.0)


def test_a_ticket_expires_by_itself(ledger: Ledger, open_again: OpenLedger, meddler: Meddler) -> None:
    assert ledger.take_ticket("sweep", 3600.0)
    assert not open_again().take_ticket("sweep", 3600.0)
    meddler.expire_ticket("sweep")
    assert open_again().take_ticket("sweep", 0.01)
    wait_for(lambda: ledger.take_ticket("sweep", 3600.0), "the end of a ticket")


def numbers_after_restore(ledger: Ledger, name: str) -> dict[str, int]:
    """Void the tokens of a ledger that was just restored, and return the first numbers that it gives out then."""
    ledger.void_tokens()
    last = ledger.events(limit=1)[-1].id
    audit_id = ledger.begin_audit("ops", "cli", "prune", "jobs")
    ledger.register(birth(name))
    job_id = put(ledger)
    claimed = max(claim(ledger, name), key=lambda job: job.token)
    return {"job": job_id, "token": claimed.token, "event": last, "audit": audit_id}


def test_numbers_given_out_since_the_backup_are_never_given_out_again(
    ledger: Ledger, w1: str, open_again: OpenLedger, meddler: Meddler
) -> None:
    audit_id = ledger.begin_audit("ops", "cli", "prune", "jobs")
    ran = running(ledger)
    ledger.condemn("w1", verdict(), GuardNone())
    backup = meddler.numbers()
    # A day at 600 jobs per second, after the backup was taken.
    day = 24 * 3600 * 600
    event_id = ledger.events(limit=1)[-1].id
    issued = {"job": ran.job_id, "token": ran.token, "event": event_id, "audit": audit_id}
    ledger.register(birth("w2"))
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
    [claimed] = claim(ledger, "w2")
    assert ledger.void_tokens() == 2
    assert ledger.workers(living_only=True) == []
    assert state_of(ledger, claimed.job_id) is JobState.PENDING
    assert state_of(ledger, ran.job_id) is JobState.RUNNING
    assert ledger.settle("w1", [crash(ran)], [], GuardNone()) == set()
    [held] = ledger.held_by("w1", 10)
    assert held.token != ran.token
    # A restored server knows no old sessions: whoever goes on has connected afresh.
    fresh = open_again()
    fresh.register(birth("w3"))
    [again] = claim(fresh, "w3")
    assert again.token > max(ran.token, claimed.token) + 1000
    assert put(fresh) > again.job_id + 1000
    assert fresh.void_tokens() == 1
