"""The network between one worker and PostgreSQL is cut, and after a while the server gives its sessions up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.backdoor import PostgresBackdoor
from tests.support.fleet import (
    PROMPT,
    SCALED,
    Fleet,
    WorkerProcess,
    assert_no_worker_declared_dead,
    assert_one_attempt_each,
    begin,
    overlap_s,
    own_network,
    wait_for,
)
from tests.support.hosts import Host, needs_networks, needs_other_hosts
from tests.support.network_proxy import Proxy
from tests.support.postgres import start_postgres

from unstuck.domain.states import WorkerState

pytestmark = needs_other_hosts

LEASE_S = 6.0
GIVES_UP_S = LEASE_S * 0.45
"""When the server's keepalive ends a session: 13 to 15 s of 30 s with default settings."""
MOST_OF_THE_DEFAULT_LEASE_S = 14.0
SEVERAL_SWEEPS_S = 1.5


@pytest.fixture
def road(ready_pg_url: str) -> Iterator[Proxy]:
    with Proxy(ready_pg_url) as made:
        yield made


@pytest.fixture
def fleet(ready_pg_url: str, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(ready_pg_url, tmp_path, **{**SCALED, "heartbeat_timeout": f"{LEASE_S}s"})
    yield made
    made.close()


def _on_hosts(fleet: Fleet, road: Proxy) -> tuple[WorkerProcess, str]:
    far = fleet.start("--concurrency", "1", place=Host(host="far"), UNSTUCK_URL=road.url)
    return far, far.id


def _silent_s(fleet: Fleet, worker_id: str) -> float:
    [found] = [worker for worker in fleet.ledger.workers.list() if worker.id == worker_id]
    return found.silent_s


def test_a_cut_shorter_than_the_lease_costs_nothing_though_the_session_is_lost(
    ready_pg_url: str, road: Proxy, tmp_path: Path
) -> None:
    fleet = Fleet(ready_pg_url, tmp_path, **PROMPT)
    try:
        _, far_id = _on_hosts(fleet, road)
        gate, notes = tmp_path / "over", tmp_path / "notes"
        job = fleet.task("wait_for_file").enqueue(str(gate), str(notes))
        wait_for(notes.exists, "the job to begin")
        fleet.start("--concurrency", "1", place=Host(host="near"))
        road.cut()
        # Before the server gives up the session, as in life: a session that is lost while beats still come is a death.
        PostgresBackdoor(ready_pg_url).age_beat(far_id, MOST_OF_THE_DEFAULT_LEASE_S)
        road.server_gives_up()
        silent_s = _silent_s(fleet, far_id)
        assert silent_s > MOST_OF_THE_DEFAULT_LEASE_S / 2

        def looked_at() -> bool:
            assert_no_worker_declared_dead(fleet)
            return _silent_s(fleet, far_id) > silent_s + SEVERAL_SWEEPS_S

        wait_for(looked_at, "reapers to look at it several times")
        road.heal()
        wait_for(lambda: _silent_s(fleet, far_id) < silent_s / 2, "its next heartbeat")
        gate.touch()
        assert_one_attempt_each(fleet, [job])
        assert notes.read_text().count("begun") == 1
    finally:
        fleet.close()


def test_after_a_longer_cut_the_second_attempt_begins_only_when_the_first_was_stopped(
    fleet: Fleet, road: Proxy
) -> None:
    far, far_id = _on_hosts(fleet, road)
    job, notes = begin(fleet, "tick_once_then_quick", 30.0, "notes")
    fleet.start("--concurrency", "1", place=Host(host="near"))
    road.cut()
    wait_for(lambda: _silent_s(fleet, far_id) > GIVES_UP_S, "the server's keepalive to end")
    road.server_gives_up()
    assert job.result(timeout=30) == "quick"
    assert overlap_s(notes) < 0, "both attempts ran at once"
    road.heal()

    def back() -> bool:
        record = far.record()
        return record is not None and record.id != far_id and record.state is WorkerState.ACTIVE

    wait_for(back, "the worker that was cut off to come back under a new id")


@pytest.mark.long
@needs_networks
@pytest.mark.parametrize("lost", ["requests", "answers", "both"])
def test_packets_vanish_for_20_seconds_with_default_settings(tmp_path: Path, lost: str) -> None:
    """Both kernels give up the connection by themselves, the server's after 13 to 15 s of a lease of 30 s."""
    with own_network() as hub, hub.connect() as network, start_postgres(networks=[network]) as server:
        url = server.new_ledger()
        fleet = Fleet(url, tmp_path)
        try:
            address = url.replace("127.0.0.1", network.here)
            place = Host(host="far", network=network.path)
            far_id = fleet.start("--concurrency", "1", place=place, UNSTUCK_URL=address).id
            job, notes = begin(fleet, "nap", 35.0, "notes")
            fleet.start("--concurrency", "1", place=Host(host="near", network=hub.path))
            network.cut(requests=lost != "answers", answers=lost != "requests")

            def long_enough() -> bool:
                assert_no_worker_declared_dead(fleet)
                return _silent_s(fleet, far_id) > 20

            wait_for(long_enough, "the cut to last 20 s")
            network.heal()
            assert_one_attempt_each(fleet, [job])
            assert notes.read_text().count("begun") == 1
        finally:
            fleet.close()


@pytest.mark.long
@needs_networks
def test_packets_vanish_for_longer_than_the_default_lease(tmp_path: Path) -> None:
    with own_network() as hub, hub.connect() as network, start_postgres(networks=[network]) as server:
        url = server.new_ledger()
        fleet = Fleet(url, tmp_path)
        try:
            address = url.replace("127.0.0.1", network.here)
            fleet.start("--concurrency", "1", place=Host(host="far", network=network.path), UNSTUCK_URL=address)
            job, notes = begin(fleet, "tick_once_then_quick", 120.0, "notes")
            fleet.start("--concurrency", "1", place=Host(host="near", network=hub.path))
            network.cut()
            assert job.result(timeout=90) == "quick"
            assert overlap_s(notes) < 0, "both attempts ran at once"
        finally:
            fleet.close()
