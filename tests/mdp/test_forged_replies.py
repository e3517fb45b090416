"""A stranger hands in replies that are not its own: what other workers have stays theirs."""

import secrets
from collections.abc import Iterator
from contextlib import closing

import cbor2
import pytest
from tests.mdp.broker import READY, BrokerHarness, RawClient, RawWorker
from tests.mdp.fake_ledger import broker as core_broker
from tests.support.builders import birth
from tests.support.fleet import wait_for

from unstuck.domain.states import JobState, Transport, WorkerState
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import ClaimRequest, Turn
from unstuck.mdp.broker.request_addresses import key_of, owner_of, read_address
from unstuck.mdp.broker.workers import FORGED


def forge(address: bytes, key: str | None = None, token: int | None = None) -> bytes:
    """Give the address of another worker's request as a stranger can know it: all but the key."""
    genuine = read_address(address)
    assert genuine is not None
    proof = "" if key is None else f"-{key}"
    said = f"{genuine.job_id}.{token or genuine.token}{proof}.{genuine.worker_id}.echo"
    return said.encode()


@pytest.fixture
def stranger(scene: BrokerHarness) -> Iterator[RawWorker]:
    worker = RawWorker(scene.endpoint)
    yield worker
    worker.close(0)


@pytest.mark.parametrize("forged", ["its attempt", "another attempt"])
def test_a_reply_in_the_name_of_a_python_worker_ends_neither_the_worker_nor_its_job(
    scene: BrokerHarness, stranger: RawWorker, forged: str
) -> None:
    """Ids of workers are shown to everyone, and those of jobs and attempts are counted up."""
    worker = scene.fleet.start("--concurrency", "1")
    gate = scene.folder / "gate"
    job, _ = scene.fleet.begin("wait_for_file", str(gate))
    (held,) = scene.fleet.ledger.workers.held(worker.id)
    token = held.token if forged == "its attempt" else held.token + 1000
    stranger.reply(f"{job.id}.{token}.{worker.id}.wait_for_file".encode(), b"forged")
    # The reply was written before a stranger's next question is answered.
    stranger.is_sent_away()
    stranger.say(b"", b"MDPC01", b"mmi.health", b"")
    stranger.hear()
    record = worker.record()
    assert record is not None
    assert record.state is WorkerState.ACTIVE
    assert scene.fleet.state(job) is JobState.RUNNING
    gate.touch()
    assert job.result(60) == "rested"


def test_a_reply_to_nothing_in_the_name_of_a_worker_of_another_broker_takes_nothing_from_it(
    scene: BrokerHarness, stranger: RawWorker
) -> None:
    """Two brokers have one ledger. A token that never stood proves nothing about a worker."""
    scene.endpoint = "tcp://127.0.0.1:0"
    scene.open()
    worker, client = RawWorker(scene.endpoint, b"echo"), RawClient(scene.endpoint)
    try:
        wait_for(lambda: scene.living("echo"), "a worker")
        client.ask(b"echo", b"job")
        address, body = worker.request()
        genuine = read_address(address)
        assert genuine is not None
        worker_id = genuine.worker_id
        stranger.reply(forge(address, token=genuine.token + 1000), b"forged")
        stranger.is_sent_away()
        stranger.say(b"", b"MDPC01", b"mmi.health", b"")
        stranger.hear()
        assert [one.id for one in scene.living("echo")] == [worker_id]
        assert scene.job().state is JobState.RUNNING
        worker.reply(address, *body)
        assert client.answer(b"echo") == [b"job"]
    finally:
        worker.close(0)
        client.close(0)


@pytest.fixture(params=["the same broker", "another broker"])
def other(scene: BrokerHarness, request: pytest.FixtureRequest) -> str:
    """Give the address of the broker that the forger comes to."""
    if request.param == "the same broker":
        return scene.endpoint
    first, broker, log = scene.endpoint, scene.broker, scene.log
    scene.endpoint = "tcp://127.0.0.1:0"
    scene.open()
    other = scene.endpoint
    scene.endpoint, scene.broker, scene.log = first, broker, log
    return other


@pytest.mark.parametrize("key", ["none", "made up", "its own"])
@pytest.mark.parametrize("forger", ["a stranger", "a worker", "a worker that tells of itself"])
def test_a_majordomo_peer_cannot_reply_for_another_worker(
    scene: BrokerHarness, other: str, forger: str, key: str
) -> None:
    """It knows the job, the attempt and the worker. It is sent away, and the victim goes on with its request."""
    with (
        closing(RawWorker(scene.endpoint, b"echo")) as victim,
        closing(RawWorker(other)) as thief,
        closing(RawClient(scene.endpoint)) as client,
        closing(RawClient(other)) as asking,
    ):
        wait_for(lambda: scene.living("echo"), "a worker")
        client.ask(b"echo", b"job")
        address, body = victim.request()
        own_key = secrets.token_bytes(16)
        if forger == "a worker":
            thief.tell(READY, b"other")
        elif forger == "a worker that tells of itself":
            thief.tell(READY, b"other", b"", cbor2.dumps({"name": "thief", "instance": own_key}))
        if forger != "a stranger":
            wait_for(lambda: scene.living("other"), "the thief")
        keys = {"none": None, "made up": secrets.token_hex(16), "its own": key_of(own_key)}
        thief.reply(forge(address, keys[key]), b"forged")
        thief.is_sent_away()
        asking.call(b"mmi.health", b"")
        assert scene.living("other") == []
        assert scene.job().state is JobState.RUNNING
        assert len(scene.living("echo")) == 1
        victim.reply(address, *body)
        assert client.answer(b"echo") == [b"job"]
        assert (scene.job().attempt, scene.job().crash_count) == (1, 0)
        client.ask(b"echo", b"next")
        address, body = victim.request()
        victim.reply(address, *body)
        assert client.answer(b"echo") == [b"next"]
    logs = "".join(log.read_text() for log in scene.folder.glob("broker-*.log"))
    assert FORGED in logs


