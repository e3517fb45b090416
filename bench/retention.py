"""Measure how many finished jobs retention removes per second, and how many jobs workers run meanwhile.

Retention must be the faster one, or tables grow for ever. The removal is the reaper's own: short batches, for half of
the time. The finished jobs are copies of a real row, made by SQL in bulk, older than the retention.
"""

import time
from dataclasses import dataclass

from bench.databases import Database, Postgres
from bench.fleet import Stage, stage_on
from bench.report import Table
from bench.table_size import LedgerLoop, copy_rows
from bench.throughput import WARM_UP_JOBS, drain, drain_staged, jobs_for
from unstuck.config import Recovery
from unstuck.ledger.contract.jobs import JobExtras, NewJob
from unstuck.recovery.reap import Reaper

WORKERS = 2
SLOTS = 200
OLD_S = 8 * 86_400
"""A day older than the default retention of jobs."""
KEYS_PER_CALL = 10_000


@dataclass(frozen=True)
class Walk:
    per_s: float
    cpu_us: float
    longest_ms: float


def run(databases: list[Database], rows: int, seconds_each: float) -> Table:
    table = Table(
        "retention",
        f"Retention: {rows:,} finished jobs and expired unique keys removed by one reaper",
        ("per s", "of best drain", "CPU µs each", "longest ms"),
    )
    for database in databases:
        drains = [drain(database, "async", SLOTS, on_crash, WORKERS, seconds_each) for on_crash in ("fail", "retry")]
        best = max(drains, key=lambda one: one.per_s)
        cpu_us = best.worker_us + best.runners_us + best.server_us
        table.add(f"{database.name}, jobs drained by {WORKERS} workers", best.per_s, 1.0, cpu_us, None)
        walk = _remove(database, rows)
        table.add(f"{database.name}, jobs removed", walk.per_s, walk.per_s / best.per_s, walk.cpu_us, walk.longest_ms)
        walk = _remove_keys(database, rows)
        label = f"{database.name}, expired unique keys removed"
        table.add(label, walk.per_s, walk.per_s / best.per_s, walk.cpu_us, walk.longest_ms)
        drained, removed = _beside(database, 5 * rows, seconds_each)
        label = f"{database.name}, jobs drained while retention works"
        table.add(label, drained, drained / best.per_s, None, None)
        table.add(f"{database.name}, jobs removed meanwhile", removed, removed / best.per_s, None, None)
    table.notes += [
        f"best drain: no-op jobs, async × {SLOTS} per worker, the better of on_crash fail and retry",
        "CPU: user and system time of all processes, the server's included, per job or key",
        "pauses between batches are counted in; longest: one batch, during which the reaper's connection is taken",
        "meanwhile: the workers' own reapers remove from a backlog while the workers drain, all on this machine",
    ]
    return table


def _remove(database: Database, rows: int) -> Walk:
    with stage_on(database) as stage:
        _finish_old_jobs(stage, rows)
        return _walk(stage, rows)


def _remove_keys(database: Database, rows: int) -> Walk:
    with stage_on(database) as stage:
        stage.pause()
        for first in range(0, rows, KEYS_PER_CALL):
            numbers = range(first, min(first + KEYS_PER_CALL, rows))
            stage.ledger.jobs.enqueue([_with_key(number) for number in numbers])
        time.sleep(1.1)
        return _walk(stage, rows)


def _with_key(number: int) -> NewJob:
    return NewJob(
        task="noop", queue="default", payload=b"[]", unique_key=f"key-{number}", more=JobExtras(unique_for_s=1.0)
    )


def _walk(stage: Stage, rows: int) -> Walk:
    """Let a reaper remove all of it, with its pauses between batches."""
    reaper = Reaper(stage.ledger, Recovery(), by="bench")
    removed, longest_s = 0, 0.0
    began_s, cpu_s = time.monotonic(), time.process_time() + stage.database.server_cpu().all_s
    while True:
        batch_s = time.monotonic()
        done = reaper.keep_house()
        longest_s = max(longest_s, time.monotonic() - batch_s)
        removed += done.pruned
        if done.next_batch_in_s is None:
            break
        time.sleep(done.next_batch_in_s)
    elapsed_s = time.monotonic() - began_s
    cpu_s = time.process_time() + stage.database.server_cpu().all_s - cpu_s
    if removed < rows:
        raise RuntimeError(f"of {rows} rows only {removed} were removed; the figures would be worthless")
    return Walk(removed / elapsed_s, cpu_s / removed * 1e6, longest_s * 1000)


def _beside(database: Database, rows: int, seconds: float) -> tuple[float, float]:
    """Return the jobs drained and the jobs removed per second when both happen at once."""
    with stage_on(database) as stage:
        _finish_old_jobs(stage, rows)
        stage.workers.start(WORKERS, "--concurrency", str(SLOTS))
        warm = drain_staged(stage, "noop_async", WARM_UP_JOBS)
        began_s, before = time.monotonic(), _old_jobs(stage)
        drained = drain_staged(stage, "noop_async", jobs_for(warm.per_s, seconds))
        removed = before - _old_jobs(stage)
        return drained.per_s, removed / (time.monotonic() - began_s)


def _finish_old_jobs(stage: Stage, rows: int) -> None:
    """End one job, copy it, and make all of them old."""
    LedgerLoop(stage).run(1)
    copy_rows(stage, "succeeded", rows)
    past = f"interval '{OLD_S} seconds'" if isinstance(stage.database, Postgres) else str(OLD_S)
    ages = ", ".join(f"{column} = {column} - {past}" for column in ("enqueued_at", "finished_at"))
    stage.database.query(stage.url, f"update {{jobs}} set {ages}")
    if isinstance(stage.database, Postgres):
        stage.database.query(stage.url, "vacuum (analyze) {jobs}")


def _old_jobs(stage: Stage) -> int:
    if isinstance(stage.database, Postgres):
        when = "enqueued_at < now() - interval '7 days'"
    else:
        when = "enqueued_at < unixepoch() - 7 * 86400"
    return int(stage.database.query(stage.url, f"select count(*) from {{jobs}} where {when}")[0][0])
