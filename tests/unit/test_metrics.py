"""What is tallied is neither lost nor counted twice, costs little, and is written as Prometheus reads it."""

import json
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from unstuck.client.metrics import Meter, gauges, measure
from unstuck.errors import LedgerUnavailable, RefusedValue, UncertainCommit
from unstuck.ledger import metrics_writer
from unstuck.ledger.contract.admin import Count
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import Fleet
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.metrics import catalogue
from unstuck.metrics.catalogue import JOB_RETRIES, JOB_RUN, JOBS_ENDED, SUPERSEDED
from unstuck.metrics.counters import MAX_SERIES, OTHER, Counters
from unstuck.metrics.prometheus import expose

NASTY = 'a"b\\c\nd{}é,='


class Book:
    """A ledger, and its part with the counters, that only counts, and refuses to when asked to."""

    def __init__(self) -> None:
        self.admin = self
        self.totals: dict[tuple[str, str], float] = {}
        self.lately: dict[tuple[str, str], float] = {}
        self.writes = 0
        self.rows: list[int] = []
        self.refuse: Exception | None = None

    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        self.writes += 1
        if self.refuse is not None:
            raise self.refuse
        self.rows.append(len(totals) + len(lately))
        for counts, kept in ((totals, self.totals), (lately, self.lately)):
            for one in counts:
                kept[one.name, one.labels] = kept.get((one.name, one.labels), 0.0) + one.value

    def bookkeeper(self, tallies: Counters) -> MetricsWriter:
        return MetricsWriter(self, tallies)  # type: ignore[arg-type]


@pytest.fixture
def book() -> Book:
    return Book()


# Tallies ------------------------------------------------------------------------------------------


def test_many_threads_lose_no_count() -> None:
    tallies = Counters()

    def count() -> None:
        for number in range(2_000):
            tallies.add(JOBS_ENDED, ("default", "succeeded"))
            tallies.observe(JOB_RUN, number / 1000, ("default", "add"))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = tallies.snapshot().totals
    assert totals[JOBS_ENDED.name, '{"queue":"default","state":"succeeded"}'] == 8_000
    assert sum(value for (name, _), value in totals.items() if name == JOB_RUN.name) == 8_000


def test_a_value_on_a_bound_falls_into_the_bucket_below() -> None:
    tallies = Counters()
    for value in (0.005, 0.0051, 1e9):
        tallies.observe(JOB_RUN, value, ("q", "t"))
    buckets = {
        json.loads(labels)["le"]: value
        for (name, labels), value in tallies.snapshot().totals.items()
        if name == JOB_RUN.name
    }
    assert buckets == {"0.005": 1, "0.01": 1, "+Inf": 1}


def test_a_user_with_endless_names_cannot_fill_the_memory() -> None:
    tallies = Counters()
    for number in range(MAX_SERIES + 50):
        tallies.add(JOB_RETRIES, (f"queue-{number}", "TASK_FAILED"))
        tallies.observe(JOB_RUN, 1.0, ("default", f"task-{number}"))
    totals = tallies.snapshot().totals
    assert totals[JOB_RETRIES.name, json.dumps({"code": "TASK_FAILED", "queue": OTHER}, separators=(",", ":"))] == 50
    assert sum(name == JOB_RUN.name for name, _ in totals) == MAX_SERIES + 1


def test_minutes_are_kept_by_fewer_labels() -> None:
    tallies = Counters()
    for task in ("a", "b"):
        tallies.observe(JOB_RUN, 1.0, ("default", task))
    lately = tallies.snapshot().per_minute_labels
    assert lately == {(JOB_RUN.name, '{"le":"1"}'): 2, (JOB_RUN.sum_name, "{}"): 2.0}


# Bringing it to the ledger ------------------------------------------------------------------------


def test_what_could_not_be_written_waits_for_the_next_time(book: Book) -> None:
    tallies = Counters()
    keeper = book.bookkeeper(tallies)
    tallies.add(SUPERSEDED)
    book.refuse = LedgerUnavailable("away")
    keeper.flush()
    tallies.add(SUPERSEDED)
    book.refuse = None
    keeper.flush()
    keeper.flush()
    assert book.totals == {(SUPERSEDED.name, "{}"): 2}
    assert book.writes == 2


