"""Who is told of deaths and empty benches, what, and how often: the rules one by one, and old clients hear nothing."""

import secrets
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cbor2
import pytest
from tests.mdp.broker import NO_WORKERS, WORKER_DIED, Broker, BrokerHarness, Peers, broker_on
from tests.mdp.guide_shapes import jobs
from tests.support.fleet import TIMEOUT_S, wait_for
from tests.support.signals import send_signal

from unstuck.domain.states import JobState
from unstuck.errors import CallFailed


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param, retry_attempts=1) as broker:
        yield broker


def one(maps: list[dict[str, Any]]) -> dict[str, Any]:
    (only,) = maps
    return only


def test_who_did_not_ask_hears_nothing_of_deaths_and_empty_benches(peers: Peers) -> None:
    old, named = peers.client(), peers.client(secrets.token_bytes(16))
    for client in (old, named):
        client.ask(peers.service, cbor2.dumps({"JobID": "mine"}))
        assert client.is_silent()
    for _ in range(2):
        worker = peers.worker()
        worker.request()
        worker.close()
        peers.broker.awaits(peers.service, served=False)
    assert old.is_silent(0.1)
    assert named.is_silent(0.1)


def test_a_worker_dies_and_the_client_is_told_once_and_gets_its_reply_and_then_nothing(peers: Peers) -> None:
    client, worker = peers.listener(), peers.worker()
    client.ask(peers.service, cbor2.dumps({"JobID": "mine-7"}))
    address, _ = worker.request()
    worker.close()
    heard = client.hear()
    assert 150 <= sum(map(len, heard)) <= 300, heard
    assert heard[:3] == [b"", b"MDPC01", WORKER_DIED]
    told = cbor2.loads(heard[3])
    assert (told["error"], told["service"], told["job_id"]) == ("WORKER_CRASHED", peers.service.decode(), "mine-7")
    assert told["message"] == "Worker processing your job has crashed. Job will be retried."
    assert told["ledger_id"] == int(address.partition(b".")[0])
    assert told["attempt"] == 1
    assert not told.get("final")
    assert datetime.fromisoformat(told["timestamp"]).tzinfo is not None
    second = peers.worker()
    again, _ = second.request()
    second.reply(again, b"done")
    assert client.answer(peers.service) == [b"done"]
    second.close()
    assert client.is_silent(0.5), "something came after the reply"


def test_the_last_death_says_that_it_was_the_last(peers: Peers) -> None:
    client = peers.listener()
    client.ask(peers.service, b"deadly")
    assert one(client.notice(NO_WORKERS))["error"] == "NO_WORKERS"
    for attempt in (1, 2):
        worker = peers.worker()
        worker.request()
        worker.close()
        told = one(client.notice(WORKER_DIED))
        assert told["attempt"] == attempt
        assert told.get("final", False) is (attempt == 2)
        assert ("not be retried" in told["message"]) is (attempt == 2)
    assert client.is_silent(0.5)


def test_nobody_there_is_told_at_once_and_the_job_waits(peers: Peers) -> None:
    client = peers.listener()
    client.ask(peers.service, b"job")
    told = one(client.notice(NO_WORKERS))
    assert told["message"] == "No workers are currently available to process this job."
    assert told["job_id"] == str(told["ledger_id"])
    worker = peers.worker()
    address, body = worker.request()
    worker.reply(address, *body)
    assert client.answer(peers.service) == [b"job"]


def test_each_message_names_its_request_by_the_frame_before_the_empty_one(peers: Peers) -> None:
    client = peers.listener()
    tags = [b"first", cbor2.dumps({"job_id": "mine"})]
    for tag in tags:
        client.ask(peers.service, tag, correlation=tag)
    assert {one(client.notice(NO_WORKERS, tag))["job_id"] == "mine" for tag in tags} == {False, True}
    worker = peers.worker()
    for tag in tags:
        address, body = worker.request()
        worker.reply(address, *body)
        assert client.answer(peers.service, tag) == [tag]


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ({}, b"200"),
        ({"ttl": 10**400}, b"200"),
        ({"ttl": -5}, b"200"),
        ({"events": []}, b"200"),
        ({"events": ["NO_WORKERS", "SOMETHING_ELSE", 7]}, b"501"),
        ({"v": 2}, b"501"),
        ({"ttl": float("nan")}, b"501"),
        ({"ttl": "long"}, b"501"),
        ({"events": 7}, b"501"),
    ],
)
def test_a_wish_is_granted_or_refused(peers: Peers, wish: dict[str, Any], code: bytes) -> None:
    answer = peers.client(secrets.token_bytes(16)).listen(**wish)
    assert answer[0] == code
    if code == b"200":
        assert 1 <= cbor2.loads(answer[1])["lease"] <= 3600


