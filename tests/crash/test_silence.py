"""Who is silent, and for how long: at settings that our checks allow, behind a lock, and between containers."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest
from tests.crash.conftest import MakeFleet
from tests.crash.trials import (
    LEASE_S,
    SCALED,
    begin,
    begin_on_each,
    needs_other_boots,
    needs_other_hosts,
    rested_at_once,
    the_dead,
)
from tests.elsewhere import Place
from tests.fleet import Fleet
from tests.sqlite_model import ready_sqlite

SLOW_HEARTBEATS = {"heartbeat_interval": "1s", "heartbeat_timeout": "2s", "check_interval": "0.25s"}
SHORT_CLAIMS = {
    "heartbeat_interval": "0.6s",
    "heartbeat_timeout": "3s",
    "claimed_stale_after": "1.2s",
    "check_interval": "0.25s",
}


@pytest.mark.parametrize("settings", [SLOW_HEARTBEATS, SHORT_CLAIMS], ids=["half-the-timeout", "short-claims"])
def test_a_frozen_worker_is_found_at_the_slowest_heartbeat_that_is_allowed(
    make_fleet: MakeFleet, settings: dict[str, str]
) -> None:
    fleet = make_fleet(**settings)
    frozen = fleet.start("--concurrency", "1")
    frozen_id = frozen.id
    job, notes = begin(fleet, "nap_once_then_quick", 60.0, "notes")
    for _ in range(2):
        fleet.start("--concurrency", "1")
    frozen.freeze()
    assert job.result(timeout=15) == "quick"
    assert notes.read_text().count("begun") == 2
    assert [worker.id for worker in fleet.ledger.workers() if worker.state == "dead"] == [frozen_id]


@contextmanager
def _transaction(path: Path) -> Iterator[None]:
    """Hold the write lock, as a user's transaction does that takes its time."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    connection.execute("begin immediate")
    yield
    connection.execute("rollback")
    connection.close()


@pytest.fixture
def locked_fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(ready_sqlite(tmp_path), tmp_path, **SCALED)
    yield fleet
    fleet.close()


def test_transactions_that_keep_the_write_lock_longer_than_the_lease_kill_nobody(locked_fleet: Fleet) -> None:
    fleet = locked_fleet
    workers = [fleet.start("--concurrency", "1") for _ in range(3)]
    jobs, notes = begin_on_each(fleet, workers, "nap", LEASE_S + 4)
    for held_s in (LEASE_S + 1.5, 1.0, 1.0):
        with _transaction(fleet.folder / "jobs.db"):
            time.sleep(held_s)  # The transaction itself.
    rested_at_once(fleet, jobs)
    assert notes.read_text().count("begun") == len(jobs)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_worker_frozen_beside_a_long_transaction_is_found_after_it(locked_fleet: Fleet, when: str) -> None:
    fleet = locked_fleet
    frozen = fleet.start("--concurrency", "1")
    frozen_id = frozen.id
    job, _ = begin(fleet, "nap_once_then_quick", 60.0, "notes")
    fleet.start("--concurrency", "1")
    if when == "before":
        frozen.freeze()
    with _transaction(fleet.folder / "jobs.db"):
        time.sleep(LEASE_S / 2)  # The transaction itself, in two halves.
        frozen.signal_family(signal.SIGSTOP)
        time.sleep(LEASE_S / 2 + 1)
    freed_s = time.monotonic()
    assert job.result(timeout=30) == "quick"
    assert time.monotonic() - freed_s < 2.5 * LEASE_S, "found soon after its lease"
    assert [worker.id for worker in fleet.ledger.workers() if worker.state == "dead"] == [frozen_id]


@needs_other_boots
def test_two_containers_with_boot_ids_of_their_own_share_a_file_in_peace(locked_fleet: Fleet) -> None:
    fleet = locked_fleet
    workers = [
        fleet.start("--concurrency", "1", place=Place(boot_id=boot_id))
        for boot_id in ("", "b7f4a1c0-0000-4000-8000-000000000001")
    ]
    jobs, _ = begin_on_each(fleet, workers, "nap", 2.0)
    rested_at_once(fleet, jobs)


@needs_other_hosts
def test_a_worker_killed_on_another_host_is_seen_by_its_session_long_before_its_lease(
    ready_pg_url: str, tmp_path: Path
) -> None:
    """What makes session evidence worth having must survive the caution that it is taken with."""
    fleet = Fleet(ready_pg_url, tmp_path, **{**SCALED, "heartbeat_timeout": "30s"})
    try:
        victim = fleet.start("--concurrency", "1", place=Place(host="far"))
        job, _ = begin(fleet, "nap_once_then_quick", 60.0, "notes")
        fleet.start("--concurrency", "1", place=Place(host="near"))
        victim.kill_family()
        killed_s = time.monotonic()
        assert job.result(timeout=20) == "quick"
        assert time.monotonic() - killed_s < 8
        assert len(the_dead(fleet)) == 1
    finally:
        fleet.close()
