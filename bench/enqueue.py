"""Measure how many jobs a client stores durably per second."""

import threading
import time
from collections.abc import Callable
from functools import partial

from bench.databases import Database
from bench.fleet import stage_on
from bench.report import Table

THREADS = 16
BATCH = 1_000


def run(databases: list[Database], seconds_each: float) -> Table:
    table = Table(
        "enqueue",
        "Enqueue: durable jobs per second from one process, no worker running",
        ("one by one", f"{THREADS} threads", f"many ({BATCH})"),
    )
    for database in databases:
        with stage_on(database) as stage:
            task = stage.task("noop")
            task.enqueue()
            table.add(
                database.name,
                _threads(task.enqueue, 1, seconds_each),
                _threads(task.enqueue, THREADS, seconds_each),
                _threads(partial(task.enqueue_many, [()] * BATCH), 1, seconds_each) * BATCH,
            )
    table.notes.append("one by one: a commit each; threads: concurrent calls share commits; many: enqueue_many")
    return table


def _threads(act: Callable[[], object], count: int, seconds: float) -> float:
    counts = [0] * count
    deadline_s = time.monotonic() + seconds

    def work(me: int) -> None:
        while time.monotonic() < deadline_s:
            act()
            counts[me] += 1

    begun_s = time.monotonic()
    threads = [threading.Thread(target=work, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - begun_s)
