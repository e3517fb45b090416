"""Measure what it costs to watch over jobs: pulses, signs of the logic, memory, deadlines, beats.

First the CPU that a worker takes for jobs that only sleep, with every limit set, beyond what it takes for nothing. Then
no-op jobs with every limit against the same without any, in turns, by CPU time per job and by rate.
"""

import os
import statistics
import time

from bench.databases import Database
from bench.measure_drain import drain_task
from bench.processes import wait_for
from bench.report import Table
from bench.stage import Stage, stage_on

CROWDS = (2, 8, 32)
ROUNDS = 3
SLOTS = 8


def run(databases: list[Database], seconds: float) -> Table:
    table = Table("watching", "Watching: what limits cost", ("without", "with", "difference %"))
    for database in databases:
        for jobs in CROWDS:
            idle, busy = _cpu_share(database, jobs, seconds)
            table.add(f"{database.name}, {jobs} sleeping jobs, % of the machine", idle, busy, busy - idle)
        plain, limited = zip(*(_costs(database, seconds / 4) for _ in range(ROUNDS)), strict=True)
        for at, what in ((0, "CPU µs per no-op"), (1, "no-ops/s")):
            before = statistics.median(one[at] for one in plain)
            after = statistics.median(one[at] for one in limited)
            table.add(f"{database.name}, sync × {SLOTS}, {what}", before, after, (after / before - 1) * 100)
    table.notes += [
        "sleeping: one worker, as many slots as jobs, each with timeout, stall_timeout, interpreter_timeout and "
        "memory_limit, and a ctx.heartbeat() a second; 'without' is the same worker with nothing to do",
        f"no-ops: medians of {ROUNDS} rounds in turns, the same task with and without those limits",
    ]
    return table


def _cpu_share(database: Database, jobs: int, seconds: float) -> tuple[float, float]:
    with stage_on(database) as stage:
        stage.workers.start(1, "--concurrency", str(jobs))
        idle = _share(stage, seconds)
        handles = stage.task("watched_nap").enqueue_many([(seconds + 5.0,)] * jobs)
        wait_for(lambda: all(handle.state == "running" for handle in handles), "all of them to run")
        time.sleep(1.0)  # the first seconds of a process are its birth
        busy = _share(stage, seconds)
        return idle, busy


def _share(stage: Stage, seconds: float) -> float:
    before, began_s = stage.workers.cpu(), time.monotonic()
    time.sleep(seconds)
    used = stage.workers.cpu() - before
    return used.all_s / (time.monotonic() - began_s) / (os.cpu_count() or 1) * 100


def _costs(database: Database, seconds: float) -> tuple[tuple[float, float], tuple[float, float]]:
    found = []
    for name in ("noop", "noop_limited"):
        drained = drain_task(database, name, SLOTS, 1, seconds)
        found.append((drained.worker_us + drained.runners_us, drained.per_s))
    return found[0], found[1]
