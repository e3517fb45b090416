"""A broken connection is noticed, named and replaced; nothing is written twice or in doubt without saying so."""

import os
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from tests.support.builders import birth, claim_jobs, new_job, put, running, turn, verdict, wish
from tests.support.fleet import wait_for
from tests.support.network_proxy import Proxy
from tests.support.postgres import GUARDED, PgServer, start_postgres

from unstuck import failpoints
from unstuck.config import Settings
from unstuck.domain.liveness import Session
from unstuck.domain.states import JobState, WorkerState
from unstuck.domain.watch_clock import Cause, Tick
from unstuck.errors import LedgerError, LedgerUnavailable, RefusedValue, SchemaMismatch, UncertainCommit
from unstuck.ledger.contract.recovery import GuardNone, GuardSilent
from unstuck.ledger.contract.workers import ClaimRequest, Heartbeat, Turn
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.turn import turn_values

WISH = ClaimRequest(("default",), ("add",), 10)


def test_after_every_session_was_cut_the_next_call_of_each_kind_works(
    pg_ledger: PostgresLedger, pg_server: PgServer
) -> None:
    pg_ledger.workers.register(birth("w1"))
    put(pg_ledger)
    turn(pg_ledger)
    pg_server.terminate_all()
    # Noticed before anything is sent, so there is no doubt about what was written.
    assert claim_jobs(pg_ledger)
    assert put(pg_ledger)
    assert pg_ledger.jobs.count()
    assert pg_ledger.recovery.watch()


