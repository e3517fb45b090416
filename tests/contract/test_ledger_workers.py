"""A worker's life in the ledger: birth, beats, suspicion, drain, end; and mercy after an outage."""

import time

import pytest
from tests.contract.hands import birth, crash, done, put, run, running, turn, verdict
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck.domain.liveness import Session
from unstuck.domain.states import JobState, WorkerState
from unstuck.store.contract import Ledger
from unstuck.store.records import GuardNone, Pulse, TaskRecord, WorkerRecord, WorkerWatch


def the_worker(ledger: Ledger, worker_id: str = "w1") -> WorkerRecord:
    return next(worker for worker in ledger.workers() if worker.id == worker_id)


CLOCKS_S = 0.1
"""So much two clocks of one machine may differ."""


def seen(ledger: Ledger, worker_id: str) -> WorkerWatch:
    return next(worker for worker in ledger.watch() if worker.id == worker_id)


def silent(ledger: Ledger, meddler: Meddler, worker_id: str, at_least_s: float = 0.5) -> None:
    """Make a worker silent. (A database that was started a moment ago cannot know of a longer silence yet.)"""
    meddler.age_beat(worker_id, 3600)
    wait_for(lambda: seen(ledger, worker_id).silent_s >= at_least_s, "the silence")


def silent_only_since(ledger: Ledger, worker_id: str, began_s: float) -> bool:
    """Say whether its silence is no longer than the time since then, however slow this machine is."""
    silent_s = seen(ledger, worker_id).silent_s
    return silent_s <= time.monotonic() - began_s + CLOCKS_S


def test_a_newborn_is_active_and_has_beaten_once(ledger: Ledger) -> None:
    ledger.register(
        birth(
            queues=("a", "b"),
            tasks=(TaskRecord("t1", "a", b"{}", True), TaskRecord("t2", "b")),
            metadata={"zone": "é", "n": 1},
        )
    )
    worker = the_worker(ledger)
    assert (worker.state, worker.queues, worker.tasks) == (WorkerState.ACTIVE, ("a", "b"), ("t1", "t2"))
    assert (worker.metadata, worker.running, worker.processed, worker.held) == ({"zone": "é", "n": 1}, 0, 0, 0)
    assert (worker.verdict, worker.request, worker.stopped_at) == (None, None, None)
    assert worker.created_at == pytest.approx(time.time(), abs=5)
    assert worker.silent_s < 5
    assert ledger.tasks() == [TaskRecord("t1", "a", b"{}", True), TaskRecord("t2", "b")]


def test_a_later_birth_brings_its_tasks_up_to_date(ledger: Ledger, w1: str) -> None:
    ledger.register(birth("w2", tasks=(TaskRecord("add", "moved", b"{}"),)))
    assert ledger.tasks() == [TaskRecord("add", "moved", b"{}")]


