"""The parts of the HTTP server that foreign workers meet, one by one: whose worker it is, who is woken, who is gone."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, field_validator
from tests.support.builders import birth, put

from unstuck.client.runtime import ClientRuntime
from unstuck.client.views import call_view, value_view
from unstuck.config import HttpSettings, Recovery, Settings
from unstuck.domain.api_tokens import LOCAL, Caller, Scope
from unstuck.domain.policy import Policy, decode_policy, encode_policy
from unstuck.domain.states import JobState, WorkerState
from unstuck.errors import ConfigError, LedgerUnavailable, RefusedValue
from unstuck.http.api import jobs, status
from unstuck.http.auth.answers import AnswerBudget, AnswerRoom
from unstuck.http.auth.limits import LARGE_BYTES
from unstuck.http.problems import Problem
from unstuck.http.routing import api_router
from unstuck.http.server import listening_socket
from unstuck.http.services import SLOW_AT_ONCE, Services
from unstuck.http.workers import protocol
from unstuck.http.workers.batching import HeartbeatBatcher
from unstuck.http.workers.claims import ClientConnection, ClientGone, Requester, Waiter, WakeUps, claim
from unstuck.http.workers.turn_batcher import TurnBatcher
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import HeartbeatAnswer, RemoteHeartbeat
from unstuck.ledger.open import ready_ledger
from unstuck.remote.messages import RegisterBody, TaskBody
from unstuck.remote.registry import Registry, RemoteWorker

MINE = Caller("mine", frozenset({Scope.WORKER}), "t1")
THEIRS = Caller("theirs", frozenset({Scope.WORKER}), "t2")
OPERATOR = Caller("boss", frozenset({Scope.WORKER, Scope.OPERATE}), "t3")
BODY = RegisterBody(name="node", queues=["default"], tasks=["add"])
KEY = (("default",), ("add",))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(url=f"sqlite:///{tmp_path}/jobs.db")


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    ledger = ready_ledger(settings)
    yield ledger
    ledger.close()


@pytest.fixture
def seats(settings: Settings) -> Registry:
    return Registry(settings, HttpSettings())


def registered(seats: Registry, ledger: Ledger, caller: Caller = LOCAL) -> RemoteWorker:
    return seats.keep(seats.register(ledger, BODY, caller, "127.0.0.1"))


# By which rules ---------------------------------------------------------------------------------


def test_a_remote_worker_is_judged_by_the_settings_of_the_server_that_registered_it(
    settings: Settings, ledger: Ledger
) -> None:
    careful = replace(settings, recovery=Recovery(auto_fail_stale_running=False))
    remote = registered(Registry(careful, HttpSettings()), ledger)
    assert [worker.rules for worker in ledger.workers.list() if worker.id == remote.id] == [careful.recovery.rules]


def test_a_remote_worker_that_describes_a_task_keeps_the_switches_of_the_app_that_owns_it(
    seats: Registry, ledger: Ledger
) -> None:
    owned = encode_policy(Policy(on_crash="retry", auto_fail_stale_running=False))
    ledger.workers.register(birth("python", tasks=(TaskRecord("resize", "default", owned),)))
    body = RegisterBody(name="node", queues=["default"], tasks=[TaskBody(name="resize", on_crash="retry")])
    # The same rules as those of the app: it names no switches, and is not refused for that.
    seats.register(ledger, body, THEIRS, "127.0.0.1")
    [task] = ledger.queues.tasks()
    assert decode_policy(task.policy) == decode_policy(owned)


# Whose worker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("remembered", [True, False])
def test_only_its_own_token_and_an_operator_speak_for_a_worker(
    settings: Settings, seats: Registry, ledger: Ledger, remembered: bool
) -> None:
    remote = registered(seats, ledger, MINE)
    asked = seats if remembered else Registry(settings, HttpSettings())
    assert asked.find(ledger, remote.id, MINE).id == remote.id
    assert asked.find(ledger, remote.id, OPERATOR).id == remote.id
    with pytest.raises(Problem) as refused:
        asked.find(ledger, remote.id, THEIRS)
    assert refused.value.status == 403


def test_nobody_takes_the_place_of_anothers_worker(seats: Registry, ledger: Ledger) -> None:
    remote = registered(seats, ledger, MINE)
    with pytest.raises(Problem) as refused:
        seats.register(ledger, RegisterBody(name="node", replace=True), THEIRS, "127.0.0.1")
    assert refused.value.status == 403
    record = ledger.workers.remote(remote.id)
    assert record is not None
    assert record.state is WorkerState.ACTIVE


def test_the_same_instance_of_two_tokens_is_two_workers(seats: Registry, ledger: Ledger) -> None:
    mine = seats.register(ledger, RegisterBody(name="a", instance="i"), MINE, "::1")
    theirs = seats.register(ledger, RegisterBody(name="b", instance="i"), THEIRS, "::1")
    assert mine.id != theirs.id
    assert mine.host == "::1"


@pytest.mark.parametrize("worker_id", ["", "nobody", "a\0b", "ä", "x" * 5000, "../.."])
def test_what_is_no_id_is_not_found(seats: Registry, ledger: Ledger, worker_id: str) -> None:
    with pytest.raises(Problem) as refused:
        seats.find(ledger, worker_id, LOCAL)
    assert refused.value.status == 404


def test_metadata_are_written_when_they_change(seats: Registry, ledger: Ledger) -> None:
    remote = registered(seats, ledger)
    assert seats.news(remote, {"n": 1}) == {"n": 1}
    assert seats.news(remote, {"n": 1}) is None
    assert seats.news(remote, {"n": 2}) == {"n": 2}


# Who is woken -----------------------------------------------------------------------------------


def test_one_ring_wakes_one_and_who_leaves_with_a_ring_passes_it_on() -> None:
    async def scene() -> None:
        wakeups = WakeUps(poll_s=60)
        with wakeups.wait_in(KEY, "second") as second, wakeups.wait_in((("other",), ("add",)), "other") as other:
            with wakeups.wait_in(KEY, "first") as first:
                wakeups.heard(frozenset({"queue:default"}))
                assert (second.woken, first.woken, other.woken) == (True, False, False)
                wakeups.heard(frozenset({"queue:default"}))
                assert first.woken
                second.rest()
            assert second.woken
            wakeups.heard(frozenset({"worker:other"}))
            assert (other.woken, other.told, second.told) == (True, True, False)

    asyncio.run(scene())


def test_without_a_bell_one_of_each_line_looks_now_and_then() -> None:
    async def scene() -> None:
        wakeups = WakeUps(poll_s=0.01)
        with wakeups.wait_in(KEY, "a") as waiter:
            await asyncio.wait_for(waiter.wait(), 20)

    asyncio.run(scene())


# Who is gone ------------------------------------------------------------------------------------


async def wanted() -> bool:
    return True


def test_what_was_claimed_for_a_client_that_is_gone_goes_back_at_once(seats: Registry, ledger: Ledger) -> None:
    remote = registered(seats, ledger)
    job_id = put(ledger)

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def scene() -> None:
        presence = ClientConnection(gone)
        await asyncio.sleep(0)
        with pytest.raises(ClientGone):
            await claim(
                turns.take,
                ledger,
                WakeUps(60),
                Waiter(remote.id),
                remote,
                presence,
                AnswerRoom(AnswerBudget(), "mine"),
                wanted,
                limit=1,
                wait_s=0,
                start=True,
            )

    turns = TurnBatcher(lambda: ledger)
    asyncio.run(scene())
    turns.close()
    record = ledger.jobs.get(job_id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.PENDING, 0)


def test_a_claim_that_is_cut_off_in_the_middle_leaves_nothing_behind(seats: Registry, ledger: Ledger) -> None:
    remote = registered(seats, ledger)
    job_id = put(ledger)

    async def there() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def scene() -> None:
        waiter, presence, room = Waiter(remote.id), ClientConnection(there), AnswerRoom(AnswerBudget(), "mine")
        claiming = claim(
            turns.take, ledger, WakeUps(60), waiter, remote, presence, room, wanted, limit=1, wait_s=0, start=False
        )
        task = asyncio.ensure_future(claiming)
        while ledger.jobs.get(job_id).state is JobState.PENDING:  # type: ignore[union-attr]
            # The commit is made in another thread; whoever is in the middle of it is cut off.
            await asyncio.sleep(0)
            task.cancel()
            if task.done():
                break
        with pytest.raises(asyncio.CancelledError):
            await task

    turns = TurnBatcher(lambda: ledger)
    asyncio.run(scene())
    turns.close()
    assert ledger.workers.held(remote.id) == []


# Large bodies -----------------------------------------------------------------------------------


class Seen(BaseModel):
    texts: list[str]

    @field_validator("texts")
    @classmethod
    def note(cls, texts: list[str]) -> list[str]:
        checked_in.append(threading.get_ident())
        return texts


checked_in: list[int] = []
"""The threads in which bodies were checked."""


@pytest.mark.parametrize("texts", [["a"] * LARGE_BYTES, ["a"], [1] * LARGE_BYTES])
def test_a_large_body_is_checked_once_and_not_in_the_event_loop(texts: list[Any]) -> None:
    app, router = FastAPI(), api_router("test")

    @router.post("/seen")
    async def seen(body: Seen) -> int:
        return len(body.texts)

    app.include_router(router)

    async def scene() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/api/v1/seen", json={"texts": texts})

    checked_in.clear()
    answer = asyncio.run(scene())
    if texts[0] == 1:
        assert (answer.status_code, checked_in) == (422, [])
        assert answer.json()["detail"][0]["loc"] == ["body", "texts", 0]
    else:
        assert (answer.status_code, answer.json(), len(checked_in)) == (200, len(texts), 1)
        assert (checked_in[0] == threading.get_ident()) == (len(texts) == 1)


@pytest.mark.parametrize("is_large", [True, False])
def test_a_large_body_of_a_worker_is_read_beside_the_event_loop(is_large: bool) -> None:
    async def receive() -> Any:
        raise AssertionError

    def read(body: bytes) -> int:
        return threading.get_ident()

    requester = Requester(receive, AnswerRoom(AnswerBudget(), "mine"), is_large)
    assert (asyncio.run(protocol._beside(requester, read, b"")) != threading.get_ident()) == is_large


# Beats ------------------------------------------------------------------------------------------


class Book:
    """A ledger, and its part for workers, that is asked for heartbeats only."""

    def __init__(self) -> None:
        self.workers = self
        self.batches: list[list[RemoteHeartbeat]] = []

    def beat_async(self, pulses: list[RemoteHeartbeat]) -> None:
        pass

    def record_heartbeats(self, pulses: list[RemoteHeartbeat]) -> list[HeartbeatAnswer]:
        self.batches.append(pulses)
        if any(pulse.worker_id == "away" for pulse in pulses):
            raise LedgerUnavailable("away")
        if any(pulse.metadata == {"bad": 1} for pulse in pulses):
            raise RefusedValue("bad")
        return [HeartbeatAnswer(WorkerState.ACTIVE) for _ in pulses]


def test_beats_that_come_together_are_written_together_and_one_that_is_refused_fails_alone() -> None:
    book: Any = Book()

    async def scene() -> list[Any]:
        beats = HeartbeatBatcher(lambda: book)
        beats.note_settled("w1", 2)
        pulses = [
            RemoteHeartbeat("w0"),
            RemoteHeartbeat("w1"),
            RemoteHeartbeat("w2", metadata={"bad": 1}),
            RemoteHeartbeat("w3"),
        ]
        try:
            return await asyncio.gather(*(beats.beat(pulse) for pulse in pulses), return_exceptions=True)
        finally:
            beats.close()

    answers = asyncio.run(scene())
    assert [type(answer) for answer in answers] == [HeartbeatAnswer, HeartbeatAnswer, RefusedValue, HeartbeatAnswer]
    assert len(book.batches[0]) == 4
    assert book.batches[0][1].settled == 2
    assert [pulse.settled for batch in book.batches[1:] for pulse in batch] == [0, 2, 0, 0]


def test_a_ledger_that_is_away_is_told_to_everybody_who_beat() -> None:
    book: Any = Book()

    async def scene() -> list[Any]:
        beats = HeartbeatBatcher(lambda: book)
        pulses = [RemoteHeartbeat("away"), RemoteHeartbeat("w1")]
        try:
            return await asyncio.gather(*(beats.beat(pulse) for pulse in pulses), return_exceptions=True)
        finally:
            beats.close()

    assert [type(answer) for answer in asyncio.run(scene())] == [LedgerUnavailable, LedgerUnavailable]


MANY = 60
"""More than there are threads for handlers."""
PATIENCE_S = 20.0


def test_nobody_waits_for_those_who_ask_for_what_takes_long() -> None:
    desk = Services(ClientRuntime(Settings(url="sqlite:///never-opened.db")), HttpSettings())
    enough, crowded, lock = threading.Event(), threading.Event(), threading.Lock()
    at_work = most = 0

    def visit() -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
            if at_work == SLOW_AT_ONCE:
                crowded.set()
        enough.wait(PATIENCE_S)
        with lock:
            at_work -= 1

    async def scene() -> str:
        visits = [asyncio.create_task(desk.run_slow(visit)) for _ in range(MANY)]
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                await asyncio.to_thread(crowded.wait, PATIENCE_S / 4)
                return await anyio.to_thread.run_sync(lambda: "a beat")
        finally:
            enough.set()
            await asyncio.gather(*visits)

    assert asyncio.run(scene()) == "a beat"
    assert most == SLOW_AT_ONCE


def test_visits_of_the_doctor_are_such() -> None:
    # A plain function would be run in the threads of everybody.
    assert asyncio.iscoroutinefunction(status.doctor)
    assert asyncio.iscoroutinefunction(jobs.doctor)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_body_of_an_answer_does_not_wait_until_its_head_is_confirmed(host: str) -> None:
    """With Nagle's algorithm every answer on a connection that stays open took 40 ms."""
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    async def switched_off() -> int:
        answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def visited(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answered.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening_socket(HttpSettings(host=host, port=0)) as listener:
            async with await asyncio.start_server(visited, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                try:
                    return await answered
                finally:
                    writer.close()

    assert asyncio.run(switched_off()) == 1


@pytest.mark.parametrize("host", ["nowhere.invalid", "198.51.100.7"])
def test_an_address_that_is_not_of_this_machine_is_refused_with_its_own_cure(host: str) -> None:
    with pytest.raises(ConfigError, match="--host an address of this machine"):
        listening_socket(HttpSettings(host=host, port=0))


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'{"args":[1],"kwargs":{"a":2}}', ([1], {"a": 2})),
        (b"[1,2]", ([[1, 2]], {})),
        (b"", ([""], {})),
        (b'{"args":[1,', (['{"args":[1,'], {})),
        (b'{"args":["\xff"]}', (['{"args":["\ufffd"]}'], {})),
        # As text it would show secrets that only a reader of JSON finds.
        (b"[" * 100_000, (["(too much to show)"], {})),
    ],
    ids=["a call", "a list", "nothing", "cut off", "no text", "lists without end"],
)
def test_arguments_that_cannot_be_read_are_shown_as_they_are(payload: bytes, shown: tuple[Any, Any]) -> None:
    assert call_view(payload, "json") == shown


def test_what_is_no_json_is_shown_as_bytes() -> None:
    assert value_view(b"\x80\x04", "pickle") == {"type": "pickle", "base64": "gAQ="}
    assert value_view(None, "json") is None
