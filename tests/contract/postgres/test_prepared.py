"""The statements that run all the time are prepared once per connection, and never where that could go wrong."""

from collections.abc import Iterator

import pytest
from tests.support.builders import QUEUE, TASK, birth, claim_jobs, done, new_job, put, start, state_of, turn
from tests.support.postgres_cluster import needs_pgbouncer, start_pooler

from unstuck.config import Settings
from unstuck.domain.states import JobState
from unstuck.ledger.contract.workers import ClaimRequest, Exchange, Heartbeat, Turn
from unstuck.ledger.postgres.connection import ManagedConnection
from unstuck.ledger.postgres.ledger import PostgresLedger


@pytest.fixture
def ledger(ready_pg_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=ready_pg_url))
    ledger.workers.register(birth("w1"))
    yield ledger
    ledger.close()


def prepared(lane: ManagedConnection) -> list[str]:
    """Return what the server has prepared for a connection."""
    return [row[0] for row in lane.ask(b"select statement from pg_prepared_statements")]


def live(ledger: PostgresLedger) -> None:
    """Take a job from its enqueue to its end, with one exchange of several turns."""
    put(ledger)
    jobs = claim_jobs(ledger)
    start(ledger, jobs)
    assert turn(ledger, done=map(done, jobs)).superseded == frozenset()
    assert state_of(ledger, jobs[0].job_id) is JobState.SUCCEEDED
    ledger.workers.beat(Heartbeat("w1", 0, 0))
    wish = ClaimRequest((QUEUE,), (TASK,), 1, start=1)
    ended = ledger.workers.exchange(Exchange(jobs=(new_job(),), turns=(Turn("w1", claim_request=wish),)))
    assert ended.turns is not None
    assert turn(ledger, done=map(done, ended.turns[0].claimed)).superseded == frozenset()
    assert state_of(ledger, ended.enqueued[0].job_id) is JobState.SUCCEEDED


def test_a_statement_that_comes_again_is_parsed_once(ledger: PostgresLedger) -> None:
    live(ledger)
    before = prepared(ledger.db.turn_connection)
    live(ledger)
    live(ledger)
    assert prepared(ledger.db.turn_connection) == before
    assert all("turn_v1(" in text or "enqueue_v1(" in text or "exchange_v1(" in text for text in before)
    assert any("turn_v1(" in text for text in before)
    assert any("enqueue_v1(" in text for text in prepared(ledger.db.client_connection))
    assert any("beat_v1(" in text for text in prepared(ledger.db.service_connection))


def test_what_is_no_plain_call_of_a_function_is_planned_anew_each_time(ledger: PostgresLedger) -> None:
    put(ledger)
    for _ in range(10):
        ledger.workers.held("w1")
        ledger.jobs.missing([1])
    assert prepared(ledger.db.turn_connection) == []
    assert prepared(ledger.db.read_connection) == []


def test_a_session_that_forgot_what_was_prepared_loses_no_turn(ledger: PostgresLedger) -> None:
    """A pooler that hides behind our own process id would look like this."""
    live(ledger)
    for lane in (ledger.db.turn_connection, ledger.db.client_connection, ledger.db.service_connection):
        lane.open().connection.pgconn.exec_(b"deallocate all")
    live(ledger)
    assert prepared(ledger.db.turn_connection) == []


def test_a_name_that_another_client_took_loses_no_turn(ledger: PostgresLedger) -> None:
    for lane in (ledger.db.turn_connection, ledger.db.client_connection, ledger.db.service_connection):
        for number in range(20):
            lane.open().connection.pgconn.exec_(b"prepare _pg3_%d as select 1" % number)
    live(ledger)


@needs_pgbouncer
def test_nothing_is_prepared_behind_a_pooler(ready_pg_url: str) -> None:
    with start_pooler(ready_pg_url) as pooler:
        ledger = PostgresLedger(Settings(url=pooler.url))
        try:
            ledger.workers.register(birth("w1"))
            for _ in range(7):
                live(ledger)
                assert prepared(ledger.db.turn_connection) == []
        finally:
            ledger.close()
