"""Measure throughput: no-op jobs per second, each in an isolated runner, and the CPU time of each.

The jobs are enqueued while their queue is paused. The rate is the ledger's own account: jobs between the first
claim and the last end. CPU time is the kernel's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.databases import Database, Postgres
from bench.fleet import Stage, stage_on
from bench.processes import wait_for
from bench.report import Table

WARM_UP_JOBS = 400
MIN_JOBS, MAX_JOBS = 800, 100_000
Shapes = tuple[tuple[str, int], ...]
"""Kinds of tasks, each with the concurrency of a worker."""
STATS_DELAY_S = 1.3
"""PostgreSQL sessions report their counters at most once a second."""


@dataclass(frozen=True)
class Drained:
    jobs: int
    per_s: float
    worker_us: float
    runners_us: float
    server_us: float
    commits: float | None = None
    wal_bytes: float | None = None


def run(databases: list[Database], seconds_each: float, shapes: Shapes, fleets: tuple[int, ...]) -> Table:
    table = Table(
        "throughput",
        "Throughput: no-op jobs per second through isolated runners",
        ("jobs/s", "worker µs", "runners µs", "server µs", "commits/job", "WAL B/job"),
    )
    for database in databases:
        for kind, concurrency in shapes:
            for on_crash in ("fail", "retry"):
                for workers in fleets:
                    drained = drain(database, kind, concurrency, on_crash, workers, seconds_each)
                    table.add(
                        f'{database.name}, {kind} × {concurrency}, on_crash="{on_crash}", {workers} worker(s)',
                        drained.per_s,
                        drained.worker_us,
                        drained.runners_us,
                        drained.server_us if isinstance(database, Postgres) else None,
                        drained.commits,
                        drained.wal_bytes,
                    )
    table.notes += [
        "concurrency is per worker: sync × 8 is eight processes; async × 200 is one process with 200 jobs at once",
        'on_crash="fail" never runs ahead: a runner gets its next job after a commit that says so',
        "µs: CPU time (user + system) per job: worker process; fork server and runners; the server's processes",
        "commits and WAL: from the first job to the last, heartbeats included, without the enqueue and our own queries",
    ]
    return table


def drain(database: Database, kind: str, concurrency: int, on_crash: str, workers: int, seconds: float) -> Drained:
    """Start workers on an empty ledger, warm them up, then let them drain what `seconds` should take."""
    name = "noop" + ("_async" if kind == "async" else "") + ("_retry" if on_crash == "retry" else "")
    return drain_task(database, name, concurrency, workers, seconds)


def drain_task(database: Database, name: str, concurrency: int, workers: int, seconds: float) -> Drained:
    with stage_on(database) as stage:
        stage.workers.start(workers, "--concurrency", str(concurrency))
        first = drain_staged(stage, name, WARM_UP_JOBS)
        warm = drain_staged(stage, name, jobs_for(first.per_s, seconds / 4))
        return drain_staged(stage, name, jobs_for(warm.per_s, seconds), counted=True)


def drain_in_turns(database: Database, names: list[str], concurrency: int, seconds: float) -> list[Drained]:
    """Let one worker drain these tasks one after another, so that they share process, table and caches."""
    with stage_on(database) as stage:
        stage.workers.start(1, "--concurrency", str(concurrency))
        drain_staged(stage, names[0], WARM_UP_JOBS)
        warm = drain_staged(stage, names[0], WARM_UP_JOBS)
        jobs = jobs_for(warm.per_s, seconds)
        return [drain_staged(stage, name, jobs) for name in names]


def jobs_for(rate: float, seconds: float) -> int:
    return int(min(MAX_JOBS, max(MIN_JOBS, rate * seconds)))


def drain_staged(stage: Stage, name: str, jobs: int, *, counted: bool = False) -> Drained:
    database = stage.database
    counted = counted and isinstance(database, Postgres)
    stage.pause()
    if counted:
        # Before the jobs: else the WAL would be full of whole pages, each written once after a checkpoint.
        database.query(stage.url, "checkpoint")
    handles = stage.task(name).enqueue_many([()] * jobs)
    if counted:
        time.sleep(STATS_DELAY_S)
    before = _counters(stage) if counted else None
    workers, server = stage.workers.cpu(), database.server_cpu()
    stage.resume()
    looks = _wait_until_empty(stage, handles[-1].id)
    workers, server = stage.workers.cpu() - workers, database.server_cpu() - server
    commits = wal_bytes = None
    if before is not None:
        time.sleep(STATS_DELAY_S)
        after = _counters(stage)
        commits, wal_bytes = (after[0] - before[0] - looks) / jobs, (after[1] - before[1]) / jobs
    return Drained(
        jobs,
        jobs / _span_s(stage, handles[0].id),
        workers.head_s / jobs * 1e6,
        workers.below_s / jobs * 1e6,
        server.all_s / jobs * 1e6,
        commits,
        wal_bytes,
    )


def _wait_until_empty(stage: Stage, last_id: int) -> int:
    """Wait for the last job, and return the number of commits of ours that this took."""
    looks = 1

    def look(ended: Callable[[], object]) -> object:
        nonlocal looks
        looks += 1
        return ended()

    # The last id ends about last; asking for one row does not disturb the workers.
    wait_for(lambda: look(lambda: stage.ledger.jobs.outcomes([last_id])), "last job", patience_s=300, every_s=0.02)
    wait_for(lambda: look(lambda: not stage.database.unfinished(stage.url)), "all jobs", every_s=0.02)
    return looks


def _span_s(stage: Stage, first_id: int) -> float:
    span = "max(finished_at) - min(claimed_at)"
    if isinstance(stage.database, Postgres):
        span = f"extract(epoch from {span})"
    failed, span_s = stage.database.query(
        stage.url,
        f"select sum(case state when 'succeeded' then 0 else 1 end), {span} from {{jobs}} where id >= {first_id}",
    )[0]
    if failed:
        raise RuntimeError(f"{failed} no-op jobs did not succeed; the figures would be worthless")
    return float(span_s)


def _counters(stage: Stage) -> tuple[int, int]:
    """Return commits and WAL bytes until now."""
    sql = (
        "select xact_commit, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"
        " from pg_stat_database where datname = current_database()"
    )
    commits, wal = stage.database.query(stage.url, sql)[0]
    return int(commits), int(wal)
