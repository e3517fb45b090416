"""Measure the bare machine in the same run: on a shared disk nothing else says what a figure is worth."""

import os
import threading
import time
from pathlib import Path

import apsw
import psycopg

from bench.databases import Database, Postgres, temporary_folder
from bench.report import Table

BLOCK = b"\0" * 8192
ROWS = 10_000


def run(databases: list[Database], seconds_each: float) -> Table:
    table = Table("machine", "Bare machine, in the same run", ("per second",))
    with temporary_folder() as folder:
        table.add("fdatasync of 8 KiB written", _syncs(folder, seconds_each))
        table.add("SQLite: one-row UPDATE, WAL, synchronous=FULL", _sqlite_commits(folder, seconds_each))
    for database in databases:
        if isinstance(database, Postgres):
            url = database.fresh()
            _prepare(url)
            for clients in (1, 8):
                table.add(f"PostgreSQL: one-row UPDATE, {clients} client(s)", _updates(url, clients, seconds_each))
            database.drop(url)
    table.notes.append("each client commits one random row of 10,000 at a time, over TCP, through psycopg, in a thread")
    return table


def _syncs(folder: Path, seconds: float) -> float:
    fd = os.open(folder / "sync", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Preallocated, as a log is: growing a file would pay for its metadata too.
        for _ in range(256):
            os.write(fd, BLOCK)
        os.fsync(fd)
        count, begun_s = 0, time.monotonic()
        while (elapsed_s := time.monotonic() - begun_s) < seconds:
            os.pwrite(fd, BLOCK, (count % 256) * len(BLOCK))
            os.fdatasync(fd)
            count += 1
        return count / elapsed_s
    finally:
        os.close(fd)


def _sqlite_commits(folder: Path, seconds: float) -> float:
    connection = apsw.Connection(str(folder / "machine.db"))
    try:
        connection.execute("pragma journal_mode = wal; pragma synchronous = full")
        connection.execute("create table t (id integer primary key, n integer); begin")
        connection.executemany("insert into t values (?, 0)", ((number,) for number in range(ROWS)))
        connection.execute("commit")
        count, begun_s = 0, time.monotonic()
        while (elapsed_s := time.monotonic() - begun_s) < seconds:
            connection.execute("update t set n = n + 1 where id = ?", (count * 7919 % ROWS,))
            count += 1
        return count / elapsed_s
    finally:
        connection.close()


def _prepare(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table t (id integer primary key, n integer) with (fillfactor = 70)")
        connection.execute("insert into t select g, 0 from generate_series(0, 9999) g")
        connection.execute("vacuum analyze t")


def _updates(url: str, clients: int, seconds: float) -> float:
    counts = [0] * clients
    ready = threading.Barrier(clients + 1)

    def work(me: int) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            ready.wait()
            number, deadline_s = me, time.monotonic() + seconds
            while time.monotonic() < deadline_s:
                number = (number * 7919 + 104_729) % ROWS
                connection.execute("update t set n = n + 1 where id = %s", (number,))
                counts[me] += 1

    threads = [threading.Thread(target=work, args=(me,)) for me in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    begun_s = time.monotonic()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - begun_s)
