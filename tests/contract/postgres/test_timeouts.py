"""A server that hangs is an outage: every call has a deadline, and the next one goes to whoever answers."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from tests.support.builders import birth, put, turn, wish
from tests.support.fleet import wait_for
from tests.support.network_proxy import Proxy
from tests.support.postgres import PgServer, reserve_port, start_postgres
from tests.support.signals import OwnProcess

from unstuck import App
from unstuck.config import Recovery, Settings
from unstuck.domain.liveness import Session
from unstuck.errors import LedgerBusy, LedgerUnavailable, UncertainCommit
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.ledger.postgres import connect
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.maintenance.worker_health import HEALTH_TICKET
from unstuck.recovery.reap import Reaper

QUICK = Recovery(heartbeat_interval="0.5s", heartbeat_timeout="2s")
PATIENCE_S = 60.0


@pytest.fixture
def own_server() -> Iterator[PgServer]:
    with start_postgres() as server:
        yield server


@pytest.fixture(autouse=True)
def _short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """People wait longer than workers do; a test does not."""
    monkeypatch.setattr(connect, "CLIENT_STATEMENT_S", 1.0)
    monkeypatch.setattr(connect, "READ_STATEMENT_S", 1.0)
    monkeypatch.setattr(connect, "ANSWER_MARGIN_S", 0.5)
    monkeypatch.setattr(connect, "LEAST_TURN_ANSWER_S", 2.0)


@contextmanager
def hung(server: PgServer) -> Iterator[None]:
    server.hang()
    try:
        yield
    finally:
        server.resume()


def open_ledger(url: str) -> PostgresLedger:
    return PostgresLedger(Settings(url=url, recovery=QUICK, connect_timeout="2s"))


def _gives_up(call: Callable[[], object], kind: type[Exception] = LedgerUnavailable) -> None:
    """Check that a call ends at its own deadline: what it waits for lasts until the test goes on."""
    with pytest.raises(kind):
        call()


def test_a_worker_that_gives_up_a_late_answer_keeps_its_session_until_it_has_another(own_server: PgServer) -> None:
    """The server would take the end of the session for the end of the worker, which only cannot reconnect yet."""
    url = own_server.new_ledger()
    watcher = open_ledger(url)
    with Proxy(url) as proxy, reserve_port() as nowhere:
        worker = open_ledger(proxy.url)
        worker.workers.register(birth("w1"))
        first = worker.db.service_connection.open().pid
        proxy.cut()
        with pytest.raises(LedgerUnavailable):
            worker.workers.beat(Heartbeat("w1", 0, 0))
        # The road is whole again for what is open, and leads nowhere for what is new.
        proxy.point_to(nowhere.getsockname()[1])
        proxy.heal()
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            with pytest.raises(LedgerUnavailable):
                worker.workers.beat(Heartbeat("w1", 0, 0))
            assert [one.session for one in watcher.recovery.watch()] == [Session.PRESENT]
        proxy.point_to(own_server.port)
        worker.workers.beat(Heartbeat("w1", 0, 0))
        wait_for(lambda: not _is_there(watcher, first), "the end of the old session")
        assert [one.session for one in watcher.recovery.watch()] == [Session.PRESENT]
        worker.close()
    watcher.close()


def _is_there(ledger: PostgresLedger, pid: int) -> bool:
    return bool(ledger.db.read_connection.ask(b"select 1 from pg_stat_activity where pid = %(pid)s", {"pid": pid}))


def test_no_call_waits_for_ever_for_a_server_that_hangs(own_server: PgServer, caplog: pytest.LogCaptureFixture) -> None:
    ledger = open_ledger(own_server.new_ledger())
    ledger.workers.register(birth("w1"))
    calls: dict[str, Callable[[], object]] = {
        "service": lambda: ledger.workers.beat(Heartbeat("w1", 0, 0)),
        "turn": lambda: turn(ledger),
        "client": lambda: put(ledger),
        "read": ledger.jobs.count,
    }
    for call in calls.values():
        call()
    with hung(own_server), caplog.at_level(logging.INFO, "unstuck"):
        with ThreadPoolExecutor(len(calls)) as pool:
            # What may be asked again is, on a new connection, which cannot be opened either.
            list(pool.map(_gives_up, calls.values()))
        # A connection that cannot be opened is bounded as well, and does not stay behind half open.
        _gives_up(calls["read"])
        opened = OwnProcess(os.getpid()).net_connections()
        left = [one for one in opened if one.raddr and one.raddr.port == own_server.port]
        assert len(left) == 1, "the session that proves that the worker lives is left open, and no other"
    for call in calls.values():
        call()
    assert caplog.text.count("PostgreSQL does not answer; dropping the connection") == len(calls)
    ledger.close()


def test_a_write_to_a_server_that_hangs_is_uncertain(own_server: PgServer) -> None:
    ledger = open_ledger(own_server.new_ledger())
    ledger.workers.register(birth("w1"))
    turn(ledger)
    with hung(own_server):
        _gives_up(lambda: turn(ledger), UncertainCommit)
    assert turn(ledger).alive
    ledger.close()


def test_when_the_first_host_hangs_every_connection_moves_on_to_the_next_primary(
    own_server: PgServer, pg_server: PgServer, ready_pg_url: str
) -> None:
    name = ready_pg_url.rpartition("/")[2]
    model = own_server.new_ledger().rpartition("/")[2]
    own_server.execute(f"alter database {model} rename to tables")
    own_server.execute(f"drop database if exists {name}")
    own_server.execute(f"create database {name} template tables")
    other = PostgresLedger(Settings(url=ready_pg_url))
    other.workers.register(birth("w1"))
    own_server.execute(f"update unstuck.ledger set id = '{other.ledger_id()}'", name)
    url = f"postgresql://postgres@127.0.0.1:{own_server.port},127.0.0.1:{pg_server.port}/{name}"
    ledger = open_ledger(url)
    ledger.workers.register(birth("w1"))
    turn(ledger)
    answered: list[BaseException] = []

    def take_turn() -> None:
        try:
            turn(ledger)
        except UncertainCommit as error:
            answered.append(error)

    # The deadline of a turn is not what saves it here.
    ledger.db.turn_connection.open().connection.answer_s = 600
    with hung(own_server):
        waiting = threading.Thread(target=take_turn)
        waiting.start()
        ledger.workers.beat(Heartbeat("w1", 0, 0))
        waiting.join(PATIENCE_S)
        assert answered
        assert turn(ledger).alive
        for lane in (ledger.db.service_connection, ledger.db.turn_connection):
            assert lane.open().connection.info.port == pg_server.port
    ledger.close()
    other.close()


def test_a_road_that_falls_silent_is_left_for_one_that_answers(ready_pg_url: str) -> None:
    with Proxy(ready_pg_url) as silent, Proxy(ready_pg_url) as well:
        ports = f"127.0.0.1:{silent.port},127.0.0.1:{well.port}"
        ledger = open_ledger(f"postgresql://postgres@{ports}/{ready_pg_url.rpartition('/')[2]}")
        ledger.workers.register(birth("w1"))
        silent.cut()
        ledger.workers.beat(Heartbeat("w1", 0, 0))
        assert ledger.db.service_connection.open().connection.info.port == well.port
        ledger.close()


def test_clients_hear_of_a_server_that_hangs(own_server: PgServer) -> None:
    url = own_server.new_ledger()
    app = App(url, recovery=QUICK, connect_timeout="2s", no_workers="ignore")

    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    job = add.enqueue(1, 2)
    with hung(own_server):
        _gives_up(lambda: add.enqueue(1, 2))
        _gives_up(lambda: job.result(timeout=1), TimeoutError)
        _gives_up(lambda: job.record())
    app.close()


# Locks --------------------------------------------------------------------------------------


def test_a_statement_of_the_service_connection_waits_for_a_lock_for_a_moment_only(
    pg_url: str, pg_ledger: PostgresLedger
) -> None:
    ledger = open_ledger(pg_url)
    ledger.workers.register(birth("w1"))
    with psycopg.connect(pg_url) as stranger:
        stranger.execute("lock table unstuck.jobs in access exclusive mode")
        _gives_up(lambda: ledger.maintenance.promote_due(10), LedgerBusy)
        _gives_up(lambda: wish(ledger), LedgerBusy)
    assert ledger.maintenance.promote_due(10).count == 0
    ledger.close()


def test_a_heartbeat_waits_for_one_statement_at_most(pg_url: str, pg_ledger: PostgresLedger) -> None:
    ledger = open_ledger(pg_url)
    ledger.workers.register(birth("w1"))
    ended = threading.Event()
    given_up: list[LedgerUnavailable] = []

    def sweep() -> None:
        while not ended.is_set():
            try:
                ledger.maintenance.promote_due(10)
            except LedgerUnavailable as error:
                given_up.append(error)

    sweeps = [threading.Thread(target=sweep) for _ in range(4)]
    with psycopg.connect(pg_url) as stranger:
        stranger.execute("lock table unstuck.jobs in access exclusive mode")
        for one in sweeps:
            one.start()
        try:
            overtaken_by = []
            for _ in range(3):
                wait_for(lambda: _lock_waits(pg_url), "a sweep to wait for the lock")
                before = len(given_up)
                ledger.workers.beat(Heartbeat("w1", 0, 0))
                overtaken_by.append(len(given_up) - before)
        finally:
            ended.set()
            for one in sweeps:
                one.join()
    # The other three sweeps wait as well. (If this thread is kept waiting before its turn, more of them may pass.)
    assert min(overtaken_by) <= 1, overtaken_by
    ledger.close()


def test_a_round_of_the_reaper_goes_on_with_what_no_lock_holds_up(
    pg_url: str, pg_ledger: PostgresLedger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = open_ledger(pg_url)
    reaper = Reaper(ledger, QUICK, by="test")
    with psycopg.connect(pg_url) as stranger, caplog.at_level(logging.WARNING, "unstuck"):
        stranger.execute("lock table unstuck.workflows in access exclusive mode")
        done = reaper.sweep(ticket=False)
        assert 1 <= done.deferred <= 2
        assert not pg_ledger.maintenance.take_ticket(HEALTH_TICKET, 60), "the last part had its turn"
        assert reaper.sweep(ticket=False).deferred
    assert reaper.sweep(ticket=False).deferred == 0
    said = [one.getMessage() for one in caplog.records if one.name == "unstuck.recovery"]
    assert said.count("A lock holds up the reaper; the next round tries again") == 1
    ledger.close()


def test_who_administers_the_server_may_set_less(pg_url: str, pg_ledger: PostgresLedger, pg_server: PgServer) -> None:
    name = pg_url.rpartition("/")[2]
    pg_server.execute(f"alter database {name} set lock_timeout = '90ms'")
    pg_server.execute(f"alter database {name} set statement_timeout = '1h'")
    ledger = PostgresLedger(Settings(url=pg_url))
    connection = ledger.db.service_connection.open().connection
    told = connection.execute("select current_setting('lock_timeout'), current_setting('statement_timeout')").fetchone()
    assert told == ("90ms", "2500ms")
    pg_server.execute(f"alter database {name} reset all")
    ledger.close()


def _lock_waits(url: str) -> bool:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from pg_stat_activity where wait_event_type = 'Lock'").fetchone()
    return row is not None and row[0] > 0
