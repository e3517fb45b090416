"""Measure what it costs to watch over jobs: heartbeats, checks of runners, memory, deadlines.

First the CPU that a worker needs while its jobs sleep under every limit there is. Then no-ops with every limit beside
no-ops without any, in neighbouring turns of one worker: the part of the cost that comes when a job begins and ends.
"""

import os
import time
from statistics import median

from bench.databases import Database
from bench.fleet import Stage, stage_on
from bench.processes import wait_for
from bench.report import Table
from bench.throughput import Drained, drain_in_turns

SLOTS = 8
TASKS = ("noop", "noop_limited")
STARTED_S = 1.0
"""In its first second a process is busy with its start."""


def run(databases: list[Database], sleeping: tuple[int, ...], seconds: float, turns: int) -> Table:
    table = Table("watch-cost", "Watch cost", ("without", "with", "difference %", "least %", "greatest %"))
    for database in databases:
        for jobs in sleeping:
            idle, busy = _cpu_share(database, jobs, seconds)
            table.add(f"{database.name}, {jobs} sleeping jobs, % of the machine", idle, busy, busy - idle, None, None)
        plain, limited = _limited(database, turns)
        _compare(table, f"{database.name}, limits of no-ops, CPU µs each", _cpu_us(plain), _cpu_us(limited))
        _compare(table, f"{database.name}, limits of no-ops, jobs/s", _rates(plain), _rates(limited))
    table.notes += [
        "sleeping: one worker, as many slots as jobs, each with timeout, stall_timeout, interpreter_timeout and "
        "memory_limit, and a ctx.heartbeat() a second; 'without' is the same worker with nothing to do, and the "
        "difference is in points of percent",
        f"limits: {turns} pairs of turns of one worker, the same task without limits and with them; median, least and "
        "greatest difference of a pair",
    ]
    return table


def _compare(table: Table, label: str, without: list[float], limited: list[float]) -> None:
    differences = [(after / before - 1) * 100 for before, after in zip(without, limited, strict=True)]
    figures = (median(differences), min(differences), max(differences))
    table.add(label, median(without), median(limited), *figures)


def _cpu_share(database: Database, jobs: int, seconds: float) -> tuple[float, float]:
    with stage_on(database) as stage:
        stage.workers.start(1, "--concurrency", str(jobs))
        idle = _share(stage, seconds)
        handles = stage.task("watched_nap").enqueue_many([(seconds + 5.0,)] * jobs)
        wait_for(lambda: all(handle.state == "running" for handle in handles), "all of them to run")
        time.sleep(STARTED_S)
        return idle, _share(stage, seconds)


def _share(stage: Stage, seconds: float) -> float:
    before, began_s = stage.workers.cpu(), time.monotonic()
    time.sleep(seconds)
    used = stage.workers.cpu() - before
    return used.all_s / (time.monotonic() - began_s) / (os.cpu_count() or 1) * 100


def _limited(database: Database, turns: int) -> tuple[list[Drained], list[Drained]]:
    # The first of a pair changes: the second finds warmer caches.
    order = [TASKS[(turn + turn // 2) % 2] for turn in range(2 * turns)]
    drained = drain_in_turns(database, order, SLOTS, 0.4)
    plain, limited = ([one for name, one in zip(order, drained, strict=True) if name == task] for task in TASKS)
    return plain, limited


def _cpu_us(drained: list[Drained]) -> list[float]:
    return [one.worker_us + one.runners_us + one.server_us for one in drained]


def _rates(drained: list[Drained]) -> list[float]:
    return [one.per_s for one in drained]