def test_a_beat_ends_the_silence_and_carries_the_counts(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    silent(ledger, meddler, "w1")
    began_s = time.monotonic()
    answer = ledger.beat(Pulse("w1", running=3, processed=17))
    assert (answer.state, answer.was_suspect, answer.request, answer.cancel) == (WorkerState.ACTIVE, False, None, ())
    worker = the_worker(ledger)
    assert (worker.running, worker.processed) == (3, 17)
    assert silent_only_since(ledger, "w1", began_s)
    assert worker.last_seen_at == pytest.approx(time.time(), abs=5)


def test_metadata_changes_only_when_it_is_sent(ledger: Ledger) -> None:
    ledger.register(birth(metadata={"a": 1}))
    ledger.beat(Pulse("w1", 0, 0))
    assert the_worker(ledger).metadata == {"a": 1}
    ledger.beat(Pulse("w1", 0, 0, metadata={"b": 2}))
    assert the_worker(ledger).metadata == {"b": 2}


def test_beats_make_no_table_grow(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    for number in range(20):
        ledger.beat(Pulse("w1", 0, number))
    assert meddler.count("beats") == 1
    events = [event.kind for event in ledger.events()]
    assert len(events) <= 1


@pytest.mark.parametrize("who", ["dead", "stopped", "unknown"])
def test_a_beat_never_raises_the_dead(ledger: Ledger, w1: str, meddler: Meddler, who: str) -> None:
    if who == "dead":
        ledger.condemn("w1", verdict(), GuardNone())
    elif who == "stopped":
        ledger.retire("w1")
    answer = ledger.beat(Pulse("nobody" if who == "unknown" else "w1", 1, 1))
    assert answer.state is (WorkerState.STOPPED if who == "stopped" else WorkerState.DEAD)
    assert not ledger.workers(living_only=True) or who == "unknown"
    assert meddler.count("beats") == 1


def test_a_suspect_that_beats_was_only_slow(ledger: Ledger, w1: str) -> None:
    assert ledger.condemn("w1", verdict(WorkerState.SUSPECT), GuardNone())
    assert seen(ledger, "w1").state is WorkerState.SUSPECT
    answer = ledger.beat(Pulse("w1", 0, 0))
    assert (answer.state, answer.was_suspect) == (WorkerState.ACTIVE, True)
    assert the_worker(ledger).verdict is None
    assert seen(ledger, "w1").suspect_s == 0.0
    assert not ledger.beat(Pulse("w1", 0, 0)).was_suspect


def test_a_draining_suspect_that_beats_goes_on_draining(ledger: Ledger, w1: str) -> None:
    ledger.drain("w1")
    assert the_worker(ledger).state is WorkerState.DRAINING
    ledger.condemn("w1", verdict(WorkerState.SUSPECT), GuardNone())
    assert ledger.beat(Pulse("w1", 0, 0)).state is WorkerState.DRAINING


def test_a_worker_that_shut_down_in_order_is_stopped_and_leaves_what_it_holds_to_the_reaper(
    ledger: Ledger, w1: str
) -> None:
    job = running(ledger)
    ledger.retire("w1")
    worker = the_worker(ledger)
    assert worker.state is WorkerState.STOPPED
    assert worker.stopped_at is not None
    assert [held.job_id for held in ledger.held_by("w1", 10)] == [job.job_id]
    assert [watched.id for watched in ledger.watch()] == ["w1"]


def test_the_dead_can_not_be_drained_or_retired(ledger: Ledger, w1: str) -> None:
    ledger.condemn("w1", verdict(), GuardNone())
    ledger.drain("w1")
    ledger.retire("w1")
    assert the_worker(ledger).state is WorkerState.DEAD


def test_a_worker_hears_what_operators_ask_of_it(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.request("w1", "drain", "ops")
    assert ledger.cancel([job.job_id], "ops") == {job.job_id: "requested"}
    answer = ledger.beat(Pulse("w1", 1, 0))
    assert (answer.request, answer.cancel) == ("drain", ((job.job_id, job.token),))
    # It is told again until the job has ended: an answer may be lost.
    assert ledger.beat(Pulse("w1", 1, 0)).cancel == ((job.job_id, job.token),)
    turn(ledger, done=[done(job)])
    assert ledger.beat(Pulse("w1", 0, 1)).cancel == ()


def test_nothing_can_be_asked_of_the_dead(ledger: Ledger, w1: str) -> None:
    ledger.condemn("w1", verdict(), GuardNone())
    assert not ledger.request("w1", "stop", "ops")
    assert not ledger.request("nobody", "stop", "ops")


def test_held_is_exactly_what_the_ledger_believes(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger, policy=b"{}", timeout_s=9.0, heartbeat_timeout_s=7.0)
    running(ledger, "w2")
    [held] = ledger.held("w1")
    assert (held.job_id, held.token, held.worker_id, held.state) == (job.job_id, job.token, "w1", JobState.RUNNING)
    assert (held.task, held.queue, held.policy, held.failures, held.crashes) == ("add", "default", b"{}", 0, 0)
    assert (held.timeout_s, held.heartbeat_timeout_s, held.cancel_requested) == (9.0, 7.0, False)
    assert 0 <= held.running_s <= held.held_s + 0.001 < 5
    assert ledger.held("nobody") == []


def test_the_timeout_of_a_held_job_is_its_own_or_its_workers_or_none(ledger: Ledger, w1: str) -> None:
    running(ledger, heartbeat_timeout_s=7.0)
    running(ledger)
    running(ledger, heartbeat=False, timeout_s=60.0)
    assert [held.heartbeat_timeout_s for held in ledger.held("w1")] == [7.0, 0.2, None]


def test_a_worker_waits_as_long_as_its_most_patient_running_job(ledger: Ledger, w1: str) -> None:
    assert seen(ledger, "w1").waits_for_s is None
    running(ledger)
    assert seen(ledger, "w1").waits_for_s == pytest.approx(0.2)
    running(ledger, heartbeat_timeout_s=500.0)
    put(ledger)
    watched = seen(ledger, "w1")
    assert (watched.waits_for_s, watched.shortest_s) == (500.0, pytest.approx(0.2))
    put(ledger, heartbeat=False, timeout_s=60.0)
    run(ledger)
    watched = seen(ledger, "w1")
    assert watched.waits_for_s == float("inf")
    assert watched.shortest_s == pytest.approx(0.2)
    assert watched.held == 4


def test_the_watchman_sees_who_it_is(ledger: Ledger) -> None:
    ledger.register(birth(trace="/dev/shm/unstuck-w1"))
    [watched] = ledger.watch()
    facts = birth(trace="/dev/shm/unstuck-w1")
    for name in ("name", "host", "pid", "boot_id", "pid_namespace", "process_started", "trace", "suspect_after_s"):
        assert getattr(watched, name) == getattr(facts, name)
    assert watched.session in (Session.PRESENT, Session.UNKNOWN)
    assert ledger.watch("another-host") == []
    assert len(ledger.watch(facts.host)) == 1


def test_the_dead_are_watched_only_while_they_hold_something(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    ledger.condemn("w1", verdict(), GuardNone())
    ledger.condemn("w2", verdict(), GuardNone())
    assert [worker.id for worker in ledger.watch()] == ["w1"]
    ledger.settle("w1", [crash(job)], [], GuardNone())
    assert ledger.watch() == []


def test_neighbours_go_round_in_a_ring(ledger: Ledger) -> None:
    for worker_id in ("a", "b", "c", "d"):
        ledger.register(birth(worker_id, host="here"))
    ledger.register(birth("bb", host="elsewhere"))
    ledger.condemn("d", verdict(), GuardNone())
    assert [worker.id for worker in ledger.ring_of("a", "here", 3)] == ["b", "c"]
    assert [worker.id for worker in ledger.ring_of("b", "here", 1)] == ["c"]
    assert [worker.id for worker in ledger.ring_of("c", "here", 3)] == ["a", "b"]
    assert ledger.ring_of("c", "nowhere", 3) == []