def test_what_may_have_been_written_is_not_counted_twice(book: Book) -> None:
    tallies = Counters()
    keeper = book.bookkeeper(tallies)
    tallies.add(SUPERSEDED)
    book.refuse = UncertainCommit("lost")
    keeper.flush()
    book.refuse = None
    tallies.add(SUPERSEDED)
    keeper.flush()
    assert book.totals == {(SUPERSEDED.name, "{}"): 1}


def test_labels_that_cannot_be_stored_are_left_out_for_good(book: Book) -> None:
    tallies = Counters()
    keeper = book.bookkeeper(tallies)
    tallies.add(JOBS_ENDED, ("nul\0", "failed"))
    book.refuse = RefusedValue("nul")
    keeper.flush()
    keeper.flush()
    assert book.writes == 1


def test_a_write_is_bounded(book: Book) -> None:
    tallies = Counters()
    for number in range(900):
        tallies.observe(JOB_RUN, 1.0, ("default", f"task-{number}"))
    book.bookkeeper(tallies).flush()
    assert max(book.rows) <= metrics_writer.MAX_ROWS
    assert sum(value for (name, _), value in book.totals.items() if name == JOB_RUN.name) == 900
    assert book.lately[JOB_RUN.name, '{"le":"1"}'] == 900


def test_an_idle_process_writes_once_a_minute(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(metrics_writer.host, "boottime_s", lambda: now_s)
    tallies = Counters()
    keeper = book.bookkeeper(tallies)
    written = []
    for _ in range(60):
        now_s += 5.0
        tallies.observe(catalogue.BEAT_DELAY, 0.01)
        keeper.tend()
        written.append(book.writes)
    assert 4 <= written[-1] <= 6
    tallies.add(SUPERSEDED)
    now_s += 15.0
    keeper.tend()
    assert book.writes == written[-1] + 1


# The text -----------------------------------------------------------------------------------------


def samples(text: str) -> dict[str, list[Any]]:
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def example() -> str:
    tallies = Counters()
    tallies.add(JOBS_ENDED, (NASTY, "failed"), 3)
    for value in (0.002, 0.3, 5000.0):
        tallies.observe(JOB_RUN, value, ("default", "add"))
    queue = QueueRecord(NASTY, True, 1, 2, 3, 4, 12.5, 0, 5, 6)
    return expose(tallies.snapshot().totals, gauges([queue], Fleet({"active": 2}, 1, 7.5, None)))


def test_the_text_is_what_a_parser_reads() -> None:
    found = samples(example())
    [ended] = found["unstuck_jobs_ended"]
    assert (ended.labels, ended.value) == ({"queue": NASTY, "state": "failed"}, 3.0)
    run = {sample.labels.get("le", sample.name): sample.value for sample in found["unstuck_job_run_seconds"]}
    assert run["0.001"] == 0
    assert run["0.005"] == 1
    assert run["0.5"] == 2
    assert run["3600"] == 2
    assert run["+Inf"] == run["unstuck_job_run_seconds_count"] == 3
    assert run["unstuck_job_run_seconds_sum"] == pytest.approx(5000.302)
    assert {sample.labels["state"]: sample.value for sample in found["unstuck_jobs"]} == {
        "pending": 1,
        "scheduled": 2,
        "claimed": 3,
        "running": 4,
        "waiting": 5,
        "blocked": 6,
    }
    assert found["unstuck_sweep_overdue_seconds"][0].value == math.inf
    assert found["unstuck_queue_oldest_pending_age_seconds"][0].value == 12.5
    # Without labels it is there before anything happened.
    assert found["unstuck_superseded_writes"][0].value == 0
    assert found["unstuck_sweep_seconds"][-1].value == 0


def test_what_a_newer_version_counted_is_left_out() -> None:
    assert "from_the_future" not in expose({("unstuck_from_the_future_total", "{}"): 1.0})


def test_scrapes_at_once_ask_the_ledger_once() -> None:
    class Asked:
        looks = 0

        def __init__(self) -> None:
            self.admin = self.queues = self.workers = self

        def counters(self) -> list[Count]:
            self.looks += 1
            return []

        def list(self) -> Sequence[QueueRecord]:
            return []

        def fleet(self) -> Fleet:
            return Fleet({})

    ledger, meter = Asked(), Meter()
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(meter.text(ledger))) for _ in range(8)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A second look where the machine took longer than an answer is fresh.
    assert ledger.looks <= 2
    assert set(texts) == {measure(ledger)}  # type: ignore[arg-type]
