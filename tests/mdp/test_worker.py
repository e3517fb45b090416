"""Workers in Python: never silent while they work, back when the broker was away, and gone only with a goodbye."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import cbor2
import pytest
from tests.mdp.broker import Played, foreign_broker, line_of, played, running
from tests.support.fleet import wait_for

from unstuck.errors import ConfigError, PayloadError
from unstuck.mdp import Client, Worker

PATIENT_S = 60.0
QUICK_S = 0.3
READY, REQUEST, REPLY, BEAT, BYE, PROCESSES, FINISHED = (bytes([number]) for number in range(1, 8))


@contextmanager
def serving(endpoint: str, services: Any, function: Any = None, **options: Any) -> Iterator[Worker]:
    """Run a worker in a thread; what ended it is raised here."""
    worker = Worker(endpoint, services, function, **options)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(PATIENT_S)
        assert not thread.is_alive()
    if ended:
        raise ended[0]


@contextmanager
def ending(worker: Worker) -> Iterator[None]:
    try:
        yield
    finally:
        worker.stop()


def ready(broker: Played) -> tuple[bytes, list[bytes], dict[str, Any]]:
    """Give a worker's identity, its services and what it says of itself."""
    identity, *frames = broker.hear()
    assert frames[:3] == [b"", b"MDPW01", READY], frames
    parting = frames.index(b"", 1)
    return identity, frames[3:parting], cbor2.loads(frames[parting + 1])


def order(broker: Played, worker: bytes, address: bytes, *body: bytes) -> None:
    broker.say(worker, b"", b"MDPW01", REQUEST, address, b"", *body)


