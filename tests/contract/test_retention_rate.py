"""Retention keeps up: it goes on while there is something to remove, in short batches, for a share of the time."""

import threading
import time

import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, done, new_job, put, run, turn
from tests.support.fleet import TIMEOUT_S

from unstuck import host
from unstuck.config import Recovery
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.maintenance.loop import Loop
from unstuck.maintenance.retention import RETENTION_TICKET
from unstuck.maintenance.service import run_once
from unstuck.recovery.reap import Reaper

HOUR_S = 3600.0
OLD_S = 8 * 24 * HOUR_S


@pytest.fixture
def w1(ledger: Ledger) -> str:
    """A worker that is given up by no round of these tests, although it sends no heartbeat."""
    ledger.workers.register(
        birth("w1", heartbeat_interval_s=100.0, suspect_after_s=1000.0, running_stale_after_s=1000.0)
    )
    return "w1"


def finish(ledger: Ledger, meddler: Backdoor, count: int, **changes: object) -> int:
    """Finish one job and copy it until there are `count`; then make everything eight days older. Return its id."""
    first = put(ledger, **changes)
    [job] = run(ledger)
    turn(ledger, done=[done(job)])
    meddler.copy_job(first, count - 1)
    meddler.age_all_jobs(OLD_S)
    return first


def watch(ledger: Ledger, **settings: object) -> Loop:
    """Run a reaper loop in this thread until it plans no other batch and nothing is due for half a second."""
    reaper_loop = Loop(Reaper(ledger, Recovery(**settings), by="reaper"))  # type: ignore[arg-type]
    deadline_s = time.monotonic() + TIMEOUT_S
    # The pause after a slow batch is longer than that.
    while (wait_s := reaper_loop.step()) < 0.5 or reaper_loop._batch_s is not None:
        assert time.monotonic() < deadline_s, "it never comes to rest"
        time.sleep(wait_s)
    return reaper_loop


def test_a_backlog_of_finished_jobs_is_removed_within_seconds_not_hours(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    # Before, 10,000 a minute at most on SQLite and 50,000 on PostgreSQL: the rest would have waited for a minute.
    finish(ledger, meddler, 60_000)
    watch(ledger)
    assert meddler.count("jobs") == 0


def test_a_backlog_of_expired_unique_keys_is_removed_within_seconds(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    # Before, 1,000 a minute at most.
    ledger.jobs.enqueue([new_job(unique_key=f"k{n}", more=JobExtras(unique_for_s=60.0)) for n in range(5_000)])
    meddler.age_keys(61.0)
    watch(ledger)
    assert meddler.count("unique_keys") == 0


def test_jobs_with_a_keep_of_their_own_are_removed_as_quickly(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    finish(ledger, meddler, 15_000, more=JobExtras(retain_s=60.0))
    watch(ledger, retention="365d")
    assert meddler.count("jobs") == 0


def test_a_backlog_of_events_is_removed_as_quickly(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    meddler.add_events(15_000)
    meddler.age_events(OLD_S)
    watch(ledger)
    assert meddler.count("events") < 10, "only what the reaper himself told"


def test_a_round_for_cron_removes_the_backlog_too(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    finish(ledger, meddler, 20_000)
    done_round = run_once(ledger, Recovery(), pause=lambda _: None)
    assert done_round.pruned >= 20_000
    assert meddler.count("jobs") == 0


def test_retention_takes_a_share_of_the_time_in_short_batches(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    finish(ledger, meddler, 40_000)
    reaper = Reaper(ledger, Recovery(), by="reaper")
    batches: list[tuple[float, float]] = []
    reaper.sweep()
    began_s = host.boottime_s()
    while (removed := reaper.keep_house()).next_batch_in_s is not None:
        batches.append((host.boottime_s() - began_s, removed.next_batch_in_s))
        time.sleep(removed.next_batch_in_s)
        began_s = host.boottime_s()
    assert len(batches) > 5, "in many batches"
    worked_s, paused_s = sum(took_s for took_s, _ in batches), sum(pause_s for _, pause_s in batches)
    assert paused_s > worked_s / 3, "others get their share"


def test_one_reaper_removes_at_a_time_and_another_goes_on_when_its_ticket_ran_out(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    finish(ledger, meddler, 20_000)
    first, second = (Reaper(ledger, Recovery(), by=name) for name in ("first", "second"))
    assert first.keep_house().pruned > 0
    assert second.keep_house().pruned == 0
    # The first is killed here; its ticket ends by itself.
    meddler.expire_ticket(RETENTION_TICKET)
    third = Reaper(ledger, Recovery(), by="third")
    assert third.keep_house().pruned > 0


def test_jobs_that_stay_do_not_stand_in_the_way_of_those_behind_them(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    # Scheduled for next year, and older than every job that is to go.
    ledger.jobs.enqueue([new_job(delay_s=365 * 24 * HOUR_S) for _ in range(3_000)])
    finish(ledger, meddler, 3_000)
    watch(ledger)
    assert meddler.count("jobs") == 3_000
    # A walk that begins anew finds what became old meanwhile.
    finish(ledger, meddler, 10)
    for _ in range(10):
        ledger.maintenance.sweep_old(7 * 24 * HOUR_S, OLD_S, OLD_S, 1_000)
    assert meddler.count("jobs") == 3_000


def test_a_job_from_the_future_does_not_stop_retention(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    # The clock was a year ahead when it was enqueued.
    ahead = finish(ledger, meddler, 500)
    meddler.age_job(ahead, -365 * 24 * HOUR_S - OLD_S)
    for _ in range(10):
        ledger.maintenance.sweep_old(7 * 24 * HOUR_S, OLD_S, OLD_S, 50)
    assert ledger.jobs.missing([ahead]) == set()
    assert meddler.count("jobs") == 1


def test_heartbeats_and_turns_do_not_wait_for_retention(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    finish(ledger, meddler, 30_000)
    reaper = Reaper(ledger, Recovery(), by="reaper")
    removing = threading.Event()

    def remove() -> None:
        removing.set()
        while (pause_s := reaper.keep_house().next_batch_in_s) is not None:
            time.sleep(pause_s)
        removing.clear()

    thread = threading.Thread(target=remove)
    thread.start()
    beside = 0
    removing.wait()
    while removing.is_set():
        ledger.workers.beat(Heartbeat("w1", 0, 0))
        put(ledger)
        turn(ledger, done=[done(job) for job in run(ledger)])
        beside += 1
    thread.join()
    assert beside > 5, "they take turns"


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_dead_rows_that_vacuum_cannot_remove_are_not_read_with_every_walk(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    finish(ledger, meddler, 5_000)
    stays = finish(ledger, meddler, 1)
    meddler.age_job(stays, -OLD_S)
    for _ in range(20):
        ledger.maintenance.sweep_old(7 * 24 * HOUR_S, OLD_S, OLD_S, 1_000)
    assert meddler.rows("select position from retention_positions where name = 'jobs'") == [(stays - 1,)]
