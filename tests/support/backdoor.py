"""Reach into the tables behind the ledger's back, to make time pass without waiting for it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import apsw
import psycopg

from unstuck import host


class Backdoor(Protocol):
    dialect: str

    def rows(self, query: str) -> list[tuple[Any, ...]]: ...

    def count(self, table: str) -> int:
        """Count the rows of a table, by the name that it has without the dialect's prefix."""
        ...

    def age_beat(self, worker_id: str, seconds: float) -> None:
        """As if the worker had last beaten so much earlier, and a reaper had watched all along."""
        ...

    def move_beats(self, seconds: float) -> None:
        """As if every heartbeat had come so much later, or earlier if negative."""
        ...

    def move_watch(self, seconds: float) -> None:
        """As if the reapers had watched so much later, or earlier if negative."""
        ...

    def prolong_outage(self, seconds: float) -> None:
        """Move heartbeats and watch back in one step, see `age`."""
        ...

    def forget_watch(self) -> None:
        """As if no one had ever watched."""
        ...

    def age_job(self, job_id: int, seconds: float) -> None:
        """As if all that happened to the job had happened so much earlier, and a reaper had watched all along; a
        scheduled one comes nearer."""
        ...

    def age_all_jobs(self, seconds: float) -> None:
        """As if every job had been enqueued, and had ended, so much earlier."""
        ...

    def copy_job(self, job_id: int, count: int) -> None:
        """Make more jobs like this one, which has ended."""
        ...

    def add_events(self, count: int) -> None: ...

    def age_worker(self, worker_id: str, seconds: float) -> None: ...

    def age_tokens(self, queue: str, seconds: float) -> None:
        """As if so much time had filled the bucket of the queue."""
        ...

    def age_keys(self, seconds: float) -> None: ...

    def age_expiry(self, job_id: int, seconds: float) -> None: ...

    def untie(self, job_id: int) -> None:
        """As if nobody were concerned when the job ends."""
        ...

    def forget_line(self, job_id: int) -> None:
        """Block the job again, in a line that nobody knows of."""
        ...

    def age_events(self, seconds: float) -> None: ...

    def set_clock_back(self, seconds: float) -> None:
        """As if the clock had been so much ahead until now: whatever was written by it lies that much later."""
        ...

    def note_clock(self) -> None:
        """As if a reaper had just looked at the clock."""
        ...

    def age_counters(self, minutes: int) -> None: ...

    def expire_ticket(self, name: str) -> None: ...

    def numbers(self) -> dict[str, int]:
        """Return the last number of every sequence, as a backup taken now would have it."""
        ...

    def set_numbers(self, numbers: dict[str, int]) -> None: ...

    def age_schema(self, number: int) -> None:
        """As if a later version had migrated the tables."""
        ...


def age(backdoor: Backdoor, seconds: float) -> None:
    """As if an outage had lasted this much longer. Only while no worker and no reaper can reach the ledger."""
    backdoor.prolong_outage(seconds)


def watches_again(backdoor: "PostgresBackdoor", longer_s: float = 1.0) -> bool:
    """Return whether a reaper has watched for this long since an outage that was prolonged, see `age`."""
    [(watched_s,)] = backdoor.rows(
        "select coalesce(extract(epoch from max(until) - max(since)), 0)::float8 from watch_periods "
        "where since > clock_timestamp() - interval '30 s'"
    )
    return bool(watched_s > longer_s)


def backdoor_of(url: str) -> Backdoor:
    """Return the backdoor of the ledger at this address."""
    sqlite = url.removeprefix("sqlite://")
    return PostgresBackdoor(url) if sqlite == url else SqliteBackdoor(Path(sqlite))


