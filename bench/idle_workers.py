"""Measure what real idle workers cost: their own CPU, and connections, statements, CPU and memory of PostgreSQL."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
from tests.support.signals import OwnProcess

from bench.databases import Database, Postgres
from bench.fleet import Stage, stage_on
from bench.processes import wait_for
from bench.report import Table

STARTED_TOGETHER = 2
"""More at once starve each other on a small machine."""
MAX_CONNECTIONS_EACH = 3


@dataclass(frozen=True)
class Server:
    """Counters of a PostgreSQL server."""

    connections: int
    commits: int
    statements: int | None
    """None if the server cannot count them."""


def run(databases: list[Database], workers: int, seconds: float, settle_s: float) -> Table:
    """Measure for `seconds`, from `settle_s` after all workers are active: reapers ask less often after ten lost
    tickets, a second apart."""
    table = Table(
        "idle-workers",
        f"{workers:,} idle workers, default settings",
        ("workers CPU s/s", "connections", "commits/s", "statements/s", "server CPU s/s", "server MB"),
    )
    for database in databases:
        if isinstance(database, Postgres):
            with _room_for(database, workers * MAX_CONNECTIONS_EACH + 100) as counts_statements:
                _measure(table, database, workers, seconds, settle_s, counts_statements)
        else:
            _measure(table, database, workers, seconds, settle_s, False)
    table.notes.append(
        f"over {seconds:g} s; CPU is of all processes, one core is 1.0; server MB is what its processes hold of the "
        "memory (PSS), buffers included"
    )
    return table


def _measure(
    table: Table, database: Database, workers: int, seconds: float, settle_s: float, counts_statements: bool
) -> None:
    with stage_on(database) as stage:
        for _ in range(workers // STARTED_TOGETHER):
            stage.workers.start(STARTED_TOGETHER)
        wait_for(lambda: len(stage.ledger.workers.list(living_only=True)) >= workers, "all workers alive", every_s=0.5)
        if counts_statements:
            database.query(stage.url, "create extension if not exists pg_stat_statements")
        time.sleep(settle_s)
        cpu, server_cpu, begun_s = stage.workers.cpu(), database.server_cpu(), time.monotonic()
        before = _server(stage, counts_statements)
        time.sleep(seconds)
        elapsed_s = time.monotonic() - begun_s
        cpu, server_cpu = stage.workers.cpu() - cpu, database.server_cpu() - server_cpu
        after = _server(stage, counts_statements)
        living = len(stage.ledger.workers.list(living_only=True))
        if living != workers:
            raise RuntimeError(f"{living} of {workers} idle workers are alive; the figures would be worthless")
        table.add(
            database.name, cpu.all_s / elapsed_s, *_per_second(database, before, after, server_cpu.all_s, elapsed_s)
        )


def _per_second(
    database: Database, before: Server | None, after: Server | None, server_cpu_s: float, elapsed_s: float
) -> tuple[float | None, ...]:
    if before is None or after is None or not isinstance(database, Postgres):
        return (None,) * 5
    statements = None
    if before.statements is not None and after.statements is not None:
        statements = (after.statements - before.statements) / elapsed_s
    return (
        after.connections,
        (after.commits - before.commits) / elapsed_s,
        statements,
        server_cpu_s / elapsed_s,
        _memory_bytes(database.server.pid) / (1 << 20),
    )


def _server(stage: Stage, counts_statements: bool) -> Server | None:
    """Return the counters of the workers' server; None if there is no server."""
    database = stage.database
    if not isinstance(database, Postgres):
        return None
    connections, commits = database.query(
        stage.url,
        "select (select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name in ('unstuck turn', 'unstuck service')),"
        " (select xact_commit + xact_rollback from pg_stat_database where datname = current_database())",
    )[0]
    if not counts_statements:
        return Server(int(connections), int(commits), None)
    [(statements,)] = database.query(
        stage.url,
        "select coalesce(sum(calls), 0) from pg_stat_statements where toplevel"
        " and query !~ 'pg_stat_|datname|current_database'"
        " and dbid = (select oid from pg_database where datname = current_database())",
    )
    return Server(int(connections), int(commits), int(statements))


def _memory_bytes(pid: int) -> int:
    """Return what a server holds; memory that its processes share is counted once."""
    server = OwnProcess(pid)
    total = 0
    for process in (server, *server.children()):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


@contextmanager
def _room_for(database: Postgres, connections: int) -> Iterator[bool]:
    """Restart the server with room for these connections; yield whether it can count statements."""
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
