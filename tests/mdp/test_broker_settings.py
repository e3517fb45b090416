"""What the broker's settings change for clients that asked to be told."""

import time
from pathlib import Path

import cbor2
import pytest
from tests.mdp.wire import NO_WORKERS, WORKER_DIED, Peers, RawClient, broker_on

from unstuck.domain.errors import CallFailed
from unstuck.mdp import Client
from unstuck.mdp.broker.mmi import Listeners
from unstuck.mdp.broker.notices import Notice, Notices


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


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_delay_for_crashes_delays_no_other_notice_and_loses_none(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> None:
    settings = {"crash_notification_delay_ms": 600_000, "request_ttl": "1s", "heartbeat_interval": "200ms"}
    with broker_on(request, tmp_path, dialect, **settings) as broker:
        peers = Peers(broker)
        client = peers.listener()
        client.ask(peers.service, b"job", correlation=b"c")
        [told] = client.notice(NO_WORKERS, b"c")
        assert "final" not in told
        [told] = client.notice(NO_WORKERS, b"c")
        assert (told["final"], told["message"]) == (True, "No worker took this job in time. It was cancelled.")
        assert client.is_silent(), "something came after the last word about a job"
        with Client(broker.endpoint, timeout=30, log_errors=False) as ours, pytest.raises(CallFailed) as raised:
            ours.call(peers.service.decode(), b"job")
        assert raised.value.error == "NO_WORKERS"
        peers.close()


def test_a_last_word_overtakes_no_earlier_one_of_the_same_job() -> None:
    notices = Notices(delay_s=60.0)

    def notice(job_id: int, **facts: object) -> Notice:
        return Notice(WORKER_DIED, job_id, None, {"ledger_id": job_id, **facts})

    notices.add(b"a", notice(1), 0.0)
    notices.add(b"a", notice(2), 0.0)
    assert list(notices.due(1.0)) == []
    notices.add(b"a", notice(1, final=True), 1.0, at_once=True)
    [(_, message)] = notices.due(1.0)
    assert [cbor2.loads(one) for one in message[3:]] == [{"ledger_id": 1}, {"ledger_id": 1, "final": True}]
    assert notices.next_due_s() == 60.0
    [(_, message)] = notices.due(60.0)
    assert [cbor2.loads(one) for one in message[3:]] == [{"ledger_id": 2}]


def test_a_wish_for_events_that_nobody_knows_is_refused() -> None:
    listeners = Listeners()
    identity = b"i" * 16

    def ask(**wish: object) -> list[bytes]:
        return listeners.ask(identity, (cbor2.dumps({"v": 1, **wish}),), 0.0)

    for events in (["WORKER_DIED", "SOMETHING"], ["worker_died"], [7], [["NO_WORKERS"]]):
        code, why = ask(events=events)
        assert code == b"501"
        assert "NO_WORKERS" in cbor2.loads(why)["why"], "it says what there is"
        assert not listeners.is_on(identity)
    assert ask(events=[])[0] == b"200"
    assert ask(events=["WORKER_DIED"])[0] == b"200"
