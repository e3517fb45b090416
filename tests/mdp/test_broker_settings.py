"""What the broker's settings change for clients that asked to be told."""

import time
from pathlib import Path

import pytest
from tests.mdp.wire import NO_WORKERS, WORKER_DIED, Peers, RawClient, broker_on


def kill_one_at_work(peers: Peers, client: RawClient) -> None:
    worker = peers.worker()
    client.ask(peers.service, b"job")
    worker.request()
    worker.close()
    peers.broker.awaits(peers.service, served=False)


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_without_notices_of_crashes_the_job_is_queued_again_in_silence(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> None:
    with broker_on(request, tmp_path, dialect, notify_worker_crash="false") as broker:
        peers = Peers(broker)
        client = peers.listener()
        kill_one_at_work(peers, client)
        assert client.is_silent()
        second = peers.worker()
        address, body = second.request()
        second.reply(address, *body)
        assert client.answer(peers.service) == [b"job"]
        client.ask(peers.service + b"-unserved", b"x")
        assert client.notice(NO_WORKERS)[0]["error"] == "NO_WORKERS", "the other kind is still told"
        peers.close()


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_without_notices_of_empty_benches_the_job_waits_in_silence(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> None:
    with broker_on(request, tmp_path, dialect, notify_no_workers="false") as broker:
        peers = Peers(broker)
        client = peers.listener()
        client.ask(peers.service, b"early")
        assert client.is_silent()
        worker = peers.worker()
        address, body = worker.request()
        worker.reply(address, *body)
        assert client.answer(peers.service) == [b"early"]
        worker.close()
        peers.broker.awaits(peers.service, served=False)
        kill_one_at_work(peers, client)
        assert client.notice(WORKER_DIED)[0]["error"] == "WORKER_CRASHED", "the other kind is still told"
        peers.close()


def test_a_delay_gathers_the_deaths_of_its_time_into_one_message(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with broker_on(request, tmp_path, "sqlite", crash_notification_delay_ms=1500) as broker:
        peers = Peers(broker)
        client = peers.listener()
        workers = [peers.worker() for _ in range(3)]
        for _ in workers:
            client.ask(peers.service, b"job")
        for worker in workers:
            worker.request()
        killed_s = time.monotonic()
        for worker in workers:
            worker.close()
        told = client.notice(WORKER_DIED)
        assert time.monotonic() - killed_s >= 1.5
        assert len({one["ledger_id"] for one in told}) == 3
        assert client.is_silent()
        peers.close()


@pytest.mark.parametrize("attempts", [0, 2])
def test_a_bare_service_is_retried_so_often_and_no_more(
    request: pytest.FixtureRequest, tmp_path: Path, attempts: int
) -> None:
    with broker_on(request, tmp_path, "sqlite", retry_attempts=attempts) as broker:
        peers = Peers(broker)
        client = peers.listener(events=["WORKER_DIED"])
        client.ask(peers.service, b"job")
        for attempt in range(1, attempts + 2):
            worker = peers.worker()
            worker.request()
            worker.close()
            (told,) = client.notice(WORKER_DIED)
            assert (told["attempt"], told.get("final", False)) == (attempt, attempt > attempts)
        assert peers.worker().is_idle()
        peers.close()
