"""Measure what it costs to watch over jobs: beats, pulses, looks, memory, deadlines.

Watching is too cheap to be seen beside the noise of a machine. So a second worker watches twenty times as often, the
two work in short turns, one frozen while the other works, and what the second costs more is divided by nineteen. What
limits cost a job when it begins and ends does not depend on how often anybody looks: for that no-ops with every limit
stand against no-ops without any, in turns within one worker. Both by CPU time per job (worker, fork server, runners
and the database's server) and by rate: the median over pairs of neighbouring turns, with its interval.
"""

import os
import signal
import time
from contextlib import ExitStack

from bench import pairs, quickened
from bench.databases import Database
from bench.fleet import Stage, stage_on
from bench.processes import WorkerProcess, wait_for
from bench.report import Table
from bench.throughput import WARM_UP_JOBS, Drained, drain_in_turns, drain_staged, jobs_for

CROWDS = (2, 8, 32)
SLOTS = 8
TIMES = 20
"""How many times as often the quickened worker watches."""


def run(databases: list[Database], seconds: float, turns: int) -> Table:
    table = Table("watching", "Watching: what it costs", ("without", "with", "difference %", "from", "to"))
    for database in databases:
        for jobs in CROWDS:
            idle, busy = _cpu_share(database, jobs, seconds)
            table.add(f"{database.name}, {jobs} sleeping jobs, % of the machine", idle, busy, busy - idle, None, None)
        for task, named, jobs in (
            ("noop_limited", "no-ops", 0),
            ("work_limited", "jobs of a third of a second", SLOTS),
        ):
            usual, quick = _quickened(database, task, jobs, turns)
            _compare(table, f"{database.name}, watching of {named}", usual, quick, TIMES - 1)
        plain, limited = _limited(database, turns)
        _compare(table, f"{database.name}, limits of no-ops", plain, limited, 1)
    table.notes += [
        "sleeping: one worker, as many slots as jobs, each with timeout, stall_timeout, interpreter_timeout and "
        "memory_limit, and a ctx.heartbeat() a second; 'without' is the same worker with nothing to do",
        f"watching: {turns} pairs of turns of two workers with {SLOTS} slots, tasks with all those limits; 'with' "
        f"watches {TIMES} times as often (beats, pulses, looks, weighing, the fork server's rounds); the difference is "
        f"divided by {TIMES - 1}: it is what watching costs in life",
        f"limits: {turns} pairs of turns of one worker, the same task without limits and with them",
        "the difference is the median over the pairs; from, to: its 95 % interval (bootstrap)",
    ]
    return table


def _compare(table: Table, named: str, before: list[Drained], after: list[Drained], times: int) -> None:
    for what, cost in (("CPU µs each", _cpu_us), ("per s", _rate)):
        usual, other = [cost(one) for one in before], [cost(one) for one in after]
        found = pairs.difference(usual, other, times=times)
        middle = len(usual) // 2
        table.add(f"{named}, {what}", sorted(usual)[middle], sorted(other)[middle], found.middle, found.low, found.high)


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


def _quickened(database: Database, task: str, jobs: int, turns: int) -> tuple[list[Drained], list[Drained]]:
    """Have two workers drain in turns, each on a ledger of its own: one as in life, one that watches far more often."""
    with ExitStack() as stack:
        stages = [stack.enter_context(stage_on(database)) for _ in range(2)]
        concurrency = ("--concurrency", str(SLOTS))
        [usual] = stages[0].workers.start(1, *concurrency)
        [quick] = stages[1].workers.start(1, *concurrency, module="bench.quickened", **quickened.environment(TIMES))
        workers = [usual, quick]
        if not jobs:
            for stage in stages:
                drain_staged(stage, task, WARM_UP_JOBS)
            jobs = jobs_for(drain_staged(stages[0], task, WARM_UP_JOBS).per_s, 0.7)
        drained: list[list[Drained]] = [[], []]
        for worker in workers:
            worker.signal_family(signal.SIGSTOP)
        for turn in pairs.order(turns):
            drained[turn].append(_awake(workers[turn], stages[turn], task, jobs))
        for worker in workers:
            worker.signal_family(signal.SIGCONT)
        return drained[0], drained[1]


def _awake(worker: WorkerProcess, stage: Stage, task: str, jobs: int) -> Drained:
    """Let a frozen worker work, and freeze it again: the one that waits must not cost anything."""
    worker.signal_family(signal.SIGCONT)
    try:
        # Whatever it has to make up for after the pause.
        drain_staged(stage, "noop_limited", SLOTS)
        return drain_staged(stage, task, jobs)
    finally:
        worker.signal_family(signal.SIGSTOP)


def _limited(database: Database, turns: int) -> tuple[list[Drained], list[Drained]]:
    names = ("noop", "noop_limited")
    taken = [names[turn] for turn in pairs.order(turns)]
    drained = drain_in_turns(database, taken, SLOTS, 0.4)
    plain, limited = ([one for name, one in zip(taken, drained, strict=True) if name == wanted] for wanted in names)
    return plain, limited


def _cpu_us(drained: Drained) -> float:
    return drained.worker_us + drained.runners_us + drained.server_us


def _rate(drained: Drained) -> float:
    return drained.per_s
