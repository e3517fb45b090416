"""Measure what old and waiting jobs cost the claim: turns of the ledger alone, without runners, in this process.

A turn settles a hundred jobs, starts a hundred and claims a hundred. The million rows are copies of a real row, made by
SQL in bulk.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from tests.support.builders import birth

from bench.databases import Database, Postgres
from bench.fleet import Stage, stage_on
from bench.report import Table
from unstuck import config
from unstuck.ledger.contract.workers import AttemptRef, ClaimRequest, Success, Turn

BATCH = 100
ROUNDS = 3


def run(databases: list[Database], rows: int, jobs: int) -> Table:
    table = Table(
        "table-size",
        f"Table size: claims of {BATCH} per turn, the ledger alone, with {rows:,} more rows in the table",
        ("jobs/s", "of fresh %", "CPU µs/job", "CPU of fresh %"),
    )
    for database in databases:
        with stage_on(database) as stage:
            loop = LedgerLoop(stage)
            loop.run(jobs // 4)
            fresh = _median(loop, jobs)
            table.add(f"{database.name}, fresh", fresh[0], 100.0, fresh[1], 100.0)
            copy_rows(stage, "succeeded", rows)
            _compare(table, f"{database.name}, {rows:,} finished", _median(loop, jobs), fresh)
            copy_rows(stage, "pending", rows)
            _compare(table, f"{database.name}, and {rows:,} pending behind", _median(loop, jobs), fresh)
            if isinstance(database, Postgres):
                with _old_snapshot(stage.url):
                    label = f"{database.name}, and an old snapshot held open all the while"
                    _compare(table, label, _median(loop, jobs), fresh)
                database.query(stage.url, "vacuum {jobs}")
            copy_rows(stage, "pending", rows, task="unknown_here", rank=-1)
            label = f"{database.name}, and {rows:,} pending ahead of a task that this worker does not know"
            _compare(table, label, _whole(loop, jobs), fresh)
    table.notes.append(
        f"median of {ROUNDS} times {jobs:,} jobs; the last case is all of them in one, with the search for gaps"
    )
    return table


@contextmanager
def _old_snapshot(url: str) -> Iterator[None]:
    """Hold a snapshot that keeps dead rows from being vacuumed, as a forgotten transaction or a long report does."""
    with psycopg.connect(url) as connection:
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select 1 from unstuck.jobs limit 1")
        yield


def _compare(table: Table, label: str, now: tuple[float, float], fresh: tuple[float, float]) -> None:
    table.add(label, now[0], now[0] / fresh[0] * 100, now[1], now[1] / fresh[1] * 100)


def _median(loop: "LedgerLoop", jobs: int) -> tuple[float, float]:
    rounds = [loop.run(jobs) for _ in range(ROUNDS)]
    return statistics.median(rate for rate, _ in rounds), statistics.median(cpu for _, cpu in rounds)


def _whole(loop: "LedgerLoop", jobs: int) -> tuple[float, float]:
    """As `_median`, but with the cost of what is done once in a while."""
    return loop.run(jobs * ROUNDS)


class LedgerLoop:
    """A worker without runners: each job that it started has ended by the next turn."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._worker_id = "tablesizewrk"
        defaults = config.Settings()
        stage.ledger.workers.register(
            birth(
                self._worker_id,
                name="table-size",
                pid=0,
                pid_namespace="",
                process_started="",
                tasks=(),
                concurrency=BATCH,
                version="0",
                heartbeat_interval_s=defaults.recovery.heartbeat_interval_s,
                suspect_after_s=defaults.recovery.claimed_stale_after_s,
                running_stale_after_s=defaults.recovery.running_stale_after_s,
            )
        )

    def run(self, jobs: int) -> tuple[float, float]:
        """Return jobs per second, and CPU µs per job of this process and the server's."""
        stage, ledger = self._stage, self._stage.ledger
        # A higher priority puts them before whatever waits already, so that every round claims its own.
        stage.task("noop").options(priority=1).enqueue_many([()] * jobs)
        wish = ClaimRequest(("default",), ("noop",), BATCH)
        claimed: tuple[AttemptRef, ...] = ()
        running: tuple[AttemptRef, ...] = ()
        done = 0
        begun_s, cpu_s = time.monotonic(), time.process_time() + stage.database.server_cpu().all_s
        while done < jobs:
            turn = Turn(
                self._worker_id,
                done=tuple(Success(held.job_id, held.token, b"null") for held in running),
                start=claimed,
                claim_request=wish if done + len(running) + len(claimed) < jobs else None,
            )
            answer = ledger.workers.turn(turn)
            assert answer.alive
            done += len(running)
            running, claimed = claimed, tuple(AttemptRef(job.job_id, job.token) for job in answer.claimed)
        elapsed_s = time.monotonic() - begun_s
        cpu_s = time.process_time() + stage.database.server_cpu().all_s - cpu_s
        return jobs / elapsed_s, cpu_s / jobs * 1e6


def copy_rows(stage: Stage, state: str, rows: int, task: str | None = None, rank: int = 0) -> None:
    """Fill the table with copies of one real row in that state."""
    database, url = stage.database, stage.url
    if state == "pending":
        stage.task("noop").enqueue()
    columns = _columns(stage)
    columns.remove("id")
    values = ["rank" if column == "rank" else column for column in columns]
    if state == "pending":
        values = [str(rank) if column == "rank" else column for column in values]
    if task is not None:
        values = [f"'{task}'" if column == "task" else column for column in values]
    template = f"(select * from {{jobs}} where state = '{state}' limit 1) as model"
    names, copied = ", ".join(columns), ", ".join(values)
    if isinstance(database, Postgres):
        database.query(
            url,
            f"insert into {{jobs}} (id, {names}) select nextval('unstuck.job_ids'), {copied}"
            f" from {template}, generate_series(1, {rows})",
        )
        # What autovacuum would do by itself some moments later, in the middle of a measurement.
        database.query(url, "vacuum (analyze) {jobs}")
        database.query(url, "checkpoint")
        return
    numbers = f"with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows})"
    database.query(
        url,
        f"begin immediate; {numbers} insert into {{jobs}} (id, {names})"
        f" select (select last_job_id from unstuck_ledger) + i, {copied} from n, {template};"
        f" update unstuck_ledger set last_job_id = (select max(id) from {{jobs}}); commit",
    )
    # A WAL of a million rows is unusual: the first commits after it would pay for copying it back.
    database.query(url, "pragma wal_checkpoint(truncate)")


def _columns(stage: Stage) -> list[str]:
    if isinstance(stage.database, Postgres):
        sql = (
            "select column_name from information_schema.columns"
            " where table_schema = 'unstuck' and table_name = 'jobs' order by ordinal_position"
        )
    else:
        sql = "select name from pragma_table_info('unstuck_jobs')"
    return [str(row[0]) for row in stage.database.query(stage.url, sql)]
