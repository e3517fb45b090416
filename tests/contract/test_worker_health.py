"""Workers and hosts are switched off and on: they hear it, everybody sees why, and the last one stays."""

import threading
from collections.abc import Callable

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import QUEUE, TASK, birth, claim_jobs, put, run, verdict

from unstuck.domain.states import WorkerState
from unstuck.domain.worker_health import Health, Standing
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import ClaimRequest, Heartbeat, Success, Turn, WorkerRecord

WELL_S = 600.0
SICK = {"weight": 9.0, "deaths": 9, "jobs": 8, "score": 0.36}


def join(ledger: Ledger, worker_id: str, **changes: object) -> bool:
    """Register a worker that does not fall silent within this test."""
    return ledger.workers.register(birth(worker_id, suspect_after_s=WELL_S, running_stale_after_s=WELL_S, **changes))


def record(ledger: Ledger, worker_id: str) -> WorkerRecord:
    return next(worker for worker in ledger.workers.list() if worker.id == worker_id)


def standing(ledger: Ledger, worker_id: str) -> Standing:
    return next(one for one in ledger.workers.standings() if one.id == worker_id)


def is_off(ledger: Ledger, worker_id: str) -> bool:
    return ledger.workers.beat(Heartbeat(worker_id, 0, 0)).disabled


def kinds(ledger: Ledger) -> list[str]:
    return [event.kind for event in ledger.events.list()]


def test_a_disabled_worker_hears_of_it_and_everybody_sees_why(ledger: Ledger) -> None:
    join(ledger, "w1")
    assert not is_off(ledger, "w1")
    assert ledger.workers.disable("w1", "bad memory", "ops")
    assert is_off(ledger, "w1")
    flag = record(ledger, "w1").disabled
    assert flag is not None
    assert (flag.reason, flag.by, flag.auto, flag.of_host) == ("bad memory", "ops", False, False)
    assert record(ledger, "w1").state is WorkerState.ACTIVE
    event = ledger.events.list(worker_id="w1")[-1]
    assert (event.kind, event.message) == ("worker_disabled", "Disabled by ops: bad memory")
    # Once is enough, and the first reason stands.
    assert not ledger.workers.disable("w1", "again", "ops")
    assert kinds(ledger).count("worker_disabled") == 1


def test_an_enabled_worker_is_told_and_its_old_health_is_forgotten(ledger: Ledger) -> None:
    join(ledger, "w1")
    assert not ledger.workers.enable("w1", "ops")
    ledger.workers.beat(Heartbeat("w1", 0, 0, metadata={"zone": "a", "health": SICK}))
    assert standing(ledger, "w1").health == Health(9.0, 9, 8, 0.36)
    ledger.workers.disable("w1", "sick", "ops")
    assert ledger.workers.enable("w1", "ops", "it was mended")
    assert not is_off(ledger, "w1")
    assert record(ledger, "w1").disabled is None
    assert record(ledger, "w1").metadata == {"zone": "a"}
    assert standing(ledger, "w1").health == Health()
    event = ledger.events.list(worker_id="w1")[-1]
    assert (event.kind, event.message) == ("worker_enabled", "Enabled by ops: it was mended")


def test_a_disabled_worker_gets_nothing_before_it_has_heard_of_it_and_hands_in_what_it_has(ledger: Ledger) -> None:
    join(ledger, "w1")
    put(ledger)
    (mine,) = run(ledger)
    put(ledger)
    ledger.workers.disable("w1", "sick", "ops")
    done = (Success(mine.job_id, mine.token, b"1"),)
    answer = ledger.workers.turn(Turn("w1", done=done, claim_request=ClaimRequest((QUEUE,), (TASK,), 5)))
    assert (answer.alive, answer.claimed, answer.superseded) == (True, (), frozenset())
    assert claim_jobs(ledger) == []
    ledger.workers.enable("w1", "ops")
    assert len(claim_jobs(ledger, "w1")) == 1
    ledger.workers.disable_host(record(ledger, "w1").host, "sick", "ops")
    put(ledger)
    assert claim_jobs(ledger) == []


def test_the_dead_can_not_be_switched_off(ledger: Ledger) -> None:
    join(ledger, "w1")
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert not ledger.workers.disable("w1", "sick", "ops")
    assert not ledger.workers.disable("nobody", "sick", "ops")


def test_a_disabled_host_takes_its_workers_with_it_and_those_not_born_yet(ledger: Ledger) -> None:
    assert not join(ledger, "w1", host="bad")
    assert not join(ledger, "w2", host="good")
    assert ledger.workers.disable_host("bad", "disk errors", "ops")
    assert not ledger.workers.disable_host("bad", "again", "ops")
    assert is_off(ledger, "w1")
    assert not is_off(ledger, "w2")
    assert join(ledger, "w3", host="bad")
    # Asked again after a lost answer.
    assert join(ledger, "w3", host="bad")
    assert is_off(ledger, "w3")
    flag = record(ledger, "w3").disabled
    assert flag is not None
    assert (flag.reason, flag.of_host) == ("disk errors", True)
    assert ledger.workers.enable_host("bad", "ops")
    assert not ledger.workers.enable_host("bad", "ops")
    assert not is_off(ledger, "w1")
    assert not join(ledger, "w4", host="bad")
    told = [event.message for event in ledger.events.list() if event.kind.startswith("host_")]
    assert told == ["Host 'bad' was disabled by ops: disk errors", "Host 'bad' was enabled by ops"]