@pytest.mark.parametrize("identity", [None, b"short", b"fifteen bytes.."])
def test_identities_that_others_may_have_are_refused(peers: Peers, identity: bytes | None) -> None:
    client = peers.client(identity)
    assert client.listen()[0] == b"403"
    client.ask(peers.service, b"job")
    assert client.is_silent()


@pytest.mark.parametrize("body", [[b""], [b"\xff"], [b"\xa1\x61v\x01", b"second"]])
def test_a_wish_that_cannot_be_read_is_answered_with_501(peers: Peers, body: list[bytes]) -> None:
    assert peers.client(secrets.token_bytes(16)).call(b"mmi.notify", *body) == [b"501"]


def test_only_what_was_asked_for_is_told(peers: Peers) -> None:
    client = peers.listener(events=["WORKER_DIED"])
    client.ask(peers.service, b"job")
    assert client.is_silent()
    worker = peers.worker()
    worker.request()
    worker.close()
    assert one(client.notice(WORKER_DIED))["error"] == "WORKER_CRASHED"


def test_what_was_asked_before_the_wish_is_not_told_of(peers: Peers) -> None:
    """The flag is the request's own."""
    client, worker = peers.client(secrets.token_bytes(16)), peers.worker()
    client.ask(peers.service, b"job")
    worker.request()
    assert client.listen()[0] == b"200"
    worker.close()
    peers.broker.awaits(peers.service, served=False)
    assert client.is_silent(0.5)


def test_who_renews_its_wish_while_replies_come_gets_each_once(peers: Peers) -> None:
    client, worker = peers.listener(), peers.worker()
    seen: list[bytes] = []
    wish = cbor2.dumps({"v": 1})
    for number in range(60):
        client.ask(peers.service, b"%d" % number, correlation=b"tag %d" % number)
        address, body = worker.request()
        worker.reply(address, *body)
        client.ask(b"mmi.notify", wish)
        client.ask(b"mmi.notify", wish)
        heard = [client.hear() for _ in range(3)]
        seen += [frames[0] for frames in heard if frames[0]]
    assert sorted(seen) == sorted(b"tag %d" % number for number in range(60))
    assert client.is_silent(0.5), "a reply came twice"


def test_a_mass_crash_is_told_in_few_messages(peers: Peers) -> None:
    client = peers.listener(events=["WORKER_DIED"])
    workers = [peers.worker() for _ in range(40)]
    for number in range(40):
        client.ask(peers.service, b"%d" % number)
    for worker in workers:
        worker.request()
    for worker in workers:
        worker.close()
    jobs: list[int] = []
    messages = 0
    while len(jobs) < 40:
        jobs += [told["ledger_id"] for told in client.notice(WORKER_DIED)]
        messages += 1
    assert len(set(jobs)) == 40
    assert messages <= 35
    assert client.is_silent(0.5)


