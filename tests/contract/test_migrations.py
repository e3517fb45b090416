"""The tables come up to date once, whoever asks and however often; newer ones are refused."""

import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, claim_jobs, put
from tests.support.fleet import wait_for
from tests.support.sqlite import ready_sqlite

from unstuck.config import Settings
from unstuck.errors import MigrationBlocked, SchemaAhead, SchemaForked, SchemaMismatch
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.ledger.migrate import Migration
from unstuck.ledger.open import open_ledger
from unstuck.ledger.postgres import migrate as migrating_on_postgres
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.migrate import _LOCK_CLASS, MIGRATIONS
from unstuck.ledger.sqlite.ledger import SqliteLedger
from unstuck.ledger.sqlite.migrate import MIGRATIONS as SQLITE_MIGRATIONS

# As docs/contributing.md says: sessions that read a view lock it before its table.
VIEW_BEFORE_TABLE = """
alter view {schema}.held_jobs reset (security_barrier);
alter table {schema}.jobs add column colour text;
do $$ begin
    execute 'create or replace view {schema}.held_jobs as ' || pg_get_viewdef('{schema}.held_jobs'::regclass);
end $$;
"""
MIGRATE = (
    "import sys; from unstuck.config import Settings; from unstuck.ledger.open import open_ledger; "
    "print(*open_ledger(Settings(url=sys.argv[1])).migrate())"
)


def migrate_elsewhere(url: str, failpoints: str = "") -> "subprocess.Popen[str]":
    environment = {**os.environ, "UNSTUCK_FAILPOINTS": failpoints}
    command = [sys.executable, "-c", MIGRATE, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_migrating_twice_does_nothing_the_second_time(empty_ledger: Ledger) -> None:
    applied = empty_ledger.migrate()
    assert applied
    assert applied == sorted(applied)
    assert empty_ledger.migrate() == []
    empty_ledger.check_schema()


def test_a_ledger_without_tables_names_the_cure(empty_ledger: Ledger) -> None:
    with pytest.raises(SchemaMismatch, match="unstuck migrate"):
        empty_ledger.check_schema()
    with pytest.raises(SchemaMismatch, match="unstuck migrate"):
        put(empty_ledger)


@pytest.mark.parametrize(
    "how", ["update {table} set digest = 'another' where number = 1", "alter table {table} drop column digest"]
)
def test_tables_of_a_draft_that_was_never_released_are_refused_and_left_alone(
    empty_ledger: Ledger, open_again: OpenLedger, meddler: Backdoor, how: str
) -> None:
    empty_ledger.migrate()
    meddler.rows(how.format(table=migrations_table(meddler)))
    for check in (open_again().check_schema, open_again().migrate):
        with pytest.raises(SchemaForked, match=r"never released: its 000\d_.*another ledger"):
            check()
    assert meddler.count("jobs") == 0


def test_tables_of_a_draft_with_more_migrations_than_this_code_are_not_taken_for_newer_ones(
    empty_ledger: Ledger, open_again: OpenLedger, meddler: Backdoor
) -> None:
    """No version to install would work with them."""
    empty_ledger.migrate()
    meddler.age_schema(26)
    meddler.rows(f"update {migrations_table(meddler)} set digest = 'another'")
    for check in (open_again().check_schema, open_again().migrate):
        with pytest.raises(SchemaForked, match=r"never released: its 0001_schema.*another ledger"):
            check()


def test_newer_tables_are_refused_and_left_alone(
    empty_ledger: Ledger, open_again: OpenLedger, meddler: Backdoor
) -> None:
    empty_ledger.migrate()
    meddler.age_schema(900)
    for check in (open_again().check_schema, open_again().migrate):
        with pytest.raises(SchemaMismatch, match=r"newer.*Upgrade Unstuck"):
            check()
    assert meddler.count("jobs") == 0


def next_migration(meddler: Backdoor, works_with: int | None, sql: str = "select 1") -> tuple[Migration, ...]:
    """The migrations of the next version: ours and one more, which says with which code it works."""
    ours = SQLITE_MIGRATIONS if meddler.dialect == "sqlite" else MIGRATIONS
    number = len(ours) + 1
    said = "" if works_with is None else f"-- works with code from schema: {works_with}\n"
    return (*ours, Migration(number, f"{number:04}_next", f"{said}{sql};", last_released=len(ours)))


@pytest.mark.parametrize("said", [True, False])
def test_code_of_the_last_release_works_with_newer_tables(
    ledger: Ledger, open_again: OpenLedger, meddler: Backdoor, said: bool
) -> None:
    known = len(SQLITE_MIGRATIONS if meddler.dialect == "sqlite" else MIGRATIONS)
    wanted = next_migration(meddler, known if said else None)
    try:
        assert ledger.migrate(migrations=wanted) == [wanted[-1].name]
        old = open_again()
        old.check_schema()
        assert old.migrate() == [], "there is nothing to do for older code"
        assert put(old)
    finally:
        meddler.rows(f"delete from {migrations_table(meddler)} where number = {known + 1}")


def test_code_that_is_older_than_the_tables_allow_is_refused_with_the_version_that_is_needed(
    ledger: Ledger, open_again: OpenLedger, meddler: Backdoor
) -> None:
    known = len(SQLITE_MIGRATIONS if meddler.dialect == "sqlite" else MIGRATIONS)
    try:
        ledger.migrate(migrations=next_migration(meddler, known + 1))
        for check in (open_again().check_schema, open_again().migrate):
            with pytest.raises(
                SchemaAhead, match=rf"need code that knows {known + 1} or later.*knows {known}\. Upgrade"
            ):
                check()
    finally:
        meddler.rows(f"delete from {migrations_table(meddler)} where number = {known + 1}")


def test_a_migration_cannot_need_code_that_is_newer_than_itself() -> None:
    with pytest.raises(ValueError, match="newer than itself"):
        Migration(3, "0003_x", "-- works with code from schema: 4\nselect 1").works_with  # noqa: B018


@pytest.mark.parametrize("migrations", [MIGRATIONS, SQLITE_MIGRATIONS])
def test_every_migration_since_the_last_release_works_with_its_code(migrations: tuple[Migration, ...]) -> None:
    """Add first, remove one release later: see docs/contributing.md."""
    released = migrations[0].last_released
    late = [one.name for one in migrations[released:] if released and one.works_with > released]
    assert not late, f"{late} would lock out the workers of the last release: add first, remove one release later"


def migrations_table(meddler: Backdoor) -> str:
    return "unstuck_migrations" if meddler.dialect == "sqlite" else "migrations"


def test_four_processes_migrate_at_once_and_each_step_is_applied_once(url: str, empty_ledger: Ledger) -> None:
    processes = [migrate_elsewhere(url) for _ in range(4)]
    applied: list[str] = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        applied.extend(out.split())
    assert len(applied) == len(set(applied)) > 0
    empty_ledger.check_schema()
    assert put(empty_ledger) == 1


@pytest.mark.parametrize("point", ["migrate.before_commit", "migrate.between"])
def test_a_migration_killed_halfway_is_finished_by_the_next(url: str, empty_ledger: Ledger, point: str) -> None:
    killed = migrate_elsewhere(url, f"{point}=kill")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: empty_ledger.migrate() is not None, "the tables")
    empty_ledger.check_schema()
    assert put(empty_ledger) == 1


