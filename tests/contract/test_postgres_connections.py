"""A broken connection is noticed, named and replaced; nothing is written twice or in doubt without saying so."""

import os
import threading
import time

import psycopg
import pytest
from tests.contract.hands import birth, claim, new_job, put, running, turn
from tests.fleet import wait_for
from tests.pg import GUARDED, PgServer
from tests.proxy import Proxy

from unstuck import failpoints
from unstuck.config import Settings
from unstuck.domain.errors import LedgerError, LedgerUnavailable, RefusedValue, SchemaMismatch, UncertainCommit
from unstuck.domain.states import JobState
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.postgres.turning import turn_values
from unstuck.store.records import Turn, Wish

WISH = Wish(("default",), ("add",), 10)


def test_after_every_session_was_cut_the_next_call_of_each_kind_works(
    pg_ledger: PostgresLedger, pg_server: PgServer
) -> None:
    pg_ledger.register(birth("w1"))
    put(pg_ledger)
    turn(pg_ledger)
    pg_server.terminate_all()
    # Noticed before anything is sent, so there is no doubt about what was written.
    assert claim(pg_ledger)
    assert put(pg_ledger)
    assert pg_ledger.count_jobs()
    assert pg_ledger.watch()


def test_a_turn_whose_answer_was_lost_says_so(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.register(birth("w1"))
    job_id = put(pg_ledger)
    with Proxy(pg_url) as proxy:
        far = PostgresLedger(Settings(url=proxy.url))
        far.turn(Turn("w1"))
        proxy.lose_answer_to(b".turn_v1(")
        with pytest.raises(UncertainCommit):
            far.turn(Turn("w1", wish=WISH))
        assert proxy.lost.wait(10)
        # It happened, and the list of what is held tells.
        assert [job.job_id for job in far.held("w1")] == [job_id]
        far.close()


def test_an_enqueue_whose_answer_was_lost_is_stored_once(pg_ledger: PostgresLedger, pg_url: str) -> None:
    with Proxy(pg_url) as proxy:
        far = PostgresLedger(Settings(url=proxy.url))
        proxy.lose_answer_to(b".enqueue_v1(")
        answer = far.enqueue([new_job(), new_job(unique_key="once")])
        assert proxy.lost.is_set()
        assert [one.fresh for one in answer] == [True, True]
        assert pg_ledger.count_jobs() == {JobState.PENDING: 2}
        assert pg_ledger.missing([one.job_id for one in answer]) == set()
        far.close()


def test_an_answer_lost_by_failpoint_leaves_the_turn_committed(pg_ledger: PostgresLedger) -> None:
    pg_ledger.register(birth("w1"))
    put(pg_ledger)
    failpoints.arm("turn.answer_lost=raise")
    try:
        with pytest.raises(UncertainCommit):
            pg_ledger.turn(Turn("w1", wish=WISH))
    finally:
        failpoints.arm("")
    assert len(pg_ledger.held("w1")) == 1


def test_a_stopped_server_is_unavailable_and_comes_back(pg_ledger: PostgresLedger, pg_server: PgServer) -> None:
    pg_ledger.register(birth("w1"))
    pg_server.stop()
    try:
        with pytest.raises(LedgerUnavailable, match="cannot be reached"):
            turn(pg_ledger)
        with pytest.raises(LedgerUnavailable):
            put(pg_ledger)
        pg_ledger.ring(["queue:default"])
    finally:
        pg_server.start()
    assert turn(pg_ledger).alive
    assert put(pg_ledger)


def test_a_connection_from_before_a_fork_is_refused(pg_ledger: PostgresLedger) -> None:
    put(pg_ledger)
    child = os.fork()
    if child == 0:
        try:
            put(pg_ledger)
        except LedgerError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert put(pg_ledger)


def test_close_ends_a_call_that_waits(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.register(birth("w1"))
    put(pg_ledger)
    ended: list[BaseException] = []

    def take() -> None:
        try:
            pg_ledger.turn(Turn("w1", wish=WISH))
        except LedgerError as error:
            ended.append(error)

    with psycopg.connect(pg_url) as stranger:
        stranger.execute("lock table unstuck.jobs in access exclusive mode")
        thread = threading.Thread(target=take)
        thread.start()
        wait_for(lambda: _waiting(pg_url), "the turn to wait")
        begun = time.monotonic()
        pg_ledger.close()
        thread.join(10)
        assert not thread.is_alive()
        assert time.monotonic() - begun < 5
    assert ended
    assert isinstance(ended[0], LedgerUnavailable)


def _waiting(url: str) -> bool:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from pg_stat_activity where wait_event_type = 'Lock'").fetchone()
    return row is not None and row[0] > 0


def test_large_payloads_are_fetched_after_the_commit(pg_ledger: PostgresLedger) -> None:
    pg_ledger.register(birth("w1"))
    payloads = [bytes([65 + n]) * 300_000 for n in range(3)] + [b"small"]
    pg_ledger.enqueue([new_job(payload=payload) for payload in payloads])
    assert [job.payload for job in claim(pg_ledger)] == payloads


def test_a_frozen_reader_of_large_payloads_blocks_nobody(pg_ledger: PostgresLedger) -> None:
    pg_ledger.register(birth("w1"))
    pg_ledger.enqueue([new_job(payload=bytes(900_000)) for _ in range(20)])
    connection = pg_ledger.turn_lane.open().connection
    rows = connection.execute(pg_ledger.sql["turn"], turn_values(Turn("w1", wish=Wish(("default",), ("add",), 20))))
    # The answer to the turn itself is small: the server never waits for its reader with the rows locked.
    assert sum(len(row[5] or b"") for row in rows.fetchall()) <= 65536


# Bad addresses and bad values ---------------------------------------------------------------


def _message(url: str) -> str:
    with pytest.raises(LedgerError) as caught:
        PostgresLedger(Settings(url=url, connect_timeout=2)).check_schema()
    assert "sesame" not in str(caught.value)
    return str(caught.value)


def test_each_bad_address_gets_its_own_sentence(pg_server: PgServer) -> None:
    assert "cannot be reached" in _message("postgresql://me:sesame@127.0.0.1:1/none")
    assert "Create it (createdb)" in _message(pg_server.url("nowhere", password="sesame"))
    pg_server.execute(f"drop role if exists {GUARDED}")
    pg_server.execute(f"create role {GUARDED} login password 'open'")
    assert "Check user and password" in _message(pg_server.url("postgres", GUARDED, "sesame"))
    assert "Put the password" in _message(pg_server.url("postgres", GUARDED))
    assert "percent-encoded" in _message("postgresql://me:sesame%zz@127.0.0.1/x")


def test_a_database_without_tables_names_the_cure(pg_url: str) -> None:
    ledger = PostgresLedger(Settings(url=pg_url))
    for verb in (ledger.check_schema, lambda: put(ledger), ledger.workers, lambda: turn(ledger)):
        with pytest.raises(SchemaMismatch, match="unstuck migrate"):
            verb()
    ledger.close()


def test_a_read_only_database_is_named(pg_ledger: PostgresLedger, pg_url: str, pg_server: PgServer) -> None:
    name = pg_url.rpartition("/")[2]
    pg_server.execute(f"alter database {name} set default_transaction_read_only = on")
    pg_server.terminate_all()
    with pytest.raises(LedgerUnavailable, match="primary"):
        put(pg_ledger)


def test_text_that_cannot_be_stored_is_refused(pg_ledger: PostgresLedger) -> None:
    for bad in ("nul\0", "lone \ud800 surrogate"):
        with pytest.raises(RefusedValue):
            put(pg_ledger, enqueued_by=bad)
    assert pg_ledger.count_jobs() == {}


def test_the_search_path_does_not_matter(pg_url: str, pg_server: PgServer) -> None:
    name = pg_url.rpartition("/")[2]
    pg_server.execute("create schema trap; create table trap.jobs (id int); create table trap.workers (id int)", name)
    pg_server.execute(f"alter database {name} set search_path = trap")
    ledger = PostgresLedger(Settings(url=pg_url, schema="Odd_Name"))
    ledger.migrate()
    ledger.register(birth("w1"))
    put(ledger)
    assert len(claim(ledger)) == 1
    assert ledger.watch()[0].held == 1
    ledger.close()


def test_a_batch_larger_than_a_message_is_stored_as_one(pg_ledger: PostgresLedger) -> None:
    jobs = [new_job(payload=b"x" * 100, unique_key=str(n % 6000)) for n in range(12_000)]
    answer = pg_ledger.enqueue(jobs)
    assert [one.fresh for one in answer] == [True] * 6000 + [False] * 6000
    assert [one.job_id for one in answer[:6000]] == [one.job_id for one in answer[6000:]]


def test_a_servers_own_defaults_change_nothing(pg_server: PgServer) -> None:
    url = pg_server.new_database()
    name = url.rpartition("/")[2]
    for setting in ("datestyle = 'German, DMY'", "default_transaction_isolation = 'repeatable read'"):
        pg_server.execute(f"alter database {name} set {setting}")
    ledger = PostgresLedger(Settings(url=url))
    ledger.migrate()
    ledger.register(birth("w1"))
    job = running(ledger, payload=b"\\\x00")
    assert job.payload == b"\\\x00"
    connection = ledger.turn_lane.open().connection
    assert connection.execute("show transaction_isolation").fetchone() == ("read committed",)
    ledger.close()
    pg_server.drop_database(url)
