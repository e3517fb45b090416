"""What the socket keeps and nobody can take is given back, and whoever is at work goes on."""

import os
import signal
import socket
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import zmq
from tests.fleet import PATIENCE_S, wait_for
from tests.mdp.scene import Scene
from tests.mdp.wire import Raw

from unstuck.config import Mdp
from unstuck.domain.states import JobState
from unstuck.mdp.broker.core import Broker
from unstuck.mdp.broker.loop import Loop, open_router, watch_connections
from unstuck.mdp.broker.orders import Answer
from unstuck.worker.identity import new_worker_id

ACROSS_S = 2 * PATIENCE_S
LEAST_BYTES = 1024 * 1024
"""Below what the process holds when it has done nothing: then it may hold twice as much."""
MOST_SAID = 10_000
CHUNK = bytes(64 * 1024)


class Shadow:
    """Talks under a routing id that is somebody else's."""

    def __init__(self, endpoint: str) -> None:
        self._first = Raw(endpoint, b"an identity of many")
        self._first.say(b"", b"MDPC01", b"mmi.service", b"echo")
        assert self._first.hear()[-1] == b"200"
        self._second = Raw(endpoint, b"an identity of many", sndhwm=100)

    def talk(self) -> None:
        if self._second.socket.poll(100, zmq.POLLOUT):
            self._second.say(b"", b"MDPC01", b"echo", CHUNK)

    def close(self) -> None:
        self._second.close(0)
        self._first.close(0)


class Endless:
    """Talks in one message that never ends. No library sends a part before it has the whole: so by hand, ZMTP 3.0."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._line = socket.create_connection((host, int(port)), PATIENCE_S)
        self._line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        self._line.sendall(b"\x04" + bytes([len(ready)]) + ready)
        heard = b""
        while b"READY" not in heard:
            heard += self._line.recv(4096)

    def talk(self) -> None:
        with suppress(OSError):  # the socket that began afresh has hung up
            self._line.sendall(b"\x03" + len(CHUNK).to_bytes(8, "big") + CHUNK)

    def close(self) -> None:
        self._line.close()


@pytest.mark.parametrize("kind", ["ours", "plain"])
@pytest.mark.parametrize("talker", [Shadow, Endless])
def test_a_socket_that_holds_too_much_begins_afresh_and_all_go_on(
    scene: Scene, tmp_path: Path, talker: type[Shadow | Endless], kind: str
) -> None:
    scene.kill_broker()
    scene.open(max_memory_bytes=LEAST_BYTES)
    process = psutil.Process(scene.broker.pid)
    gate = tmp_path / "gate"
    scene.worker("echo", *(["--plain"] if kind == "plain" else []))
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")

    most_bytes = 0
    with closing(talker(scene.endpoint)) as somebody:
        for _ in range(MOST_SAID):
            if "begins afresh" in scene.log.read_text():
                break
            most_bytes = max(most_bytes, process.memory_info().rss)
            somebody.talk()
        else:
            raise AssertionError(f"it kept everything: {most_bytes} bytes")
    wait_for(lambda: process.memory_info().rss < most_bytes / 1.5, "the memory to be given back")
    wait_for(lambda: "open again" in scene.log.read_text(), "a new socket")

    gate.touch()
    assert call.result() == [b"done job"]
    job = scene.job()
    assert (job.state, job.attempt, job.crash_count) == (JobState.SUCCEEDED, 1, 0)
    # With a key: said before it has seen the end of the old connection, it would be lost with that.
    assert client.call("echo", b"next", timeout=ACROSS_S, idempotency_key="next") == [b"done next"]
    assert scene.times() == {"job": 1, "next": 1}


def test_whoever_wakes_a_loop_that_is_closed_writes_into_nobody_elses_file() -> None:
    """A clerk that the ledger kept waiting, or a second signal: the number is another file's by then."""
    settings = Mdp()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = open_router(context, settings)
        core = Broker(settings, new_worker_id, time.time)
        loop = Loop(router, watch_connections(router), core, print, settings)
        loop.close()
        theirs = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(50)]
        loop.answered(Answer())
        loop.stop()
        for fd in theirs:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
            os.close(fd)
    finally:
        context.destroy(0)


def test_a_broker_that_is_told_again_and_again_to_end_ends_in_order(scene: Scene) -> None:
    gate = scene.folder / "gate"
    scene.worker("echo", "--plain")
    scene.client().submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    while scene.broker.poll() is None:
        scene.broker.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    # When all is written and closed, the signal has its usual meaning again.
    assert scene.broker.returncode in (0, -signal.SIGTERM), scene.log.read_text()[-2000:]
    assert "Traceback" not in scene.log.read_text()
