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
import psycopg
from tests.support.postgres import PgServer, start_postgres

from bench.processes import CpuClock, cpu_of_family


class Database(ABC):
    """A place for ledgers; `fresh` gives the URL of an empty one."""

    name: str

    @abstractmethod
    def fresh(self) -> str: ...

    @abstractmethod
    def query(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        """Ask with SQL that both understand; `{jobs}` stands for the table of jobs."""

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

    def server_cpu(self) -> CpuClock:
        return cpu_of_family(self.server.pid)

    def drop(self, url: str) -> None:
        self.server.drop_database(url)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="unstuck-bench-"))
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
        with start_postgres() as server:
            databases.append(Postgres(server))
            if "sqlite" in names:
                databases.append(Sqlite(folder))
            yield databases
