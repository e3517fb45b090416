"""Every event is delivered, in whatever order transactions commit, or the reader is told of a gap.

On PostgreSQL an event gets its number before its transaction commits. So events appear behind the place that a reader
has reached, and a place may come from a history that a failover or a restore has replaced.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import apsw
import httpx
import psycopg
import pytest
from tests.contract.test_alerts import StartSender, receiver, start, told
from tests.contract.test_events import Reader, feed, readers
from tests.support.builders import new_job
from tests.support.fleet import wait_for
from tests.support.http_server import serve, serving
from tests.support.stored_workers import VICTIMS, Victim, kill_all, registered_victims
from tests.support.webhook_receiver import Receiver

from unstuck import App, Event
from unstuck.config import Recovery
from unstuck.domain.events import EventKind
from unstuck.http.dashboard.snapshot import RecentEvents
from unstuck.ledger.contract import Ledger
from unstuck.notify.feed import EventFeed
from unstuck.notify.subscriptions import JobSubscription
from unstuck.recovery.reap import Reaper

__all__ = ["feed", "readers", "receiver", "start"]


LATE = 600
SQL = "insert into unstuck.events (kind, job_id, about, message) values ('crash_loop', %s, 'host', %s)"
only_postgresql = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@contextmanager
def uncommitted(url: str, count: int = LATE, job_id: int | None = None) -> Iterator[psycopg.Connection]:
    """Write events in a transaction that stays open, with one event of somebody else among them and one behind."""
    with psycopg.connect(url) as slow, psycopg.connect(url, autocommit=True) as quick:
        for number in range(count):
            slow.execute(SQL, (job_id, f"late {number}"))
            if number == count // 2:
                quick.execute(SQL, (job_id, "between"))
        quick.execute(SQL, (job_id, "behind"))
        yield slow


def late_messages(count: int = LATE) -> list[str]:
    return [f"late {number}" for number in range(count)]


@only_postgresql
def test_six_hundred_events_that_commit_late_are_all_delivered(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader]
) -> None:
    ledger.events.write("failed", "before")
    readers.append(Reader(ledger, feed))
    with uncommitted(url) as slow:
        early = list(readers[0].read(2))
        assert [event.message for event in early] == ["between", "behind"]
        slow.commit()
    assert readers[0].messages(LATE + 2)[2:] == late_messages()
    # Both places of the reader know of the open transaction: nothing is missed by coming back, nothing told twice.
    readers += [Reader(ledger, EventFeed(lambda: ledger), after=event.cursor) for event in early]
    ledger.events.write("failed", "last")
    assert readers[1].messages(LATE + 2) == [*late_messages(), "behind", "last"]
    assert readers[2].messages(LATE + 1) == [*late_messages(), "last"]
    # So does a place in the middle of those that were committed late.
    readers.append(Reader(ledger, EventFeed(lambda: ledger), after=readers[0].got[2 + LATE // 2].cursor))
    assert readers[3].messages(LATE // 2)[-2:] == [f"late {LATE - 1}", "last"]
    assert not any(event.kind == EventKind.GAP for reader in readers for event in reader.got)


@only_postgresql
def test_late_commits_are_delivered_although_another_transaction_stays_open(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader]
) -> None:
    readers.append(Reader(ledger, feed))
    with psycopg.connect(url) as forgotten:
        forgotten.execute(SQL, (None, "never"))
        with uncommitted(url, 3) as slow:
            readers[0].read(2)
            slow.commit()
        assert sorted(readers[0].messages(5)) == sorted(["between", "behind", *late_messages(3)])
        # What is rolled back is waited for no longer.
        forgotten.rollback()
    newest = ledger.events.write("failed", "last")
    assert readers[0].read(6)[5].cursor.split(".")[0] == str(newest)
    wait_for(lambda: not feed.cursor.open, "no open transaction in the place")


@only_postgresql
def test_more_open_transactions_than_a_place_can_name_lose_nothing(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unstuck.domain.event_cursor.MAX_OPEN", 2)
    readers.append(Reader(ledger, feed))
    slow = [psycopg.connect(url) for _ in range(5)]
    for number, connection in enumerate(slow):
        connection.execute(SQL, (None, f"late {number}"))
    ledger.events.write("failed", "early")
    [early] = readers[0].read(1)
    for connection in slow:
        connection.commit()
        connection.close()
    readers.append(Reader(ledger, EventFeed(lambda: ledger), after=early.cursor))
    assert set(readers[1].messages(5)) >= set(late_messages(5))
    assert sorted(readers[0].messages(6)[1:]) == late_messages(5)


@only_postgresql
def test_who_follows_a_job_hears_what_is_committed_late(ledger: Ledger, url: str) -> None:
    from tests.support.builders import new_job

    job_id = ledger.jobs.enqueue([new_job()])[0].job_id
    reading = JobSubscription(lambda: ledger, job_id, frozenset({"crash_loop"}), None)
    with uncommitted(url, 20, job_id) as slow:
        assert [event.message for event in reading.take()] == ["between", "behind"]
        cursor = reading.cursor
        slow.commit()
    assert [event.message for event in reading.take()] == late_messages(20)
    from unstuck.domain.event_cursor import read_cursor

    again = JobSubscription(lambda: ledger, job_id, frozenset({"crash_loop"}), read_cursor(cursor))
    assert [event.message for event in again.take()] == late_messages(20)


@only_postgresql
def test_the_http_stream_delivers_what_commits_late(ledger: Ledger, url: str) -> None:
    with serving(url) as client:
        with client.stream("GET", "/api/v1/events?gather=0s", timeout=60) as response:
            got: list[tuple[str, str]] = []
            text = response.iter_lines()
            assert any(line.startswith("id:") for line in text)
            with uncommitted(url) as slow:
                while len(got) < 2:
                    got += _told(text)
                slow.commit()
            while len(got) < LATE + 2:
                got += _told(text)
        assert [message for _, message in got] == ["between", "behind", *late_messages()]
        headers = {"Last-Event-ID": got[1][0]}
        with client.stream("GET", "/api/v1/events?gather=0s", headers=headers, timeout=60) as response:
            again: list[tuple[str, str]] = []
            text = response.iter_lines()
            while len(again) < LATE:
                again += _told(text)
        assert [message for _, message in again] == late_messages()


def _told(lines: Iterator[str]) -> list[tuple[str, str]]:
    """Read until the end of one event; give its place and its message."""
    place = ""
    for line in lines:
        if line.startswith("id: "):
            place = line.removeprefix("id: ")
        elif line.startswith("data: "):
            return [(place, json.loads(line.removeprefix("data: "))["message"])]
    return []


@only_postgresql
def test_alerts_tell_what_commits_late(ledger: Ledger, url: str, start: StartSender, receiver: Receiver) -> None:
    sender = start(receiver.url)
    with uncommitted(url) as slow:
        wait_for(lambda: {"between.", "behind."} <= set(told(receiver.posts)), "what was committed at once")
        # Much later, and after many others: no time and no number of others makes it too late.
        for number in range(3):
            ledger.events.write("crash_loop", f"other {number}", about="host-1")
        wait_for(lambda: "other 2." in told(receiver.posts), "those that came behind")
        sender.stop()
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("update unstuck.alert_targets set state = jsonb_set(state::jsonb, '{moved_at}', '1')::text")
        start(receiver.url)
        slow.commit()
    wait_for(lambda: _count(receiver) == LATE + 5, "all of them")
    assert _count(receiver) == LATE + 5


def _count(receiver: Receiver) -> int:
    return sum(body["count"] for body in {post.delivery: post.body for post in receiver.posts}.values())


@only_postgresql
def test_the_dashboard_shows_what_commits_late(ledger: Ledger, url: str) -> None:
    book = RecentEvents()
    ledger.events.write("failed", "before")
    book.read(ledger)
    with uncommitted(url) as slow:
        book.read(ledger)
        slow.commit()
    for number in range(300):
        ledger.events.write("failed", str(number))
    book.read(ledger)
    assert {event.message for event in book.events} >= {"before", "between", "behind", *late_messages(), "299"}


def _rewrite(ledger: Ledger, url: str, count: int) -> None:
    """Replace the newest events by others with the same numbers, as a failover to a lagging standby does."""
    if url.startswith("sqlite"):
        db = apsw.Connection(url.removeprefix("sqlite:///"))
        db.execute("DELETE FROM unstuck_events WHERE message LIKE 'lost%'")
        db.execute(
            "UPDATE sqlite_sequence SET seq = (SELECT max(id) FROM unstuck_events) WHERE name = 'unstuck_events'"
        )
        db.close()
    else:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("delete from unstuck.events where message like 'lost%'")
            db.execute("select setval('unstuck.events_id_seq', (select max(id) from unstuck.events))")
    for number in range(count):
        ledger.events.write("failed", f"new {number}")


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_place_in_a_history_that_was_replaced_is_a_gap(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader], count: int
) -> None:
    ledger.events.write("failed", "kept")
    readers.append(Reader(ledger, feed))
    for number in range(3):
        ledger.events.write("failed", f"lost {number}")
    place = readers[0].read(3)[-1].cursor
    _rewrite(ledger, url, count)
    # Who comes back, and who had been there all the time.
    readers.append(Reader(ledger, EventFeed(lambda: ledger), after=place))
    assert readers[1].read(1)[0].kind == EventKind.GAP
    assert readers[0].read(4)[3].kind == EventKind.GAP
    ledger.events.write("failed", "last")
    wait_for(lambda: readers[1].read(1) and readers[1].got[-1].message == "last", "what comes behind the gap")
    wait_for(lambda: readers[0].read(1) and readers[0].got[-1].message == "last", "what comes behind the gap")


@only_postgresql
def test_a_ledger_moved_to_a_younger_server_goes_on_telling(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader]
) -> None:
    """A dump brings the numbers of transactions that its new server has not reached yet."""
    for number in range(3):
        ledger.events.write("failed", f"old {number}")
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("update unstuck.events set transaction_id = '999999999999'")
    readers.append(Reader(ledger, feed))
    ledger.events.write("failed", "new")
    assert readers[0].messages(1) == ["new"]
    ledger.maintenance.sweep_old(3600.0, 3600.0, 3600.0, 10)
    with psycopg.connect(url) as db:
        [(moved,)] = db.execute("select count(*) from unstuck.events where transaction_id = '0'").fetchall()
    assert moved == 3


@only_postgresql
def test_events_that_a_dump_brought_are_no_news(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader], start: StartSender, receiver: Receiver
) -> None:
    """Not even to those who begin before the first sweep, when nothing has happened in the new place yet."""
    job_id = ledger.jobs.enqueue([new_job()])[0].job_id
    for number in range(6):
        ledger.events.write("crash_loop", f"old {number}", job_id=job_id if number < 2 else None, about="host-1")
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("update unstuck.events set transaction_id = '999999999999'")
    readers.append(Reader(ledger, feed))
    of_job = JobSubscription(lambda: ledger, job_id, frozenset({"crash_loop"}), None)
    assert [event.message for event in of_job.take()] == ["old 0", "old 1"]
    start(receiver.url)
    while ledger.maintenance.sweep_old(3600.0, 3600.0, 3600.0, 2).more:
        # One who begins while they are moved.
        readers.append(Reader(ledger, EventFeed(lambda: ledger)))
    ledger.events.write("crash_loop", "new", job_id=job_id)
    ledger.events.write("crash_loop", "newest", about="host-1")
    for reader in readers:
        assert reader.messages(2) == ["new", "newest"]
    assert [event.message for event in of_job.take()] == ["new"]
    wait_for(lambda: receiver.posts, "a message")
    assert told(receiver.posts) == ["newest."]


GATHER = "3s"
"""Longer than a reaper on a busy machine pauses among five hundred burials."""


@pytest.fixture
def victims(ledger: Ledger) -> Iterator[list[Victim]]:
    with registered_victims(ledger) as victims:
        yield victims


def test_five_hundred_deaths_are_one_notification_for_each_client(
    ledger: Ledger, url: str, victims: list[Victim]
) -> None:
    with serve(url, env={"UNSTUCK_HTTP_REAP": "false"}) as served:
        streams = [Stream(served.url) for _ in range(2)]
        app = App(url)
        local: list[Event] = []
        threading.Thread(target=lambda: local.extend(iter_first(app)), daemon=True).start()
        wait_for(lambda: all(stream.begun for stream in streams), "both streams to begin")
        wait_for(lambda: app._runtime.services().feed._wakes, "a listener in this process")
        kill_all(victims)
        buried = Reaper(ledger, Recovery(), by="reaper").sweep(ticket=False).deaths
        assert buried.total() == VICTIMS
        ledger.events.write("worker_stopped", "the end")
        for stream in streams:
            wait_for(lambda stream=stream: stream.kinds()[-1:] == ["worker_stopped"], "the end of the stream")
            assert stream.kinds() == ["worker_dead", "worker_stopped"]
            [news] = [event for event in stream.events if event["kind"] == "worker_dead"]
            assert (news["count"], len(news["first"])) == (VICTIMS, 5)
            assert news["message"].endswith("and 495 more")
        wait_for(lambda: local, "the listener in this process")
        assert local[0].count == VICTIMS
        app.close()


def iter_first(app: App) -> list[Event]:
    return [next(iter(app.events(["worker_dead"], gather=GATHER)))]


class Stream:
    """A client that listens over HTTP, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.begun = False
        self.events: list[dict[str, object]] = []
        self._url = url
        threading.Thread(target=self._listen, daemon=True).start()

    def kinds(self) -> list[str]:
        return [str(event["kind"]) for event in self.events]

    def _listen(self) -> None:
        path = f"{self._url}/api/v1/events?kind=worker_dead,worker_stopped&gather={GATHER}"
        with httpx.Client(trust_env=False, timeout=60) as client, client.stream("GET", path) as response:
            try:
                for line in response.iter_lines():
                    self.begun = self.begun or line.startswith("id:")
                    if line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
            except httpx.HTTPError:
                pass  # The server ended with the test.
