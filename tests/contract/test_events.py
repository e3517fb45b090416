"""The feed of events: in order where they come in order, complete where they do not, resumable, never slowed down."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from tests.support.builders import birth, claim_jobs, new_job, put, start
from tests.support.fleet import wait_for

from unstuck.domain.event_cursor import Cursor, read_cursor
from unstuck.domain.events import Event
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import WorkerVerdict
from unstuck.notify import feed as feeds
from unstuck.notify import subscriptions
from unstuck.notify.feed import EventFeed
from unstuck.notify.subscriptions import EventFilter, FeedSubscription, JobSubscription


class Reader:
    """Somebody who listens, and reads when told to."""

    def __init__(
        self, ledger: Ledger, feed: EventFeed, after: str | None = None, gather_s: float = 0.0, kinds: str = ""
    ):
        self.woken = threading.Event()
        cursor = None if after is None else read_cursor(after)
        choice = EventFilter(frozenset(kinds.split()))
        self.reading = FeedSubscription(feed, lambda: ledger, self.woken.set, choice, cursor, gather_s)
        self.got: list[Event] = []

    def read(self, count: int) -> list[Event]:
        def look() -> bool:
            self.got += self.reading.take()
            return len(self.got) >= count

        wait_for(look, f"{count} events")
        return self.got

    def messages(self, count: int) -> list[str]:
        return [event.message for event in self.read(count)]


@pytest.fixture
def feed(ledger: Ledger) -> EventFeed:
    return EventFeed(lambda: ledger)


@pytest.fixture
def readers(ledger: Ledger, feed: EventFeed) -> Iterator[list[Reader]]:
    made: list[Reader] = []
    yield made
    for reader in made:
        reader.reading.close()


def leave_behind(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let more happen after an event, whose place is given, than anybody is told who comes back to it."""
    monkeypatch.setattr(subscriptions, "MAX_BEHIND", 5)
    monkeypatch.setattr(subscriptions, "PAGE", 3)
    ledger.events.write("failed", "first")
    first = str(ledger.events.newest_cursor())
    for number in range(20):
        ledger.events.write("failed", str(number))
    return first


def test_a_reader_hears_what_happens_from_now_on(ledger: Ledger, feed: EventFeed, readers: list[Reader]) -> None:
    ledger.events.write("failed", "before")
    readers += [Reader(ledger, feed), Reader(ledger, feed, kinds="failed")]
    ledger.events.write("requeued", "one")
    ledger.events.write("failed", "two")
    assert readers[0].messages(2) == ["one", "two"]
    assert readers[1].messages(1) == ["two"]
    assert readers[0].woken.is_set()


def test_a_reader_that_comes_back_misses_nothing_and_hears_nothing_twice(
    ledger: Ledger, feed: EventFeed, readers: list[Reader]
) -> None:
    readers.append(Reader(ledger, feed))
    ledger.events.write("failed", "one")
    [event] = readers[0].read(1)
    readers[0].reading.close()
    for word in ("two", "three"):
        ledger.events.write("failed", word)
    readers.append(Reader(ledger, feed, after=event.cursor))
    ledger.events.write("failed", "four")
    assert readers[1].messages(3) == ["two", "three", "four"]
    # Another process has a feed of its own.
    elsewhere = EventFeed(lambda: ledger)
    readers.append(Reader(ledger, elsewhere, after=event.cursor))
    assert readers[2].messages(3) == ["two", "three", "four"]


def test_a_burst_is_one_event_with_the_right_count(ledger: Ledger, feed: EventFeed, readers: list[Reader]) -> None:
    readers.append(Reader(ledger, feed, gather_s=1.0))
    for number in range(12):
        ledger.events.write("worker_dead", f"Dead worker detected: w{number}", worker_id=f"w{number}")
    ledger.events.write("requeued", "one", job_id=5)
    dead, requeued = readers[0].read(2)
    assert (dead.kind, dead.count, len(dead.first)) == ("worker_dead", 12, 5)
    assert dead.message == "12 times worker_dead: w0, w1, w2, w3, w4 and 7 more"
    assert (requeued.count, requeued.message) == (1, "one")


