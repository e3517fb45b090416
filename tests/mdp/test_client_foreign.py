"""Clients in Python with foreign brokers, as old clients do; and what old clients themselves make of our notices."""

import contextlib
import os
import time
from collections.abc import Iterator

import cbor2
import pytest
import zmq
from tests.fleet import wait_for
from tests.mdp.stage import Played, foreign_broker, line_of, notice, played, running

from unstuck.domain.errors import CallFailed, LineClosed, ReplyTimeout
from unstuck.mdp import Client

PATIENT_S = 60.0


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with foreign_broker() as endpoint, running("tests.mdp.plain", "worker", endpoint, "echo"):
        yield endpoint


def test_a_foreign_broker_answers_and_sees_nothing_that_it_does_not_know(foreign: str) -> None:
    with Client(foreign, timeout=PATIENT_S) as client:
        assert client.call("echo", b"one", b"", b"two", idempotency_key="k", priority=3, job_id="j") == [
            b"one",
            b"",
            b"two",
        ]
        assert cbor2.loads(client.call("echo", {"a": [1, None]})[0]) == {"a": [1, None]}
        assert client.call("echo") == [b""]
        assert client.status
        assert client.mmi("service", b"echo") == [b"200"]
        assert client.mmi("service", b"nobody") == [b"404"]
        with pytest.raises(CallFailed, match="cannot say what became of a job"):
            client.query(7)


def test_many_calls_to_a_foreign_broker_are_made_one_after_the_other(foreign: str) -> None:
    with Client(foreign, timeout=PATIENT_S) as client:
        calls = [client.submit("echo", str(number).encode()) for number in range(200)]
        assert [call.result() for call in calls] == [[str(number).encode()] for number in range(200)]


def test_a_late_reply_is_not_taken_for_that_of_the_next_call() -> None:
    with played() as broker, Client(broker.endpoint, timeout=PATIENT_S) as client:
        asked = broker.hear()
        broker.say(asked[0], *asked[1:4], b"501")
        wait_for(lambda: client.status, "the answer")
        slow = client.submit("echo", b"slow", timeout=0.2)
        first = broker.hear()
        with pytest.raises(ReplyTimeout, match="idempotency_key"):
            slow.result()
        assert not client.status
        with contextlib.suppress(zmq.ZMQError):  # That line may be gone already.
            broker.say(first[0], b"", b"MDPC01", b"echo", b"slow")
        again = broker.hear()
        assert again[0] != first[0]
        broker.say(again[0], *again[1:4], b"501")
        quick = client.submit("echo", b"quick")
        second = broker.hear()
        assert second == [again[0], b"", b"MDPC01", b"echo", b"quick"]
        broker.say(second[0], b"", b"MDPC01", b"echo", b"quick")
        assert quick.result() == [b"quick"]


def test_a_broker_that_is_silent_on_the_question_is_a_plain_one(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        call = client.submit("echo", b"body")
        assert broker.hear()[3] == b"mmi.notify"
        identity, *frames = broker.hear()
        assert frames == [b"", b"MDPC01", b"echo", b"body"]
        broker.say(identity, *frames)
        assert call.result() == [b"body"]


def test_who_waits_for_a_foreign_broker_has_its_time_from_its_turn(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        asked = broker.hear()
        broker.say(asked[0], *asked[1:4], b"501")
        wait_for(lambda: client.status, "the answer")
        first = client.submit("echo", b"1")
        behind = client.submit("echo", b"2", timeout=0.4)
        frames = broker.hear()
        assert broker.is_silent(for_s=0.8)
        assert not behind.done()
        broker.say(*frames)
        assert first.result() == [b"1"]
        with pytest.raises(ReplyTimeout):
            behind.result()


def test_nobody_there_is_a_timeout_for_all_who_wait() -> None:
    with played() as gone:
        endpoint = gone.endpoint
    with Client(endpoint, timeout=0.3) as client:
        for call in [client.submit("echo", b"x") for _ in range(20)]:
            with pytest.raises(ReplyTimeout):
                call.result()
        assert not client.status


def test_a_broker_that_starts_late_is_found() -> None:
    with played() as gone:
        endpoint = gone.endpoint
    with Client(endpoint, timeout=PATIENT_S) as client:
        call = client.submit("echo", b"x")
        with pytest.raises(ReplyTimeout, match="may still come"):
            call.result(timeout=1.2)
        with foreign_broker(endpoint) as at, running("tests.mdp.plain", "worker", at, "echo"):
            assert call.result() == [b"x"]


def test_a_fork_is_refused_and_the_parent_goes_on(foreign: str) -> None:
    with Client(foreign, timeout=PATIENT_S) as client:
        assert client.call("echo", b"x") == [b"x"]
        child = os.fork()
        if not child:
            try:
                client.call("echo", b"x")
            except LineClosed:
                client.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.call("echo", b"y") == [b"y"]


# The old peers themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [[], ["--dealer"]], ids=["req", "dealer"])
def test_an_old_client_is_broken_by_any_other_message_than_its_reply(kind: list[str]) -> None:
    with played() as broker, running("tests.mdp.plain", "client", broker.endpoint, "echo", "x", *kind) as client:
        identity, *_ = broker.hear()
        broker.say(identity, b"", b"MDPC01", b"\x08", notice())
        out, error = client.communicate(timeout=PATIENT_S)
        assert out == ""
        assert "AssertionError" in error


def test_an_old_client_is_silent_about_silence(foreign: str) -> None:
    with running("tests.mdp.plain", "client", foreign, "nobody", "x", "--timeout", "0.2") as client:
        begun_s = time.monotonic()
        assert line_of(client.stdout) == "silence"
        assert time.monotonic() - begun_s >= 0.6
