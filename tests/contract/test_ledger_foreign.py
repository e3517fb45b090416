"""Workers that come through another door: judged by their lease alone, found by name, beaten many at once."""

import threading
import time

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth, claim, put, run, verdict
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck import host
from unstuck.config import Recovery
from unstuck.domain.health import DISABLE_AT, Health, should_disable_host
from unstuck.domain.liveness import Process
from unstuck.domain.states import Door, WorkerState
from unstuck.reaper.evidence import Witness
from unstuck.reaper.sweep import Reaper
from unstuck.store.contract import Ledger
from unstuck.store.records import ForeignPulse, GuardNone, TaskRecord, WorkerBirth

LONG_S = 600.0


def foreign(worker_id: str = "f1", name: str = "node", **changes: object) -> WorkerBirth:
    """A foreign worker that names this very machine as its own, the worst that it can do."""
    facts: dict[str, object] = {
        "name": name,
        "door": Door.HTTP,
        "owner": "tok",
        "pid": 0,
        "pid_namespace": "",
        "process_started": "",
        "suspect_after_s": LONG_S,
        "running_stale_after_s": LONG_S,
    }
    return birth(worker_id, **{**facts, **changes})


def test_it_is_found_by_id_and_by_name_and_python_workers_are_not(ledger: Ledger, w1: str) -> None:
    ledger.register(foreign(metadata={"hostname": "far"}))
    by_id, by_name = ledger.foreign_worker("f1"), ledger.foreign_worker_named("node")
    assert by_id is not None
    assert by_name is not None
    assert (by_id.id, by_id.door, by_id.owner, by_id.metadata) == ("f1", Door.HTTP, "tok", {"hostname": "far"})
    assert by_name.id == "f1"
    assert ledger.foreign_worker("w1") is None
    assert ledger.foreign_worker_named("name-of-w1") is None
    assert {worker.id: worker.door for worker in ledger.workers()} == {"w1": Door.PYTHON, "f1": Door.HTTP}


def test_a_name_leads_to_one_living_worker_and_to_the_last_when_none_lives(ledger: Ledger) -> None:
    ledger.register(foreign("f1"))
    ledger.register(foreign("f2", tasks=(TaskRecord("stolen", "default"),)))
    assert ledger.foreign_worker("f2") is None
    assert "stolen" not in {task.name for task in ledger.tasks()}
    ledger.condemn("f1", verdict(), GuardNone())
    found = ledger.foreign_worker_named("node")
    assert found is not None
    assert (found.id, found.state) == ("f1", WorkerState.DEAD)
    ledger.register(foreign("f2"))
    found = ledger.foreign_worker_named("node")
    assert found is not None
    assert (found.id, found.state) == ("f2", WorkerState.ACTIVE)