def test_a_request_that_nobody_took_in_time_ends_with_a_last_word(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {"request_ttl": "500ms", "heartbeat_interval": "100ms"}
    with broker_on(request, tmp_path_factory.mktemp("ttl"), "sqlite", **settings) as broker:
        peers = Peers(broker)
        client, old = peers.listener(), peers.client()
        old.ask(peers.service, b"old")
        client.ask(peers.service, b"job", correlation=b"tag")
        assert "final" not in one(client.notice(NO_WORKERS, b"tag"))
        told = one(client.notice(NO_WORKERS, b"tag"))
        assert (told["final"], told["error"]) == (True, "NO_WORKERS")
        wait_for(lambda: {job.state for job in jobs(peers)} == {JobState.CANCELLED}, "the other one to expire")
        assert old.is_silent()
        assert peers.worker().is_idle(), "it is not done any more"
        peers.close()


def test_after_a_restart_a_client_that_comes_back_gets_its_reply(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with broker_on(request, tmp_path_factory.mktemp("again"), "sqlite") as broker:
        peers = Peers(broker)
        client = peers.listener()
        client.ask(peers.service, b"job", correlation=b"tag")
        assert one(client.notice(NO_WORKERS, b"tag"))["error"] == "NO_WORKERS"
        broker.again()
        assert client.listen()[0] == b"200"
        worker = peers.worker()
        address, body = worker.request()
        worker.reply(address, *body)
        assert client.answer(peers.service, b"tag") == [b"job"]
        assert client.is_silent()
        peers.close()


DIED = "Worker processing your job has crashed. Job will be retried."
DIED_FOR_GOOD = "Worker processing your job has crashed. Job will not be retried."
NOBODY = "No workers are currently available to process this job."
RETRIES = 3


def kill(pid: int) -> None:
    send_signal(pid, signal.SIGKILL)


def check_notice(notice: dict[str, Any], error: str, message: str) -> None:
    assert {"error", "service", "message", "timestamp", "job_id", "ledger_id"} <= notice.keys()
    assert (notice["error"], notice["service"], notice["message"]) == (error, "echo", message)
    said_at = datetime.fromisoformat(notice["timestamp"])
    assert abs(datetime.now(UTC) - said_at) < timedelta(seconds=TIMEOUT_S)


def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


# The first case: a crash is seen ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_a_client_is_told_of_the_crash_and_gets_its_reply_from_another_worker(
    scene: BrokerHarness, tmp_path: Path, kind: str
) -> None:
    more = ["--plain"] if kind == "plain" else []
    first = scene.worker("echo", *more)
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate(tmp_path)}".encode(), job_id="mine")
    kill(scene.wait_begun("job").pid)
    notice = client.next()
    check_notice(notice, "WORKER_CRASHED", DIED)
    job = scene.job()
    assert (notice["job_id"], notice["ledger_id"], notice["attempt"]) == ("mine", job.id, 1)
    assert "final" not in notice
    assert (job.state, job.crash_count) == (JobState.PENDING, 1)
    first.wait(TIMEOUT_S)

    gate(tmp_path).touch()
    scene.worker("echo", *more)
    assert call.result() == [b"done job"]
    assert scene.times()["job"] == 2
    assert client.news.empty()


def test_an_old_client_sees_nothing_of_the_crash_but_its_reply(scene: BrokerHarness, tmp_path: Path) -> None:
    scene.worker("echo", "--plain")
    client = scene.plain_client("echo", f"job 0 {gate(tmp_path)}")
    kill(scene.wait_begun("job").pid)
    wait_for(lambda: scene.job().crash_count == 1, "the crash to be known")
    gate(tmp_path).touch()
    scene.worker("echo", "--plain")
    said, complaints = client.communicate(timeout=TIMEOUT_S)
    assert (said.decode().strip(), client.returncode) == ("done job", 0), complaints
    assert scene.times()["job"] == 2


def test_after_the_last_retry_the_client_is_told_so_and_nothing_more(scene: BrokerHarness, tmp_path: Path) -> None:
    client = scene.client()
    scene.worker("echo")
    call = client.submit("echo", f"job 0 {gate(tmp_path)}".encode())
    for crash in range(1, RETRIES + 2):
        victim = scene.wait_begun("job", crash)
        # The next one stands ready, so that nobody is told that there is none.
        scene.worker("echo")
        kill(victim.pid)
        notice = client.next()
        last = crash > RETRIES
        check_notice(notice, "WORKER_CRASHED", DIED_FOR_GOOD if last else DIED)
        assert (notice["attempt"], notice.get("final", False)) == (crash, last)
    with pytest.raises(CallFailed) as caught:
        call.result()
    assert (caught.value.error, caught.value.ledger_id) == ("WORKER_CRASHED", scene.job().id)
    gate(tmp_path).touch()
    job = scene.job()
    assert (job.state, job.crash_count) == (JobState.QUARANTINED, RETRIES + 1)
    # What came later would stand behind this answer.
    assert client.call("echo", b"next") == [b"done next"]
    assert client.news.empty()
    assert scene.times()["job"] == RETRIES + 1