def test_a_worker_that_was_switched_off_itself_stays_off_when_its_host_is_back(ledger: Ledger) -> None:
    join(ledger, "w1", host="bad")
    ledger.workers.disable("w1", "sick", "ops")
    ledger.workers.disable_host("bad", "disk errors", "ops")
    ledger.workers.enable_host("bad", "ops")
    assert is_off(ledger, "w1")


def test_to_enable_a_host_forgets_the_health_of_its_workers(ledger: Ledger) -> None:
    join(ledger, "w1", host="bad")
    ledger.workers.beat(Heartbeat("w1", 0, 0, metadata={"zone": "a", "health": SICK}))
    ledger.workers.disable_host("bad", "disk errors", "ops")
    ledger.workers.enable_host("bad", "ops")
    assert standing(ledger, "w1").health == Health()
    assert record(ledger, "w1").metadata == {"zone": "a"}


def test_the_dead_do_not_stand_among_those_who_are_judged(ledger: Ledger) -> None:
    join(ledger, "w1")
    join(ledger, "w2")
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert [one.id for one in ledger.workers.standings()] == ["w2"]


# Never the last one -------------------------------------------------------------------------------


def no_other(ledger: Ledger) -> None:
    pass


def other_queue(ledger: Ledger) -> None:
    join(ledger, "w2", queues=("other",))


def other_task(ledger: Ledger) -> None:
    join(ledger, "w2", tasks=(TaskRecord("another", "default"),))


def draining(ledger: Ledger) -> None:
    join(ledger, "w2")
    ledger.workers.drain("w2")


def asked_to_stop(ledger: Ledger) -> None:
    join(ledger, "w2")
    ledger.workers.request("w2", "stop", "ops")


def suspect(ledger: Ledger) -> None:
    join(ledger, "w2")
    ledger.recovery.declare_dead("w2", verdict(WorkerState.SUSPECT), GuardNone())


def off_itself(ledger: Ledger) -> None:
    join(ledger, "w2")
    ledger.workers.disable("w2", "sick", "ops")


def off_with_its_host(ledger: Ledger) -> None:
    join(ledger, "w2", host="bad")
    ledger.workers.disable_host("bad", "sick", "ops")


@pytest.mark.parametrize(
    "others", [no_other, other_queue, other_task, draining, asked_to_stop, suspect, off_itself, off_with_its_host]
)
def test_the_last_one_that_serves_a_queue_is_not_switched_off_by_itself(
    ledger: Ledger, others: Callable[[Ledger], None]
) -> None:
    join(ledger, "w1", host="good")
    others(ledger)
    assert not ledger.workers.disable("w1", "sick", "reaper", auto=True)
    assert not is_off(ledger, "w1")
    # An operator may.
    assert ledger.workers.disable("w1", "maintenance", "ops")


def test_a_silent_worker_is_nobody_to_rely_on(ledger: Ledger, meddler: Backdoor) -> None:
    join(ledger, "w1")
    ledger.workers.register(birth("w2", suspect_after_s=0.001))
    meddler.age_beat("w2", 3600)
    assert not ledger.workers.disable("w1", "sick", "reaper", auto=True)


def test_where_another_is_left_the_sick_one_is_switched_off(ledger: Ledger) -> None:
    join(ledger, "w1", host="bad")
    join(ledger, "w2", host="good")
    assert ledger.workers.disable("w1", "sick", "reaper", auto=True)
    flag = record(ledger, "w1").disabled
    assert flag is not None
    assert flag.auto
    assert not ledger.workers.disable("w2", "sick", "reaper", auto=True)


def test_two_who_switch_off_two_at_the_same_moment_leave_one(ledger: Ledger, open_again: OpenLedger) -> None:
    ledgers = [open_again(), open_again()]
    for pair in range(5):
        names = (f"a{pair}", f"b{pair}")
        for name in names:
            join(ledger, name, queues=(f"q{pair}",))
        gate = threading.Barrier(2)
        done: dict[str, bool] = {}

        def off(one: Ledger, name: str, gate: threading.Barrier = gate, done: dict[str, bool] = done) -> None:
            one.workers.standings()
            gate.wait(20)
            done[name] = one.workers.disable(name, "sick", "reaper", auto=True)

        threads = [threading.Thread(target=off, args=pairing) for pairing in zip(ledgers, names, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(done.values()) == [False, True]


def test_what_an_operator_switches_off_the_reaper_may_not_take_back(ledger: Ledger) -> None:
    join(ledger, "w1")
    join(ledger, "w2")
    assert ledger.workers.disable("w1", "its runners keep dying", "reaper", auto=True)
    assert ledger.workers.disable("w1", "its disk is broken", "ops")
    # The reaper comes again, and changes nothing.
    assert not ledger.workers.disable("w1", "its runners keep dying", "reaper", auto=True)
    flag = record(ledger, "w1").disabled
    assert flag is not None
    assert (flag.by, flag.auto) == ("ops", False)
