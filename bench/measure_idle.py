"""Measure what a thousand idle workers cost one PostgreSQL: connections, statements and CPU per second.

A thousand real workers would be three thousand Python processes here; so each process is a host with twenty of them:
all of a worker but nursery and runners, which do nothing while it is idle.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.databases import Database, Postgres
from bench.processes import ROOT, CpuClock, cpu_of_family, wait_for
from bench.report import Table
from bench.stage import Stage, stage_on
from unstuck.runner.trace import trace_path

WORKERS_PER_HOST = 20
SETTLE_S = 8.0
MOST_CONNECTIONS_EACH = 3
LEAST_SPREAD_S = 2.0
BIRTHS_PER_S = 6.0
"""Each birth costs two sessions that compile their functions, and that is not what is measured."""


def run(databases: list[Database], sizes: list[int], seconds: float) -> Table:
    table = Table(
        "idle",
        "Idle workers on one PostgreSQL, default settings",
        ("connections", "commits/s", "statements/s", "server CPU s/s", "client CPU ms/s per worker"),
    )
    for database in databases:
        if isinstance(database, Postgres):
            with _room_for(database, max(sizes) * MOST_CONNECTIONS_EACH + 100) as counts_statements:
                for workers in sizes:
                    with stage_on(database) as stage:
                        _measure(table, stage, database, workers, seconds, counts_statements)
    table.notes += [
        f"simulated: each process is a host of {WORKERS_PER_HOST} workers with their real threads (floor, wheel,"
        " heartbeat, watchman, neighbours) and connections, without nurseries and runners",
        f"over {seconds:.0f} s; server CPU is of all its processes; one core is 1.0",
    ]
    return table


def _measure(
    table: Table, stage: Stage, database: Postgres, workers: int, seconds: float, counts_statements: bool
) -> None:
    if counts_statements:
        database.query(stage.url, "create extension if not exists pg_stat_statements")
    with _fleet(stage, workers) as fleet:
        wait_for(lambda: len(stage.ledger.workers(living_only=True)) >= workers, "all born", 300, every_s=0.5)
        time.sleep(SETTLE_S)
        before, cpu, clients = _counters(database, stage.url, counts_statements), database.server_cpu(), _cpu(fleet)
        begun_s = time.monotonic()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - begun_s
        after, cpu, clients = (
            _counters(database, stage.url, counts_statements),
            database.server_cpu() - cpu,
            _cpu(fleet) - clients,
        )
        living = len(stage.ledger.workers(living_only=True))
        if living < workers:
            raise RuntimeError(
                f"{workers - living} of {workers} idle workers were lost; the figures would be worthless"
            )
        table.add(
            f"{workers:,} workers",
            after[0],
            (after[1] - before[1]) / elapsed_s,
            None if not counts_statements else (after[2] - before[2]) / elapsed_s,
            cpu.all_s / elapsed_s,
            clients.all_s / elapsed_s / workers * 1000,
        )


def _cpu(fleet: list["subprocess.Popen[bytes]"]) -> CpuClock:
    return sum((cpu_of_family(process.pid) for process in fleet), CpuClock())


def _counters(database: Postgres, url: str, counts_statements: bool) -> tuple[int, int, int]:
    name = url.rpartition("/")[2]
    statements = "(select sum(calls) from pg_stat_statements where toplevel)" if counts_statements else "0"
    row: tuple[Any, ...] = database.query(
        url,
        f"select (select count(*) from pg_stat_activity where datname = '{name}' and pid <> pg_backend_pid()),"
        f" (select xact_commit + xact_rollback from pg_stat_database where datname = '{name}'), {statements}",
    )[0]
    return int(row[0]), int(row[1]), int(row[2] or 0)


@contextmanager
def _fleet(stage: Stage, workers: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    hosts = workers // WORKERS_PER_HOST
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(hosts):
            name = f"host-{number}"
            spread_s = max(LEAST_SPREAD_S, hosts / BIRTHS_PER_S)
            command = [
                sys.executable,
                "-m",
                "bench.idle_workers",
                str(WORKERS_PER_HOST),
                stage.url,
                name,
                f"{spread_s}",
            ]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=os.environ)
            )
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"born\n":
                raise RuntimeError("a process of idle workers ended early; its words are on stderr")
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        # Killed workers leave their shared pages behind, and nobody is left to bury them.
        for worker in stage.ledger.workers():
            trace_path(worker.id).unlink(missing_ok=True)


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
