"""The database goes away and comes back: no running job of a living worker is lost or failed."""

import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.support.backdoor import PostgresBackdoor, SqliteBackdoor, age
from tests.support.fleet import SEEN_FIRST, Fleet, assert_no_worker_declared_dead, wait_for
from tests.support.job_history import check_history
from tests.support.network_proxy import Proxy
from tests.support.postgres import PgServer, start_postgres

from unstuck.domain.states import JobState

LONGER_THAN_THE_LEASE_S = 60.0
NOWHERE = 1
"""A port that no one listens on."""


@pytest.fixture
def own_server() -> Iterator[PgServer]:
    """A server of this test's own: it is stopped in the middle."""
    with start_postgres() as server:
        yield server


def _down_for(server: PgServer, road: Proxy, url: str, seconds: float, aged_s: float) -> None:
    """Stop the server for a while; to those who come back by the road it lasted longer by `aged_s`."""
    road.point_to(NOWHERE)
    server.stop()
    time.sleep(seconds)  # The outage itself.
    server.start()
    if aged_s:
        age(PostgresBackdoor(url), aged_s)
    road.point_to(server.port)


@pytest.mark.parametrize(
    ("outage_s", "aged_s"),
    [(10.0, 0.0), (1.0, LONGER_THAN_THE_LEASE_S), pytest.param(LONGER_THAN_THE_LEASE_S, 0.0, marks=pytest.mark.long)],
    ids=["10s", "longer-than-the-lease-by-the-ledgers-clock", "60s"],
)
def test_postgresql_is_stopped_and_started_again(
    own_server: PgServer, tmp_path: Path, outage_s: float, aged_s: float
) -> None:
    url = own_server.new_ledger()
    road = Proxy(url)
    fleet = Fleet(road.url, tmp_path)
    try:
        fleet.start("--concurrency", "4")
        fleet.start("--concurrency", "4")
        notes = tmp_path / "notes"
        through = [fleet.task("nap").enqueue(outage_s + 3, str(notes)) for _ in range(2)]
        during = [fleet.task("nap").enqueue(outage_s / 2, str(notes)) for _ in range(2)]
        again = [fleet.task("nap_again").enqueue(outage_s + 3) for _ in range(2)]
        jobs = through + during + again
        for job in jobs:
            fleet.wait_running(job)
        _down_for(own_server, road, url, outage_s, aged_s)
        for job in jobs:
            assert job.result(timeout=90) == "rested"
        check_history(fleet.ledger, [job.id for job in jobs])
        # Those that nobody else would take went on all through it: each began once.
        assert notes.read_text().count("begun") == 4
        for job in through + during:
            assert len(fleet.ledger.jobs.attempts(job.id)) == 1
        for job in again:
            assert job.record().crash_count == 0, "an outage counts for nobody"
        assert_no_worker_declared_dead(fleet)
    finally:
        fleet.close()
        road.close()


def test_every_session_is_terminated(own_server: PgServer, tmp_path: Path) -> None:
    fleet = Fleet(own_server.new_database(), tmp_path)
    try:
        fleet.start("--concurrency", "4")
        fleet.start("--concurrency", "4")
        jobs = [fleet.task("nap").enqueue(6) for _ in range(4)] + [fleet.task("nap_again").enqueue(6) for _ in range(4)]
        for job in jobs:
            fleet.wait_running(job)
        for _ in range(3):
            assert own_server.terminate_all() > 0
            time.sleep(0.5)  # The second blow comes while they are reconnecting.
        for job in jobs:
            assert job.result(timeout=60) == "rested"
            assert len(fleet.ledger.jobs.attempts(job.id)) == 1
        assert all(worker.process.poll() is None for worker in fleet.workers)
    finally:
        fleet.close()


def test_somebody_else_locks_the_sqlite_file_for_longer_than_the_lease(tmp_path: Path) -> None:
    fleet = Fleet(f"sqlite:///{tmp_path}/jobs.db", tmp_path, **SEEN_FIRST)
    try:
        fleet.start("--concurrency", "4")
        fleet.start("--concurrency", "4")
        jobs = [fleet.task("nap").enqueue(2) for _ in range(2)] + [fleet.task("nap").enqueue(8) for _ in range(2)]
        for job in jobs:
            fleet.wait_running(job)
        locker = _locker(tmp_path / "jobs.db")
        locker.execute("begin exclusive")
        time.sleep(1)  # The lock itself.
        age(SqliteBackdoor(tmp_path / "jobs.db", locker), LONGER_THAN_THE_LEASE_S)
        locker.execute("commit")
        locker.close()
        for job in jobs:
            assert job.result(timeout=60) == "rested"
            assert len(fleet.ledger.jobs.attempts(job.id)) == 1
        assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
        assert_no_worker_declared_dead(fleet)
    finally:
        fleet.close()


def _locker(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    return connection


def test_a_client_enqueues_through_a_short_outage(own_server: PgServer, tmp_path: Path) -> None:
    fleet = Fleet(own_server.new_database(), tmp_path)
    try:
        fleet.task("add").enqueue(0, 0)
        own_server.terminate_all()
        # The connection under our feet is gone; the enqueue finds another and stores the job once.
        job = fleet.task("add").enqueue(1, 2)
        wait_for(lambda: fleet.ledger.jobs.count().get("pending") == 2, "both jobs")
        fleet.start()
        assert job.result(timeout=30) == 3
        assert fleet.state(job) is JobState.SUCCEEDED
    finally:
        fleet.close()
