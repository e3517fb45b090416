"""Give benchmarks empty ledgers on both databases, and a look into them that costs the workers nothing."""

import itertools
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import psutil
import psycopg
from tests.support.postgres import PgServer, start_postgres

from bench.processes import CpuClock, cpu_of_family

DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
"""What the server of the tests goes without. SQLite syncs every commit, so a comparison needs it."""


class Database(ABC):
    """A place for ledgers; `fresh` gives the URL of an empty one."""

    name: str

    @abstractmethod
    def fresh(self) -> str: ...

    @abstractmethod
    def query(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        """Ask with SQL that both understand; `{jobs}` stands for the table of jobs."""

    @abstractmethod
    def durability(self) -> str:
        """Return, in one line, what a commit of this database survives."""

    @abstractmethod
    def server_cpu(self) -> CpuClock:
        """Give the CPU time of the server's own processes; zero where there is none."""

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
        return f"{self.name} {apsw.sqlite_lib_version()}: {_disk(self.folder)}"

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
        return f"{self.name} {self.setting('server_version')}: {settings}, {_disk(self.server.data)}"

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
def open_databases(names: list[str]) -> Iterator[list[Database]]:
    """Bring up what was asked for ('sqlite', 'postgresql'), and clean up behind it."""
    with temporary_folder() as folder:
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


def _disk(folder: Path) -> str:
    """Return on which file system a folder is."""
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(one.mountpoint)]
    kind = max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown"
    return f"files in memory ({kind}), where nothing is synced" if kind in ("tmpfs", "ramfs") else f"files on {kind}"