class Gate:
    """A function that works until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, body: list[bytes]) -> list[bytes]:
        self.entered.set()
        assert self.open.wait(PATIENT_S)
        return body


# With a plain broker --------------------------------------------------------------------------


def test_a_plain_broker_gets_plain_words_and_a_worker_that_survives_its_function() -> None:
    with (
        foreign_broker() as endpoint,
        running("tests.mdp.python_worker", endpoint, "--plain") as worker,
        Client(endpoint, timeout=PATIENT_S) as client,
    ):
        assert client.call("echo", b"one", b"two") == [b"one", b"two"]
        assert client.call("echo", b"progress") == [b"progress"]
        lost = client.submit("echo", b"raise", timeout=0.5)
        assert client.call("echo", b"after") == [b"after"]
        assert lost.done()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENT_S) == 0
        assert client.mmi("service", b"echo") == [b"404"]


def test_an_old_client_is_served_too() -> None:
    with (
        foreign_broker() as endpoint,
        running("tests.mdp.python_worker", endpoint, "--plain"),
        running("tests.mdp.plain_peers", "client", endpoint, "echo", "x", "--timeout", PATIENT_S) as client,
    ):
        assert line_of(client.stdout) == "x"


def test_a_plain_broker_that_is_silent_to_those_who_work_is_not_left() -> None:
    heartbeat_s = 0.2
    with foreign_broker(heartbeat_s=heartbeat_s) as endpoint, Client(endpoint, timeout=PATIENT_S) as client:
        addresses = []

        def work(body: list[bytes], call: Any) -> list[bytes]:
            addresses.append(call.address)
            # More than twice as long as what would be silence.
            threading.Event().wait(8 * heartbeat_s)
            return body

        with serving(endpoint, "echo", work, heartbeat=heartbeat_s, plain=True):
            assert client.call("echo", b"x") == [b"x"]
        assert len(addresses) == 1


def test_work_of_a_plain_broker_ends_a_worker_that_was_not_told_of_it(broker: Played) -> None:
    worker = Worker(broker.endpoint, "echo", lambda body: body)
    with ThreadPoolExecutor(1) as threads, ending(worker):
        run = threads.submit(worker.run)
        identity, *_ = ready(broker)
        order(broker, identity, b"\x00\x8f1.2.3.", b"x")
        assert broker.hear()[1:] == [b"", b"MDPW01", BYE]
        with pytest.raises(ConfigError, match=f"{broker.endpoint} is not a broker of Unstuck.*plain=True"):
            run.result(PATIENT_S)


@pytest.mark.parametrize("answer", ["it ends the connection", "it says nothing"])
def test_a_broker_that_does_not_answer_ready_may_be_a_plain_one(
    answer: str, broker: Played, caplog: pytest.LogCaptureFixture
) -> None:
    def is_said() -> bool:
        return any("plain=True" in record.getMessage() for record in caplog.records)

    with serving(broker.endpoint, "echo", lambda body: body, heartbeat=QUICK_S):
        worker, *_ = ready(broker)
        if answer == "it ends the connection":
            broker.say(worker, b"", b"MDPW01", BYE)
        wait_for(is_said, "the advice")


def test_a_broker_that_answered_ready_is_taken_for_ours(broker: Played, caplog: pytest.LogCaptureFixture) -> None:
    refusal = cbor2.dumps({"error": "TOO_MANY_SERVICES", "message": "no room"})
    with serving(broker.endpoint, "echo", lambda body: body):
        worker, *_ = ready(broker)
        broker.say(worker, b"", b"MDPW01", BEAT)
        broker.say(worker, b"", b"MDPW01", BYE)
        worker, *_ = ready(broker)
        broker.say(worker, b"", b"MDPW01", BYE, refusal)
        ready(broker)
    assert not any("plain=True" in record.getMessage() for record in caplog.records)


def test_a_reply_is_not_sent_to_a_plain_broker_that_was_away_meanwhile() -> None:
    gate = Gate()
    with played() as before:
        endpoint = before.endpoint
        context = serving(endpoint, "echo", gate, plain=True)
        context.__enter__()
        worker, *_ = before.hear()
        order(before, worker, b"some client", b"x")
        assert gate.entered.wait(PATIENT_S)
    try:
        with played(endpoint) as after:
            worker, *frames = after.hear()
            assert frames == [b"", b"MDPW01", READY, b"echo"]
            gate.open.set()
            # The next order is served, and only that one answered.
            order(after, worker, b"another client", b"y")
            assert after.hear_beside(BEAT, READY)[3:] == [REPLY, b"another client", b"", b"y"]
    finally:
        gate.open.set()
        context.__exit__(None, None, None)


# With a broker of ours ------------------------------------------------------------------------


def test_our_broker_hears_who_it_is_and_gives_work_of_several_services(broker: Played) -> None:
    services: dict[str, Callable[..., Any]] = {
        "plain": lambda body: b"!".join(body),
        "dotted.name": lambda body: {"frames": len(body)},
        "frames": lambda body, call: [call.service.encode(), call.address],
        "nothing": lambda body: None,
    }
    with serving(broker.endpoint, services, name="w1", metadata={"rack": 7}):
        worker, names, about = ready(broker)
        assert names == [b"plain", b"dotted.name", b"frames", b"nothing"]
        assert len(about.pop("instance")) == 16
        assert about == {"name": "w1", "metadata": {"rack": 7}, "pid": os.getpid(), "host": socket.gethostname()}
        for name, reply in (
            ("plain", [b"a!b"]),
            ("dotted.name", [cbor2.dumps({"frames": 2})]),
            ("frames", [b"frames", b"7.tok.w1.frames"]),
            ("nothing", [cbor2.dumps(None)]),
        ):
            address = f"7.tok.w1.{name}".encode()
            order(broker, worker, address, b"a", b"b")
            assert broker.hear()[1:] == [b"", b"MDPW01", REPLY, address, b"", *reply]
        order(broker, worker, b"7.tok.w1.other", b"a")
        *_, command, address, raised = broker.hear()
        assert (command, address) == (FINISHED, b"7.tok.w1.other")
        assert "other" in cbor2.loads(raised)["message"]


def test_our_broker_is_told_what_a_function_raised(broker: Played) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def work(body: list[bytes]) -> Any:
        if body == [b"unspeakable"]:
            raise Unspeakable
        if body == [b"unsendable"]:
            return object()
        raise KeyError("told to")

    with serving(broker.endpoint, "echo", work):
        worker, *_ = ready(broker)
        for body, name in ((b"x", "KeyError"), (b"unspeakable", "Unspeakable"), (b"unsendable", "PayloadError")):
            order(broker, worker, b"1.t.w.echo", body)
            *_, command, address, about = broker.hear()
            assert (command, address) == (FINISHED, b"1.t.w.echo")
            told = cbor2.loads(about)
            assert (told["error"], set(told)) == (name, {"error", "message", "traceback"})
            assert "in work" in told["traceback"]


def test_progress_is_told_to_our_broker(broker: Played) -> None:
    def work(body: list[bytes], call: Any) -> list[bytes]:
        call.progress(1, 3, "one")
        with pytest.raises(ValueError, match="finite"):
            call.progress(float("nan"))
        return body

    with serving(broker.endpoint, "echo", work):
        worker, *_ = ready(broker)
        order(broker, worker, b"1.t.w.echo", b"x")
        *_, command, address, about = broker.hear()
        assert (command, address, cbor2.loads(about)) == (
            PROCESSES,
            b"1.t.w.echo",
            {"done": 1, "total": 3, "message": "one"},
        )
        assert broker.hear()[3] == REPLY


def test_a_worker_beats_while_it_works() -> None:
    gate = Gate()
    with played() as broker, serving(broker.endpoint, "echo", gate, heartbeat=QUICK_S):
        worker, *_ = ready(broker)
        order(broker, worker, b"1.t.w.echo", b"x")
        assert gate.entered.wait(PATIENT_S)
        for _ in range(3):
            assert broker.hear() == [worker, b"", b"MDPW01", BEAT]
            broker.say(worker, b"", b"MDPW01", BEAT)
        gate.open.set()
        assert broker.hear_beside(BEAT)[3] == REPLY


def test_a_silent_broker_is_left_and_told_what_is_held() -> None:
    gate = Gate()
    with played() as broker, serving(broker.endpoint, "echo", gate, heartbeat=QUICK_S):
        worker, *_ = ready(broker)
        order(broker, worker, b"1.t.w.echo", b"x")
        assert gate.entered.wait(PATIENT_S)
        *_, about = broker.hear_beside(BEAT)
        assert cbor2.loads(about)["holding"] == b"1.t.w.echo"
        gate.open.set()
        assert broker.hear_beside(BEAT)[3:] == [REPLY, b"1.t.w.echo", b"", b"x"]


def test_an_outcome_that_is_ready_while_the_broker_is_away_is_brought_later() -> None:
    gate = Gate()
    with played() as before:
        endpoint = before.endpoint
        context = serving(endpoint, "echo", gate)
        context.__enter__()
        worker, *_ = ready(before)
        order(before, worker, b"1.t.w.echo", b"x")
        assert gate.entered.wait(PATIENT_S)
    try:
        gate.open.set()
        with played(endpoint) as after:
            _, _, about = ready(after)
            assert about["holding"] == b"1.t.w.echo"
            assert after.hear()[1:] == [b"", b"MDPW01", REPLY, b"1.t.w.echo", b"", b"x"]
    finally:
        context.__exit__(None, None, None)


def test_work_goes_on_over_a_restart_of_the_broker() -> None:
    gate = Gate()
    with played() as before:
        endpoint = before.endpoint
        context = serving(endpoint, "echo", gate)
        context.__enter__()
        worker, *_ = ready(before)
        order(before, worker, b"1.t.w.echo", b"x")
        # It came by the old connection and was not begun: whoever is there now gives it to somebody.
        order(before, worker, b"2.t.w.echo", b"y")
        assert gate.entered.wait(PATIENT_S)
    try:
        with played(endpoint) as after:
            worker, _, about = ready(after)
            assert about["holding"] == b"1.t.w.echo"
            gate.open.set()
            assert after.hear()[3:] == [REPLY, b"1.t.w.echo", b"", b"x"]
            order(after, worker, b"3.t.w.echo", b"z")
            assert after.hear()[3:] == [REPLY, b"3.t.w.echo", b"", b"z"]
    finally:
        context.__exit__(None, None, None)


def test_a_reply_that_may_have_been_lost_with_the_connection_is_brought_again(broker: Played) -> None:
    with serving(broker.endpoint, "echo", lambda body: body):
        worker, *_ = ready(broker)
        order(broker, worker, b"1.t.w.echo", b"x")
        assert broker.hear()[3] == REPLY
        broker.say(worker, b"", b"MDPW01", BYE)
        worker, _, about = ready(broker)
        assert about["holding"] == b"1.t.w.echo"
        assert broker.hear()[3:] == [REPLY, b"1.t.w.echo", b"", b"x"]
        # An order shows that the broker has it.
        order(broker, worker, b"2.t.w.echo", b"y")
        assert broker.hear()[3:] == [REPLY, b"2.t.w.echo", b"", b"y"]
        for _ in range(2):
            broker.say(worker, b"", b"MDPW01", BEAT)
        broker.say(worker, b"", b"MDPW01", BYE)
        _, _, about = ready(broker)
        assert "holding" not in about


def test_rubbish_from_the_broker_harms_nothing(broker: Played) -> None:
    with serving(broker.endpoint, "echo", lambda body: body):
        worker, *_ = ready(broker)
        for rubbish in ([b""], [b"", b"MDPW02", BEAT], [b"", b"MDPW01", b"\x99"], [b"", b"MDPW01", REQUEST, b"a"]):
            broker.say(worker, *rubbish)
        order(broker, worker, b"1.t.w.echo", b"x")
        assert broker.hear()[3] == REPLY


# The end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_present_call_finish(broker: Played, number: signal.Signals) -> None:
    with running("tests.mdp.python_worker", broker.endpoint) as process:
        worker, *_ = ready(broker)
        order(broker, worker, b"1.t.w.echo", b"sleep 0.5")
        assert line_of(process.stdout) == "working echo sleep 0.5"
        process.send_signal(number)
        *_, command, _, about = broker.hear()
        assert (command, cbor2.loads(about)) == (PROCESSES, {"draining": True})
        assert broker.hear()[3:] == [REPLY, b"1.t.w.echo", b"", b"sleep 0.5"]
        assert broker.hear()[3:] == [BYE]
        assert line_of(process.stdout) == "left"
        assert process.wait(PATIENT_S) == 0


def test_a_second_interrupt_does_not_wait(broker: Played) -> None:
    with running("tests.mdp.python_worker", broker.endpoint) as process:
        worker, *_ = ready(broker)
        order(broker, worker, b"1.t.w.echo", b"sleep 600")
        assert line_of(process.stdout) == "working echo sleep 600"

        def interrupted() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_for(interrupted, "its end", every_s=0.2)
        assert broker.hear()[3:] == [BYE]


def test_an_idle_worker_leaves_at_once_and_a_worker_without_broker_too(broker: Played) -> None:
    with serving(broker.endpoint, "echo", lambda body: body) as worker:
        ready(broker)
        worker.stop()
        assert broker.hear()[3:] == [BYE]
    with played() as gone:
        endpoint = gone.endpoint
    with serving(endpoint, "echo", lambda body: body):
        pass


def test_wrong_arguments_are_told_with_their_cure() -> None:
    here = "tcp://127.0.0.1:1"
    for services, function in (
        ("echo", None),
        ({}, None),
        ({"echo": bytes}, bytes),
        ({"mmi.echo": bytes}, None),
        ({"with blank": bytes}, None),
        ("echo", "no function"),
    ):
        with pytest.raises(ConfigError):
            Worker(here, services, function)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="heartbeat"):
        Worker(here, "echo", bytes, heartbeat=0)
    with pytest.raises(ConfigError, match="one service"):
        Worker(here, {"a": bytes, "b": bytes}, plain=True)
    with pytest.raises(PayloadError):
        Worker(here, "echo", bytes, metadata={"x": object()})
    with pytest.raises(ConfigError, match="nowhere"):
        Worker("nowhere", "echo", bytes).run()