class SqliteBackdoor:
    dialect = "sqlite"

    def __init__(self, path: Path, transaction: apsw.Connection | None = None) -> None:
        """With a `transaction` everything happens inside it, which may hold the write lock."""
        self.path = path
        self._transaction = transaction

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if self._transaction is not None:
            return self._transaction.execute(query, values).fetchall()
        connection = apsw.Connection(str(self.path))
        try:
            connection.set_busy_timeout(5000)
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def count(self, table: str) -> int:
        return int(self.rows(f"SELECT count(*) FROM unstuck_{table}")[0][0])

    def age_beat(self, worker_id: str, seconds: float) -> None:
        self.rows(
            "UPDATE unstuck_worker_heartbeats SET beat_at = beat_at - ?2 WHERE worker_id = ?1", (worker_id, seconds)
        )
        self._watched_all_along()

    def forget_watch(self) -> None:
        self.rows("DELETE FROM unstuck_watch_periods")

    def _watched_all_along(self) -> None:
        self.forget_watch()
        self.rows(
            "INSERT INTO unstuck_watch_periods (since, until, cause) VALUES (?1 - 864000, ?1, 'start')", (time.time(),)
        )

    def move_beats(self, seconds: float) -> None:
        self.rows("UPDATE unstuck_worker_heartbeats SET beat_at = beat_at + ?", (seconds,))

    def move_watch(self, seconds: float) -> None:
        moved = "since = since + ?1, until = until + ?1, set_back_at = set_back_at + ?1"
        self.rows(f"UPDATE unstuck_watch_periods SET {moved}", (seconds,))

    def prolong_outage(self, seconds: float) -> None:
        moved = "since = since - ?1, until = until - ?1, set_back_at = set_back_at - ?1"
        steps = f"UPDATE unstuck_worker_heartbeats SET beat_at = beat_at - ?; UPDATE unstuck_watch_periods SET {moved}"
        self.rows(f"SAVEPOINT prolonged; {steps}; RELEASE prolonged", (seconds, seconds))

    def age_job(self, job_id: int, seconds: float) -> None:
        columns = ("run_at", "enqueued_at", "claimed_at", "started_at", "started_boot_s", "finished_at")
        changes = ", ".join(f"{c} = {c} - ?2" for c in columns)
        self.rows(f"UPDATE unstuck_jobs SET {changes} WHERE id = ?1", (job_id, seconds))
        self._watched_all_along()

    def age_all_jobs(self, seconds: float) -> None:
        changes = "enqueued_at = enqueued_at - ?1, finished_at = finished_at - ?1"
        self.rows(f"UPDATE unstuck_jobs SET {changes}", (seconds,))

    def copy_job(self, job_id: int, count: int) -> None:
        names = [name for (name,) in self.rows("SELECT name FROM pragma_table_info('unstuck_jobs') WHERE name <> 'id'")]
        columns = ", ".join(names)
        self.rows(
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?2) "
            f"INSERT INTO unstuck_jobs (id, {columns}) SELECT (SELECT last_job_id FROM unstuck_ledger) + i, {columns} "
            f"FROM n, (SELECT * FROM unstuck_jobs WHERE id = ?1)",
            (job_id, count),
        )
        self.rows("UPDATE unstuck_ledger SET last_job_id = last_job_id + ?", (count,))

    def add_events(self, count: int) -> None:
        self.rows(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1) "
            "INSERT INTO unstuck_events (at, kind, message) SELECT unixepoch('subsec'), 'test', 'one of many' FROM n",
            (count,),
        )

    def age_tokens(self, queue: str, seconds: float) -> None:
        self.rows("UPDATE unstuck_queues SET refilled_at = refilled_at - ? WHERE name = ?", (seconds, queue))

    def age_keys(self, seconds: float) -> None:
        self.rows("UPDATE unstuck_unique_keys SET until = until - ?", (seconds,))

    def age_expiry(self, job_id: int, seconds: float) -> None:
        self.rows(
            "UPDATE unstuck_jobs SET expires_at = expires_at - ?1, run_at = run_at - ?1 WHERE id = ?2",
            (seconds, job_id),
        )

    def untie(self, job_id: int) -> None:
        self.rows("UPDATE unstuck_jobs SET has_links = 0 WHERE id = ?", (job_id,))

    def forget_line(self, job_id: int) -> None:
        self.rows("UPDATE unstuck_jobs SET blocked = 1, ready = 0 WHERE id = ?", (job_id,))
        self.rows("DELETE FROM unstuck_concurrency_keys")

    def age_worker(self, worker_id: str, seconds: float) -> None:
        self.rows(
            "UPDATE unstuck_workers SET created_at = created_at - ?2, stopped_at = stopped_at - ?2 WHERE id = ?1",
            (worker_id, seconds),
        )

    def set_clock_back(self, seconds: float) -> None:
        columns = ("run_at", "enqueued_at", "claimed_at", "started_at", "finished_at")
        changes = ", ".join(f"{c} = {c} + ?1" for c in columns)
        self.rows(f"UPDATE unstuck_jobs SET {changes}", (seconds,))
        self.rows("UPDATE unstuck_attempts SET ended_at = ended_at + ?1", (seconds,))
        changes = ", ".join(f"{c} = {c} + ?1" for c in ("seen_at", "begun_at", "reminded_at"))
        self.rows(f"UPDATE unstuck_conditions SET {changes}", (seconds,))
        self.rows("UPDATE unstuck_schedules SET next_at = next_at + ?1, last_at = last_at + ?1", (seconds,))
        if self.rows("SELECT 1 FROM sqlite_schema WHERE name = 'unstuck_clock'"):
            self.rows("UPDATE unstuck_clock SET ahead_s = ahead_s + ?1", (seconds,))

    def note_clock(self) -> None:
        ahead_s = time.time() - host.boottime_s()
        self.rows("UPDATE unstuck_clock SET ahead_s = ?, boot_id = ?", (ahead_s, host.boot_id()))

    def age_events(self, seconds: float) -> None:
        self.rows("UPDATE unstuck_events SET at = at - ?", (seconds,))

    def age_counters(self, minutes: int) -> None:
        self.rows("UPDATE unstuck_counters SET minute = minute - ? WHERE minute > 0", (minutes,))

    def expire_ticket(self, name: str) -> None:
        self.rows("UPDATE unstuck_tickets SET until_boot_s = 0 WHERE name = ?", (name,))

    def numbers(self) -> dict[str, int]:
        [(job_id, token)] = self.rows("SELECT last_job_id, last_token FROM unstuck_ledger")
        return {"job": job_id, "token": token, **dict(self.rows("SELECT name, seq FROM sqlite_sequence"))}

    def set_numbers(self, numbers: dict[str, int]) -> None:
        self.rows("UPDATE unstuck_ledger SET last_job_id = ?, last_token = ?", (numbers["job"], numbers["token"]))
        for name, number in numbers.items():
            self.rows("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (number, name))

    def age_schema(self, number: int) -> None:
        self.rows("INSERT INTO unstuck_migrations VALUES (?1, 'from_the_future', 0, '', ?1, '9.9')", (number,))


class PostgresBackdoor:
    dialect = "postgresql"

    def __init__(self, url: str, schema: str = "unstuck") -> None:
        self.url = url
        self._schema = schema

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"set search_path = {self._schema}")
            cursor = connection.execute(query, values)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def count(self, table: str) -> int:
        return int(self.rows(f"select count(*) from {table}")[0][0])

    def age_beat(self, worker_id: str, seconds: float) -> None:
        self.rows(
            "update worker_heartbeats set beat_at = beat_at - make_interval(secs => %s) where worker_id = %s",
            (seconds, worker_id),
        )
        self._watched_all_along()

    def forget_watch(self) -> None:
        self.rows("delete from watch_periods")

    def _watched_all_along(self) -> None:
        self.forget_watch()
        self.rows(
            "insert into watch_periods (since, until, cause) "
            "values (clock_timestamp() - interval '10 days', clock_timestamp(), 'start')"
        )

    def move_beats(self, seconds: float) -> None:
        self.rows("update worker_heartbeats set beat_at = beat_at + make_interval(secs => %s)", (seconds,))

    def move_watch(self, seconds: float) -> None:
        moved = ", ".join(f"{c} = {c} + make_interval(secs => %s)" for c in ("since", "until", "set_back_at"))
        self.rows(f"update watch_periods set {moved}", (seconds,) * 3)

    def prolong_outage(self, seconds: float) -> None:
        moved = ", ".join(f"{c} = {c} - make_interval(secs => %s)" for c in ("since", "until", "set_back_at"))
        self.rows(
            "with heartbeats as (update worker_heartbeats set beat_at = beat_at - make_interval(secs => %s)) "
            f"update watch_periods set {moved}",
            (seconds,) * 4,
        )

    def age_job(self, job_id: int, seconds: float) -> None:
        columns = ("run_at", "enqueued_at", "claimed_at", "started_at", "finished_at")
        changes = ", ".join(f"{c} = {c} - make_interval(secs => %(s)s)" for c in columns)
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                f"update {self._schema}.jobs set {changes} where id = %(id)s",  # type: ignore[arg-type]
                {"s": seconds, "id": job_id},
            )
        self._watched_all_along()

    def age_all_jobs(self, seconds: float) -> None:
        self.rows(
            "update jobs set enqueued_at = enqueued_at - make_interval(secs => %(s)s), "
            "finished_at = finished_at - make_interval(secs => %(s)s)",
            {"s": seconds},  # type: ignore[arg-type]
        )

    def copy_job(self, job_id: int, count: int) -> None:
        [(columns,)] = self.rows(
            "select string_agg(attname, ', ') from pg_attribute "
            "where attrelid = 'jobs'::regclass and attnum > 0 and not attisdropped and attname <> 'id'"
        )
        self.rows(
            f"insert into jobs (id, {columns}) select nextval('job_ids'), {columns} "
            "from (select * from jobs where id = %s) j, generate_series(1, %s)",
            (job_id, count),
        )

    def add_events(self, count: int) -> None:
        self.rows(
            "insert into events (kind, message) select 'test', 'one of many' from generate_series(1, %s)", (count,)
        )

    def age_tokens(self, queue: str, seconds: float) -> None:
        self.rows(
            "update queues set refilled_at = refilled_at - make_interval(secs => %s) where name = %s", (seconds, queue)
        )

    def age_keys(self, seconds: float) -> None:
        self.rows("update unique_keys set until = until - make_interval(secs => %s)", (seconds,))

    def age_expiry(self, job_id: int, seconds: float) -> None:
        self.rows(
            "update jobs set expires_at = expires_at - make_interval(secs => %s), enqueued_at = enqueued_at - "
            "make_interval(secs => %s) where id = %s",
            (seconds, seconds, job_id),
        )

    def untie(self, job_id: int) -> None:
        self.rows("update jobs set has_links = null where id = %s", (job_id,))

    def forget_line(self, job_id: int) -> None:
        self.rows("update jobs set blocked = true, ready = false where id = %s", (job_id,))
        self.rows("delete from concurrency_keys")

    def age_worker(self, worker_id: str, seconds: float) -> None:
        self.rows(
            "update workers set created_at = created_at - make_interval(secs => %s), "
            "stopped_at = stopped_at - make_interval(secs => %s) where id = %s",
            (seconds, seconds, worker_id),
        )

    def set_clock_back(self, seconds: float) -> None:
        written = {
            "jobs": ("run_at", "enqueued_at", "claimed_at", "started_at", "finished_at"),
            "attempts": ("ended_at",),
            "conditions": ("seen_at", "begun_at", "reminded_at"),
            "schedules": ("next_at", "last_at"),
            "tickets": ("until",),
            "worker_heartbeats": ("beat_at",),
            "watch_periods": ("since", "until"),
            "clock": ("at",),
        }
        for table, columns in written.items():
            if self.rows("select to_regclass(%s)", (table,)) != [(None,)]:
                changes = ", ".join(f"{c} = {c} + make_interval(secs => {seconds})" for c in columns)
                self.rows(f"update {table} set {changes}")

    def note_clock(self) -> None:
        self.rows("update clock set at = clock_timestamp()")

    def age_events(self, seconds: float) -> None:
        self.rows("update events set at = at - make_interval(secs => %s)", (seconds,))

    def age_counters(self, minutes: int) -> None:
        self.rows("update counters set minute = minute - %s where minute > 0", (minutes,))

    def expire_ticket(self, name: str) -> None:
        self.rows("update tickets set until = 'epoch' where name = %s", (name,))

    def numbers(self) -> dict[str, int]:
        found = self.rows("select sequencename, coalesce(last_value, 1) from pg_sequences where schemaname = 'unstuck'")
        return dict(found)

    def set_numbers(self, numbers: dict[str, int]) -> None:
        for name, number in numbers.items():
            self.rows("select setval(%s::regclass, %s)", (name, number))

    def age_schema(self, number: int) -> None:
        self.rows(
            "insert into migrations (number, name, digest, works_with, version) "
            "values (%s, 'from_the_future', '', %s, '9.9')",
            (number, number),
        )
