"""What alerts stand on: targets are told from now on, cursors are fenced, conditions have one event per step."""

from concurrent.futures import ThreadPoolExecutor

from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth, crash, put, running, verdict

from unstuck.domain.cursor import Cursor, read_cursor
from unstuck.domain.states import WorkerState
from unstuck.store.contract import Ledger
from unstuck.store.records import ConditionChange, GuardNone

LONG_S = 3600.0


def kinds(ledger: Ledger) -> list[str]:
    return [event.kind for event in ledger.events()]


def test_a_new_target_hears_of_what_happens_from_now_on(ledger: Ledger) -> None:
    ledger.note_event("crash_loop", "before")
    assert ledger.alert_target("t") is None
    ledger.add_alert_target("t")
    ledger.note_event("crash_loop", "after", about="host-1")
    ledger.add_alert_target("t")
    target = ledger.alert_target("t")
    assert target is not None
    assert target.state == "{}"
    [event] = ledger.events_to_tell({"crash_loop"}, read_cursor(target.position), (), 10).events
    assert (event.message, event.about) == ("after", "host-1")
    assert target.newest.id == event.id
    assert abs(target.now_at - event.at) < 60


def test_who_decided_on_an_old_version_writes_nothing(ledger: Ledger) -> None:
    ledger.add_alert_target("t")
    target = ledger.alert_target("t")
    assert target is not None
    assert ledger.save_alert_target("t", target.version, "5.5.5", '{"a":1}')
    assert not ledger.save_alert_target("t", target.version, "9.9.9", '{"a":2}')
    now = ledger.alert_target("t")
    assert now is not None
    assert (now.position, now.state) == ("5.5.5", '{"a":1}')


def test_events_are_told_with_the_names_of_what_they_are_about(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ending = crash(job, event="quarantined", message="CRASHED_TOO_OFTEN: SIGSEGV")
    ledger.settle(w1, [ending], [], GuardNone())
    assert ledger.condemn(w1, verdict(evidence="no heartbeat for 9s"), GuardNone())
    jobs, dead = ledger.events_to_tell({"quarantined", "worker_dead"}, Cursor(), (), 10).events
    assert (jobs.job_id, jobs.task, jobs.queue) == (job.job_id, "add", "default")
    assert (dead.worker_id, dead.worker_name) == (w1, "name-of-w1")
    assert dead.verdict is not None
    assert dead.verdict.evidence == "no heartbeat for 9s"
    assert ledger.events_to_tell({"quarantined", "worker_dead"}, Cursor(), {jobs.id}, 10).events == [dead]
    assert ledger.events_to_tell({"quarantined", "worker_dead"}, Cursor(), (), 1).events == [jobs]
    assert ledger.events_to_tell({"worker_dead"}, Cursor(*dead.key), (), 10).events == []


def test_a_condition_begins_lasts_and_ends_with_one_event_each(ledger: Ledger) -> None:
    def step(name: str, remind_s: float = LONG_S) -> int:
        return ledger.change_conditions([ConditionChange(name, "backlog_old", "q", f"it is {name}")], remind_s)  # type: ignore[arg-type]

    assert step("seen") == step("seen") == 0
    [seen] = ledger.conditions()
    assert seen.begun_at is None
    assert [step("begun"), step("begun")] == [1, 0]
    [begun] = ledger.conditions()
    assert begun.begun_at is not None
    assert [step("lasting"), step("lasting", 0.0)] == [0, 1]
    assert [step("over"), step("over")] == [1, 0]
    assert ledger.conditions() == []
    assert kinds(ledger) == ["backlog_old", "backlog_old_still", "backlog_old_over"]
    # One that was only seen leaves without a word.
    assert step("seen") == step("over") == 0
    assert len(kinds(ledger)) == 3


def test_many_who_look_at_once_tell_of_a_condition_once(open_again: OpenLedger, ledger: Ledger) -> None:
    changes = [ConditionChange("begun", "no_workers", f"q{number}", "nobody") for number in range(20)]
    others = [open_again() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda one: one.change_conditions(changes, LONG_S), others))
    assert sum(written) == 20
    assert kinds(ledger) == ["no_workers"] * 20


def test_the_look_shows_queues_workers_and_whether_somebody_sweeps(ledger: Ledger, w1: str) -> None:
    put(ledger, queue="lonely")
    look = ledger.look_for_conditions()
    assert (look.unswept_s, look.held) == (None, False)
    [queue] = look.queues
    assert (queue.name, queue.ready) == ("lonely", 1)
    assert (look.living, look.able, look.served, look.check_interval_s) == (1, 1, frozenset({"default"}), None)
    assert look.eldest_s is not None
    assert 0 <= look.eldest_s < 60
    assert ledger.look_for_conditions(600.0).late == ()
    [late] = ledger.look_for_conditions(0.0).late
    assert (late.id, late.name, late.state) == (w1, "name-of-w1", WorkerState.ACTIVE)
    ledger.register(birth("w2", metadata={"settings": {"check_interval_s": 7}}, queues=("mail",)))
    ledger.register(birth("w3", metadata={"settings": {"check_interval_s": "odd"}}))
    ledger.disable("w2", "so", "ann")
    look = ledger.look_for_conditions()
    assert (look.living, look.able, look.served, look.check_interval_s) == (3, 2, frozenset({"default"}), 7.0)
    running(ledger)
    ledger.take_ticket("sweep", 30.0)
    look = ledger.look_for_conditions()
    assert (look.unswept_s, look.held) == (0.0, True)


def test_what_was_switched_off_by_itself_is_a_crash_loop_and_by_a_person_is_not(ledger: Ledger, w1: str) -> None:
    ledger.register(birth("w2"))
    ledger.register(birth("w3", host="elsewhere"))
    assert ledger.disable(w1, "three deaths", "reaper", auto=True)
    assert ledger.disable("w2", "I say so", "ann")
    assert ledger.disable_host("nowhere", "deaths", "reaper", auto=True)
    found = ledger.events_to_tell({"crash_loop"}, Cursor(), (), 10).events
    assert [(event.worker_id, event.about) for event in found] == [(w1, None), (None, "nowhere")]
    assert "three deaths" in found[0].message
