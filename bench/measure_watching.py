"""Measure what it costs to watch over jobs: pulses, signs of the logic, memory, deadlines, beats.

First the CPU that a worker takes for jobs that only sleep, with every limit set, beyond what it takes for nothing. Then
no-op jobs with every limit against the same without any, in turns within one worker, by CPU time per job and by rate.
The difference is the median over pairs of neighbouring turns; its quartiles say how far this machine can be trusted.
"""

import os
import statistics
import time

from bench.databases import Database
from bench.measure_drain import Drained, drain_in_turns
from bench.processes import wait_for
from bench.report import Table
from bench.stage import Stage, stage_on

CROWDS = (2, 8, 32)
PAIRS = 15
SLOTS = 8


def run(databases: list[Database], seconds: float) -> Table:
    table = Table(
        "watching",
        "Watching: what limits cost",
        ("without", "with", "difference %", "lower quartile", "upper quartile"),
    )
    for database in databases:
        for jobs in CROWDS:
            idle, busy = _cpu_share(database, jobs, seconds)
            table.add(f"{database.name}, {jobs} sleeping jobs, % of the machine", idle, busy, busy - idle, None, None)
        plain, limited = _pairs(database, seconds / 8)
        for what, cost in (("CPU µs per no-op", _cpu_us), ("no-ops/s", _rate)):
            before, after = [cost(one) for one in plain], [cost(one) for one in limited]
            low, middle, high = statistics.quantiles(
                ((b / a - 1) * 100 for a, b in zip(before, after, strict=True)), n=4
            )
            named = f"{database.name}, sync × {SLOTS}, {what}"
            table.add(named, statistics.median(before), statistics.median(after), middle, low, high)
    table.notes += [
        "sleeping: one worker, as many slots as jobs, each with timeout, stall_timeout, interpreter_timeout and "
        "memory_limit, and a ctx.heartbeat() a second; 'without' is the same worker with nothing to do",
        f"no-ops: {PAIRS} pairs of turns of one worker, the same task with and without those limits, who goes first"
        " changing; the difference is that of each pair",
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


def _pairs(database: Database, seconds: float) -> tuple[list[Drained], list[Drained]]:
    names = ("noop", "noop_limited")
    # Who goes first changes: the second of a pair finds warmer caches and a longer table.
    order = [names[(turn + turn // 2) % 2] for turn in range(2 * PAIRS)]
    drained = drain_in_turns(database, order, SLOTS, seconds)
    plain, limited = ([one for name, one in zip(order, drained, strict=True) if name == wanted] for wanted in names)
    return plain, limited


def _cpu_us(drained: Drained) -> float:
    return drained.worker_us + drained.runners_us


def _rate(drained: Drained) -> float:
    return drained.per_s