def test_a_worker_whose_tables_were_migrated_under_it_hears_that_it_is_too_old(pg_url: str) -> None:
    ledger = open_ledger(Settings(url=pg_url))
    ledger.migrate()
    ledger.workers.register(birth("w1"))
    put(ledger)
    with psycopg.connect(pg_url) as newer:
        newer.execute("alter function unstuck.turn_v1 rename to turn_of_tomorrow")
    with pytest.raises(SchemaMismatch, match="upgrade Unstuck here"):
        claim_jobs(ledger)
    ledger.close()


def test_an_old_reaper_that_reads_while_the_tables_are_migrated_is_no_deadlock(
    pg_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the server needs to find a deadlock.
    monkeypatch.setattr(migrating_on_postgres, "LOCK_TIMEOUT_S", 30.0)
    ledger = PostgresLedger(Settings(url=pg_url))
    ledger.migrate()
    number = len(MIGRATIONS) + 1
    following = Migration(number, f"{number:04}_next", VIEW_BEFORE_TABLE, last_released=len(MIGRATIONS))
    migrating = threading.Thread(target=ledger.migrate, kwargs={"migrations": (*MIGRATIONS, following)})
    found: list[object] = []

    def read() -> None:
        with psycopg.connect(pg_url) as reaper:
            found.append(reaper.execute("select count(*) from unstuck.held_jobs").fetchone())

    reading = threading.Thread(target=read)
    with psycopg.connect(pg_url) as turn, psycopg.connect(pg_url, autocommit=True) as onlooker:

        def waiting() -> int:
            blocked = "select 1 from pg_locks where not granted and locktype = 'relation'"
            return len(onlooker.execute(blocked).fetchall())

        turn.execute("select count(*) from unstuck.jobs")
        migrating.start()
        wait_for(lambda: waiting() == 1, "the migration waits for the turn")
        reading.start()
        wait_for(lambda: waiting() == 2, "the reaper waits for the migration")
        turn.commit()
        migrating.join()
        reading.join()
        deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
        assert onlooker.execute(deadlocks).fetchone() == (0,)
    assert found == [(0,)]
    ledger.check_schema()
    ledger.close()


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
    pg_ledger.workers.register(birth("w1"))
    put(pg_ledger)
    migrator = PostgresLedger(Settings(url=pg_url))
    applied: list[str] = []
    migrating = threading.Thread(target=lambda: applied.extend(migrator.migrate(migrations=(*MIGRATIONS, NEXT))))
    with psycopg.connect(pg_url, autocommit=True) as onlooker, long_reader(pg_url, 600.0) as reader:
        migrating.start()
        wait_for(lambda: lock_waits(onlooker), "the migration to wait for the reader")
        for _ in range(20):
            put(pg_ledger)
            pg_ledger.workers.beat(Heartbeat("w1", 0, 0))
        assert migrating.is_alive()
        reader.rollback()
    migrating.join(30)
    migrator.close()
    assert applied == [NEXT.name]


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
