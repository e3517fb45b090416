"""Alerts reach those who asked for them: gathered, once each, whatever becomes of senders and targets."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest
from tests.contract.conftest import OpenLedger
from tests.support.builders import birth, crash, failure, put, run, running, turn, verdict
from tests.support.fleet import wait_for
from tests.support.stored_workers import VICTIMS, registered_victims
from tests.support.webhook_receiver import SECRET, Post, Receiver, receiving

from unstuck import App
from unstuck.config import Alerts, Recovery, Settings
from unstuck.domain import conditions as domain_conditions
from unstuck.domain.event_cursor import Cursor, read_cursor
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import ConditionChange
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.postgres.events import cursor_values
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.notify.alerts import conditions, sender
from unstuck.notify.alerts.delivery import target_status
from unstuck.notify.alerts.sender import AlertSender
from unstuck.recovery.reap import Reaper

QUICK: dict[str, Any] = {"webhook_secret": SECRET, "batch_window": "200ms", "min_interval": "0s"}
StartSender = Callable[..., AlertSender]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def start(open_again: OpenLedger, ledger: Ledger, url: str) -> Iterator[StartSender]:
    """Start a sender on a ledger of its own, as another process would have; it has met its targets."""
    with ExitStack() as stack:

        def start(*targets: str, **rules: Any) -> AlertSender:
            settings = Settings(url=url, alerts=Alerts(targets=targets, **{**QUICK, **rules}))
            started = AlertSender(open_again(), settings)
            started.start()
            stack.callback(started.stop)
            wait_for(
                lambda: all(view.known for view in target_status(ledger, settings.alerts)), "every target is known"
            )
            return started

        yield start


def told(posts: list[Post]) -> list[str]:
    """Give the messages of all alerts in these posts, those of a repeated delivery once."""
    once = {post.delivery: post.body for post in posts}
    return [alert["message"] for body in once.values() for alert in body["alerts"]]


def tell(ledger: Ledger, message: str) -> None:
    ledger.events.write("crash_loop", message, about="host-1")


def test_five_hundred_workers_killed_at_once_are_one_message(
    ledger: Ledger, start: StartSender, receiver: Receiver
) -> None:
    with registered_victims(ledger):
        # Not of the reaper: none runs here, and to register so many can take as long as makes that worth a word.
        start(receiver.url, batch_window="3s", min_interval="1s", kinds=("worker_died", "crash_loop"))
    buried = Reaper(ledger, Recovery(), by="reaper").sweep(ticket=False).deaths
    assert buried.total() == VICTIMS
    wait_for(lambda: receiver.posts, "the message")
    tell(ledger, "the end")
    wait_for(lambda: len(receiver.posts) == 2, "the message after it")
    first, second = (post.body for post in receiver.posts)
    assert first["title"] == "Unstuck: 500 workers died"
    assert first["counts"] == {"worker_died": VICTIMS}
    assert first["causes"] == {"worker_died": {"its process no longer exists": VICTIMS}}
    assert "name-of-victim-000 on" in first["text"]
    assert "and 495 more" in first["text"]
    assert [alert["worker"] for alert in first["alerts"][:3]] == ["victim-000", "victim-001", "victim-002"]
    assert (len(first["alerts"]), first["left_out"]) == (100, 400)
    assert second["counts"] == {"crash_loop": 1}
    assert all(post.is_signed() for post in receiver.posts)


def test_a_new_target_is_not_told_of_history(ledger: Ledger, start: StartSender, receiver: Receiver) -> None:
    tell(ledger, "before")
    start(receiver.url)
    tell(ledger, "after")
    wait_for(lambda: receiver.posts, "a message")
    assert told(receiver.posts) == ["after."]


def test_what_comes_between_two_messages_is_gathered(ledger: Ledger, start: StartSender, receiver: Receiver) -> None:
    start(receiver.url, min_interval="3s")
    tell(ledger, "first")
    wait_for(lambda: receiver.posts, "the first message")
    for number in range(5):
        tell(ledger, f"later {number}")
    wait_for(lambda: len(told(receiver.posts)) == 6, "the rest")
    assert len(receiver.posts) == 2


def test_many_senders_tell_each_event_once(ledger: Ledger, start: StartSender, receiver: Receiver) -> None:
    for _ in range(3):
        start(receiver.url)
    for number in range(30):
        tell(ledger, f"alert {number}")
        if number % 6 == 5:
            # Some of them are still on their way when the next ones come.
            oldest = f"alert {number - 5}."
            wait_for(lambda oldest=oldest: oldest in told(receiver.posts), oldest)  # type: ignore[misc]
    wait_for(lambda: len(told(receiver.posts)) >= 30, "all of them")
    tell(ledger, "the end")
    wait_for(lambda: "the end." in told(receiver.posts), "the end")
    assert sorted(told(receiver.posts)) == sorted([*(f"alert {number}." for number in range(30)), "the end."])
    assert len(receiver.posts) == len(receiver.deliveries)


@pytest.mark.parametrize("trouble", ["hangs", "refuses"])
def test_a_target_in_trouble_delays_nobody_and_gets_what_it_missed_when_it_is_back(
    ledger: Ledger, start: StartSender, receiver: Receiver, trouble: str
) -> None:
    with receiving() as broken:
        if trouble == "hangs":
            broken.hangs = True
        else:
            broken.status = 503
        start(broken.url, receiver.url, send_timeout="1s")
        for number in range(3):
            # One at a time, each with a message of its own: the other one is at its second and third try meanwhile.
            tell(ledger, f"alert {number}")
            wait_for(lambda number=number: len(receiver.posts) == number + 1, f"message {number}")  # type: ignore[misc]
        assert told(receiver.posts) == ["alert 0.", "alert 1.", "alert 2."]
        wait_for(lambda: len(broken.posts) >= 2, "it is tried again")
        assert len(broken.deliveries) == 1
        broken.hangs, broken.status = False, 200
        wait_for(lambda: "alert 2." in told(broken.posts), "it was told of all of it")
        assert sorted(told(broken.posts)) == ["alert 0.", "alert 1.", "alert 2."]
        assert len(broken.deliveries) <= 2


def test_a_failing_target_is_shown_with_its_reason_and_without_its_secrets(
    ledger: Ledger, start: StartSender, receiver: Receiver
) -> None:
    receiver.status = 404
    start(receiver.url)
    rules = Alerts(targets=receiver.url, **QUICK)
    tell(ledger, "one")
    [view] = wait_for(
        lambda: [view for view in target_status(ledger, rules) if view.failures], "the failure is written down"
    )
    assert view.error == "it answered 404"
    assert view.waiting == 1
    assert view.failing_since is not None
    assert "token-in-the-path" not in str(view)


# Apprise loads all of its services at once, and some of them are older than the Python that they run on.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_apprise_carries_alerts_too(ledger: Ledger, start: StartSender, receiver: Receiver) -> None:
    start(f"json://127.0.0.1:{receiver.port}/hidden-token")
    tell(ledger, "by another way")
    wait_for(lambda: receiver.posts, "a message")
    [post] = receiver.posts
    assert post.body["title"] == "Unstuck: 1 crash loop"
    assert "by another way" in post.body["message"]


def test_a_workflow_that_waits_for_an_operator_is_told(
    ledger: Ledger, start: StartSender, receiver: Receiver, url: str
) -> None:
    start(receiver.url, kinds="workflow_paused")
    with closing(App(url)) as app:
        task = app.task(name="add")(len)
        flow = app.workflow("books")
        flow.add(task, "x").named("count").on_error("pause")
        run_id = flow.start().id
    ledger.workers.register(birth())
    (job,) = run(ledger)
    turn(ledger, endings=[failure(job)])
    wait_for(lambda: receiver.posts, "a message")
    [post] = receiver.posts
    assert post.body["title"] == "Unstuck: 1 workflow waits for an operator"
    assert post.body["alerts"][0]["job"] == run_id
    assert "Node count failed (TASK_FAILED) and waits for an operator" in post.body["text"]
    assert f"`unstuck workflows resume {run_id}`" in post.body["text"]


def test_conditions_begin_and_end_with_an_event_and_an_alert_each(
    ledger: Ledger, start: StartSender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "CONDITIONS_S", 0.2)
    monkeypatch.setattr(conditions, "LATE_FOR_S", 0.0)
    put(ledger, queue="lonely")
    ledger.workers.register(birth("sleepy", suspect_after_s=0.2))
    start(receiver.url, unserved_after="100ms", remind_every="1h")

    def kinds() -> list[str]:
        return sorted(
            event.kind for event in ledger.events.list() if event.kind not in ("worker_started", "worker_stopped")
        )

    wait_for(lambda: kinds() == ["heartbeat_late", "no_workers"], "both began")
    assert {record.about for record in ledger.events.conditions()} == {"lonely", "sleepy"}
    ledger.workers.register(birth("helper", queues=("lonely",), suspect_after_s=600.0))
    ledger.workers.stop("sleepy")
    wait_for(lambda: len(kinds()) == 4, "both ended")
    assert kinds() == ["heartbeat_late", "heartbeat_late_over", "no_workers", "no_workers_over"]
    wait_for(lambda: len(told(receiver.posts)) == 4, "all of it was told")
    lonely = [alert for post in receiver.posts for alert in post.body["alerts"] if alert["kind"] == "no_workers"]
    assert [(alert["phase"], alert["queue"]) for alert in lonely] == [("begun", "lonely"), ("over", "lonely")]
    assert lonely[0]["next"] == "Start one with `unstuck worker module:app --queues lonely`."
    assert ledger.events.conditions() == []


def test_an_old_backlog_and_a_missing_reaper_begin_and_end(
    ledger: Ledger, start: StartSender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "CONDITIONS_S", 0.2)
    monkeypatch.setattr(domain_conditions, "PATIENCE_S", 0.0)
    monkeypatch.setattr(domain_conditions, "ROUNDS_MISSED", 0.1)
    job_id = put(ledger)
    ledger.workers.register(birth("busy", suspect_after_s=600.0))
    start(receiver.url, backlog_age="100ms")

    def kinds() -> list[str]:
        return sorted(event.kind for event in ledger.events.list() if event.kind.startswith(("backlog", "no_reaper")))

    wait_for(lambda: kinds() == ["backlog_old", "no_reaper"], "both began")
    ledger.jobs.cancel([job_id], "ann")
    ledger.maintenance.take_ticket("sweep", 600.0)
    wait_for(lambda: len(kinds()) == 4, "both ended")
    assert kinds() == ["backlog_old", "backlog_old_over", "no_reaper", "no_reaper_over"]
    wait_for(lambda: len(told(receiver.posts)) == 4, "all of it was told")


def test_the_look_of_a_sender_does_not_read_what_jobs_go_through(pg_url: str, pg_ledger: PostgresLedger) -> None:
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute(
            "insert into unstuck.events (kind, job_id, message)"
            " select 'retrying', n, 'again' from generate_series(1, 20000) n"
        )
        connection.execute("analyze unstuck.events")
        tell(pg_ledger, "one")
        values = {
            "kinds": ["crash_loop"],
            "but": [],
            "limit": 2000,
            **cursor_values(Cursor()),
            "open": [],
            "begun": [],
            "begun_up_to": [],
        }
        plan = connection.execute(b"explain " + pg_ledger.db.sql["events_to_tell"], values).fetchall()
    assert "events_to_tell" in str(plan), plan


def test_what_a_client_was_told_when_it_enqueued_is_no_second_alert(
    ledger: Ledger, start: StartSender, receiver: Receiver
) -> None:
    start(receiver.url)
    ledger.events.write("no_workers", "No living worker takes task 'add' from queue 'x'")
    tell(ledger, "the end")
    wait_for(lambda: receiver.posts, "a message")
    assert told(receiver.posts) == ["the end."]


def test_an_event_that_commits_behind_a_later_one_is_told_all_the_same(
    pg_url: str, pg_ledger: Ledger, receiver: Receiver
) -> None:
    settings = Settings(url=pg_url, alerts=Alerts(targets=receiver.url, **QUICK))
    pg_ledger.migrate()
    started = AlertSender(pg_ledger, settings)
    started.start()
    try:
        wait_for(lambda: target_status(pg_ledger, settings.alerts)[0].known, "the target is known")
        with psycopg.connect(pg_url) as slow:
            slow.execute("insert into unstuck.events (kind, about, message) values ('crash_loop', 'h', 'slow')")
            tell(pg_ledger, "quick")
            wait_for(lambda: receiver.posts, "the quick one")
        wait_for(lambda: len(told(receiver.posts)) == 2, "the slow one too")
        tell(pg_ledger, "the end")
        wait_for(lambda: "the end." in told(receiver.posts), "the end")
    finally:
        started.stop()
    assert told(receiver.posts) == ["quick.", "slow.", "the end."]


LONG_S = 3600.0


def kinds(ledger: Ledger) -> list[str]:
    return [event.kind for event in ledger.events.list()]


def test_a_new_target_hears_of_what_happens_from_now_on(ledger: Ledger) -> None:
    ledger.events.write("crash_loop", "before")
    assert ledger.events.alert_target("t") is None
    ledger.events.add_alert_target("t")
    ledger.events.write("crash_loop", "after", about="host-1")
    ledger.events.add_alert_target("t")
    target = ledger.events.alert_target("t")
    assert target is not None
    assert target.state == "{}"
    [event] = ledger.events.for_alerts({"crash_loop"}, read_cursor(target.position), (), 10).events
    assert (event.message, event.about) == ("after", "host-1")
    assert target.newest.id == event.id
    assert abs(target.now_at - event.at) < 60


def test_who_decided_on_an_old_version_writes_nothing(ledger: Ledger) -> None:
    ledger.events.add_alert_target("t")
    target = ledger.events.alert_target("t")
    assert target is not None
    assert ledger.events.save_alert_target("t", target.version, "5.5.5", '{"a":1}')
    assert not ledger.events.save_alert_target("t", target.version, "9.9.9", '{"a":2}')
    now = ledger.events.alert_target("t")
    assert now is not None
    assert (now.position, now.state) == ("5.5.5", '{"a":1}')


def test_events_are_told_with_the_names_of_what_they_are_about(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ending = crash(job, event="quarantined", message="CRASHED_TOO_OFTEN: SIGSEGV")
    ledger.recovery.settle(w1, [ending], [], GuardNone())
    assert ledger.recovery.declare_dead(w1, verdict(evidence="no heartbeat for 9s"), GuardNone())
    jobs, dead = ledger.events.for_alerts({"quarantined", "worker_dead"}, Cursor(), (), 10).events
    assert (jobs.job_id, jobs.task, jobs.queue) == (job.job_id, "add", "default")
    assert (dead.worker_id, dead.worker_name) == (w1, "name-of-w1")
    assert dead.verdict is not None
    assert dead.verdict.evidence == "no heartbeat for 9s"
    assert ledger.events.for_alerts({"quarantined", "worker_dead"}, Cursor(), {jobs.id}, 10).events == [dead]
    assert ledger.events.for_alerts({"quarantined", "worker_dead"}, Cursor(), (), 1).events == [jobs]
    assert ledger.events.for_alerts({"worker_dead"}, Cursor(*dead.key), (), 10).events == []


def test_a_condition_begins_lasts_and_ends_with_one_event_each(ledger: Ledger) -> None:
    def step(name: str, remind_s: float = LONG_S) -> int:
        return ledger.events.change_conditions([ConditionChange(name, "backlog_old", "q", f"it is {name}")], remind_s)  # type: ignore[arg-type]

    assert step("seen") == step("seen") == 0
    [seen] = ledger.events.conditions()
    assert seen.begun_at is None
    assert [step("begun"), step("begun")] == [1, 0]
    [begun] = ledger.events.conditions()
    assert begun.begun_at is not None
    assert [step("lasting"), step("lasting", 0.0)] == [0, 1]
    assert [step("over"), step("over")] == [1, 0]
    assert ledger.events.conditions() == []
    assert kinds(ledger) == ["backlog_old", "backlog_old_still", "backlog_old_over"]
    # One that was only seen leaves without a word.
    assert step("seen") == step("over") == 0
    assert len(kinds(ledger)) == 3


def test_many_who_look_at_once_tell_of_a_condition_once(open_again: OpenLedger, ledger: Ledger) -> None:
    changes = [ConditionChange("begun", "no_workers", f"q{number}", "nobody") for number in range(20)]
    others = [open_again() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda one: one.events.change_conditions(changes, LONG_S), others))
    assert sum(written) == 20
    assert kinds(ledger) == ["no_workers"] * 20


def test_the_look_shows_queues_workers_and_whether_somebody_sweeps(ledger: Ledger, w1: str) -> None:
    put(ledger, queue="lonely")
    look = ledger.events.look_for_conditions()
    assert (look.unswept_s, look.held) == (None, False)
    [queue] = look.queues
    assert (queue.name, queue.ready) == ("lonely", 1)
    assert (look.living, look.able, look.served, look.check_interval_s) == (1, 1, frozenset({"default"}), None)
    assert look.eldest_s is not None
    assert 0 <= look.eldest_s < 60
    assert ledger.events.look_for_conditions(600.0).late == ()
    [late] = ledger.events.look_for_conditions(0.0).late
    assert (late.id, late.name, late.state) == (w1, "name-of-w1", WorkerState.ACTIVE)
    ledger.workers.register(birth("w2", metadata={"settings": {"check_interval_s": 7}}, queues=("mail",)))
    ledger.workers.register(birth("w3", metadata={"settings": {"check_interval_s": "odd"}}))
    ledger.workers.disable("w2", "so", "ann")
    look = ledger.events.look_for_conditions()
    assert (look.living, look.able, look.served, look.check_interval_s) == (3, 2, frozenset({"default"}), 7.0)
    running(ledger)
    ledger.maintenance.take_ticket("sweep", 30.0)
    look = ledger.events.look_for_conditions()
    assert (look.unswept_s, look.held) == (0.0, True)


def test_what_was_switched_off_by_itself_is_a_crash_loop_and_by_a_person_is_not(ledger: Ledger, w1: str) -> None:
    ledger.workers.register(birth("w2"))
    ledger.workers.register(birth("w3", host="elsewhere"))
    assert ledger.workers.disable(w1, "three deaths", "reaper", auto=True)
    assert ledger.workers.disable("w2", "I say so", "ann")
    assert ledger.workers.disable_host("nowhere", "I say so", "ann")
    found = ledger.events.for_alerts({"crash_loop"}, Cursor(), (), 10).events
    assert [(event.worker_id, event.about) for event in found] == [(w1, None)]
    assert "three deaths" in found[0].message
