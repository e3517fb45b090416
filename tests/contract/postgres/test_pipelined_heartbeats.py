"""Beats that an event loop sends and takes in itself: the same as others, and whatever goes wrong, they are beaten."""

import asyncio
import select
import signal
import socket
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from tests.contract.test_workers import foreign
from tests.support.builders import put, run, verdict
from tests.support.fleet import TIMEOUT_S, wait_for
from tests.support.network_proxy import Proxy
from tests.support.signals import send_signal

from unstuck.config import Recovery, Settings
from unstuck.domain.states import WorkerState
from unstuck.errors import LedgerUnavailable, RefusedValue
from unstuck.http.workers.batching import HeartbeatBatcher
from unstuck.ledger.contract import PipelinedHeartbeats
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import HeartbeatAnswer, RemoteHeartbeat
from unstuck.ledger.postgres.ledger import PostgresLedger

BIG = {"words": "x" * 1_000_000}


@pytest.fixture
def workers(pg_ledger: PostgresLedger) -> PostgresLedger:
    for number in range(1, 5):
        pg_ledger.workers.register(foreign(f"f{number}", f"node-{number}"))
    # It opens the connection: a flight never does.
    pg_ledger.workers.record_heartbeats([RemoteHeartbeat("f1")])
    return pg_ledger


def launched(ledger: PostgresLedger, *pulses: RemoteHeartbeat) -> PipelinedHeartbeats:
    flight = ledger.workers.beat_async(pulses)
    assert flight is not None
    return flight


def landed(flight: PipelinedHeartbeats) -> list[HeartbeatAnswer]:
    while True:
        assert select.select([flight.fd], [flight.fd] if flight.unsent else [], [], TIMEOUT_S) != ([], [], [])
        flight.push()
        answers = flight.land()
        if answers is not None:
            return answers


