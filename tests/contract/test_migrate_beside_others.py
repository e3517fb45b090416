"""A migration beside sessions that hold locks: it waits, and nobody waits behind it."""

import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.contract.hands import birth, put
from tests.fleet import wait_for
from tests.sqlite_model import ready_sqlite

from unstuck.config import Settings
from unstuck.domain.errors import MigrationBlocked
from unstuck.store.migrations import Migration
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.postgres.migrating import _LOCK_CLASS, MIGRATIONS
from unstuck.store.records import Pulse
from unstuck.store.sqlite.ledger import SqliteLedger
from unstuck.store.sqlite.migrating import MIGRATIONS as SQLITE_MIGRATIONS

NEXT = Migration(
    len(MIGRATIONS) + 1,
    f"{len(MIGRATIONS) + 1:04}_colours",
    f"-- works with code from schema: {len(MIGRATIONS)}\nalter table {{schema}}.jobs add column colour text;",
)
REPORT = "select count(*) as the_long_report from unstuck.jobs"


@contextmanager
def long_reader(url: str, seconds: float) -> Iterator[psycopg.Connection]:
    """A report that reads the jobs and ends its transaction only after some time."""
    with psycopg.connect(url) as reader:
        reader.execute(REPORT)
        ending = threading.Timer(seconds, reader.rollback)
        ending.start()
        yield reader
        ending.cancel()
        ending.join()


def lock_waits(onlooker: psycopg.Connection) -> int:
    query = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock'"
    row = onlooker.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def test_nobody_waits_behind_a_migration_that_waits_for_a_long_reader(pg_url: str, pg_ledger: PostgresLedger) -> None:
    pg_ledger.register(birth("w1"))
    put(pg_ledger)
    migrator = PostgresLedger(Settings(url=pg_url))
    applied: list[str] = []
    migrating = threading.Thread(target=lambda: applied.extend(migrator.migrate(migrations=(*MIGRATIONS, NEXT))))
    slowest_s, rounds = 0.0, 0
    with psycopg.connect(pg_url, autocommit=True) as onlooker, long_reader(pg_url, 3.0):
        migrating.start()
        wait_for(lambda: lock_waits(onlooker), "the migration to wait for the reader")
        while migrating.is_alive() and not applied:
            began_s = time.monotonic()
            put(pg_ledger)
            pg_ledger.beat(Pulse("w1", 0, 0))
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            rounds += 1
    migrating.join(30)
    migrator.close()
    assert applied == [NEXT.name]
    assert slowest_s < 1.0, "an enqueue and a beat together, each of which may wait for one lock timeout"
    assert rounds > 3


def test_a_migration_that_gives_up_names_who_was_in_the_way_and_can_be_run_again(
    pg_url: str, pg_ledger: PostgresLedger, caplog: pytest.LogCaptureFixture
) -> None:
    with long_reader(pg_url, 60.0) as reader:
        pid = reader.info.backend_pid
        with pytest.raises(MigrationBlocked) as refused:
            pg_ledger.migrate(migrations=(*MIGRATIONS, NEXT), wait_s=2.0)
    message = str(refused.value)
    assert NEXT.name in message
    assert f"session {pid}" in message
    assert "the_long_report" in message
    assert f"pg_terminate_backend({pid})" in message
    assert "unstuck migrate" in message
    waiting = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert waiting, "it says what it waits for while it waits"
    assert f"session {pid}" in waiting[0]
    assert pg_ledger.migrate(migrations=(*MIGRATIONS, NEXT)) == [NEXT.name]
    assert pg_ledger.migrate(migrations=(*MIGRATIONS, NEXT)) == []


def test_another_migration_under_way_is_waited_for(pg_url: str, pg_ledger: PostgresLedger) -> None:
    with psycopg.connect(pg_url) as other:
        other.execute("select pg_advisory_xact_lock(%s, %s)", (_LOCK_CLASS, zlib.crc32(b"unstuck") - 2**31))
        ending = threading.Timer(0.5, other.rollback)
        ending.start()
        assert pg_ledger.migrate(migrations=(*MIGRATIONS, NEXT)) == [NEXT.name]
        ending.join()


def test_the_command_says_what_it_waits_for_and_gives_up_when_told(pg_url: str, pg_ledger: PostgresLedger) -> None:
    with psycopg.connect(pg_url) as other:
        other.execute("select pg_advisory_xact_lock(%s, %s)", (_LOCK_CLASS, zlib.crc32(b"unstuck") - 2**31))
        command = [sys.executable, "-m", "unstuck.cli.main", "migrate", "--url", pg_url, "--wait", "1s"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert f"session {other.info.backend_pid}" in done.stderr
    assert done.returncode != 0
    assert "unstuck migrate" in done.stderr


WRITER = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.execute("BEGIN IMMEDIATE")
print("writing", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
print("over", flush=True)
sys.stdin.readline()
"""
SQLITE_NEXT = Migration(
    len(SQLITE_MIGRATIONS) + 1,
    f"{len(SQLITE_MIGRATIONS) + 1:04}_colours",
    f"-- works with code from schema: {len(SQLITE_MIGRATIONS)}\nALTER TABLE unstuck_jobs ADD COLUMN colour TEXT;",
)


def test_a_migration_of_a_file_names_the_process_that_writes_and_can_be_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = SqliteLedger(Settings(url=ready_sqlite(tmp_path)))
    put(ledger)
    command = [sys.executable, "-c", WRITER, str(tmp_path / "jobs.db")]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "writing\n"
        with pytest.raises(MigrationBlocked) as refused:
            ledger.migrate(migrations=(*SQLITE_MIGRATIONS, SQLITE_NEXT), wait_s=0.5)
        assert f"process {writer.pid}" in str(refused.value)
        assert any(f"process {writer.pid}" in record.getMessage() for record in caplog.records)
        applied: list[str] = []
        wanted = (*SQLITE_MIGRATIONS, SQLITE_NEXT)
        migrating = threading.Thread(target=lambda: applied.extend(ledger.migrate(migrations=wanted)))
        migrating.start()
        writer.stdin.write("\n")
        writer.stdin.flush()
        migrating.join(30)
        assert applied == [SQLITE_NEXT.name]
    finally:
        writer.kill()
        writer.wait()
        writer.stdin.close()
        writer.stdout.close()
        ledger.close()
