"""The session of a worker is evidence: present, missing or unknown, and never a verdict by itself."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from tests.contract.hands import birth, put, turn, verdict, wish
from tests.fleet import wait_for
from tests.pg import PgServer

from unstuck.config import Settings
from unstuck.domain.liveness import Session
from unstuck.domain.states import WorkerState
from unstuck.domain.watch import Cause, Tick
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.records import GuardNone, GuardSilent, Pulse


@pytest.fixture
def fleet(pg_ledger: PostgresLedger, pg_url: str) -> Iterator[list[PostgresLedger]]:
    """Four workers in processes of their own, as far as the server can tell; `pg_ledger` watches them."""
    ledgers = [PostgresLedger(Settings(url=pg_url)) for _ in range(4)]
    for number, ledger in enumerate(ledgers):
        ledger.register(birth(f"w{number}"))
    yield ledgers
    for ledger in ledgers:
        ledger.close()


def lose_session(ledger: PostgresLedger, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select pg_terminate_backend(%s, 5000)", (ledger.service_lane.open().pid,))


def sessions(watcher: PostgresLedger) -> list[Session]:
    return [worker.session for worker in watcher.watch()]


def test_a_lost_session_is_missed_and_comes_back_with_the_next_beat(
    pg_ledger: PostgresLedger, fleet: list[PostgresLedger], pg_url: str
) -> None:
    assert sessions(pg_ledger) == [Session.PRESENT] * 4
    lose_session(fleet[1], pg_url)
    assert sessions(pg_ledger) == [Session.PRESENT, Session.MISSING, Session.PRESENT, Session.PRESENT]
    fleet[1].beat(Pulse("w1", 0, 0))
    assert sessions(pg_ledger) == [Session.PRESENT] * 4


def test_many_sessions_lost_at_once_prove_nothing(
    pg_ledger: PostgresLedger, fleet: list[PostgresLedger], pg_url: str
) -> None:
    lose_session(fleet[0], pg_url)
    lose_session(fleet[1], pg_url)
    assert sessions(pg_ledger).count(Session.MISSING) == 2
    lose_session(fleet[2], pg_url)
    assert sessions(pg_ledger) == [Session.UNKNOWN] * 4


def test_a_bell_that_waits_reconnects_and_shows_the_new_session(
    pg_ledger: PostgresLedger, fleet: list[PostgresLedger], pg_url: str
) -> None:
    bell = fleet[0].listen("w0")
    heard: list[frozenset[str]] = []
    thread = threading.Thread(target=lambda: heard.append(bell.wait(30)))
    thread.start()
    lose_session(fleet[0], pg_url)
    wait_for(lambda: sessions(pg_ledger) == [Session.PRESENT] * 4, "the new session")
    pg_ledger.ring(["queue:default"])
    thread.join(10)
    assert heard == [frozenset({"queue:default"})]
    bell.close()


def test_a_restarted_server_says_nothing_of_old_sessions_and_forgives_silence(
    pg_ledger: PostgresLedger, fleet: list[PostgresLedger], pg_server: PgServer
) -> None:
    pg_server.stop()
    pg_server.start()
    watch = pg_ledger.watch()
    assert [worker.session for worker in watch] == [Session.UNKNOWN] * 4
    assert all(worker.silent_s < 20 for worker in watch)


def test_a_turn_in_flight_delays_a_verdict_only_for_a_moment(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.register(birth("w1"))
    with psycopg.connect(pg_url) as frozen:
        frozen.execute("select 1 from unstuck.workers where id = 'w1' for share")
        assert not pg_ledger.condemn("w1", verdict(), GuardNone())
    assert pg_ledger.condemn("w1", verdict(), GuardNone())


def test_a_turn_that_waited_for_a_verdict_sees_it(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.register(birth("w1"))
    answers: list[bool] = []
    with psycopg.connect(pg_url) as judge:
        judge.execute("update unstuck.workers set state = 'dead', stopped_at = now() where id = 'w1'")
        put(pg_ledger)
        thread = threading.Thread(target=lambda: answers.append(wish(pg_ledger).alive))
        thread.start()
        wait_for(lambda: _lock_waits(pg_url), "the turn to wait")
    thread.join(10)
    assert answers == [False]
    assert not turn(pg_ledger).alive


def test_a_beat_that_came_first_refutes_a_verdict_by_silence(pg_ledger: PostgresLedger) -> None:
    pg_ledger.tick(Tick(None, 1.0))
    pg_ledger.register(birth("w1"))
    wait_for(lambda: pg_ledger.tick(Tick(60.0, 1.0)) and pg_ledger.watch()[0].silent_s >= 0.2, "the silence")
    pg_ledger.beat(Pulse("w1", 0, 0))
    assert not pg_ledger.condemn("w1", verdict(), GuardSilent(0.2))
    assert pg_ledger.watch()[0].state is WorkerState.ACTIVE


def _lock_waits(url: str) -> bool:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from pg_stat_activity where wait_event_type = 'Lock'").fetchone()
    return row is not None and row[0] > 0


def test_no_reaper_takes_the_word_of_another_one_that_has_not_committed(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.tick(Tick(None, 1.0))
    with psycopg.connect(pg_url) as other:
        other.execute("update unstuck.watch_periods set since = since - interval '1m', until = until - interval '1m'")
        other.commit()
        other.execute("select 1 from unstuck.ledger for update")
        # After an outage of a minute, while another reaper is about to begin a new period.
        assert pg_ledger.tick(Tick(None, 1.0, cause=Cause.OUTAGE)).stale_s == 0.0
        # One that was in touch all along may go on vouching for that time.
        assert pg_ledger.tick(Tick(60.0, 1.0)).stale_s == pytest.approx(60.0, abs=5.0)
