"""Alerts reach those who asked for them: gathered, once each, whatever becomes of senders and targets."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth, failure, put, run, turn
from tests.contract.victims import VICTIMS, registered_victims
from tests.fleet import wait_for
from tests.receiver import SECRET, Post, Receiver, receiving

from unstuck import App
from unstuck.config import Alerts, Recovery, Settings
from unstuck.domain import sweeping
from unstuck.domain.cursor import Cursor
from unstuck.notify.alerts import conditions, sender
from unstuck.notify.alerts.roster import look_at_targets
from unstuck.notify.alerts.sender import AlertSender
from unstuck.reaper.sweep import Reaper
from unstuck.store.contract import Ledger
from unstuck.store.postgres.cursors import cursor_values
from unstuck.store.postgres.ledger import PostgresLedger

QUICK: dict[str, Any] = {"webhook_secret": SECRET, "allow_private": True, "batch_window": "200ms", "min_interval": "0s"}
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
                lambda: all(view.known for view in look_at_targets(ledger, settings.alerts)), "every target is known"
            )
            return started

        yield start


def told(posts: list[Post]) -> list[str]:
    """Give the messages of all alerts in these posts, those of a repeated delivery once."""
    once = {post.delivery: post.body for post in posts}
    return [alert["message"] for body in once.values() for alert in body["alerts"]]


def tell(ledger: Ledger, message: str) -> None:
    ledger.note_event("crash_loop", message, about="host-1")


def test_five_hundred_workers_killed_at_once_are_one_message(
    ledger: Ledger, start: StartSender, receiver: Receiver
) -> None:
    with registered_victims(ledger):
        # Not of the reaper: none runs here, and to register so many can take as long as makes that worth a word.
        start(receiver.url, batch_window="3s", min_interval="1s", kinds=("worker_died", "crash_loop"))
    buried = Reaper(ledger, Recovery(), by="reaper").round(ticket=False).buried
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
        lambda: [view for view in look_at_targets(ledger, rules) if view.failures], "the failure is written down"
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
    ledger.register(birth())
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
    ledger.register(birth("sleepy", suspect_after_s=0.2))
    start(receiver.url, unserved_after="100ms", remind_every="1h")

    def kinds() -> list[str]:
        return sorted(event.kind for event in ledger.events() if event.kind not in ("worker_started", "worker_stopped"))

    wait_for(lambda: kinds() == ["heartbeat_late", "no_workers"], "both began")
    assert {record.about for record in ledger.conditions()} == {"lonely", "sleepy"}
    ledger.register(birth("helper", queues=("lonely",), suspect_after_s=600.0))
    ledger.retire("sleepy")
    wait_for(lambda: len(kinds()) == 4, "both ended")
    assert kinds() == ["heartbeat_late", "heartbeat_late_over", "no_workers", "no_workers_over"]
    wait_for(lambda: len(told(receiver.posts)) == 4, "all of it was told")
    lonely = [alert for post in receiver.posts for alert in post.body["alerts"] if alert["kind"] == "no_workers"]
    assert [(alert["phase"], alert["queue"]) for alert in lonely] == [("begun", "lonely"), ("over", "lonely")]
    assert lonely[0]["next"] == "Start one with `unstuck worker module:app --queues lonely`."
    assert ledger.conditions() == []


def test_an_old_backlog_and_a_missing_reaper_begin_and_end(
    ledger: Ledger, start: StartSender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "CONDITIONS_S", 0.2)
    monkeypatch.setattr(sweeping, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sweeping, "ROUNDS_MISSED", 0.1)
    job_id = put(ledger)
    ledger.register(birth("busy", suspect_after_s=600.0))
    start(receiver.url, backlog_age="100ms")

    def kinds() -> list[str]:
        return sorted(event.kind for event in ledger.events() if event.kind.startswith(("backlog", "no_reaper")))

    wait_for(lambda: kinds() == ["backlog_old", "no_reaper"], "both began")
    ledger.cancel([job_id], "ann")
    ledger.take_ticket("sweep", 600.0)
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
        plan = connection.execute(b"explain " + pg_ledger.sql["events_to_tell"], values).fetchall()
    assert "events_to_tell" in str(plan), plan


def test_what_a_client_was_told_when_it_enqueued_is_no_second_alert(
    ledger: Ledger, start: StartSender, receiver: Receiver
) -> None:
    start(receiver.url)
    ledger.note_event("no_workers", "No living worker takes task 'add' from queue 'x'")
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
        wait_for(lambda: look_at_targets(pg_ledger, settings.alerts)[0].known, "the target is known")
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