def test_who_is_too_far_behind_is_told_of_the_gap(
    ledger: Ledger, feed: EventFeed, readers: list[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = leave_behind(ledger, monkeypatch)
    readers.append(Reader(ledger, feed, after=first))
    [gap] = readers[0].read(1)
    assert gap.kind == "gap"
    assert gap.count > 5
    ledger.events.write("failed", "new")
    assert readers[0].messages(2)[1] == "new"


def test_who_reads_too_slowly_is_told_of_the_gap(ledger: Ledger, readers: list[Reader]) -> None:
    feed = EventFeed(lambda: ledger)
    feed._events = type(feed._events)(maxlen=4)
    readers += [Reader(ledger, feed), Reader(ledger, feed)]
    for number in range(10):
        ledger.events.write("failed", str(number))
    wait_for(lambda: feed.read(0)[1] >= 10, "ten events taken in")
    got = readers[0].reading.take()
    assert [event.kind for event in got] == ["gap", "failed", "failed", "failed", "failed"]
    assert (got[0].count, got[1].message) == (6, "6")


def test_who_comes_back_after_a_burst_of_several_kinds_hears_nothing_twice_and_misses_nothing(
    ledger: Ledger, feed: EventFeed, readers: list[Reader]
) -> None:
    readers.append(Reader(ledger, feed, gather_s=1.0))
    before = readers[0].reading.cursor
    for number in range(6):
        ledger.events.write("failed" if number % 2 else "requeued", str(number))
    ledger.events.write("requeued", "last")
    first, last = readers[0].read(2)
    assert (first.count, last.count) == (4, 3)
    # Cut off between the two, somebody must hear the second kind again; after both, neither.
    assert first.cursor == before
    readers += [Reader(ledger, feed, after=first.cursor), Reader(ledger, feed, after=last.cursor)]
    ledger.events.write("failed", "new")
    assert readers[1].messages(8) == ["0", "1", "2", "3", "4", "5", "last", "new"]
    assert readers[2].messages(1) == ["new"]


@pytest.mark.parametrize(
    "place", ["1000000.1000000000.5", f"{2**63 - 1}.{2**63 - 1}.5", "1000000.1000000000.5.1", "1.1000000000.5.from7"]
)
def test_a_place_of_another_ledger_is_a_gap_and_no_silence(
    ledger: Ledger, feed: EventFeed, readers: list[Reader], place: str
) -> None:
    ledger.events.write("failed", "old")
    readers.append(Reader(ledger, feed, after=place))
    ledger.events.write("failed", "new")
    gap, new = readers[0].read(2)
    assert (gap.kind, new.message) == ("gap", "new")
    assert read_cursor(gap.cursor) != read_cursor(place)


def test_what_retention_removed_is_a_gap(ledger: Ledger, feed: EventFeed, readers: list[Reader]) -> None:
    ledger.events.write("failed", "the last that was heard")
    place = str(ledger.events.newest_cursor())
    ledger.events.write("failed", "missed")
    ledger.maintenance.sweep_old(3600.0, 0.0, 3600.0, 10)
    ledger.events.write("failed", "kept")
    readers.append(Reader(ledger, feed, after=place))
    gap, kept = readers[0].read(2)
    assert (gap.kind, kept.message) == ("gap", "kept")


def test_who_chose_what_seldom_happens_is_not_behind_for_the_rest(
    ledger: Ledger, feed: EventFeed, readers: list[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = leave_behind(ledger, monkeypatch)
    ledger.events.write("worker_dead", "rare")
    readers.append(Reader(ledger, feed, after=first, kinds="worker_dead"))
    assert readers[0].messages(1) == ["rare"]
    # Its place moves on with what it did not choose.
    ledger.events.write("failed", "last")
    newest = str(ledger.events.newest_cursor())

    def moved() -> bool:
        readers[0].reading.take()
        return readers[0].reading.cursor == newest

    wait_for(moved, "a place behind the last event")


def test_who_could_not_catch_up_leaves_nothing_behind(ledger: Ledger, feed: EventFeed, readers: list[Reader]) -> None:
    def away() -> Ledger:
        raise LedgerUnavailable("away")

    readers.append(Reader(ledger, feed))
    with pytest.raises(LedgerUnavailable):
        FeedSubscription(feed, away, lambda: None, EventFilter(), Cursor(1, 1))
    assert len(feed._wakes) == 1


def test_who_follows_a_job_outlives_an_outage(ledger: Ledger) -> None:
    job_id = ledger.jobs.enqueue([new_job()])[0].job_id
    up = True

    def sometimes() -> Ledger:
        if not up:
            raise LedgerUnavailable("away")
        return ledger

    reading = JobSubscription(sometimes, job_id, frozenset(), None)
    assert [event.kind for event in reading.take()] == ["enqueued"]
    up = False
    assert reading.take() == []
    ledger.events.write("requeued", "meanwhile", job_id=job_id)
    up = True
    assert [event.message for event in reading.take()] == ["meanwhile"]


def test_the_thread_ends_with_the_last_reader_and_begins_again(
    ledger: Ledger, feed: EventFeed, readers: list[Reader]
) -> None:
    readers.append(Reader(ledger, feed))
    readers[0].reading.close()
    wait_for(lambda: feed._thread is None, "the end of the thread")
    ledger.events.write("failed", "unheard")
    readers.append(Reader(ledger, feed))
    ledger.events.write("failed", "heard")
    assert readers[1].messages(1) == ["heard"]


def test_a_real_death_is_heard(ledger: Ledger, feed: EventFeed, readers: list[Reader]) -> None:
    ledger.workers.register(birth("w1"))
    readers.append(Reader(ledger, feed, kinds="worker_dead"))
    ledger.recovery.declare_dead(
        "w1", WorkerVerdict(WorkerState.DEAD, Detector.OPERATOR, "a test", 0.0, "test"), GuardNone()
    )
    [event] = readers[0].read(1)
    assert event.worker_id == "w1"


# Only on PostgreSQL: numbers are taken before the commit --------------------------------------------


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_an_event_that_commits_late_is_told_and_survives_a_reconnect(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader]
) -> None:
    sql = "insert into unstuck.events (kind, message) values ('failed', %s)"
    # So that the feed knows where the numbers are: other tests used some, and left no rows.
    ledger.events.write("failed", "before")
    readers.append(Reader(ledger, feed))
    with psycopg.connect(url) as slow:
        slow.execute(sql, ("late",))
        ledger.events.write("failed", "early")
        [early] = readers[0].read(1)
        assert early.message == "early"
        assert read_cursor(early.cursor).open, "the place must know of the open transaction"
        slow.commit()
        assert readers[0].messages(2) == ["early", "late"]
    # Who was cut off in between, and comes back to another process, hears of it too.
    readers.append(Reader(ledger, EventFeed(lambda: ledger), after=early.cursor))
    ledger.events.write("failed", "last")
    assert readers[1].messages(2) == ["late", "last"]
    assert readers[0].messages(3)[2] == "last"


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_a_number_that_was_rolled_back_holds_up_nobody(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader]
) -> None:
    readers.append(Reader(ledger, feed))
    with psycopg.connect(url) as other:
        other.execute("insert into unstuck.events (kind, message) values ('failed', 'never')")
        other.rollback()
    for number in range(3):
        ledger.events.write("failed", str(number))
        assert readers[0].messages(number + 1)[number:] == [str(number)]


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_a_burst_behind_a_number_that_was_rolled_back_is_told_at_once(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "PAGE", 5)
    readers.append(Reader(ledger, feed))
    with psycopg.connect(url) as other:
        other.execute("insert into unstuck.events (kind, message) values ('failed', 'never')")
        other.rollback()
    for number in range(30):
        ledger.events.write("failed", str(number))
    assert readers[0].messages(30) == [str(number) for number in range(30)]


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_what_is_about_to_be_committed_when_the_only_reader_comes_back_is_told(
    ledger: Ledger, url: str, feed: EventFeed, readers: list[Reader]
) -> None:
    ledger.events.write("failed", "first")
    first = str(ledger.events.newest_cursor())
    with psycopg.connect(url) as slow:
        slow.execute("insert into unstuck.events (kind, message) values ('failed', 'late')")
        ledger.events.write("failed", "early")
        readers += [Reader(ledger, feed, after=first), Reader(ledger, feed)]
        [early] = readers[0].read(1)
        slow.commit()
    assert readers[0].messages(2) == ["early", "late"]
    assert readers[1].messages(1) == ["late"]
    # Cut off before it came, it is told after all.
    readers.append(Reader(ledger, feed, after=early.cursor))
    assert readers[2].messages(1) == ["late"]


def test_an_event_is_written_and_read(ledger: Ledger) -> None:
    number = ledger.events.write("no_workers", "nobody is there", job_id=7, worker_id="w9")
    [event] = [event for event in ledger.events.list(limit=10) if event.kind == "no_workers"]
    assert (event.id, event.job_id, event.worker_id, event.message) == (number, 7, "w9", "nobody is there")


def test_a_glance_says_where_jobs_stand(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1"))
    first, second = put(ledger), put(ledger)
    [job] = claim_jobs(ledger, limit=1)
    start(ledger, [job])
    seen = {glance.job_id: glance for glance in ledger.jobs.positions([first, second, 999])}
    assert set(seen) == {first, second}
    assert (seen[first].state, seen[first].token, seen[first].worker_id) == (JobState.RUNNING, job.token, "w1")
    assert seen[second].state is JobState.PENDING
    assert seen[second].worker_id is None
    assert ledger.jobs.positions([]) == []


def test_unserved_are_pairs_that_no_worker_would_take(ledger: Ledger) -> None:
    wanted = [("default", "add"), ("default", "unknown"), ("other", "add")]
    assert ledger.queues.unserved(wanted) == set(wanted)
    tasks = (TaskRecord("add", "default"),)
    ledger.workers.register(birth("w1", tasks=tasks, suspect_after_s=60.0))
    assert ledger.queues.unserved(wanted) == {("default", "unknown"), ("other", "add")}
    ledger.workers.request("w1", "drain", "test")
    assert ledger.queues.unserved(wanted) == set(wanted)
    ledger.workers.register(birth("w2", tasks=tasks, suspect_after_s=60.0))
    assert ("default", "add") not in ledger.queues.unserved(wanted)
    ledger.workers.disable("w2", "a test", "test")
    assert ("default", "add") in ledger.queues.unserved(wanted)


def test_a_silent_worker_serves_nothing(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", suspect_after_s=0.0))
    assert ledger.queues.unserved([("default", "add")]) == {("default", "add")}