def backend(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "select pid from pg_stat_activity where application_name = 'unstuck beats' and datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def beaten(ledger: PostgresLedger, *pulses: RemoteHeartbeat) -> list[Any]:
    async def scene() -> list[Any]:
        beats = HeartbeatBatcher(lambda: ledger)
        try:
            return await asyncio.gather(*(beats.beat(pulse) for pulse in pulses), return_exceptions=True)
        finally:
            await asyncio.to_thread(beats.close)

    return asyncio.run(scene())


def test_what_flies_is_answered_as_what_walks(workers: PostgresLedger) -> None:
    job_id = put(workers)
    other_id = put(workers)
    run(workers, "f1")
    workers.jobs.cancel([job_id, other_id], "me")
    workers.workers.request("f2", "drain", "me")
    workers.recovery.declare_dead("f3", verdict(), GuardNone())
    pulses = [RemoteHeartbeat(one, metadata={"n": "ä"}) for one in ("f1", "f2", "f3", "f4", "nobody")]
    flown = landed(launched(workers, *pulses))
    assert flown == workers.workers.record_heartbeats(pulses)
    assert {job for job, _ in flown[0].cancel} == {job_id, other_id}
    assert (flown[1].request, flown[2].state, flown[3].state) == ("drain", WorkerState.DEAD, WorkerState.ACTIVE)


def test_there_is_no_flight_without_a_connection_that_is_free(pg_ledger: PostgresLedger) -> None:
    pg_ledger.workers.register(foreign())
    assert pg_ledger.workers.beat_async([RemoteHeartbeat("f1")]) is None
    pg_ledger.workers.record_heartbeats([RemoteHeartbeat("f1")])
    flight = launched(pg_ledger, RemoteHeartbeat("f1"))
    assert pg_ledger.workers.beat_async([RemoteHeartbeat("f1")]) is None
    # Who does not fly meanwhile has another connection, and that one stays.
    assert pg_ledger.workers.record_heartbeats([RemoteHeartbeat("f1")])[0].state is WorkerState.ACTIVE
    assert landed(flight)[0].state is WorkerState.ACTIVE
    assert landed(launched(pg_ledger, RemoteHeartbeat("f1")))[0].state is WorkerState.ACTIVE
    flight = launched(pg_ledger, RemoteHeartbeat("f1"))
    pg_ledger.close()
    assert landed(flight)[0].state is WorkerState.ACTIVE


def test_what_is_longer_than_the_socket_takes_is_pushed_when_there_is_room(
    workers: PostgresLedger, pg_url: str
) -> None:
    pid = backend(pg_url)
    send_signal(pid, signal.SIGSTOP)
    try:
        flight = launched(workers, *[RemoteHeartbeat(f"f{number % 4 + 1}", metadata=BIG) for number in range(20)])
        assert flight.unsent
    finally:
        send_signal(pid, signal.SIGCONT)
    assert [answer.state for answer in landed(flight)] == [WorkerState.ACTIVE] * 20
    assert (
        beaten(workers, *[RemoteHeartbeat("f1", metadata=BIG) for _ in range(20)])
        == [HeartbeatAnswer(WorkerState.ACTIVE)] * 20
    )


def test_a_connection_that_was_cut_costs_nobody_the_beat(workers: PostgresLedger, pg_url: str) -> None:
    cut(pg_url, pid := backend(pg_url))
    assert beaten(workers, RemoteHeartbeat("f2")) == [HeartbeatAnswer(WorkerState.ACTIVE)]
    assert backend(pg_url) != pid


def test_a_connection_that_is_cut_in_flight_costs_nobody_the_beat(workers: PostgresLedger, pg_url: str) -> None:
    pid = backend(pg_url)
    with psycopg.connect(pg_url) as other:
        other.execute("select 1 from unstuck.workers where id = 'f2' for update")

        async def scene() -> HeartbeatAnswer:
            beats = HeartbeatBatcher(lambda: workers)
            beating = asyncio.create_task(beats.beat(RemoteHeartbeat("f2")))
            try:
                await asyncio.to_thread(wait_for, lambda: waits(pg_url, pid), "the beat waits for the row")
                await asyncio.to_thread(cut, pg_url, pid)
                await asyncio.to_thread(other.rollback)
                return await beating
            finally:
                await asyncio.to_thread(beats.close)

        assert asyncio.run(scene()).state is WorkerState.ACTIVE
    assert backend(pg_url) != pid


def waits(url: str, pid: int) -> bool:
    with psycopg.connect(url) as connection:
        row = connection.execute("select wait_event_type from pg_stat_activity where pid = %s", (pid,)).fetchone()
    return row is not None and row[0] == "Lock"


def cut(url: str, pid: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("select pg_terminate_backend(%s, 5000)", (pid,))


def test_a_road_that_falls_silent_in_flight_is_given_up_in_time(pg_url: str, workers: PostgresLedger) -> None:
    with Proxy(pg_url) as road:
        far = PostgresLedger(Settings(url=road.url, recovery=Recovery(heartbeat_interval="0.5s"), connect_timeout="2s"))
        far.workers.record_heartbeats([RemoteHeartbeat("f1")])
        road.cut()
        answers = beaten(far, RemoteHeartbeat("f1"))
        assert [type(answer) for answer in answers] == [LedgerUnavailable]
        road.heal()
        assert beaten(far, RemoteHeartbeat("f1")) == [HeartbeatAnswer(WorkerState.ACTIVE)]
        far.close()


def test_one_that_is_refused_fails_alone(workers: PostgresLedger) -> None:
    answers = beaten(
        workers,
        RemoteHeartbeat("f1"),
        RemoteHeartbeat("f2", metadata={"nul": "\0"}),
        RemoteHeartbeat("f3", metadata={"n": 1}),
    )
    assert [type(answer) for answer in answers] == [HeartbeatAnswer, RefusedValue, HeartbeatAnswer]


def test_a_server_that_is_gone_is_said_to_everybody(workers: PostgresLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pulses: object) -> list[HeartbeatAnswer]:
        raise LedgerUnavailable("away")

    flight = launched(workers, RemoteHeartbeat("f1"))
    flight.drop()
    monkeypatch.setattr(workers.workers, "record_heartbeats", gone)
    answers = beaten(workers, RemoteHeartbeat("f1"), RemoteHeartbeat("f2"))
    assert [type(answer) for answer in answers] == [LedgerUnavailable, LedgerUnavailable]


def test_who_closes_with_beats_in_the_air_does_not_wait_for_them(workers: PostgresLedger, pg_url: str) -> None:
    pid = backend(pg_url)
    send_signal(pid, signal.SIGSTOP)
    try:

        async def scene() -> None:
            beats = HeartbeatBatcher(lambda: workers)
            beating = asyncio.create_task(beats.beat(RemoteHeartbeat("f1")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.to_thread(beats.close), TIMEOUT_S)
            # Nor does who beats.
            with pytest.raises(LedgerUnavailable):
                await asyncio.wait_for(beating, TIMEOUT_S)

        asyncio.run(scene())
    finally:
        send_signal(pid, signal.SIGCONT)


def test_a_connection_comes_back_as_the_driver_wants_it(workers: PostgresLedger) -> None:
    assert landed(launched(workers, RemoteHeartbeat("f1")))[0].state is WorkerState.ACTIVE
    assert workers.db.heartbeat_connection.open().connection.pgconn.nonblocking == 1


def test_a_beat_that_is_refused_costs_nobody_the_connection(workers: PostgresLedger, pg_url: str) -> None:
    pid = backend(pg_url)
    assert [type(answer) for answer in beaten(workers, RemoteHeartbeat("f2", metadata={"nul": "\0"}))] == [RefusedValue]
    assert beaten(workers, RemoteHeartbeat("f1")) == [HeartbeatAnswer(WorkerState.ACTIVE)]
    assert backend(pg_url) == pid


def test_a_loop_that_is_closed_with_beats_in_the_air_costs_the_next_one_nothing(
    workers: PostgresLedger, pg_url: str
) -> None:
    beats = HeartbeatBatcher(lambda: workers)

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(beats.beat(RemoteHeartbeat("f1")), 0.1)

    async def beaten_anew() -> HeartbeatAnswer:
        return await asyncio.wait_for(beats.beat(RemoteHeartbeat("f1")), TIMEOUT_S)

    pid = backend(pg_url)
    send_signal(pid, signal.SIGSTOP)
    try:
        asyncio.run(given_up())
        assert asyncio.run(beaten_anew()) == HeartbeatAnswer(WorkerState.ACTIVE)
    finally:
        send_signal(pid, signal.SIGCONT)
        beats.close()


def test_a_loop_that_will_not_wait_for_the_connection_lets_them_walk(workers: PostgresLedger) -> None:
    async def scene() -> HeartbeatAnswer:
        def used_already(*given: object) -> None:
            raise RuntimeError("this descriptor is a transport's")

        asyncio.get_running_loop().add_reader = used_already  # type: ignore[assignment]
        beats = HeartbeatBatcher(lambda: workers)
        try:
            return await asyncio.wait_for(beats.beat(RemoteHeartbeat("f1")), TIMEOUT_S)
        finally:
            await asyncio.to_thread(beats.close)

    assert asyncio.run(scene()) == HeartbeatAnswer(WorkerState.ACTIVE)


class SentUnnoticed:
    """A flight whose last bytes went with something that was taken in, before the socket was said to be writable."""

    unsent = True
    limit_s = TIMEOUT_S

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def push(self) -> None: ...

    def land(self) -> list[HeartbeatAnswer]:
        return [HeartbeatAnswer(WorkerState.ACTIVE)]

    def drop(self) -> None: ...


def test_nobody_waits_to_write_what_has_landed() -> None:
    mine, theirs = socket.socketpair()
    workers = SimpleNamespace(beat_async=lambda pulses: SentUnnoticed(mine.fileno()))
    ledger: Any = SimpleNamespace(workers=workers)

    async def scene() -> bool:
        theirs.send(b"!")
        await asyncio.wait_for(HeartbeatBatcher(lambda: ledger).beat(RemoteHeartbeat("f1")), TIMEOUT_S)
        return asyncio.get_running_loop().remove_writer(mine.fileno())

    with mine, theirs:
        assert asyncio.run(scene()) is False
