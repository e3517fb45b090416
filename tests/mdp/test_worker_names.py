"""Two workers want one name, at one broker or at two: the living one keeps it, with its jobs."""

import threading
from contextlib import closing
from pathlib import Path

import cbor2
import pytest
from tests.mdp.broker import DISCONNECT, READY, BrokerHarness, RawWorker
from tests.mdp.fake_ledger import FakeLedger
from tests.mdp.fake_ledger import broker as core_broker
from tests.support.fleet import TIMEOUT_S, wait_for

from unstuck.domain.states import JobState
from unstuck.errors import NameTaken
from unstuck.mdp import Worker, worker_thread
from unstuck.mdp.broker.batch import Batch
from unstuck.mdp.broker.core import BrokerCore

CHURN = 20


@pytest.fixture(params=["the same broker", "another broker"])
def other(scene: BrokerHarness, request: pytest.FixtureRequest) -> str:
    """Give the address of the broker that the second worker comes to, while the scene goes on at the first one."""
    if request.param == "the same broker":
        return scene.endpoint
    first, broker = scene.endpoint, scene.broker
    scene.endpoint = "tcp://127.0.0.1:0"
    scene.open()
    other = scene.endpoint
    scene.endpoint, scene.broker = first, broker
    return other


def rival(endpoint: str, name: str, **about: object) -> RawWorker:
    worker = RawWorker(endpoint)
    worker.tell(READY, b"echo", b"", cbor2.dumps({"name": name, **about}))
    return worker


def refusal(worker: RawWorker) -> dict[str, str]:
    """Give what a worker hears that is turned away."""
    command, rest = worker.heard()
    assert command == DISCONNECT
    (about,) = rest
    said: dict[str, str] = cbor2.loads(about)
    return said


def test_a_living_workers_name_cannot_be_taken(scene: BrokerHarness, other: str, tmp_path: Path) -> None:
    scene.worker("echo", "--name", "w1")
    (before,) = scene.living("echo")
    gate = tmp_path / "gate"
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=TIMEOUT_S)
    scene.wait_begun("job")
    for _ in range(2):
        with closing(rival(other, "w1")) as second:
            said = refusal(second)
        assert said["error"] == "NAME_TAKEN"
        assert "'w1'" in said["message"]
        assert before.id in said["message"]
    assert [(one.id, one.name) for one in scene.living("echo")] == [(before.id, "w1")]
    gate.touch()
    assert call.result() == [b"done job"]
    assert (scene.job().attempt, scene.job().crash_count) == (1, 0)
    assert client.call("echo", b"next") == [b"done next"]
    assert [one.id for one in scene.living("echo")] == [before.id]


def test_a_rival_that_comes_and_goes_harms_nobody(scene: BrokerHarness, other: str, tmp_path: Path) -> None:
    """It may be gone before anything was written of it: then the end of its former life was written."""
    scene.worker("echo", "--name", "w1")
    (before,) = scene.living("echo")
    gate = tmp_path / "gate"
    call = scene.client().submit("echo", f"job 0 {gate}".encode(), timeout=TIMEOUT_S)
    scene.wait_begun("job")
    for _ in range(CHURN):
        rival(other, "w1").close()
    with closing(rival(other, "w1")) as last:
        refusal(last)
    gate.touch()
    assert call.result() == [b"done job"]
    assert [one.id for one in scene.living("echo")] == [before.id]
    assert (scene.job().attempt, scene.job().crash_count) == (1, 0)


def test_a_worker_whose_name_is_taken_says_so_and_ends(
    scene: BrokerHarness, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_thread, "NAME_PATIENCE_S", 0.5)
    scene.worker("echo", "--name", "w1")
    (before,) = scene.living("echo")
    with pytest.raises(NameTaken, match=rf"'w1' lives \({before.id}\).*[Cc]hoose another name"):
        Worker(other, "echo", lambda body: body, name="w1").run()
    assert [one.id for one in scene.living("echo")] == [before.id]


def test_a_name_is_free_when_its_worker_left(scene: BrokerHarness, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "FIRST_BACKOFF_S", 0.2)
    first = scene.worker("echo", "--name", "w1")
    (before,) = scene.living("echo")
    with closing(rival(other, "w1")) as refused:
        refusal(refused)
    worker = Worker(other, "echo", lambda body: [b"second"], name="w1")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        first.kill()

        def follows() -> bool:
            found = scene.living("echo")
            return [one.name for one in found] == ["w1"] and found[0].id != before.id

        wait_for(follows, "the second one under the name")
        assert scene.client().call("echo", b"x") == [b"second"]
    finally:
        worker.stop()
        thread.join(TIMEOUT_S)


