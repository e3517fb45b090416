"""The tables come up to date once, whoever asks and however often; newer ones are refused."""

import os
import signal
import subprocess
import sys
import threading

import psycopg
import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import birth, claim, put
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck.config import Settings
from unstuck.domain.errors import SchemaAhead, SchemaForked, SchemaMismatch
from unstuck.store.contract import Ledger
from unstuck.store.migrations import Migration
from unstuck.store.opening import open_ledger
from unstuck.store.postgres import migrating as migrating_on_postgres
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.postgres.migrating import MIGRATIONS
from unstuck.store.sqlite.migrating import MIGRATIONS as SQLITE_MIGRATIONS

# As docs/contributing.md says: sessions that read a view lock it before its table.
VIEW_BEFORE_TABLE = """
alter view {schema}.held_jobs reset (security_barrier);
alter table {schema}.jobs add column colour text;
do $$ begin
    execute 'create or replace view {schema}.held_jobs as ' || pg_get_viewdef('{schema}.held_jobs'::regclass);
end $$;
"""
MIGRATE = (
    "import sys; from unstuck.config import Settings; from unstuck.store.opening import open_ledger; "
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
    empty_ledger: Ledger, open_again: OpenLedger, meddler: Meddler, how: str
) -> None:
    empty_ledger.migrate()
    meddler.rows(how.format(table=migrations_table(meddler)))
    for check in (open_again().check_schema, open_again().migrate):
        with pytest.raises(SchemaForked, match=r"never released: its 000\d_.*another ledger"):
            check()
    assert meddler.count("jobs") == 0


def test_tables_of_a_draft_with_more_migrations_than_this_code_are_not_taken_for_newer_ones(
    empty_ledger: Ledger, open_again: OpenLedger, meddler: Meddler
) -> None:
    """No version to install would work with them."""
    empty_ledger.migrate()
    meddler.age_schema(26)
    meddler.rows(f"update {migrations_table(meddler)} set digest = 'another'")
    for check in (open_again().check_schema, open_again().migrate):
        with pytest.raises(SchemaForked, match=r"never released: its 0001_schema.*another ledger"):
            check()


def test_newer_tables_are_refused_and_left_alone(
    empty_ledger: Ledger, open_again: OpenLedger, meddler: Meddler
) -> None:
    empty_ledger.migrate()
    meddler.age_schema(900)
    for check in (open_again().check_schema, open_again().migrate):
        with pytest.raises(SchemaMismatch, match=r"newer.*Upgrade Unstuck"):
            check()
    assert meddler.count("jobs") == 0


def next_migration(meddler: Meddler, works_with: int | None, sql: str = "select 1") -> tuple[Migration, ...]:
    """The migrations of the next version: ours and one more, which says with which code it works."""
    ours = SQLITE_MIGRATIONS if meddler.dialect == "sqlite" else MIGRATIONS
    number = len(ours) + 1
    said = "" if works_with is None else f"-- works with code from schema: {works_with}\n"
    return (*ours, Migration(number, f"{number:04}_next", f"{said}{sql};", last_released=len(ours)))


@pytest.mark.parametrize("said", [True, False])
def test_code_of_the_last_release_works_with_newer_tables(
    ledger: Ledger, open_again: OpenLedger, meddler: Meddler, said: bool
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
    ledger: Ledger, open_again: OpenLedger, meddler: Meddler
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


def migrations_table(meddler: Meddler) -> str:
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
    ledger.register(birth("w1"))
    put(ledger)
    with psycopg.connect(pg_url) as newer:
        newer.execute("alter function unstuck.turn_v1 rename to turn_of_tomorrow")
    with pytest.raises(SchemaMismatch, match="upgrade Unstuck here"):
        claim(ledger)
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
