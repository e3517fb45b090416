"""Open empty ledgers for benchmarks on both databases, and query them without costing the workers anything."""

import itertools
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import psutil
import psycopg
from tests.support.postgres import PgServer, start_postgres

from bench.processes import CpuClock, cpu_of_family

NAMES = ("postgresql", "sqlite")
DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
"""The server of the tests runs without these. SQLite syncs every commit, so a comparison needs them."""
SURVIVES = "a commit survives a power failure if the disk keeps what it synced"
IN_MEMORY = ("tmpfs", "ramfs")


class NotDurable(Exception):
    """A commit would be lost with the machine, so its figures say nothing."""


class Database(ABC):
    """A database server or folder for ledgers; `fresh` returns the URL of an empty one."""

    name: str

    @abstractmethod
    def fresh(self) -> str: ...

    @abstractmethod
    def query(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL that both understand; `{jobs}` stands for the table of jobs."""

    @abstractmethod
    def durability(self) -> str:
        """Return, in one line, what a commit of this database survives."""

    @abstractmethod
    def server_cpu(self) -> CpuClock:
        """Return the CPU time of the server's own processes; zero if there is no server."""

    def unfinished(self, url: str) -> int:
        return int(self.query(url, "select count(*) from {jobs} where finished_at is null")[0][0])

    @abstractmethod
    def drop(self, url: str) -> None: ...


class Sqlite(Database):
    name = "SQLite"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count(1)

    def fresh(self) -> str:
        return f"sqlite:///{self.folder / f'{next(self._numbers)}.db'}"

    def query(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        connection = apsw.Connection(url.removeprefix("sqlite://"))
        try:
            connection.set_busy_timeout(5000)
            return list(connection.execute(sql.replace("{jobs}", "unstuck_jobs")))
        finally:
            connection.close()

    def durability(self) -> str:
        return f"{self.name} {apsw.sqlite_lib_version()}: {_survives('synchronous=full', self.folder)}"

    def server_cpu(self) -> CpuClock:
        return CpuClock()

    def drop(self, url: str) -> None:
        path = Path(url.removeprefix("sqlite://"))
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink(missing_ok=True)


class Postgres(Database):
    name = "PostgreSQL"

    def __init__(self, server: PgServer) -> None:
        self.server = server

    def fresh(self) -> str:
        return self.server.new_database()

    def query(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(sql.replace("{jobs}", "unstuck.jobs"))
            return list(cursor.fetchall()) if cursor.description else []

    def setting(self, name: str) -> str:
        return str(self.query(self.server.url(), f"show {name}")[0][0])

    def durability(self) -> str:
        settings = ", ".join(f"{name}={self.setting(name)}" for name in DURABLE)
        return f"{self.name} {self.setting('server_version')}: {_survives(settings, self.server.data)}"

    def server_cpu(self) -> CpuClock:
        return cpu_of_family(self.server.pid)

    def drop(self, url: str) -> None:
        self.server.drop_database(url)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="unstuck-bench-"))
    folder.chmod(0o711)  # PostgreSQL may run under another account, in a folder below this one
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_databases(names: Sequence[str], *, in_memory: bool = False) -> Iterator[list[Database]]:
    """Yield the named databases, and remove their files at the end.

    Raise NotDurable if the folder for temporary files is in memory, unless `in_memory` allows it."""
    with temporary_folder() as folder:
        if _file_system(folder) in IN_MEMORY and not in_memory:
            raise NotDurable(
                f"{folder.parent} is in memory, where no commit survives a power failure. "
                "Set TMPDIR to a folder on a disk."
            )
        databases: list[Database] = []
        if "postgresql" not in names:
            yield [Sqlite(folder)]
            return
        settings = "\n".join(f"{name} = {value}" for name, value in DURABLE.items())
        # Beside the files of SQLite: the tests' server may keep its files in memory.
        with start_postgres(settings, home=folder) as server:
            databases.append(Postgres(server))
            if "sqlite" in names:
                databases.append(Sqlite(folder))
            yield databases


def _survives(settings: str, folder: Path) -> str:
    """Return what a commit survives, and the settings that make it so."""
    kind = _file_system(folder)
    survives = "a commit survives the end of the process only" if kind in IN_MEMORY else SURVIVES
    return f"{survives} ({settings}, files on {kind})"


def _file_system(folder: Path) -> str:
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(one.mountpoint)]
    return str(max(mounts, key=lambda one: len(one.mountpoint)).fstype) if mounts else "unknown"
