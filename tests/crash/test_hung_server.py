"""PostgreSQL hangs while its kernel still answers, or a road to it falls silent: workers notice, say so and move on."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import Fleet, wait_for
from tests.support.network_proxy import Proxy
from tests.support.postgres import PgServer, start_postgres

from unstuck.domain.states import JobState, WorkerState

QUICK = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "4s", "check_interval": "0.25s"}
SAID = "PostgreSQL does not answer; dropping the connection"


@pytest.fixture
def own_server() -> Iterator[PgServer]:
    """A server of this test's own: it hangs in the middle."""
    with start_postgres() as server:
        yield server


def test_a_worker_whose_road_falls_silent_takes_another_and_settles_what_ended_meanwhile(
    ready_pg_url: str, tmp_path: Path
) -> None:
    fleet = Fleet(ready_pg_url, tmp_path, **QUICK)
    with Proxy(ready_pg_url) as first, Proxy(ready_pg_url) as second:
        try:
            name = ready_pg_url.rpartition("/")[2]
            url = f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/{name}"
            worker = fleet.start("--concurrency", "2", UNSTUCK_URL=url)
            worker_id = worker.id
            job = fleet.begin("nap", 1.0)[0]
            first.cut()
            cut_s = time.monotonic()
            assert job.result(timeout=30) == "rested"
            # The deadline of a turn, and the time to find that the first road does not answer.
            assert time.monotonic() - cut_s < 15
            assert fleet.task("nap").enqueue(0.0).result(timeout=30) == "rested"
            assert SAID in worker.said()
            assert "Connected to PostgreSQL again" in worker.said()
            assert worker.id == worker_id, "it lost no lease"
            assert len(fleet.ledger.attempts(job.id)) == 1
        finally:
            fleet.close()


def test_a_server_that_hangs_for_longer_than_every_lease_costs_no_job(own_server: PgServer, tmp_path: Path) -> None:
    fleet = Fleet(own_server.new_ledger(), tmp_path, **QUICK)
    try:
        workers = [fleet.start("--concurrency", "2") for _ in range(2)]
        notes = tmp_path / "notes"
        during, through = (fleet.task("nap").enqueue(seconds, str(notes)) for seconds in (2.0, 9.0))
        for job in (during, through):
            fleet.wait_running(job)
        ids = {worker.id for worker in workers}
        own_server.hang()
        try:
            wait_for(lambda: all(SAID in worker.said() for worker in workers), "every worker to notice")
            time.sleep(4.0)  # The outage itself: longer than the lease.
        finally:
            own_server.resume()
        for job in (during, through):
            assert job.result(timeout=60) == "rested"
            assert len(fleet.ledger.attempts(job.id)) == 1
        assert notes.read_text().count("begun") == 2
        assert {worker.id for worker in workers} == ids
        states = {record.state for record in fleet.ledger.workers() if record.id in ids}
        assert states <= {WorkerState.ACTIVE, WorkerState.SUSPECT}
        assert fleet.state(through) is JobState.SUCCEEDED
    finally:
        fleet.close()
