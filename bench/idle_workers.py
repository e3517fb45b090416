"""Count what a PostgreSQL was asked, by the names that the ledger's statements have, and compare two counts."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import psutil
from tests.support.signals import OwnProcess

from bench.databases import Database, Postgres
from bench.fleet import Stage, stage_on
from bench.idle_replay import WORKERS_PER_HOST, pgbench_of, replayed
from bench.processes import wait_for
from bench.report import Table
from unstuck import config
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.recovery.reap import Reaper

Calls = dict[str, float]
"""Calls per second, by the statement's name in the `.sql` files."""

OTHERS = "others"
FAIR_PART = 0.05
"""What is asked less often than that was counted too seldom to say much alone; it is part of the sum."""


def calls_of(database: Postgres, stage: Stage, elapsed_s: float) -> Calls:
    """Give what was asked since the counters were reset, without the look at them."""
    names = {_shape(text.decode()): name for name, text in cast(PostgresLedger, stage.ledger).sql.items()}
    rows = database.query(
        stage.url,
        "select query, calls from pg_stat_statements where toplevel and query !~ 'pg_stat_|datname|current_database'"
        " and dbid = (select oid from pg_database where datname = current_database())",
    )
    calls: Calls = {}
    for text, count in rows:
        name = names.get(_shape(text), OTHERS)
        calls[name] = calls.get(name, 0.0) + count / elapsed_s
    return calls


def compared(real: Calls, replayed: Calls) -> str:
    """Say both, the most frequent first."""
    names = sorted({*real, *replayed}, key=lambda name: -real.get(name, 0.0))
    each = (f"{name} {real.get(name, 0.0):.2f} and {replayed.get(name, 0.0):.2f}" for name in names)
    return f"{', '.join(each)}; in all {sum(real.values()):.1f} and {sum(replayed.values()):.1f}"


def minutely_each(calls: Calls, workers: int) -> Calls:
    """Give calls per minute of one worker."""
    return {name: count * 60 / workers for name, count in calls.items()}


def disagreement(real: Calls, replayed: Calls) -> float:
    """Give the largest share by which the sums differ, or a statement that is a fair part of them."""
    total = sum(real.values())
    shares = [abs(sum(replayed.values()) / total - 1.0)]
    shares += [abs(replayed.get(name, 0.0) / calls - 1.0) for name, calls in real.items() if calls >= FAIR_PART * total]
    return max(shares)


def _shape(text: str) -> str:
    """Leave out what each writes in its own way: parameters, constants and their types, white space."""
    text = re.sub(r"%\(\w+\)s|\$\d+|'[^']*'|\b(\d+(\.\d+)?|true|false|null)\b|(?<=extract\()epoch", "?", text)
    return " ".join(re.sub(r"\?::(double precision|\w+)(\[\])?", "?", text).replace("%%", "%").split())


REAL_WORKERS = WORKERS_PER_HOST
BORN_TOGETHER = 2
"""All at once starve each other on a small machine."""
SETTLE_S = 20.0
"""A reaper learns by ten lost tickets, a second apart, how many there are, and asks less often from then on."""
MOST_CONNECTIONS_EACH = 3
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
    table.notes.append(
        f"over {seconds:.0f} s; server CPU is of all its processes, one core is 1.0; server MB is what they hold of the"
        " memory (PSS), buffers included"
    )
    return table


def _measure_all(table: Table, database: Postgres, sizes: list[int], seconds: float, counts_statements: bool) -> None:
    with stage_on(database) as stage:
        for _ in range(REAL_WORKERS // BORN_TOGETHER):
            stage.workers.start(BORN_TOGETHER)
        real = _observed(stage, database, REAL_WORKERS, seconds, counts_statements)
        _add(table, f"{REAL_WORKERS:,} real workers", real)
    program = pgbench_of(database.server)
    if program is None:
        table.notes.append("no more than these: `pgbench`, which replays the others, is not installed with this server")
        return
    for workers in dict.fromkeys((REAL_WORKERS, *sizes)):
        with stage_on(database) as stage, replayed(stage, database.server, program, workers) as clients:
            cpu, begun_s = clients.cpu(), time.monotonic()
            idle = _observed(stage, database, workers, seconds, counts_statements)
            clients.check()
            cpu_share = (clients.cpu() - cpu).all_s / (time.monotonic() - begun_s)
            silent_s = _judged(stage, workers)
        _add(table, f"{workers:,} replayed", idle)
        table.notes.append(
            f"{workers:,} replayed: no beat was older than {silent_s:.2f} s in the end, and a real reaper's sweep"
            f" suspected nobody; `pgbench` took {cpu_share:.2f} of a core"
        )
        if real.calls is not None and idle.calls is not None:
            asked, replay = minutely_each(real.calls, REAL_WORKERS), minutely_each(idle.calls, workers)
            table.notes.append(f"calls per minute and worker, real and {workers:,} replayed: {compared(asked, replay)}")
            if workers == REAL_WORKERS and disagreement(asked, replay) > MOST_DISAGREEMENT:
                raise RuntimeError(f"The replay does not do what real workers do: {table.notes[-1]}")


def _judged(stage: Stage, workers: int) -> float:
    """Sweep the replayed workers with a real reaper, and return the longest silence."""
    silent_s = stage.ledger.fleet().silent_s
    done = Reaper(stage.ledger, config.load({"url": stage.url}).recovery, by="bench").sweep(ticket=False)
    if done.watched != workers or done.suspected or done.deaths:
        raise RuntimeError(f"a reaper saw {done.watched} of {workers} idle workers: {done.counts()}")
    return silent_s


def _add(table: Table, label: str, idle: Idle) -> None:
    statements = None if idle.calls is None else sum(idle.calls.values())
    table.add(label, idle.connections, idle.commits, statements, idle.server_cpu, idle.server_bytes / (1 << 20))


def _observed(stage: Stage, database: Postgres, workers: int, seconds: float, counts_statements: bool) -> Idle:
    if counts_statements:
        database.query(stage.url, "create extension if not exists pg_stat_statements")
    wait_for(lambda: len(stage.ledger.workers(living_only=True)) >= workers, "all born", every_s=0.5)
    time.sleep(SETTLE_S)
    # In the same order at both ends: a look takes its time with thousands of processes, and so all count equally long.
    begun_s, cpu = time.monotonic(), database.server_cpu()
    connections, commits = _activity(database, stage.url)
    if counts_statements:
        database.query(stage.url, "select pg_stat_statements_reset()")
    time.sleep(seconds)
    elapsed_s, cpu = time.monotonic() - begun_s, database.server_cpu() - cpu
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
