"""Measure what idle workers cost one PostgreSQL: connections, statements, CPU and memory.

Each worker is a few Python processes, and a thousand of them do not fit beside their server on a small machine. So only
a few are real. The others are replayed by `bench.idle_workers`: real connections and real statements at the real times,
from one thread per host. The real ones are replayed too, and both are compared statement by statement.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from bench.databases import Database, Postgres
from bench.processes import ROOT, wait_for
from bench.report import Table, progress
from bench.stage import Stage, stage_on
from bench.statements import Calls, agreement, calls_of, compared

WORKERS_PER_HOST = 20
REAL_WORKERS = 20
SETTLE_S = 20.0
"""A watchman learns by ten lost tickets, a second apart, how many there are, and asks less often from then on."""
MOST_CONNECTIONS_EACH = 3
BIRTHS_PER_S = 10.0
"""Each birth costs two sessions that compile their functions, and that is not what is measured."""
LEAST_MEMORY_BYTES = 3 << 30
MOST_DISAGREEMENT = 0.1


@dataclass(frozen=True)
class Idle:
    """What was seen of one fleet, per second but for the first and the last."""

    connections: int
    commits: float
    server_cpu: float
    server_bytes: int
    calls: Calls | None
    """By statement; None where the server cannot count them."""


def run(databases: list[Database], sizes: list[int], seconds: float) -> Table:
    table = Table(
        "idle",
        "Idle workers on one PostgreSQL, default settings",
        ("connections", "commits/s", "statements/s", "server CPU s/s", "server MB"),
    )
    for database in databases:
        if isinstance(database, Postgres):
            with _room_for(database, max(*sizes, REAL_WORKERS) * MOST_CONNECTIONS_EACH + 100) as counts_statements:
                _measure_all(table, database, sizes, seconds, counts_statements)
    table.notes += [
        f"replayed: real connections, births, watchmen and neighbours, and the turns and beats of idle workers at their"
        f" times, from one process for each {WORKERS_PER_HOST} of them, with a host name of its own",
        f"over {seconds:.0f} s; server CPU is of all its processes, one core is 1.0; server MB is what they hold of the"
        " memory (PSS), buffers included",
    ]
    return table


def _measure_all(table: Table, database: Postgres, sizes: list[int], seconds: float, counts_statements: bool) -> None:
    with stage_on(database) as stage:
        stage.workers.start(REAL_WORKERS)
        real = _observed(stage, database, REAL_WORKERS, seconds, counts_statements)
        _add(table, f"{REAL_WORKERS:,} real workers", real)
    for workers in dict.fromkeys((REAL_WORKERS, *sizes)):
        with stage_on(database) as stage, _replay(stage, workers) as fleet:
            for host in fleet:
                host.start_clock()
            idle = _observed(stage, database, workers, seconds, counts_statements)
            for host in fleet:
                host.end()
            late_s = max(host.late_s() for host in fleet)
        _add(table, f"{workers:,} replayed", idle)
        table.notes.append(f"{workers:,} replayed: no call was later than {late_s:.2f} s after its time")
        if workers == REAL_WORKERS and real.calls is not None and idle.calls is not None:
            table.notes.append(
                f"calls per minute and worker, real and replayed: {compared(real.calls, idle.calls, workers)}"
            )
            if agreement(real.calls, idle.calls) > MOST_DISAGREEMENT:
                raise RuntimeError(f"The replay does not do what real workers do: {table.notes[-1]}")


def _add(table: Table, label: str, idle: Idle) -> None:
    statements = None if idle.calls is None else sum(idle.calls.values())
    table.add(label, idle.connections, idle.commits, statements, idle.server_cpu, idle.server_bytes / (1 << 20))


def _observed(stage: Stage, database: Postgres, workers: int, seconds: float, counts_statements: bool) -> Idle:
    if counts_statements:
        database.query(stage.url, "create extension if not exists pg_stat_statements")
    wait_for(lambda: len(stage.ledger.workers(living_only=True)) >= workers, "all born", every_s=0.5)
    time.sleep(SETTLE_S)
    if counts_statements:
        database.query(stage.url, "select pg_stat_statements_reset()")
    connections, commits = _activity(database, stage.url)
    cpu, begun_s = database.server_cpu(), time.monotonic()
    time.sleep(seconds)
    cpu, elapsed_s = database.server_cpu() - cpu, time.monotonic() - begun_s
    commits = _activity(database, stage.url)[1] - commits
    calls = calls_of(database, stage, elapsed_s) if counts_statements else None
    living = len(stage.ledger.workers(living_only=True))
    if living != workers:
        raise RuntimeError(f"{living} idle workers live, of {workers}; the figures would be worthless")
    return Idle(connections, commits / elapsed_s, cpu.all_s / elapsed_s, _memory_bytes(database.server.pid), calls)


def _activity(database: Postgres, url: str) -> tuple[int, int]:
    """Give the connections of workers, and all transactions so far."""
    connections, commits = database.query(
        url,
        "select (select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name in ('unstuck turn', 'unstuck service')),"
        " (select xact_commit + xact_rollback from pg_stat_database where datname = current_database())",
    )[0]
    return int(connections), int(commits)


def _memory_bytes(pid: int) -> int:
    """Give what a server holds, with what its processes share counted once."""
    server = psutil.Process(pid)
    total = 0
    for process in (server, *server.children()):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


class Host:
    """A process that replays the idle workers of one host."""

    def __init__(self, url: str, name: str, workers: int) -> None:
        command = [sys.executable, "-m", "bench.idle_workers", str(workers), url, name, str(BIRTHS_PER_S)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ, text=True
        )
        if self._line() != "born":
            self.kill()
            self.bury()
            raise RuntimeError("a process of idle workers ended early; its words are on stderr")

    def start_clock(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("now\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Ask it to end; all together, so that nobody is left to find the others dead."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def late_s(self) -> float:
        """Give by how much its worst call was late; it says so in the end."""
        if not (late := self._line()):
            raise RuntimeError("a process of idle workers ended early; its words are on stderr")
        return float(late)

    def kill(self) -> None:
        self._process.kill()

    def bury(self) -> None:
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def _replay(stage: Stage, workers: int) -> Iterator[list[Host]]:
    hosts: list[Host] = []
    try:
        for number in range(workers // WORKERS_PER_HOST):
            # One host after the other: births at once starve each other, and then everybody else.
            hosts.append(Host(stage.url, f"host-{number}", WORKERS_PER_HOST))
            if (left := psutil.virtual_memory().available) < LEAST_MEMORY_BYTES:
                raise RuntimeError(
                    f"only {left >> 20:,} MB of memory are left with {len(hosts) * WORKERS_PER_HOST:,} workers"
                )
            if number % 10 == 9:
                progress(f"  {len(hosts) * WORKERS_PER_HOST:,} born, {left >> 20:,} MB free")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
        for host in hosts:
            host.bury()


@contextmanager
def _room_for(database: Postgres, connections: int) -> Iterator[bool]:
    """Restart the server with room for so many; True where statements can be counted."""
    server = database.server
    available = "select 1 from pg_available_extensions where name = 'pg_stat_statements'"
    counts_statements = bool(database.query(server.url(), available))
    server.execute(f"alter system set max_connections = {connections}")
    if counts_statements:
        server.execute("alter system set shared_preload_libraries = 'pg_stat_statements'")
    server.stop()
    server.start()
    try:
        yield counts_statements
    finally:
        server.execute("alter system reset all")
        server.stop()
        server.start()
