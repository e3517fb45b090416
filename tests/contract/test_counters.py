"""What is counted is added up, minute by minute and since ever, whoever counts it at the same time."""

import threading
import time

import psycopg
import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, verdict

from unstuck.errors import LedgerError, RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import Count
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import Fleet
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.recovery.reap import SWEEP_TICKET


def this_minute() -> int:
    return int(time.time() // 60)


def test_counts_add_up_since_ever_and_by_the_minute(ledger: Ledger) -> None:
    since = this_minute()
    for _ in range(2):
        ledger.admin.count([Count("b", "{}", 2.0), Count("a", '{"x":"1"}', 1.5)], [Count("b", "{}", 2.0)])
    assert ledger.admin.counters() == [Count("a", '{"x":"1"}', 3.0), Count("b", "{}", 4.0)]
    series = ledger.admin.counter_series(["a", "b"], since)
    assert {(one.name, one.labels) for one in series} == {("b", "{}")}
    assert sum(one.value for one in series) == 4.0
    assert all(since <= one.minute <= this_minute() for one in series)
    assert ledger.admin.counter_series(["a"], 0) == []
    assert ledger.admin.counter_series(["b"], this_minute() + 2) == []


def test_counting_nothing_writes_nothing(ledger: Ledger) -> None:
    ledger.admin.count([], [])
    assert ledger.admin.counters() == []


def test_a_label_that_cannot_be_stored_is_refused_and_nothing_is_counted(ledger: Ledger) -> None:
    with pytest.raises(RefusedValue):
        ledger.admin.count([Count("a", "{}", 1.0), Count("a", "nul\0", 1.0)])
    assert ledger.admin.counters() == []


def test_many_who_count_the_same_at_once_lose_nothing(ledger: Ledger, open_again: OpenLedger) -> None:
    names = [f"n{number}" for number in range(40)]

    def count(own: Ledger, order: list[str]) -> None:
        for _ in range(10):
            counts = [Count(name, "{}", 1.0) for name in order]
            own.admin.count(counts, counts)

    # Half of them name the counters in the opposite order: a deadlock, if the ledger did not sort.
    others = [open_again() for _ in range(4)]
    threads = [
        threading.Thread(target=count, args=(own, names if n % 2 else names[::-1])) for n, own in enumerate(others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.value for one in ledger.admin.counters()} == {40.0}
    assert len(ledger.admin.counters()) == 40


def test_old_minutes_are_swept_and_the_totals_stay(ledger: Ledger, meddler: Backdoor) -> None:
    counts = [Count("a", str(number), 1.0) for number in range(10)]
    ledger.admin.count(counts, counts)
    assert ledger.maintenance.sweep_counters(60, 100) == 0
    meddler.age_counters(61)
    assert ledger.maintenance.sweep_counters(60, 4) == 4
    assert ledger.maintenance.sweep_counters(60, 100) == 6
    assert ledger.admin.counter_series(["a"], 0) == []
    assert ledger.admin.counters() == counts


def test_the_fleet_is_counted_by_state_with_who_is_late(ledger: Ledger, meddler: Backdoor) -> None:
    assert ledger.workers.fleet() == Fleet({})
    ledger.workers.register(birth("w1", heartbeat_interval_s=0.001))
    ledger.workers.register(birth("w2", heartbeat_interval_s=100.0))
    ledger.workers.register(birth("w3"))
    ledger.recovery.declare_dead("w3", verdict(), GuardNone())
    meddler.age_beat("w1", 10.0)
    ledger.maintenance.take_ticket(SWEEP_TICKET, 60.0)
    fleet = ledger.workers.fleet()
    assert fleet.workers == {"active": 2, "dead": 1}
    assert fleet.late == 1
    # Not counted is time in which the database server did not run.
    assert 0.002 < fleet.silent_s < 60.0
    assert fleet.unswept_s == 0.0


def test_a_table_of_counters_that_somebody_keeps_costs_a_moment_and_nothing_else(
    pg_ledger: PostgresLedger, pg_url: str
) -> None:
    with psycopg.connect(pg_url) as other:
        other.execute("lock table unstuck.counters in access exclusive mode")
        with pytest.raises(LedgerError):
            pg_ledger.admin.count([Count("a", "{}", 1.0)])
    pg_ledger.admin.count([Count("a", "{}", 1.0)])
    assert pg_ledger.admin.counters() == [Count("a", "{}", 1.0)]