def test_of_many_that_register_one_name_at_once_one_lives(ledger: Ledger, open_again: OpenLedger) -> None:
    ledgers = [open_again() for _ in range(4)]
    threads = [threading.Thread(target=other.register, args=(foreign(f"f{n}"),)) for n, other in enumerate(ledgers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.workers()) == 1


def test_many_beats_are_answered_in_their_order(ledger: Ledger, meddler: Meddler, w1: str) -> None:
    for n in range(4):
        ledger.register(foreign(f"f{n}", f"node-{n}"))
    ledger.condemn("f1", verdict(), GuardNone())
    ledger.retire("f2")
    ledger.condemn("f3", verdict(WorkerState.SUSPECT), GuardNone())
    ledger.request("f0", "drain", "me")
    answers = ledger.beat_foreign(
        [
            ForeignPulse("f3"),
            ForeignPulse("f1"),
            ForeignPulse("f0", running=2, settled=3, metadata={"a": "é"}),
            ForeignPulse("f2"),
            ForeignPulse("nobody"),
            ForeignPulse("w1"),
        ]
    )
    assert [answer.state for answer in answers] == [
        *(WorkerState.ACTIVE, WorkerState.DEAD, WorkerState.ACTIVE),
        *(WorkerState.STOPPED, WorkerState.DEAD, WorkerState.DEAD),
    ]
    assert (answers[0].was_suspect, answers[2].request) == (True, "drain")
    ledger.beat_foreign([ForeignPulse("f0", settled=1)])
    seen = ledger.foreign_worker("f0")
    assert seen is not None
    assert (seen.running, seen.processed, seen.metadata) == (2, 4, {"a": "é"})
    kinds = [event.kind for event in ledger.events(worker_id="f3")]
    assert kinds == ["worker_started", "worker_suspect", "worker_recovered"]


def test_a_beat_tells_what_to_cancel_and_that_it_is_switched_off(ledger: Ledger) -> None:
    ledger.register(foreign())
    job_id = put(ledger)
    [job] = run(ledger, "f1")
    ledger.cancel([job_id], "me")
    ledger.disable("f1", "no", "me")
    [answer] = ledger.beat_foreign([ForeignPulse("f1")])
    assert (answer.cancel, answer.disabled) == (((job.job_id, job.token),), True)


def test_a_beat_ends_the_silence(ledger: Ledger, meddler: Meddler) -> None:
    ledger.register(foreign())
    meddler.age_beat("f1", 3600)
    wait_for(lambda: ledger.watch()[0].silent_s >= 0.5, "the silence")
    began_s = time.monotonic()
    ledger.beat_foreign([ForeignPulse("f1")])
    silent_s = ledger.watch()[0].silent_s
    assert silent_s <= time.monotonic() - began_s + 0.1, "no longer than since the beat, but for two clocks"


def test_a_late_beat_forgives_nobody(ledger: Ledger, meddler: Meddler) -> None:
    ledger.register(foreign("f1", "a"))
    ledger.register(foreign("f2", "b"))
    meddler.age_beat("f1", 3600)
    meddler.age_beat("f2", 3600)
    wait_for(lambda: all(worker.silent_s >= 0.5 for worker in ledger.watch()), "the silence")
    ledger.beat_foreign([ForeignPulse("f1")])
    silent = {worker.id: worker.silent_s for worker in ledger.watch()}
    assert silent["f2"] >= 0.5


def test_no_process_of_this_host_is_taken_for_it(ledger: Ledger) -> None:
    # Every fact of a process that is gone, on this very machine: it must prove nothing.
    ledger.register(foreign(pid=999_999, pid_namespace=host.pid_namespace(), process_started="1"))
    [worker] = ledger.watch()
    witness = Witness(one_host=ledger.one_host)
    assert not witness.is_neighbour(worker)
    assert witness.process_of(worker) is Process.UNKNOWN
    assert ledger.watch(host.hostname()) == []
    ledger.register(birth("w1"))
    assert [seen.id for seen in ledger.ring_of("w1", host.hostname(), 10)] == []


def test_it_outlives_a_restart_of_this_machine_and_of_our_session(ledger: Ledger) -> None:
    ledger.register(foreign(boot_id="another-boot"))
    reaper = Reaper(ledger, Recovery(), by="test")
    reaper.round(ticket=False)
    [worker] = ledger.watch()
    assert worker.state is WorkerState.ACTIVE
    assert not reaper.witness.rebooted(worker)
    assert worker.silent_s < LONG_S
    ledger.beat_foreign([ForeignPulse("f1")])
    assert ledger.watch()[0].silent_s < 5


def test_a_round_looks_at_those_alone_of_whom_there_is_something_to_judge(ledger: Ledger, meddler: Meddler) -> None:
    for worker_id in ("well", "holds", "short", "silent", "suspect", "dead", "stopped", "missing"):
        ledger.register(foreign(worker_id, f"name-of-{worker_id}"))
    ledger.register(birth("python"))
    for worker_id, timeout_s in (("holds", None), ("short", 0.2), ("dead", None)):
        put(ledger, heartbeat_timeout_s=timeout_s)
        run(ledger, worker_id)
    ledger.condemn("suspect", verdict(WorkerState.SUSPECT), GuardNone())
    ledger.condemn("dead", verdict(), GuardNone())
    ledger.retire("stopped")
    meddler.age_beat("silent", 2 * LONG_S)
    meddler.age_beat("short", 3600)
    wait_for(lambda: {w.id: w.silent_s for w in ledger.watch()}["short"] >= 0.2, "the silence")
    workers, well = ledger.to_judge()
    seen = {worker.id: worker for worker in ledger.watch()}
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


def test_it_is_dead_when_its_own_lease_is_over_and_not_before(ledger: Ledger, meddler: Meddler) -> None:
    ledger.register(foreign("f1", "patient"))
    ledger.register(foreign("f2", "tight", suspect_after_s=0.2, running_stale_after_s=0.2))
    put(ledger)
    [job] = claim(ledger, "f2")
    meddler.age_beat("f2", 3600)
    wait_for(lambda: {w.id: w.silent_s for w in ledger.watch()}["f2"] >= 0.5, "the silence")
    reaper = Reaper(ledger, Recovery(), by="test")
    reaper.round(ticket=False)
    states = {worker.id: worker.state for worker in ledger.workers()}
    assert states == {"f1": WorkerState.ACTIVE, "f2": WorkerState.DEAD}
    record = ledger.job(job.job_id)
    assert record is not None
    assert record.state == "pending"


def test_its_deaths_and_its_word_on_its_health_weigh_on_no_host(ledger: Ledger) -> None:
    sick = Health(weight=10 * DISABLE_AT, deaths=50, jobs=50)
    for n in range(8):
        ledger.register(foreign(f"f{n}", f"n{n}", metadata={"health": {"weight": sick.weight, "jobs": 50}}))
        ledger.condemn(f"f{n}", verdict(), GuardNone())
    ledger.register(birth("w1", host="elsewhere"))
    fleet = ledger.standings(LONG_S)
    assert {standing.health.weight for standing in fleet} == {0.0}
    assert should_disable_host(host.hostname(), fleet) is None


def test_whoever_speaks_for_many_hears_every_word(ledger: Ledger, open_again: OpenLedger) -> None:
    bell = ledger.overhear()
    wanted = {"queue:any", "worker:f7", "workers"}
    heard: set[str] = set()
    try:
        open_again().ring(wanted)
        deadline_s = time.monotonic() + 20
        while heard != wanted and time.monotonic() < deadline_s:
            heard |= bell.wait(1.0)
    finally:
        bell.close()
    assert heard == wanted


def test_a_listener_is_heard_at_once_by_a_process_that_had_rung_before(ledger: Ledger) -> None:
    ledger.ring(["queue:before"])
    bell = ledger.overhear()
    try:
        ledger.ring(["worker:f7"])
        assert "worker:f7" in bell.wait(20.0)
    finally:
        bell.close()


def test_a_listener_that_was_killed_is_forgotten_by_the_next(open_again: OpenLedger, ledger: Ledger) -> None:
    ledger.overhear().close()
    bell = open_again().overhear()
    try:
        ledger.ring(["queue:a"])
        assert "queue:a" in bell.wait(20.0)
    finally:
        bell.close()


@pytest.mark.parametrize("living", [True, False])
def test_clients_can_enqueue_what_only_it_knows(ledger: Ledger, living: bool) -> None:
    ledger.register(foreign(tasks=(TaskRecord("resize", "images", b"{}"),)))
    if not living:
        ledger.retire("f1")
    assert TaskRecord("resize", "images", b"{}") in ledger.tasks()