def test_an_old_client_whose_job_is_given_up_sees_silence(scene: BrokerHarness, tmp_path: Path) -> None:
    scene.worker("echo", "--plain")
    client = scene.plain_client("echo", f"job 0 {gate(tmp_path)}")
    for crash in range(1, RETRIES + 2):
        victim = scene.wait_begun("job", crash)
        scene.worker("echo", "--plain")
        kill(victim.pid)
    wait_for(lambda: scene.job().state is JobState.QUARANTINED, "the job to be given up")
    # A message of whatever kind would have ended it: it takes a reply, and anything else breaks it.
    with scene.client() as other:
        assert other.call("echo", b"next") == [b"done next"]
    assert client.poll() is None


def test_a_worker_that_is_only_busy_is_let_be(scene: BrokerHarness, tmp_path: Path) -> None:
    """It says nothing at all while it works, as old ones do."""
    scene.worker("echo", "--plain")
    client = scene.client()
    assert client.call("echo", b"job 9") == [b"done job"]
    assert client.news.empty()
    assert scene.times()["job"] == 1


# The second case: nobody is there ---------------------------------------------------------------


def test_a_client_is_told_at_once_that_nobody_is_there_and_then_a_worker_comes(scene: BrokerHarness) -> None:
    client = scene.client()
    call = client.submit("echo", b"job")
    notice = client.next()
    check_notice(notice, "NO_WORKERS", NOBODY)
    assert (notice["job_id"], notice["ledger_id"]) == (str(scene.job().id), scene.job().id)
    assert scene.job().state is JobState.PENDING
    scene.worker("echo")
    assert call.result() == [b"done job"]
    assert client.news.empty()
    assert scene.times()["job"] == 1


@pytest.mark.parametrize(("key", "times"), [("the-key", 1), (None, 2)])
def test_what_is_submitted_again_runs_once_with_a_key_and_twice_without(
    scene: BrokerHarness, key: str | None, times: int
) -> None:
    client = scene.client()
    first = client.submit("echo", b"job", idempotency_key=key)
    check_notice(client.next(), "NO_WORKERS", NOBODY)
    scene.worker("echo")
    again = client.submit("echo", b"job", idempotency_key=key)
    assert first.result() == again.result() == [b"done job"]
    third = client.call("echo", b"job", idempotency_key=key)
    assert third == [b"done job"]
    assert scene.times()["job"] == (1 if key else times + 1)
    assert len(scene.jobs()) == (1 if key else times + 1)


def test_an_old_client_waits_in_silence_until_a_worker_comes(scene: BrokerHarness) -> None:
    client = scene.plain_client("echo", "job")
    wait_for(lambda: scene.jobs(), "its request in the ledger")
    scene.worker("echo")
    said, complaints = client.communicate(timeout=TIMEOUT_S)
    assert (said.decode().strip(), client.returncode) == ("done job", 0), complaints


def test_an_old_client_that_gives_up_and_asks_again_has_two_jobs(scene: BrokerHarness) -> None:
    client = scene.plain_client("echo", "job", timeout_s=0.7)
    said, complaints = client.communicate(timeout=TIMEOUT_S)
    assert (said.decode().strip(), client.returncode) == ("silence", 0), complaints
    wait_for(lambda: len(scene.jobs(JobState.PENDING)) == 3, "all of its requests in the ledger")
    scene.worker("echo")
    wait_for(lambda: scene.times()["job"] == 3, "each to be done")


# The third case: a death after the first step -----------------------------------------------------


@pytest.mark.parametrize("who", ["new", "old"])
def test_a_job_whose_worker_died_after_its_first_step_begins_anew(
    scene: BrokerHarness, tmp_path: Path, who: str
) -> None:
    scene.worker("echo")
    scene.worker("echo")
    words = f"steps 0.05 {gate(tmp_path)}"
    client = scene.client()
    old = scene.plain_client("echo", words) if who == "old" else None
    call = client.submit("echo", words.encode()) if who == "new" else None
    victim = scene.wait_begun("steps")
    kill(victim.pid)
    other = scene.wait_begun("steps", 2)
    assert other.pid != victim.pid
    gate(tmp_path).touch()
    if call is not None:
        check_notice(client.next(), "WORKER_CRASHED", DIED)
        assert call.result() == [b"done steps"]
    if old is not None:
        said, complaints = old.communicate(timeout=TIMEOUT_S)
        assert (said.decode().strip(), old.returncode) == ("done steps", 0), complaints
    assert client.news.empty()
    assert [(work.pid, work.ended is None) for work in scene.done()] == [(victim.pid, True), (other.pid, False)]
