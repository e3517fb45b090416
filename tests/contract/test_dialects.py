"""The two dialects say the same things: same names for the same queries, same columns, no dead SQL."""

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import apsw
import psycopg
import pytest

import unstuck.ledger
from unstuck.config import Settings
from unstuck.ledger.open import open_ledger
from unstuck.ledger.sql import parse_queries, read_sql
from unstuck.ledger.sqlite.migrate import MIGRATIONS

PACKAGES = {"sqlite": "unstuck.ledger.sqlite", "postgresql": "unstuck.ledger.postgres"}
PARTS = ("jobs", "workers", "recovery", "maintenance", "workflows", "schedules", "queues", "events", "admin")

# PostgreSQL does the hot verbs in functions, one call each, where SQLite (no round trips) takes several small steps.
# What is one statement on both has one name on both.
SHARED = frozenset(
    {
        *("amend", "attempts", "beat", "count_jobs", "drain", "events_after", "held_by", "job", "jobs", "last_events"),
        *(
            "note_progress",
            "outcomes",
            "outputs",
            "progress",
            "promote_due",
            "request",
            "reserve_job_ids",
            "ring_of",
            "retire",
        ),
        *("set_paused", "take_ticket"),
        *("look_overdue", "look_quarantined", "look_ready", "look_retention", "look_scheduled"),
        *("tasks", "watch", "workers"),
        *("disable", "disable_host", "enable", "enable_host", "standings"),
        *("beat_foreign", "to_judge", "foreign_worker", "foreign_worker_named"),
        *("answer_letters", "letter", "letters", "store_letter"),
        *("journal", "journal_lines", "kept_signals", "signals"),
        *("count", "counter_series", "counters", "fleet", "sweep_counters"),
        *("add_api_token", "api_tokens", "audit", "begin_audit", "end_audit", "revoke_api_token", "sweep_audit"),
        *("declare_limit", "limit_queue", "lines", "queue_limits", "ties"),
        *("add_alert_target", "alert_target", "conditions", "events_to_tell", "look_fleet", "save_alert_target"),
    }
)
TABLES = (
    *("jobs", "attempts", "outputs", "autopsies", "progress", "reply_addresses", "journal", "signals"),
    *("worker_status", "heartbeats", "attempt_status"),
)
ONLY_SQLITE = {("jobs", "started_boot_s")}
"""Leases on one host are judged by the boot clock; PostgreSQL has a clock of its own."""


def names(dialect: str) -> set[str]:
    package = f"{PACKAGES[dialect]}.queries"
    found: set[str] = set()
    for entry in files(package).iterdir():
        if entry.name.endswith(".sql"):
            found |= parse_queries(read_sql(package, entry.name)).keys()
    return found


@pytest.mark.parametrize("dialect", PACKAGES)
def test_the_shared_queries_have_the_same_names(dialect: str) -> None:
    assert names(dialect) >= SHARED


def test_no_query_of_the_sqlite_ledger_is_dead() -> None:
    code = "\n".join(path.read_text() for path in (Path(unstuck.ledger.__file__).parent / "sqlite").glob("*.py"))
    # `events_of_job` and its kin are put together from their parts.
    built = {name for name in names("sqlite") if re.fullmatch(r"(last_)?events(_of_\w+|_after)?", name)}
    assert {name for name in names("sqlite") - built if f'"{name}"' not in code} == set()


@pytest.fixture
def sqlite_columns(tmp_path: Path) -> Iterator[set[tuple[str, str]]]:
    connection = apsw.Connection(str(tmp_path / "a.db"))
    for migration in MIGRATIONS:
        connection.execute(migration.sql).fetchall()
    yield set(
        connection.execute(
            "select replace(t.name, 'unstuck_', '') as plain, c.name from sqlite_schema t, pragma_table_info(t.name) c "
            f"where plain in {TABLES}"
        ).fetchall()
    )
    connection.close()


def test_jobs_attempts_and_views_have_the_same_columns(sqlite_columns: set[tuple[str, str]], pg_url: str) -> None:
    ledger = open_ledger(Settings(url=pg_url))
    ledger.migrate()
    ledger.close()
    with psycopg.connect(pg_url) as connection:
        found = connection.execute(
            "select table_name, column_name from information_schema.columns where table_schema = 'unstuck' "
            f"and table_name in {TABLES}"
        ).fetchall()
    assert sqlite_columns - ONLY_SQLITE == set(found)


def verbs(part: object) -> set[str]:
    return {name for name, value in vars(part).items() if callable(value) and not name.startswith("_")}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dialect", PACKAGES)
def test_each_part_has_the_verbs_of_its_protocol(dialect: str, part: str) -> None:
    of_contract, of_dialect = (
        getattr(import_module(f"{package}.{part}"), part.capitalize())
        for package in ("unstuck.ledger.contract", PACKAGES[dialect])
    )
    assert verbs(of_dialect) == verbs(of_contract)
