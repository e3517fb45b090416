"""A worker's life in the ledger: birth, beats, suspicion, drain, end; and mercy after an outage."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, claim_jobs, crash, done, put, run, running, turn, verdict
from tests.support.fleet import wait_for

from unstuck import host
from unstuck.config import Recovery, Settings
from unstuck.domain.liveness import Detector, Process, Session
from unstuck.domain.states import JobState, Transport, WorkerState
from unstuck.domain.worker_health import DISABLE_AT, Health
from unstuck.errors import NameTaken
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.recovery import GuardNone, WorkerWatch
from unstuck.ledger.contract.workers import Heartbeat, NewWorker, RemoteHeartbeat, WorkerRecord
from unstuck.recovery.evidence import Observer
from unstuck.recovery.reap import Reaper
from unstuck.worker.sd_notify import SdNotifier
from unstuck.worker.watchdog import ProgressClock, Watchdog, Watched


def the_worker(ledger: Ledger, worker_id: str = "w1") -> WorkerRecord:
    return next(worker for worker in ledger.workers.list() if worker.id == worker_id)


CLOCKS_S = 0.1
"""So much two clocks of one machine may differ."""


def seen(ledger: Ledger, worker_id: str) -> WorkerWatch:
    return next(worker for worker in ledger.recovery.watch() if worker.id == worker_id)


def silent(ledger: Ledger, meddler: Backdoor, worker_id: str, at_least_s: float = 0.5) -> None:
    """Make a worker silent. (A database that was started a moment ago cannot know of a longer silence yet.)"""
    meddler.age_beat(worker_id, 3600)
    wait_for(lambda: seen(ledger, worker_id).silent_s >= at_least_s, "the silence")


def silent_only_since(ledger: Ledger, worker_id: str, began_s: float) -> bool:
    """Say whether its silence is no longer than the time since then, however slow this machine is."""
    silent_s = seen(ledger, worker_id).silent_s
    return silent_s <= time.monotonic() - began_s + CLOCKS_S


def test_a_newborn_is_active_and_has_beaten_once(ledger: Ledger) -> None:
    ledger.workers.register(
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
    assert ledger.queues.tasks() == [TaskRecord("t1", "a", b"{}", True), TaskRecord("t2", "b")]


def test_a_later_birth_brings_its_tasks_up_to_date(ledger: Ledger, w1: str) -> None:
    ledger.workers.register(birth("w2", tasks=(TaskRecord("add", "moved", b"{}"),)))
    assert ledger.queues.tasks() == [TaskRecord("add", "moved", b"{}")]


def test_a_beat_ends_the_silence_and_carries_the_counts(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    silent(ledger, meddler, "w1")
    began_s = time.monotonic()
    answer = ledger.workers.beat(Heartbeat("w1", running=3, processed=17))
    assert (answer.state, answer.was_suspect, answer.request, answer.cancel) == (WorkerState.ACTIVE, False, None, ())
    worker = the_worker(ledger)
    assert (worker.running, worker.processed) == (3, 17)
    assert silent_only_since(ledger, "w1", began_s)
    assert worker.last_seen_at == pytest.approx(time.time(), abs=5)


def test_metadata_changes_only_when_it_is_sent(ledger: Ledger) -> None:
    ledger.workers.register(birth(metadata={"a": 1}))
    ledger.workers.beat(Heartbeat("w1", 0, 0))
    assert the_worker(ledger).metadata == {"a": 1}
    ledger.workers.beat(Heartbeat("w1", 0, 0, metadata={"b": 2}))
    assert the_worker(ledger).metadata == {"b": 2}


def test_beats_make_no_table_grow(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    for number in range(20):
        ledger.workers.beat(Heartbeat("w1", 0, number))
    assert meddler.count("worker_heartbeats") == 1
    events = [event.kind for event in ledger.events.list()]
    assert len(events) <= 1


@pytest.mark.parametrize("who", ["dead", "stopped", "unknown"])
def test_a_beat_never_raises_the_dead(ledger: Ledger, w1: str, meddler: Backdoor, who: str) -> None:
    if who == "dead":
        ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    elif who == "stopped":
        ledger.workers.stop("w1")
    answer = ledger.workers.beat(Heartbeat("nobody" if who == "unknown" else "w1", 1, 1))
    assert answer.state is (WorkerState.STOPPED if who == "stopped" else WorkerState.DEAD)
    assert not ledger.workers.list(living_only=True) or who == "unknown"
    assert meddler.count("worker_heartbeats") == 1


def test_a_suspect_that_beats_was_only_slow(ledger: Ledger, w1: str) -> None:
    assert ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), GuardNone())
    assert seen(ledger, "w1").state is WorkerState.SUSPECT
    answer = ledger.workers.beat(Heartbeat("w1", 0, 0))
    assert (answer.state, answer.was_suspect) == (WorkerState.ACTIVE, True)
    assert the_worker(ledger).verdict is None
    assert seen(ledger, "w1").suspect_s == 0.0
    assert not ledger.workers.beat(Heartbeat("w1", 0, 0)).was_suspect


def test_a_draining_suspect_that_beats_goes_on_draining(ledger: Ledger, w1: str) -> None:
    ledger.workers.drain("w1")
    assert the_worker(ledger).state is WorkerState.DRAINING
    ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), GuardNone())
    assert ledger.workers.beat(Heartbeat("w1", 0, 0)).state is WorkerState.DRAINING


def test_a_worker_that_shut_down_in_order_is_stopped_and_leaves_what_it_holds_to_the_reaper(
    ledger: Ledger, w1: str
) -> None:
    job = running(ledger)
    ledger.workers.stop("w1")
    worker = the_worker(ledger)
    assert worker.state is WorkerState.STOPPED
    assert worker.stopped_at is not None
    assert [held.job_id for held in ledger.recovery.held_jobs("w1", 10)] == [job.job_id]
    assert [watched.id for watched in ledger.recovery.watch()] == ["w1"]


def test_the_dead_can_not_be_drained_or_retired(ledger: Ledger, w1: str) -> None:
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    ledger.workers.drain("w1")
    ledger.workers.stop("w1")
    assert the_worker(ledger).state is WorkerState.DEAD


def test_a_worker_hears_what_operators_ask_of_it(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.workers.request("w1", "drain", "ops")
    assert ledger.jobs.cancel([job.job_id], "ops") == {job.job_id: "requested"}
    answer = ledger.workers.beat(Heartbeat("w1", 1, 0))
    assert (answer.request, answer.cancel) == ("drain", ((job.job_id, job.token),))
    # It is told again until the job has ended: an answer may be lost.
    assert ledger.workers.beat(Heartbeat("w1", 1, 0)).cancel == ((job.job_id, job.token),)
    turn(ledger, done=[done(job)])
    assert ledger.workers.beat(Heartbeat("w1", 0, 1)).cancel == ()


def test_nothing_can_be_asked_of_the_dead(ledger: Ledger, w1: str) -> None:
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert not ledger.workers.request("w1", "stop", "ops")
    assert not ledger.workers.request("nobody", "stop", "ops")


def test_held_is_exactly_what_the_ledger_believes(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger, policy=b"{}", timeout_s=9.0, heartbeat_timeout_s=7.0)
    running(ledger, "w2")
    [held] = ledger.workers.held("w1")
    assert (held.job_id, held.token, held.worker_id, held.state) == (job.job_id, job.token, "w1", JobState.RUNNING)
    assert (held.task, held.queue, held.policy, held.failures, held.crashes) == ("add", "default", b"{}", 0, 0)
    assert (held.timeout_s, held.heartbeat_timeout_s, held.cancel_requested) == (9.0, 7.0, False)
    assert 0 <= held.running_s <= held.held_s + 0.001 < 5
    assert ledger.workers.held("nobody") == []


def test_the_timeout_of_a_held_job_is_its_own_or_its_workers_or_none(ledger: Ledger, w1: str) -> None:
    running(ledger, heartbeat_timeout_s=7.0)
    running(ledger)
    running(ledger, heartbeat=False, timeout_s=60.0)
    assert [held.heartbeat_timeout_s for held in ledger.workers.held("w1")] == [7.0, 0.2, None]


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


def test_the_reaper_sees_who_it_is(ledger: Ledger) -> None:
    ledger.workers.register(birth(status_page="/dev/shm/unstuck-w1"))
    [watched] = ledger.recovery.watch()
    facts = birth(status_page="/dev/shm/unstuck-w1")
    for name in (
        "name",
        "host",
        "pid",
        "boot_id",
        "pid_namespace",
        "process_started",
        "status_page",
        "suspect_after_s",
    ):
        assert getattr(watched, name) == getattr(facts, name)
    assert watched.session in (Session.PRESENT, Session.UNKNOWN)
    assert ledger.recovery.watch("another-host") == []
    assert len(ledger.recovery.watch(facts.host)) == 1


def test_the_dead_are_watched_only_while_they_hold_something(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    ledger.recovery.declare_dead("w2", verdict(), GuardNone())
    assert [worker.id for worker in ledger.recovery.watch()] == ["w1"]
    ledger.recovery.settle("w1", [crash(job)], [], GuardNone())
    assert ledger.recovery.watch() == []


def test_neighbours_go_round_in_a_ring(ledger: Ledger) -> None:
    for worker_id in ("a", "b", "c", "d"):
        ledger.workers.register(birth(worker_id, host="here"))
    ledger.workers.register(birth("bb", host="elsewhere"))
    ledger.recovery.declare_dead("d", verdict(), GuardNone())
    assert [worker.id for worker in ledger.recovery.peers_of("a", "here", 3)] == ["b", "c"]
    assert [worker.id for worker in ledger.recovery.peers_of("b", "here", 1)] == ["c"]
    assert [worker.id for worker in ledger.recovery.peers_of("c", "here", 3)] == ["a", "b"]
    assert ledger.recovery.peers_of("c", "nowhere", 3) == []


LONG_S = 600.0


def foreign(worker_id: str = "f1", name: str = "node", **changes: object) -> NewWorker:
    """A foreign worker that names this very machine as its own, the worst that it can do."""
    facts: dict[str, object] = {
        "name": name,
        "transport": Transport.HTTP,
        "owner": "tok",
        "pid": 0,
        "pid_namespace": "",
        "process_started": "",
        "suspect_after_s": LONG_S,
        "running_stale_after_s": LONG_S,
    }
    return birth(worker_id, **{**facts, **changes})


def test_it_is_found_by_id_and_by_name_and_python_workers_are_not(ledger: Ledger, w1: str) -> None:
    ledger.workers.register(foreign(metadata={"hostname": "far"}))
    by_id, by_name = ledger.workers.remote("f1"), ledger.workers.find_remote("node")
    assert by_id is not None
    assert by_name is not None
    assert (by_id.id, by_id.transport, by_id.owner, by_id.metadata) == (
        "f1",
        Transport.HTTP,
        "tok",
        {"hostname": "far"},
    )
    assert by_name.id == "f1"
    assert ledger.workers.remote("w1") is None
    assert ledger.workers.find_remote("name-of-w1") is None
    assert {worker.id: worker.transport for worker in ledger.workers.list()} == {
        "w1": Transport.PYTHON,
        "f1": Transport.HTTP,
    }


def test_a_name_leads_to_one_living_worker_and_to_the_last_when_none_lives(ledger: Ledger) -> None:
    ledger.workers.register(foreign("f1"))
    ledger.workers.register(foreign("f2", tasks=(TaskRecord("stolen", "default"),)))
    assert ledger.workers.remote("f2") is None
    assert "stolen" not in {task.name for task in ledger.queues.tasks()}
    ledger.recovery.declare_dead("f1", verdict(), GuardNone())
    found = ledger.workers.find_remote("node")
    assert found is not None
    assert (found.id, found.state) == ("f1", WorkerState.DEAD)
    ledger.workers.register(foreign("f2"))
    found = ledger.workers.find_remote("node")
    assert found is not None
    assert (found.id, found.state) == ("f2", WorkerState.ACTIVE)


def test_a_python_worker_and_one_of_another_transport_cannot_share_a_name(ledger: Ledger) -> None:
    python, other = birth("py", name="ada"), birth("http", name="ada", transport=Transport.HTTP)
    ledger.workers.register(other)
    with pytest.raises(NameTaken, match=r"worker over HTTP or ZeroMQ is named 'ada'.*another name"):
        ledger.workers.register(python)
    assert [worker.id for worker in ledger.workers.list()] == ["http"]
    # Repeated after a lost answer it changes nothing.
    ledger.workers.register(other)
    ledger.workers.stop("http")
    ledger.workers.register(python)
    ledger.workers.register(python)
    # Of one app many workers may have the same name.
    ledger.workers.register(birth("py2", name="ada"))
    with pytest.raises(NameTaken, match="worker in Python is named 'ada'"):
        ledger.workers.register(birth("http2", name="ada", transport=Transport.HTTP))
    assert {worker.id for worker in ledger.workers.list(living_only=True)} == {"py", "py2"}


def test_of_two_kinds_that_register_one_name_at_once_one_lives(ledger: Ledger, open_again: OpenLedger) -> None:
    second = open_again()
    both = threading.Barrier(2)
    refused: list[str] = []

    def register(through: Ledger, number: int, transport: Transport) -> None:
        both.wait()
        try:
            through.workers.register(birth(f"{transport}{number}", name=f"n{number}", transport=transport))
        except NameTaken:
            refused.append(f"{transport}{number}")

    def register_all(through: Ledger, transport: Transport) -> None:
        for number in range(50):
            register(through, number, transport)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(register_all, (ledger, second), (Transport.PYTHON, Transport.HTTP)))
    assert len(refused) == 50
    assert sorted(worker.name for worker in ledger.workers.list(living_only=True)) == sorted(f"n{n}" for n in range(50))


def test_of_many_that_register_one_name_at_once_one_lives(ledger: Ledger, open_again: OpenLedger) -> None:
    ledgers = [open_again() for _ in range(4)]
    threads = [
        threading.Thread(target=other.workers.register, args=(foreign(f"f{n}"),)) for n, other in enumerate(ledgers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.workers.list()) == 1


def test_many_beats_are_answered_in_their_order(ledger: Ledger, meddler: Backdoor, w1: str) -> None:
    for n in range(4):
        ledger.workers.register(foreign(f"f{n}", f"node-{n}"))
    ledger.recovery.declare_dead("f1", verdict(), GuardNone())
    ledger.workers.stop("f2")
    ledger.recovery.declare_dead("f3", verdict(WorkerState.SUSPECT), GuardNone())
    ledger.workers.request("f0", "drain", "me")
    answers = ledger.workers.record_heartbeats(
        [
            RemoteHeartbeat("f3"),
            RemoteHeartbeat("f1"),
            RemoteHeartbeat("f0", running=2, settled=3, metadata={"a": "é"}),
            RemoteHeartbeat("f2"),
            RemoteHeartbeat("nobody"),
            RemoteHeartbeat("w1"),
        ]
    )
    assert [answer.state for answer in answers] == [
        *(WorkerState.ACTIVE, WorkerState.DEAD, WorkerState.ACTIVE),
        *(WorkerState.STOPPED, WorkerState.DEAD, WorkerState.DEAD),
    ]
    assert (answers[0].was_suspect, answers[2].request) == (True, "drain")
    ledger.workers.record_heartbeats([RemoteHeartbeat("f0", settled=1)])
    seen = ledger.workers.remote("f0")
    assert seen is not None
    assert (seen.running, seen.processed, seen.metadata) == (2, 4, {"a": "é"})
    kinds = [event.kind for event in ledger.events.list(worker_id="f3")]
    assert kinds == ["worker_started", "worker_suspect", "worker_recovered"]


def test_a_beat_tells_what_to_cancel_and_that_it_is_switched_off(ledger: Ledger) -> None:
    ledger.workers.register(foreign())
    job_id = put(ledger)
    [job] = run(ledger, "f1")
    ledger.jobs.cancel([job_id], "me")
    ledger.workers.disable("f1", "no", "me")
    [answer] = ledger.workers.record_heartbeats([RemoteHeartbeat("f1")])
    assert (answer.cancel, answer.disabled) == (((job.job_id, job.token),), True)


def test_a_beat_ends_the_silence(ledger: Ledger, meddler: Backdoor) -> None:
    ledger.workers.register(foreign())
    meddler.age_beat("f1", 3600)
    wait_for(lambda: ledger.recovery.watch()[0].silent_s >= 0.5, "the silence")
    began_s = time.monotonic()
    ledger.workers.record_heartbeats([RemoteHeartbeat("f1")])
    silent_s = ledger.recovery.watch()[0].silent_s
    assert silent_s <= time.monotonic() - began_s + 0.1, "no longer than since the beat, but for two clocks"


def test_a_late_beat_forgives_nobody(ledger: Ledger, meddler: Backdoor) -> None:
    ledger.workers.register(foreign("f1", "a"))
    ledger.workers.register(foreign("f2", "b"))
    meddler.age_beat("f1", 3600)
    meddler.age_beat("f2", 3600)
    wait_for(lambda: all(worker.silent_s >= 0.5 for worker in ledger.recovery.watch()), "the silence")
    ledger.workers.record_heartbeats([RemoteHeartbeat("f1")])
    silent = {worker.id: worker.silent_s for worker in ledger.recovery.watch()}
    assert silent["f2"] >= 0.5


def test_no_process_of_this_host_is_taken_for_it(ledger: Ledger) -> None:
    # Every fact of a process that is gone, on this very machine: it must prove nothing.
    ledger.workers.register(foreign(pid=999_999, pid_namespace=host.pid_namespace(), process_started="1"))
    [worker] = ledger.recovery.watch()
    witness = Observer(single_host=ledger.single_host)
    assert not witness.on_this_host(worker)
    assert witness.process_of(worker) is Process.UNKNOWN
    assert ledger.recovery.watch(host.hostname()) == []
    ledger.workers.register(birth("w1"))
    assert [seen.id for seen in ledger.recovery.peers_of("w1", host.hostname(), 10)] == []


def test_it_outlives_a_restart_of_this_machine_and_of_our_session(ledger: Ledger) -> None:
    ledger.workers.register(foreign(boot_id="another-boot"))
    reaper = Reaper(ledger, Recovery(), by="test")
    reaper.sweep(ticket=False)
    [worker] = ledger.recovery.watch()
    assert worker.state is WorkerState.ACTIVE
    assert not reaper.observer.rebooted(worker)
    assert worker.silent_s < LONG_S
    ledger.workers.record_heartbeats([RemoteHeartbeat("f1")])
    assert ledger.recovery.watch()[0].silent_s < 5


def test_a_round_looks_at_those_alone_of_whom_there_is_something_to_judge(ledger: Ledger, meddler: Backdoor) -> None:
    for worker_id in ("well", "holds", "short", "silent", "suspect", "dead", "stopped", "missing"):
        ledger.workers.register(foreign(worker_id, f"name-of-{worker_id}"))
    ledger.workers.register(birth("python"))
    for worker_id, timeout_s in (("holds", None), ("short", 0.2), ("dead", None)):
        put(ledger, heartbeat_timeout_s=timeout_s)
        run(ledger, worker_id)
    ledger.recovery.declare_dead("suspect", verdict(WorkerState.SUSPECT), GuardNone())
    ledger.recovery.declare_dead("dead", verdict(), GuardNone())
    ledger.workers.stop("stopped")
    meddler.age_beat("silent", 2 * LONG_S)
    meddler.age_beat("short", 3600)
    wait_for(lambda: {w.id: w.silent_s for w in ledger.recovery.watch()}["short"] >= 0.2, "the silence")
    workers, well = ledger.recovery.to_judge()
    seen = {worker.id: worker for worker in ledger.recovery.watch()}
    for worker in workers:
        # The same words of the same worker, but for the time that has passed since.
        assert (worker.held, worker.waits_for_s, worker.shortest_s, worker.state, worker.session) == (
            seen[worker.id].held,
            seen[worker.id].waits_for_s,
            seen[worker.id].shortest_s,
            seen[worker.id].state,
            seen[worker.id].session,
        )
    judged = {worker.id for worker in workers}
    # A database that was started a moment ago forgives a longer silence than its own age.
    assert judged | {"silent"} == {"short", "silent", "suspect", "dead", "python"}
    assert well == len([worker for worker in seen.values() if worker.id not in judged])


def test_it_is_dead_when_its_own_lease_is_over_and_not_before(ledger: Ledger, meddler: Backdoor) -> None:
    ledger.workers.register(foreign("f1", "patient"))
    ledger.workers.register(foreign("f2", "tight", suspect_after_s=0.2, running_stale_after_s=0.2))
    put(ledger)
    [job] = claim_jobs(ledger, "f2")
    meddler.age_beat("f2", 3600)
    wait_for(lambda: {w.id: w.silent_s for w in ledger.recovery.watch()}["f2"] >= 0.5, "the silence")
    reaper = Reaper(ledger, Recovery(), by="test")
    reaper.sweep(ticket=False)
    states = {worker.id: worker.state for worker in ledger.workers.list()}
    assert states == {"f1": WorkerState.ACTIVE, "f2": WorkerState.DEAD}
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert record.state == "pending"


def test_what_it_says_of_its_health_does_not_count(ledger: Ledger) -> None:
    ledger.workers.register(foreign("f1", metadata={"health": {"weight": 10 * DISABLE_AT, "jobs": 50}}))
    assert [standing.health for standing in ledger.workers.standings()] == [Health()]


def test_whoever_speaks_for_many_hears_every_word(ledger: Ledger, open_again: OpenLedger) -> None:
    bell = ledger.workers.listen_all()
    wanted = {"queue:any", "worker:f7", "workers"}
    heard: set[str] = set()
    try:
        open_again().notify(wanted)
        deadline_s = time.monotonic() + 20
        while heard != wanted and time.monotonic() < deadline_s:
            heard |= bell.wait(1.0)
    finally:
        bell.close()
    assert heard == wanted


def test_a_listener_is_heard_at_once_by_a_process_that_had_rung_before(ledger: Ledger) -> None:
    ledger.notify(["queue:before"])
    bell = ledger.workers.listen_all()
    try:
        ledger.notify(["worker:f7"])
        assert "worker:f7" in bell.wait(20.0)
    finally:
        bell.close()


def test_a_listener_that_was_killed_is_forgotten_by_the_next(open_again: OpenLedger, ledger: Ledger) -> None:
    ledger.workers.listen_all().close()
    bell = open_again().workers.listen_all()
    try:
        ledger.notify(["queue:a"])
        assert "queue:a" in bell.wait(20.0)
    finally:
        bell.close()


@pytest.mark.parametrize("living", [True, False])
def test_clients_can_enqueue_what_only_it_knows(ledger: Ledger, living: bool) -> None:
    ledger.workers.register(foreign(tasks=(TaskRecord("resize", "images", b"{}"),)))
    if not living:
        ledger.workers.stop("f1")
    assert TaskRecord("resize", "images", b"{}") in ledger.queues.tasks()


def watchdog(url: str) -> Watchdog:
    watched = Watched(ProgressClock(), ProgressClock(), ProgressClock(), lambda: False, lambda: False)
    return Watchdog("w1", Settings(url=url), watched, SdNotifier())


def test_the_last_words_stand_in_the_ledger(ledger: Ledger, url: str) -> None:
    ledger.workers.register(birth())
    watchdog(url)._last_words("alive but doing nothing: its floor has not gone round for 60s")
    [worker] = ledger.workers.list()
    assert worker.state is WorkerState.DEAD
    assert worker.verdict is not None
    assert (worker.verdict.detector, worker.verdict.by) == (Detector.WATCHDOG, "w1")
    assert any("its floor has not gone round" in event.message for event in ledger.events.list(worker_id="w1"))