def test_a_worker_cannot_be_taken_over_with_the_address_of_its_request(scene: BrokerHarness, other: str) -> None:
    with closing(RawWorker(scene.endpoint, b"echo")) as victim, closing(RawClient(scene.endpoint)) as client:
        wait_for(lambda: scene.living("echo"), "a worker")
        (before,) = scene.living("echo")
        client.ask(b"echo", b"job")
        address, body = victim.request()
        for key in (None, secrets.token_hex(16)):
            with closing(RawWorker(other)) as thief:
                about = {"holding": forge(address, key), "instance": secrets.token_bytes(16)}
                thief.tell(READY, b"echo", b"", cbor2.dumps(about))
                thief.reply(forge(address, key), b"forged")
                wait_for(lambda: len(scene.living("echo")) == 2, "the thief, as another worker")
            wait_for(lambda: len(scene.living("echo")) == 1, "its end")
        assert [one.id for one in scene.living("echo")] == [before.id]
        victim.reply(address, *body)
        assert client.answer(b"echo") == [b"job"]
        assert (scene.job().attempt, scene.job().crash_count) == (1, 0)


def test_while_the_broker_is_away_no_other_peer_can_reply(scene: BrokerHarness) -> None:
    """An old worker comes back with another routing id, and its late reply counts. A forger was faster, without its
    key."""
    with closing(RawWorker(scene.endpoint, b"echo")) as victim, closing(RawClient(scene.endpoint)) as client:
        wait_for(lambda: scene.living("echo"), "a worker")
        client.ask(b"echo", b"job")
        address, _ = victim.request()
        scene.kill_broker()
    scene.open()
    for key in (None, secrets.token_hex(16), owner_of(read_address(address).key)[4:]):  # type: ignore[index,union-attr]
        with closing(RawWorker(scene.endpoint)) as thief, closing(RawClient(scene.endpoint)) as asking:
            thief.reply(forge(address, key), b"forged")
            thief.is_sent_away()
            asking.call(b"mmi.health", b"")
            assert scene.job().state is JobState.RUNNING
    with closing(RawWorker(scene.endpoint)) as back:
        back.reply(address, b"late")
        wait_for(lambda: scene.job().state is JobState.SUCCEEDED, "the late reply")
    assert b"late" in (scene.job().result or b"")
    assert (scene.job().attempt, scene.job().crash_count) == (1, 0)


def test_a_worker_of_a_broker_without_keys_hands_in_its_reply_to_one_with_keys(
    scene: BrokerHarness, stranger: RawWorker
) -> None:
    """Its broker was killed for an upgrade. Its row has no owner, and its address no key."""
    ledger = scene.fleet.ledger
    worker = birth(
        "old1", name="old1", host="here", pid=0, boot_id="", pid_namespace="", process_started="", queues=("echo",),
        tasks=(TaskRecord("echo", "echo"),), concurrency=1, version="", heartbeat_interval_s=60.0,
        suspect_after_s=60.0, running_stale_after_s=60.0, transport=Transport.MDP,
    )  # fmt: skip
    ledger.workers.register(worker)
    with closing(RawClient(scene.endpoint)) as client:
        client.ask(b"echo", b"job")
        wait_for(lambda: scene.jobs(), "the request")
        (job,) = ledger.workers.turn(
            Turn("old1", claim_request=ClaimRequest(("echo",), ("echo",), limit=1, start=1))
        ).claimed
        stranger.reply(f"{job.job_id}.{job.token}-{secrets.token_hex(16)}.old1.echo".encode(), b"forged")
        stranger.is_sent_away()
        stranger.reply(f"{job.job_id}.{job.token}.old1.echo".encode(), b"late")
        assert client.answer(b"echo") == [b"late"]


def test_keys_of_workers_are_random_and_what_is_shown_does_not_give_them_away() -> None:
    core = core_broker()
    for number in range(1_000):
        core.on_message(b"w%d" % number, [b"", b"MDPW01", READY, b"crowd"], number, 0.0)
    keys = [peer.key for peer in core.workers]
    assert {len(bytes.fromhex(key)) for key in keys} == {16}
    assert len(set(keys)) == 1_000
    for place in range(32):
        # Each digit takes every value: with fewer than 128 bits one of them would stand still.
        assert len({key[place] for key in keys}) == 16
    assert all(key not in (owner_of(key) or "") for key in keys)
