"""PostgreSQL hangs while its kernel still answers, or a road to it falls silent: workers notice, say so and move on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.backdoor import PostgresBackdoor, age, watches_again
from tests.support.fleet import PROMPT, QUICK_ANSWERS, TIMEOUT_S, Fleet, assert_no_worker_declared_dead, wait_for
from tests.support.network_proxy import Proxy
from tests.support.postgres import PgServer, start_postgres

from unstuck.domain.states import JobState, WorkerState

LONGER_THAN_THE_LEASE_S = 60.0
SAID = "PostgreSQL does not answer; dropping the connection"


@pytest.fixture
def own_server() -> Iterator[PgServer]:
    """A server of this test's own: it hangs in the middle."""
    with start_postgres() as server:
        yield server


def test_a_worker_whose_road_falls_silent_takes_another_and_settles_what_ended_meanwhile(
    ready_pg_url: str, tmp_path: Path
) -> None:
    fleet = Fleet(ready_pg_url, tmp_path, **QUICK_ANSWERS)
    with Proxy(ready_pg_url) as first, Proxy(ready_pg_url) as second:
        try:
            name = ready_pg_url.rpartition("/")[2]
            url = f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/{name}"
            worker = fleet.start("--concurrency", "2", UNSTUCK_URL=url)
            worker_id = worker.id
            job = fleet.begin("nap", 1.0)[0]
            first.cut()
            assert job.result(timeout=TIMEOUT_S) == "rested"
            assert fleet.task("nap").enqueue(0.0).result(timeout=30) == "rested"
            assert SAID in worker.said()
            assert "Connected to PostgreSQL again" in worker.said()
            assert worker.id == worker_id, "it lost no lease"
            assert len(fleet.ledger.jobs.attempts(job.id)) == 1
        finally:
            fleet.close()


def test_a_server_that_hangs_for_longer_than_every_lease_costs_no_job(own_server: PgServer, tmp_path: Path) -> None:
    url = own_server.new_ledger()
    backdoor = PostgresBackdoor(url)
    # Each worker has a road of its own, so that one comes back while the other is still silent.
    early_road, late_road = roads = [Proxy(url) for _ in range(2)]
    fleet = Fleet(url, tmp_path, **PROMPT)
    try:
        workers = [fleet.start("--concurrency", "2", UNSTUCK_URL=road.url) for road in roads]
        notes = tmp_path / "notes"
        gate = tmp_path / "over"
        during = fleet.task("nap").enqueue(2.0, str(notes))
        through = fleet.task("wait_for_file").enqueue(str(gate), str(notes))
        for job in (during, through):
            fleet.wait_running(job)
        ids = {worker.id for worker in workers}
        own_server.hang()
        try:
            wait_for(lambda: all(SAID in worker.said() for worker in workers), "every worker to notice")
            # It answers again, to us alone; to the workers it hangs until the lease is over.
            for road in roads:
                road.cut()
        finally:
            own_server.resume()
        age(backdoor, LONGER_THAN_THE_LEASE_S)
        early_road.heal()

        def looked_at() -> bool:
            assert_no_worker_declared_dead(fleet)
            return watches_again(backdoor)

        wait_for(looked_at, "one worker to watch the other while that is still cut off")
        late_road.heal()
        wait_for(lambda: all("Connected to PostgreSQL again" in worker.said() for worker in workers), "their return")
        gate.touch()
        for job in (during, through):
            assert job.result(timeout=60) == "rested"
            assert len(fleet.ledger.jobs.attempts(job.id)) == 1
        assert notes.read_text().count("begun") == 2
        assert {worker.id for worker in workers} == ids
        states = {record.state for record in fleet.ledger.workers.list() if record.id in ids}
        assert states <= {WorkerState.ACTIVE, WorkerState.SUSPECT}
        assert fleet.state(through) is JobState.SUCCEEDED
    finally:
        fleet.close()
        for road in roads:
            road.close()