def test_a_python_workers_name_cannot_be_taken(scene: BrokerHarness) -> None:
    python = scene.fleet.start("--concurrency", "1", "--name", "w1")
    with closing(rival(scene.endpoint, "w1")) as second:
        said = refusal(second)
    assert said["error"] == "NAME_TAKEN"
    assert python.id in said["message"]


def test_a_worker_gets_its_own_name_back_after_its_broker_died_and_no_other_does(scene: BrokerHarness) -> None:
    """A rival comes first, knows everything that is shown of the worker, and lacks its secret."""
    process = scene.worker("echo", "--name", "w1")
    (before,) = scene.living("echo")
    process.send_signal(19)
    scene.kill_broker()
    scene.open()
    with closing(rival(scene.endpoint, "w1", host=before.host, metadata={}, pid=process.pid)) as second:
        assert refusal(second)["error"] == "NAME_TAKEN"
    with closing(rival(scene.endpoint, "w1", instance=before.owner)) as second:
        assert refusal(second)["error"] == "NAME_TAKEN"
    process.send_signal(18)
    wait_for(lambda: scene.living("echo")[0].last_seen_at > before.last_seen_at + 1, "a beat of the same worker")
    assert [one.id for one in scene.living("echo")] == [before.id]
    assert scene.client().call("echo", b"next") == [b"done next"]
    assert scene.jobs()[0].state is JobState.SUCCEEDED


def test_a_worker_that_lost_its_connection_comes_back_under_its_name(scene: BrokerHarness) -> None:
    """Its broker lives, and may hear of the new connection before the old one is written as ended."""
    with closing(rival(scene.endpoint, "w1", instance=b"\1" * 16)) as worker:
        wait_for(lambda: scene.living("echo"), "the worker")
        (before,) = scene.living("echo")
        worker.close(0)
    for _ in range(3):
        with closing(rival(scene.endpoint, "w1", instance=b"\1" * 16)) as worker:
            wait_for(
                lambda last=before: [one.id for one in scene.living("echo")] not in ([], [last.id]), "its next life"
            )
            (before,) = scene.living("echo")
            assert before.name == "w1"
            scene.client().submit("echo", b"x")
            address, body = worker.request()
            worker.reply(address, *body)
            worker.close(0)


def test_many_workers_without_a_name_of_their_own_get_along(scene: BrokerHarness) -> None:
    """Containers may have one host name and one process id."""
    workers = [Worker(scene.endpoint, "echo", lambda body: body) for _ in range(3)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(scene.living("echo")) == 3, "three workers")
        assert len({one.name for one in scene.living("echo")}) == 3
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join(TIMEOUT_S)


def come_back(holds: bool) -> tuple[BrokerCore, Batch | None]:
    """Give a broker that hears of a worker's new connection before the end of the one by which it got a request."""
    core, ledger = core_broker(), FakeLedger()

    def settle() -> None:
        while (order := core.take_batch()) is not None:
            core.on_batch_done(ledger.do(order), 0.0)

    about = {"name": "w1", "instance": b"\1" * 16}
    core.on_message(b"old", [b"", b"MDPW01", READY, b"echo", b"", cbor2.dumps(about)], 1, 0.0)
    core.on_message(b"client", [b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    settle()
    (request,) = [frames for to, frames in core.take_sends() if to == b"old"]
    if holds:
        about["holding"] = request[3]
    core.on_message(b"new", [b"", b"MDPW01", READY, b"echo", b"", cbor2.dumps(about)], 2, 0.0)
    core.on_connection_closed(1, 0.0)
    order = core.take_batch()
    if order is not None:
        core.on_batch_done(ledger.do(order), 0.0)
    core.on_message(b"new", [b"", b"MDPW01", b"\3", request[3], b"", b"done"], None, 0.0)
    return core, order


def test_a_worker_goes_on_through_its_new_connection_before_the_old_one_ended() -> None:
    core, order = come_back(holds=True)
    assert order is None
    (peer,) = core.workers
    assert (peer.identity, peer.assignment) == (b"new", None)
    order = core.take_batch()
    assert order is not None
    assert (order.deaths, order.registrations) == ([], [])
    assert [len(hand.done) for hand in order.worker_turns.values()] == [1]


def test_a_worker_that_comes_back_without_its_request_lost_it() -> None:
    _, order = come_back(holds=False)
    assert order is not None
    assert [death.job_id for death in order.deaths] == [1]
    assert len(order.registrations) == 1
