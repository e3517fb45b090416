"""A transaction of somebody else that is in the way is found, with its process, what it runs and what waits for it."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.support.builders import birth, put
from tests.support.doctor import CALM
from tests.support.fleet import wait_for
from tests.support.postgres import PgServer
from tests.support.sqlite import ready_sqlite

from unstuck import config
from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import Thresholds, gather
from unstuck.client.doctor.findings import Finding
from unstuck.domain.conditions import Severity
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import open_ledger
from unstuck.ledger.postgres import connect

SOON = Thresholds(blocking_s=0.2)


def ask(url: str, limits: Thresholds = SOON, ledger: Ledger | None = None) -> dict[str, Finding]:
    settings = config.build({"url": url})
    opened = ledger or open_ledger(settings)
    try:
        findings = examine(gather(opened, settings, limits), limits)
    finally:
        if ledger is None:
            opened.close()
    return {one.code.value: one for one in findings}


def wait_for_blocker(url: str, limits: Thresholds = SOON) -> Finding:
    found = wait_for(lambda: ask(url, limits).get("blocking-transaction"), "the transaction to be found")
    assert isinstance(found, Finding)
    return found


class TestPostgres:
    @pytest.fixture
    def url(self, swept_pg_url: str) -> str:
        return swept_pg_url

    @pytest.fixture
    def ledger(self, url: str) -> Iterator[Ledger]:
        ledger = open_ledger(config.build({"url": url}))
        ledger.workers.register(birth("w1", **CALM))
        yield ledger
        ledger.close()

    def test_a_transaction_that_stays_open_after_an_enqueue(self, ledger: Ledger, url: str) -> None:
        job_id = put(ledger)
        with psycopg.connect(url, application_name="shop") as user:
            user.execute("select 1 from unstuck.jobs where id = %s\n  for update", (job_id,))
            user.execute("select 'something \x01 else'")
            found = wait_for_blocker(url)
            assert found.severity is Severity.WARNING, "nothing waits for it"
            assert found.facts["pid"] == user.info.backend_pid
            assert (found.facts["user"], found.facts["application"]) == ("postgres", "shop")
            assert found.facts["state"] == "idle in transaction"
            assert found.facts["tables"] == ["jobs"]
            assert found.facts["query"] == "select 'something else'"
            assert found.facts["age_s"] >= 0.2
            assert f"select pg_terminate_backend({user.info.backend_pid})" in found.cure
            assert "blocking-transaction" not in ask(url, Thresholds()), "it is not open for long"
        assert "blocking-transaction" not in ask(url)

    def test_something_of_ours_waits_for_it(self, ledger: Ledger, url: str) -> None:
        job_id = put(ledger)
        with psycopg.connect(url, application_name="shop") as user:
            user.execute("select 1 from unstuck.jobs where id = %s for update", (job_id,))
            with waiting(lambda: ledger.jobs.cancel([job_id], "ada"), user):
                found = wait_for(lambda: _problem(ask(url)), "a wait to be seen")
                assert found.facts["pid"] == user.info.backend_pid
                assert [one["application"] for one in found.facts["waiting"]] == ["unstuck read"]
                assert "1 session waits for it: unstuck read" in found.why

    def test_a_chain_of_waits_is_followed_to_its_end(self, ledger: Ledger, url: str) -> None:
        job_id = put(ledger)
        lock = f"select 1 from unstuck.jobs where id = {job_id} for update"
        with psycopg.connect(url, application_name="shop") as user, psycopg.connect(url) as second:
            user.execute(lock)
            with (
                waiting(lambda: ledger.jobs.cancel([job_id], "ada"), second),
                waiting(lambda: second.execute(lock), user),
            ):
                found = wait_for(lambda: _problem(ask(url), "unstuck read"), "a wait to be seen")
                assert found.facts["pid"] == user.info.backend_pid
                assert len(found.facts["waiting"]) == 2

    def test_a_table_that_is_locked_as_a_whole(self, ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # Nothing else can be said then, and the doctor would wait for ten seconds to know it.
        monkeypatch.setattr(connect, "CLIENT_LOCK_S", 0.3)
        with psycopg.connect(url, application_name="maintenance") as user:
            user.execute("lock table unstuck.jobs in access exclusive mode")
            found = wait_for(lambda: _problem(ask(url)), "the lock to be found")
            assert found.facts["pid"] == user.info.backend_pid
            assert "ledger-unreachable" not in ask(url)

    def test_a_reader_and_a_writer_of_other_tables_are_left_alone(self, ledger: Ledger, url: str) -> None:
        with psycopg.connect(url) as reader, psycopg.connect(url) as writer:
            reader.execute("select count(*) from unstuck.jobs")
            writer.execute("create temp table mine (id int)")
            writer.execute("insert into mine values (1)")
            wait_for(lambda: _age(reader) > 0.3 and _age(writer) > 0.3, "old transactions")
            assert "blocking-transaction" not in ask(url)

    def test_a_prepared_transaction(self, ledger: Ledger, url: str) -> None:
        with psycopg.connect(url, autocommit=True) as user:
            user.execute("begin")
            user.execute("update unstuck.queues set paused = paused")
            user.execute("select pg_current_xact_id()")
            user.execute("prepare transaction 'a transfer'")
            try:
                found = wait_for_blocker(url)
                assert "ROLLBACK PREPARED 'a transfer'" in found.cure
            finally:
                user.execute("rollback prepared 'a transfer'")

    def test_without_the_right_to_see_others_it_says_what_it_can(
        self, ledger: Ledger, url: str, pg_server: PgServer
    ) -> None:
        name = url.rpartition("/")[2]
        pg_server.execute("drop role if exists narrow; create role narrow login")
        pg_server.execute("grant usage on schema unstuck to narrow", name)
        pg_server.execute("grant select on all tables in schema unstuck to narrow", name)
        narrow = pg_server.url(name, "narrow")
        job_id = put(ledger)
        with psycopg.connect(url, application_name="shop") as user:
            user.execute("select 1 from unstuck.jobs where id = %s for update", (job_id,))
            found = wait_for_blocker(narrow)
            assert found.severity is Severity.INFO
            assert found.facts["pid"] == user.info.backend_pid
            assert (found.facts["age_s"], found.facts["query"]) == (None, "")
            assert "pg_read_all_stats" in found.cure


class TestSqlite:
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return ready_sqlite(tmp_path)

    def test_another_program_keeps_the_write_lock(self, url: str) -> None:
        path = url.removeprefix("sqlite:///")
        assert "blocking-transaction" not in ask(url)
        with other_program(path) as process:
            found = ask(url)["blocking-transaction"]
            assert found.severity is Severity.PROBLEM
            assert found.facts["pid"] == process.pid
            assert "sqlite3" in found.facts["query"]
            assert f"rocess {process.pid}" in found.what
        assert "blocking-transaction" not in ask(url)

    def test_one_of_ours_keeps_it(self, url: str) -> None:
        other = open_ledger(config.build({"url": url}))
        with waiting_writer(other):
            found = ask(url)["blocking-transaction"]
            assert found.facts["age_s"] > 0
        other.close()

    def test_a_file_that_not_even_readers_get_at(self, url: str) -> None:
        path = url.removeprefix("sqlite:///")
        with other_program(path, "pragma locking_mode = exclusive"):
            found = ask(url)
            assert set(found) == {"blocking-transaction"}


def _problem(found: dict[str, Finding], waiter: str = "") -> Finding | None:
    finding = found.get("blocking-transaction")
    is_meant = finding is not None and finding.severity is Severity.PROBLEM and waiter in finding.why
    return finding if is_meant else None


def _age(session: psycopg.Connection[Any]) -> float:
    row = session.execute("select extract(epoch from clock_timestamp() - now())").fetchone()
    assert row is not None
    return float(row[0])


@contextmanager
def waiting(call: Callable[[], object], user: psycopg.Connection[Any]) -> Iterator[None]:
    """Call in a thread of its own what waits for the transaction of `user`, and end that transaction afterwards."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        user.rollback()
        thread_ends(thread)


def thread_ends(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def waiting_writer(ledger: Any) -> Iterator[None]:
    """Keep the write lock in another thread, through another ledger object."""
    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ledger.db.write():
            holding.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(30)
    try:
        yield
    finally:
        over.set()
        thread_ends(thread)


@contextmanager
def other_program(path: str, first: str = "select 1") -> Iterator[subprocess.Popen[str]]:
    """Run a program that begins a write in the file and leaves it open."""
    code = (
        "import sqlite3, sys\n"
        f"connection = sqlite3.connect({path!r}, isolation_level=None)\n"
        f"connection.execute({first!r})\n"
        "connection.execute('begin immediate')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
