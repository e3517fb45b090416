"""Who may come in: with CURVE those of the list and nobody else; without it nobody from beyond this machine."""

import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cbor2
import pytest
import zmq
from tests.mdp.broker import NO_WORKERS, WORKER_DIED, Broker, Peers, RawClient, broker_on
from tests.support.fleet import ROOT, TIMEOUT_S

from unstuck.errors import CallFailed, ReplyTimeout
from unstuck.mdp import Client, CurveKeys
from unstuck.mdp.broker.notifications import Notifications, PendingNotification, Subscriptions
from unstuck.mdp.curve import read_keys, read_public_key

SHORT_S = 1.0


def command(*words: str, folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "unstuck.cli.main", *words],
        cwd=folder,
        env={**os.environ, "UNSTUCK_URL": f"sqlite:///{folder}/jobs.db", **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


class House:
    """A broker with keys, and a folder in which its guests' are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.guests = folder, folder / "guests"
        for name, where in (("broker", folder), ("alice", self.guests), ("mallory", folder)):
            made = command("keygen", name, "--dir", str(where), folder=folder)
            assert made.returncode == 0, made.stderr
        self.server_key = read_public_key(folder / "broker.key")
        # Only what is given away lies with the broker.
        (self.guests / "alice.key_secret").rename(folder / "alice.key_secret")
        self.broker = Broker(
            f"sqlite:///{folder}/jobs.db",
            folder / "broker.log",
            curve_secret_file=folder / "broker.key_secret",
            curve_clients_dir=self.guests,
            handshake_timeout="1s",
        )

    def keys(self, name: str) -> CurveKeys:
        public, secret = read_keys(self.folder / f"{name}.key_secret")
        return CurveKeys(self.server_key, public, secret)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.broker.process.kill()
    house.broker.process.wait(10)


def test_those_of_the_list_come_in_and_nobody_else_is_heard(house: House) -> None:
    endpoint = house.broker.endpoint
    wrong_server, _ = zmq.curve_keypair()
    public, secret = read_keys(house.folder / "alice.key_secret")
    strangers = [
        house.keys("mallory"),
        CurveKeys(house.server_key),
        CurveKeys(wrong_server, public, secret),
        None,
    ]
    for keys in strangers:
        with Client(endpoint, timeout=SHORT_S, curve=keys) as stranger:
            with pytest.raises(ReplyTimeout):
                stranger.mmi("service", b"echo")
            assert not stranger.status
    with Client(endpoint, timeout=TIMEOUT_S, curve=house.keys("alice")) as alice:
        assert alice.mmi("service", b"echo") == [b"404"]
    assert house.broker.stop() == 0, house.broker.log.read_text()


def test_what_is_said_without_keys_makes_no_job_and_those_who_only_knock_are_shown_out(house: House) -> None:
    plain = [RawClient(house.broker.endpoint) for _ in range(20)]
    for one in plain:
        # Who was shut out already has nobody to say it to.
        with contextlib.suppress(zmq.Again):
            one.socket.send_multipart([b"", b"MDPC01", b"echo", b"let me in"], zmq.NOBLOCK)
    with Client(house.broker.endpoint, timeout=TIMEOUT_S, curve=house.keys("alice")) as alice:
        before = alice.mmi("health")
        assert before[0] == b"200"
        time.sleep(SHORT_S)  # Their handshakes have run out by now, and began anew.
        assert alice.mmi("service", b"echo") == [b"404"]
    for one in plain:
        assert one.is_silent(0)
        one.close(0)
    assert "let me in" not in command("jobs", "--json", folder=house.folder).stdout
    assert command("jobs", "--json", folder=house.folder).stdout.strip() in ("[]", ""), "a stranger made a job"


def test_worker_and_client_of_the_list_work_together(house: House) -> None:
    code = (
        "import sys\n"
        "from unstuck.mdp import CurveKeys, Worker\n"
        "Worker(sys.argv[1], 'echo', lambda body: body, curve=CurveKeys(*sys.argv[2:5])).run()\n"
    )
    keys = house.keys("alice")
    words = [key.decode() for key in (keys.server_key, keys.public_key, keys.secret_key) if isinstance(key, bytes)]
    worker = subprocess.Popen([sys.executable, "-c", code, house.broker.endpoint, *words], cwd=ROOT)
    try:
        with Client(house.broker.endpoint, timeout=TIMEOUT_S, curve=keys) as client:
            assert client.call("echo", b"hello") == [b"hello"]
    finally:
        worker.kill()
        worker.wait()


def test_keys_are_never_written_over_and_the_secret_is_nobody_elses(tmp_path: Path) -> None:
    assert command("keygen", "a", "--dir", str(tmp_path), folder=tmp_path).returncode == 0
    secret = tmp_path / "a.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    again = command("keygen", "a", "--dir", str(tmp_path), folder=tmp_path)
    assert again.returncode != 0
    assert "exists already" in again.stderr
    secret.chmod(0o644)
    refused = command(
        "broker", "--bind", "tcp://127.0.0.1:0", folder=tmp_path,
        UNSTUCK_MDP_CURVE_SECRET_FILE=str(secret), UNSTUCK_MDP_CURVE_CLIENTS_DIR=str(tmp_path),
    )  # fmt: skip
    assert refused.returncode != 0
    assert "chmod 600" in refused.stderr


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_beyond_this_machine_nothing_is_served_without_keys(bind: str, tmp_path: Path) -> None:
    refused = command("broker", "--bind", bind, folder=tmp_path)
    assert refused.returncode != 0
    assert "unstuck keygen" in refused.stderr, refused.stderr
    assert "--insecure" in refused.stderr


def test_who_says_that_it_is_meant_may_listen_to_everybody(tmp_path: Path) -> None:
    broker = Broker.__new__(Broker)
    broker.url, broker.log, broker.bind = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "log", "tcp://0.0.0.0:0"
    broker.settings = {"UNSTUCK_MDP_INSECURE": "true"}
    broker.start()
    try:
        assert broker.endpoint.startswith("tcp://0.0.0.0:")
    finally:
        broker.process.kill()
        broker.process.wait(10)


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


def test_deaths_of_one_time_are_gathered_into_one_message() -> None:
    notices = Notifications(delay_s=1.5)
    for number, now_s in enumerate((0.0, 0.7, 1.4)):
        notices.add(b"a", PendingNotification(WORKER_DIED, number, None, {"ledger_id": number}), now_s)
    assert list(notices.due(1.49)) == []
    [(_, message)] = notices.due(1.5)
    assert [cbor2.loads(one)["ledger_id"] for one in message[3:]] == [0, 1, 2]
    assert list(notices.due(60.0)) == []


def test_a_death_is_told_when_its_delay_is_over_and_once(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """As many as come: on a busy machine the last of them may die after that time, and is told of later."""
    with broker_on(request, tmp_path, "sqlite", crash_notification_delay_ms=1000) as broker:
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
        assert time.monotonic() - killed_s >= 1.0
        while len(told) < 3:
            told += client.notice(WORKER_DIED)
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
        with Client(broker.endpoint, timeout=TIMEOUT_S, log_errors=False) as ours, pytest.raises(CallFailed) as raised:
            ours.call(peers.service.decode(), b"job")
        assert raised.value.error == "NO_WORKERS"
        peers.close()


def test_a_last_word_overtakes_no_earlier_one_of_the_same_job() -> None:
    notices = Notifications(delay_s=60.0)

    def notice(job_id: int, **facts: object) -> PendingNotification:
        return PendingNotification(WORKER_DIED, job_id, None, {"ledger_id": job_id, **facts})

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
    listeners = Subscriptions()
    identity = b"i" * 16

    def ask(**wish: object) -> list[bytes]:
        return listeners.subscribe(identity, (cbor2.dumps({"v": 1, **wish}),), 0.0)

    for events in (["WORKER_DIED", "SOMETHING"], ["worker_died"], [7], [["NO_WORKERS"]]):
        code, why = ask(events=events)
        assert code == b"501"
        assert "NO_WORKERS" in cbor2.loads(why)["why"], "it says what there is"
        assert not listeners.is_subscribed(identity)
    assert ask(events=[])[0] == b"200"
    assert ask(events=["WORKER_DIED"])[0] == b"200"
