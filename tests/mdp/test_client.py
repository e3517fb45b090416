"""Clients in Python with a broker of ours: they are told of deaths and mix nothing up."""

import asyncio
import contextlib
import math
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import cbor2
import pytest
import zmq
from tests.mdp.broker import Played, foreign_broker, line_of, notice, played, running
from tests.support.fleet import wait_for

from unstuck.errors import CallFailed, ClientClosed, ConfigError, JobNotFound, PayloadError, ReplyTimeout
from unstuck.mdp import AsyncClient, Client, CurveKeys, Worker
from unstuck.mdp.client_session import Mode

PATIENT_S = 60.0


# With a broker of ours ------------------------------------------------------------------------


def test_replies_of_our_broker_find_their_calls_in_any_order(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        identity = broker.admit()
        assert len(identity) >= 16
        calls = [client.submit("echo", b"%d" % number, priority=number, idempotency_key="k") for number in range(50)]
        requests = [broker.request() for _ in calls]
        assert [cbor2.loads(correlation)["priority"] for _, correlation, _ in requests] == list(range(50))
        assert len({cbor2.loads(correlation)["id"] for _, correlation, _ in requests}) == 50
        for identity, correlation, rest in reversed(requests):
            broker.say(identity, correlation, b"", b"MDPC01", *rest)
        assert [call.result() for call in calls] == [[b"%d" % number] for number in range(50)]


def test_options_that_no_broker_would_take_are_refused_at_once(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        with pytest.raises(PayloadError, match=r"take 2,0\d\d bytes, .* at most 2,000: idempotency_key"):
            client.submit("echo", b"", idempotency_key="k" * 2_000)
        with pytest.raises(PayloadError, match="An empty idempotency_key"):
            client.submit("echo", b"", idempotency_key="")
        broker.admit()
        longest = "k" * 1_900
        call = client.submit("echo", b"", idempotency_key=longest)
        identity, correlation, rest = broker.request()
        assert cbor2.loads(correlation)["idempotency_key"] == longest
        broker.say(identity, correlation, b"", b"MDPC01", *rest)
        assert call.result() == [b""]


def test_a_late_reply_of_our_broker_is_dropped_and_the_line_stays(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        broker.admit()
        wait_for(lambda: client.status, "the answer")
        slow = client.submit("echo", b"slow", timeout=0.1)
        identity, correlation, rest = broker.request()
        with pytest.raises(ReplyTimeout):
            slow.result()
        broker.say(identity, correlation, b"", b"MDPC01", *rest)
        quick = client.submit("echo", b"quick")
        same, correlation, rest = broker.request()
        assert same == identity
        broker.say(identity, correlation, b"", b"MDPC01", *rest)
        assert quick.result() == [b"quick"]
        assert client.status


def test_deaths_are_told_and_are_no_replies(broker: Played) -> None:
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    with Client(
        broker.endpoint,
        timeout=PATIENT_S,
        log_errors=False,
        on_worker_crashed=lambda service, message: told.put((service, message)),
        on_no_workers=lambda service, message: told.put(("nobody:" + service, message)),
    ) as client:
        broker.admit()
        call = client.submit("echo", b"x", job_id="mine")
        identity, correlation, rest = broker.request()
        broker.say(identity, correlation, b"", b"MDPC01", b"\x09", notice(error="NO_WORKERS"))
        broker.say(identity, correlation, b"", b"MDPC01", b"\x08", notice(ledger_id=7), notice(message="again"))
        assert [told.get(timeout=PATIENT_S) for _ in range(3)] == [
            ("nobody:echo", "died"),
            ("echo", "died"),
            ("echo", "again"),
        ]
        assert not call.done()
        assert (call.job_id, call.ledger_id) == ("mine", 7)
        broker.say(identity, correlation, b"", b"MDPC01", *rest)
        assert call.result() == [b"x"]


def test_a_final_notice_ends_its_call_and_no_other(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S, log_errors=False) as client:
        broker.admit()
        calls = [client.submit("echo", b"x") for _ in range(4)]
        identity, first, _ = broker.request()
        _, second, _ = broker.request()
        _, third, _ = broker.request()
        _, fourth, rest = broker.request()
        last = {"final": True, "attempt": 4, "ledger_id": 9, "cause": "killed by SIGKILL"}
        broker.say(identity, first, b"", b"MDPC01", b"\x08", notice(**last))
        # Several of one moment name their calls themselves.
        ids = [cbor2.loads(correlation)["id"] for correlation in (second, third)]
        broker.say(identity, b"", b"MDPC01", b"\x08", *(notice(final=True, id=one) for one in ids))
        broker.say(identity, fourth, b"", b"MDPC01", *rest)
        for call in calls[:3]:
            with pytest.raises(CallFailed, match="died") as caught:
                call.result()
            assert (caught.value.error, caught.value.service) == ("WORKER_CRASHED", "echo")
        assert calls[3].result() == [b"x"]
        with pytest.raises(CallFailed) as caught:
            calls[0].result()
        kept = pickle.loads(pickle.dumps(caught.value))
        assert (kept.attempt, kept.ledger_id, kept.cause) == (4, 9, "killed by SIGKILL")


def test_a_handler_may_raise_and_may_call(broker: Played) -> None:
    class Asking(Client):
        heard: "queue.Queue[Any]" = queue.Queue()

        def handle_error_notification(self, error: dict[str, Any]) -> None:
            if error["message"] == "broken":
                raise ValueError("a handler with a bug")
            self.heard.put(self.call("echo", b"from the handler"))

    with Asking(broker.endpoint, timeout=PATIENT_S) as client:
        identity = broker.admit()
        broker.say(identity, b"", b"MDPC01", b"\x08", notice(message="broken"))
        broker.say(identity, b"", b"MDPC01", b"\x08", b"no cbor \xff", notice())
        identity, correlation, rest = broker.request()
        broker.say(identity, correlation, b"", b"MDPC01", *rest)
        assert client.heard.get(timeout=PATIENT_S) == [b"from the handler"]


def test_a_structured_error_in_a_reply_is_a_reply(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        broker.admit()
        call = client.submit("echo", b"x")
        identity, correlation, _ = broker.request()
        broker.say(identity, correlation, b"", b"MDPC01", b"echo", cbor2.dumps({"error": "WORKER_CRASHED"}))
        assert cbor2.loads(call.result()[0]) == {"error": "WORKER_CRASHED"}


def test_who_wants_no_notices_asks_for_none_and_still_has_correlation(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S, enable_notifications=False) as client:
        identity, *frames = broker.hear()
        assert cbor2.loads(frames[3])["events"] == []
        broker.say(identity, *frames[:3], b"200", cbor2.dumps({"lease": 60}))
        client.submit("echo", b"x")
        assert cbor2.loads(broker.request()[1])["id"]


def test_the_lease_is_refreshed_at_a_third(broker: Played) -> None:
    with Client(broker.endpoint):
        identity = broker.admit(lease=0.3)
        assert broker.admit() == identity


def test_after_a_restart_calls_with_a_key_are_sent_again_and_others_are_not() -> None:
    with played() as before:
        endpoint = before.endpoint
        client = Client(endpoint, timeout=PATIENT_S)
        identity = before.admit()
        calls = [client.submit("echo", b"bare"), client.submit("echo", b"keyed", idempotency_key="k")]
        sent = [before.request() for _ in calls]
    # What is said before the client has seen the end is in the hands of the socket, and goes out at once.
    wait_for(lambda: client._conversation.mode is Mode.ASKING, "the client to see that the broker is gone")
    with client, played(endpoint) as after:
        later = client.submit("echo", b"later")
        # Nothing is said before it is known who this is: a foreign broker would break on the correlation.
        assert after.admit() == identity
        assert after.request() == sent[1]
        _, correlation, rest = after.request()
        assert rest == [b"echo", b"later"]
        for one in (sent[0][1], sent[1][1], correlation):
            after.say(identity, one, b"", b"MDPC01", b"echo", b"done")
        assert [call.result() for call in (*calls, later)] == [[b"done"]] * 3


def test_a_foreign_broker_in_the_place_of_ours_gets_plain_requests() -> None:
    with played() as before:
        endpoint = before.endpoint
        client = Client(endpoint, timeout=PATIENT_S)
        before.admit()
        wait_for(lambda: client.status, "the answer")
    # The strict broker would end by the correlation frame.
    with client, foreign_broker(endpoint) as at, running("tests.mdp.plain_peers", "worker", at, "echo"):
        assert client.call("echo", b"x") == [b"x"]


def test_the_state_of_a_job_is_asked_for(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        broker.admit()
        answers = ([b"200", cbor2.dumps({"state": "running"})], [b"404"])
        got: list[Any] = []

        def ask() -> None:
            got.append(client.query("17"))
            with pytest.raises(JobNotFound):
                client.query(18)
            got.append("not found")

        thread = threading.Thread(target=ask)
        thread.start()
        for number, answer in enumerate(answers):
            identity, correlation, rest = broker.request()
            assert rest == [b"mmi.status", b"%d" % (17 + number)]
            broker.say(identity, correlation, b"", b"MDPC01", b"mmi.status", *answer)
        thread.join()
        assert got == [{"state": "running"}, "not found"]


def test_rubbish_from_the_broker_harms_nothing(broker: Played) -> None:
    with Client(broker.endpoint, timeout=PATIENT_S) as client:
        identity = broker.admit()
        call = client.submit("echo", b"x")
        _, correlation, rest = broker.request()
        for rubbish in ([b""], [b"", b""], [b"", b"MDPC02", b"echo"], [b"x", b"y", b"z"], [b"", b"MDPC01", b"\x08"]):
            broker.say(identity, *rubbish)
        broker.say(identity, b"strange", b"", b"MDPC01", b"echo", b"not yours")
        broker.say(identity, b"", b"MDPC01", b"echo", b"without correlation")
        broker.say(identity, correlation, b"", b"MDPC01", *rest)
        assert call.result() == [b"x"]


def test_with_curve_the_right_keys_come_in_and_others_do_not() -> None:
    public, secret = zmq.curve_keypair()
    with played(curve_secret=secret) as broker:
        serving = Worker(broker.endpoint, "echo", lambda body: body, curve=CurveKeys(public.decode()))
        thread = threading.Thread(target=serving.run)
        thread.start()
        assert broker.hear()[2:5] == [b"MDPW01", b"\x01", b"echo"]
        serving.stop()
        thread.join()
        with (
            Client(
                broker.endpoint, timeout=0.3, curve=CurveKeys(zmq.curve_keypair()[0], *zmq.curve_keypair())
            ) as wrong,
            pytest.raises(ReplyTimeout),
        ):
            wrong.call("echo", b"x")
        assert broker.hear()[3:] == [b"\x05"]
        with Client(broker.endpoint, timeout=PATIENT_S, curve=CurveKeys(public, *zmq.curve_keypair())) as client:
            broker.admit()
            call = client.submit("echo", b"x")
            identity, correlation, rest = broker.request()
            broker.say(identity, correlation, b"", b"MDPC01", *rest)
            assert call.result() == [b"x"]
    with pytest.raises(ConfigError, match="pairs"):
        CurveKeys(public, public)


# What callers do wrong ------------------------------------------------------------------------


def test_a_closed_client_says_so_and_its_calls_end() -> None:
    with played() as broker:
        client = Client(broker.endpoint)
        call = client.submit("echo", b"x", timeout=math.inf)
        client.close()
        client.close()
        with pytest.raises(ClientClosed):
            call.result()
        with pytest.raises(ClientClosed, match="closed"):
            client.call("echo", b"x")


def test_wrong_arguments_are_told_with_their_cure(broker: Played) -> None:
    for wrong in ({"endpoint": "nowhere"}, {"timeout": 0}, {"timeout": True}, {"identity": b"short"}):
        with pytest.raises(ConfigError):
            Client(**{"endpoint": broker.endpoint, **wrong})  # type: ignore[arg-type]
    with Client(broker.endpoint) as client:
        for service in ("", "with blank", "\x08", "ä"):
            with pytest.raises(ConfigError, match="printable"):
                client.call(service)
        with pytest.raises(PayloadError, match="CBOR"):
            client.call("echo", object())


# On an event loop -----------------------------------------------------------------------------


def test_the_async_client_calls_many_at_once_and_tells_on_its_loop(broker: Played) -> None:
    def serve() -> None:
        identity = broker.admit()
        requests = [broker.request() for _ in range(21)]
        for _, correlation, rest in reversed(requests):
            broker.say(identity, correlation, b"", b"MDPC01", b"\x08", notice(ledger_id=5))
            broker.say(identity, correlation, b"", b"MDPC01", *rest)

    async def use() -> None:
        loop_thread = threading.get_ident()
        told: asyncio.Queue[bool] = asyncio.Queue()
        async with AsyncClient(
            broker.endpoint,
            timeout=PATIENT_S,
            log_errors=False,
            on_worker_crashed=lambda *_: told.put_nowait(threading.get_ident() == loop_thread),
        ) as client:
            kept = client.submit("echo", b"kept")
            replies = await asyncio.gather(*(client.call("echo", b"%d" % number) for number in range(20)))
            assert replies == [[b"%d" % number] for number in range(20)]
            assert await kept == [b"kept"]
            assert (kept.ledger_id, kept.done()) == (5, True)
            assert all([await told.get() for _ in range(21)])
            with pytest.raises(ReplyTimeout):
                await client.call("echo", b"x", timeout=0.05)
            gone = asyncio.ensure_future(client.call("echo", b"x", timeout=0.05))
            await asyncio.sleep(0)
            gone.cancel()
            assert not client.status

    thread = threading.Thread(target=serve)
    thread.start()
    asyncio.run(use())
    thread.join()


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with foreign_broker() as endpoint, running("tests.mdp.plain_peers", "worker", endpoint, "echo"):
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
        with foreign_broker(endpoint) as at, running("tests.mdp.plain_peers", "worker", at, "echo"):
            assert call.result() == [b"x"]


def test_a_fork_is_refused_and_the_parent_goes_on(foreign: str) -> None:
    with Client(foreign, timeout=PATIENT_S) as client:
        assert client.call("echo", b"x") == [b"x"]
        child = os.fork()
        if not child:
            try:
                client.call("echo", b"x")
            except ClientClosed:
                client.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.call("echo", b"y") == [b"y"]


# The old peers themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [[], ["--dealer"]], ids=["req", "dealer"])
def test_an_old_client_is_broken_by_any_other_message_than_its_reply(kind: list[str]) -> None:
    with played() as broker, running("tests.mdp.plain_peers", "client", broker.endpoint, "echo", "x", *kind) as client:
        identity, *_ = broker.hear()
        broker.say(identity, b"", b"MDPC01", b"\x08", notice())
        out, error = client.communicate(timeout=PATIENT_S)
        assert out == ""
        assert "AssertionError" in error


def test_an_old_client_is_silent_about_silence(foreign: str) -> None:
    with running("tests.mdp.plain_peers", "client", foreign, "nobody", "x", "--timeout", "0.2") as client:
        begun_s = time.monotonic()
        assert line_of(client.stdout) == "silence"
        assert time.monotonic() - begun_s >= 0.6
