"""Measure how soon an idle system begins a job: from "enqueue returned" to the first line of user code."""

import random
import statistics
import time

from bench.databases import Database
from bench.fleet import Stage, stage_on
from bench.report import Table

PAUSE_S = (0.03, 0.08)
WARM_UP_JOBS = 10


def run(databases: list[Database], jobs_each: int) -> Table:
    table = Table("latency", "Latency of an idle system, default settings, milliseconds", ("p50", "p95", "worst"))
    for database in databases:
        for name in ("first_line", "first_line_async"):
            with stage_on(database) as stage:
                stage.workers.start(1)
                _measure(stage, name, WARM_UP_JOBS)
                taken_ms = sorted(_measure(stage, name, jobs_each))
            kind = "async" if name.endswith("async") else "sync"
            table.add(
                f"{database.name}, {kind} task",
                statistics.median(taken_ms),
                taken_ms[int(len(taken_ms) * 0.95)],
                taken_ms[-1],
            )
    table.notes.append(
        f"{jobs_each} jobs each, one at a time, 30–80 ms apart; CLOCK_MONOTONIC in client and task; one worker"
    )
    return table


def _measure(stage: Stage, name: str, jobs: int) -> list[float]:
    task = stage.task(name)
    taken_ms = []
    for _ in range(jobs):
        job = task.enqueue()
        returned_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        # The client keeps quiet meanwhile: on a small machine its polling would delay the worker.
        time.sleep(random.uniform(*PAUSE_S))
        taken_ms.append((job.result(timeout=30) - returned_s) * 1000)
    return taken_ms