def test_a_turn_whose_answer_was_lost_says_so(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.workers.register(birth("w1"))
    job_id = put(pg_ledger)
    with Proxy(pg_url) as proxy:
        far = PostgresLedger(Settings(url=proxy.url))
        far.workers.turn(Turn("w1"))
        proxy.lose_answer_to(b".turn_v1(")
        with pytest.raises(UncertainCommit):
            far.workers.turn(Turn("w1", claim_request=WISH))
        assert proxy.lost.wait(10)
        # It happened, and the list of what is held tells.
        assert [job.job_id for job in far.workers.held("w1")] == [job_id]
        far.close()


def test_an_enqueue_whose_answer_was_lost_is_stored_once(pg_ledger: PostgresLedger, pg_url: str) -> None:
    with Proxy(pg_url) as proxy:
        far = PostgresLedger(Settings(url=proxy.url))
        proxy.lose_answer_to(b".enqueue_v1(")
        answer = far.jobs.enqueue([new_job(), new_job(unique_key="once")])
        assert proxy.lost.is_set()
        assert [one.fresh for one in answer] == [True, True]
        assert pg_ledger.jobs.count() == {JobState.PENDING: 2}
        assert pg_ledger.jobs.missing([one.job_id for one in answer]) == set()
        far.close()


def test_an_answer_lost_by_failpoint_leaves_the_turn_committed(pg_ledger: PostgresLedger) -> None:
    pg_ledger.workers.register(birth("w1"))
    put(pg_ledger)
    failpoints.arm("turn.answer_lost=raise")
    try:
        with pytest.raises(UncertainCommit):
            pg_ledger.workers.turn(Turn("w1", claim_request=WISH))
    finally:
        failpoints.arm("")
    assert len(pg_ledger.workers.held("w1")) == 1


def test_a_stopped_server_is_unavailable_and_comes_back(pg_ledger: PostgresLedger, pg_server: PgServer) -> None:
    pg_ledger.workers.register(birth("w1"))
    pg_server.stop()
    try:
        with pytest.raises(LedgerUnavailable, match="cannot be reached"):
            turn(pg_ledger)
        with pytest.raises(LedgerUnavailable):
            put(pg_ledger)
        pg_ledger.notify(["queue:default"])
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
    pg_ledger.workers.register(birth("w1"))
    put(pg_ledger)
    ended: list[BaseException] = []

    def take() -> None:
        try:
            pg_ledger.workers.turn(Turn("w1", claim_request=WISH))
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
    pg_ledger.workers.register(birth("w1"))
    payloads = [bytes([65 + n]) * 300_000 for n in range(3)] + [b"small"]
    pg_ledger.jobs.enqueue([new_job(payload=payload) for payload in payloads])
    assert [job.payload for job in claim_jobs(pg_ledger)] == payloads


def test_a_frozen_reader_of_large_payloads_blocks_nobody(pg_ledger: PostgresLedger) -> None:
    pg_ledger.workers.register(birth("w1"))
    pg_ledger.jobs.enqueue([new_job(payload=bytes(900_000)) for _ in range(20)])
    connection = pg_ledger.db.turn_connection.open().connection
    rows = connection.execute(
        pg_ledger.db.sql["turn"], turn_values(Turn("w1", claim_request=ClaimRequest(("default",), ("add",), 20)))
    )
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
    for verb in (ledger.check_schema, lambda: put(ledger), ledger.workers.list, lambda: turn(ledger)):
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
    assert pg_ledger.jobs.count() == {}


def test_the_search_path_does_not_matter(pg_url: str, pg_server: PgServer) -> None:
    name = pg_url.rpartition("/")[2]
    pg_server.execute("create schema trap; create table trap.jobs (id int); create table trap.workers (id int)", name)
    pg_server.execute(f"alter database {name} set search_path = trap")
    ledger = PostgresLedger(Settings(url=pg_url, schema="Odd_Name"))
    ledger.migrate()
    ledger.workers.register(birth("w1"))
    put(ledger)
    assert len(claim_jobs(ledger)) == 1
    assert ledger.recovery.watch()[0].held == 1
    ledger.close()


def test_a_batch_larger_than_a_message_is_stored_as_one(pg_ledger: PostgresLedger) -> None:
    jobs = [new_job(payload=b"x" * 100, unique_key=str(n % 6000)) for n in range(12_000)]
    answer = pg_ledger.jobs.enqueue(jobs)
    assert [one.fresh for one in answer] == [True] * 6000 + [False] * 6000
    assert [one.job_id for one in answer[:6000]] == [one.job_id for one in answer[6000:]]


def test_a_servers_own_defaults_change_nothing(pg_server: PgServer) -> None:
    url = pg_server.new_database()
    name = url.rpartition("/")[2]
    for setting in ("datestyle = 'German, DMY'", "default_transaction_isolation = 'repeatable read'"):
        pg_server.execute(f"alter database {name} set {setting}")
    ledger = PostgresLedger(Settings(url=url))
    ledger.migrate()
    ledger.workers.register(birth("w1"))
    job = running(ledger, payload=b"\\\x00")
    assert job.payload == b"\\\x00"
    connection = ledger.db.turn_connection.open().connection
    assert connection.execute("show transaction_isolation").fetchone() == ("read committed",)
    ledger.close()
    pg_server.drop_database(url)


@pytest.fixture
def standby() -> Iterator[PgServer]:
    """A server in recovery with a migrated ledger in database t1; `pg_promote()` ends its recovery."""
    with start_postgres() as server:
        server.new_ledger()
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        yield server


def test_a_standby_is_refused_with_a_sentence_and_used_once_it_is_promoted(standby: PgServer) -> None:
    for query in ("", "?target_session_attrs=any"):
        ledger = PostgresLedger(Settings(url=standby.url("t1") + query))
        with pytest.raises(LedgerUnavailable, match=r"is a standby \(in recovery\)"):
            ledger.workers.held("w1")
        ledger.close()
    ledger = PostgresLedger(Settings(url=standby.url("t1")))
    with pytest.raises(LedgerUnavailable):
        put(ledger)
    standby.execute("select pg_promote()")
    assert put(ledger)
    ledger.close()


def test_of_several_hosts_the_primary_is_found_wherever_it_stands(
    standby: PgServer, pg_server: PgServer, ready_pg_url: str
) -> None:
    name = ready_pg_url.rpartition("/")[2]
    for first, second in ((standby, pg_server), (pg_server, standby)):
        url = f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/{name}"
        ledger = PostgresLedger(Settings(url=url))
        assert put(ledger)
        assert ledger.db.client_connection.open().connection.info.port == pg_server.port
        ledger.close()


def test_a_session_knows_which_run_of_which_server_it_is_on(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.workers.register(birth("w1"))
    told = pg_ledger.db.service_connection.open().server
    assert [len(part) > 1 for part in told.split("/")] == [True, True, True]
    assert pg_ledger.db.service_connection.ask(b"select unstuck.incarnation()") == [(told,)]


def test_a_role_that_may_not_read_the_system_identifier_knows_the_rest(
    pg_ledger: PostgresLedger, pg_url: str, pg_server: PgServer
) -> None:
    name = pg_url.rpartition("/")[2]
    pg_server.execute("drop role if exists unprivileged; create role unprivileged login")
    pg_server.execute("revoke execute on function pg_catalog.pg_control_system() from public", name)
    pg_server.execute("grant usage on schema unstuck to unprivileged", name)
    ledger = PostgresLedger(Settings(url=pg_server.url(name, "unprivileged")))
    told = ledger.db.read_connection.open().server
    assert told == "-/" + pg_ledger.db.read_connection.open().server.partition("/")[2]
    assert ledger.db.read_connection.ask(b"select unstuck.incarnation()") == [(told,)]
    ledger.close()


def test_a_restart_and_a_promotion_are_new_incarnations(standby: PgServer) -> None:
    def incarnation() -> str:
        with psycopg.connect(standby.url("t1")) as connection:
            row = connection.execute("select unstuck.incarnation()").fetchone()
        assert row is not None
        return str(row[0])

    in_recovery = incarnation()
    standby.execute("select pg_promote()")
    promoted = incarnation()
    standby.stop()
    standby.start()
    assert len({in_recovery, promoted, incarnation()}) == 3


@pytest.fixture
def fleet(pg_ledger: PostgresLedger, pg_url: str) -> Iterator[list[PostgresLedger]]:
    """Four workers in processes of their own, as far as the server can tell; `pg_ledger` watches them."""
    ledgers = [PostgresLedger(Settings(url=pg_url)) for _ in range(4)]
    for number, ledger in enumerate(ledgers):
        ledger.workers.register(birth(f"w{number}"))
    yield ledgers
    for ledger in ledgers:
        ledger.close()


def lose_session(ledger: PostgresLedger, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select pg_terminate_backend(%s, 5000)", (ledger.db.service_connection.open().pid,))


def sessions(watcher: PostgresLedger) -> list[Session]:
    return [worker.session for worker in watcher.recovery.watch()]


def test_a_lost_session_is_missed_and_comes_back_with_the_next_beat(
    pg_ledger: PostgresLedger, fleet: list[PostgresLedger], pg_url: str
) -> None:
    assert sessions(pg_ledger) == [Session.PRESENT] * 4
    lose_session(fleet[1], pg_url)
    assert sessions(pg_ledger) == [Session.PRESENT, Session.MISSING, Session.PRESENT, Session.PRESENT]
    fleet[1].workers.beat(Heartbeat("w1", 0, 0))
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
    bell = fleet[0].workers.listen("w0")
    heard: list[frozenset[str]] = []
    thread = threading.Thread(target=lambda: heard.append(bell.wait(30)))
    thread.start()
    lose_session(fleet[0], pg_url)
    wait_for(lambda: sessions(pg_ledger) == [Session.PRESENT] * 4, "the new session")
    pg_ledger.notify(["queue:default"])
    thread.join(10)
    assert heard == [frozenset({"queue:default"})]
    bell.close()


def test_a_restarted_server_says_nothing_of_old_sessions_and_forgives_silence(
    pg_ledger: PostgresLedger, fleet: list[PostgresLedger], pg_server: PgServer
) -> None:
    pg_server.stop()
    pg_server.start()
    watch = pg_ledger.recovery.watch()
    assert [worker.session for worker in watch] == [Session.UNKNOWN] * 4
    assert all(worker.silent_s < 20 for worker in watch)


def test_a_turn_in_flight_delays_a_verdict_only_for_a_moment(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.workers.register(birth("w1"))
    with psycopg.connect(pg_url) as frozen:
        frozen.execute("select 1 from unstuck.workers where id = 'w1' for share")
        assert not pg_ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert pg_ledger.recovery.declare_dead("w1", verdict(), GuardNone())


def test_a_turn_that_waited_for_a_verdict_sees_it(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.workers.register(birth("w1"))
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
    pg_ledger.recovery.tick(Tick(None, 1.0))
    pg_ledger.workers.register(birth("w1"))
    wait_for(
        lambda: pg_ledger.recovery.tick(Tick(60.0, 1.0)) and pg_ledger.recovery.watch()[0].silent_s >= 0.2,
        "the silence",
    )
    pg_ledger.workers.beat(Heartbeat("w1", 0, 0))
    assert not pg_ledger.recovery.declare_dead("w1", verdict(), GuardSilent(0.2))
    assert pg_ledger.recovery.watch()[0].state is WorkerState.ACTIVE


def _lock_waits(url: str) -> bool:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from pg_stat_activity where wait_event_type = 'Lock'").fetchone()
    return row is not None and row[0] > 0


def test_no_reaper_takes_the_word_of_another_one_that_has_not_committed(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.recovery.tick(Tick(None, 1.0))
    with psycopg.connect(pg_url) as other:
        other.execute("update unstuck.watch_periods set since = since - interval '1m', until = until - interval '1m'")
        other.commit()
        other.execute("select 1 from unstuck.ledger for update")
        # After an outage of a minute, while another reaper is about to begin a new period.
        assert pg_ledger.recovery.tick(Tick(None, 1.0, cause=Cause.OUTAGE)).stale_s == 0.0
        # One that was in touch all along may go on vouching for that time.
        assert pg_ledger.recovery.tick(Tick(60.0, 1.0)).stale_s == pytest.approx(60.0, abs=5.0)
