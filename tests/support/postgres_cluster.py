"""A primary with a streaming standby beside it, for failovers.

with start_pair() as pair:
    url = pair.primary.new_database()
    pair.primary.kill()
    pair.promote()
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from tests.support import process_logs
from tests.support.fleet import wait_for
from tests.support.postgres import PgServer, as_account, prepare_postgres, reserve_port
from tests.support.run_guard import folder_prefix

PROMOTION_S = 30


@dataclass
class Pair:
    """Two servers with the same data; the second replays what the first writes until it is promoted."""

    primary: PgServer
    standby: PgServer

    def url_of_both(self, url: str) -> str:
        """Return the address of a database with both hosts in it, the primary first."""
        host = f"127.0.0.1:{self.primary.port}"
        assert host in url, url
        return url.replace(host, f"{host},127.0.0.1:{self.standby.port}")

    def url_of_standby(self, url: str) -> str:
        return url.replace(f":{self.primary.port}/", f":{self.standby.port}/")

    def catch_up(self) -> None:
        """Wait until the standby has replayed everything that the primary has committed."""
        with psycopg.connect(self.primary.url(), autocommit=True) as primary:
            written = primary.execute("select pg_current_wal_flush_lsn()").fetchone()
        assert written is not None
        with psycopg.connect(self.standby.url(), autocommit=True) as standby:

            def replayed() -> bool:
                return standby.execute("select pg_last_wal_replay_lsn() >= %s::pg_lsn", written).fetchone() == (True,)

            wait_for(replayed, "the standby to replay everything")

    def promote(self) -> None:
        """Make the standby a primary; it writes when this returns."""
        with psycopg.connect(self.standby.url(), autocommit=True) as standby:
            assert standby.execute("select pg_promote(true, %s)", (PROMOTION_S,)).fetchone() == (True,)

    def stop_replication(self) -> None:
        """Let the standby receive nothing more: what is committed from now on is lost with the primary."""
        with (self.standby.data / "postgresql.conf").open("a") as config:
            config.write("primary_conninfo = ''\n")
        self.standby.execute("select pg_reload_conf()")
        with psycopg.connect(self.standby.url(), autocommit=True) as standby:

            def alone() -> bool:
                return standby.execute("select count(*) from pg_stat_wal_receiver").fetchone() == (0,)

            wait_for(alone, "the standby to be alone")

    def lag(self, seconds: float) -> None:
        """Let the standby replay each commit this much later, from now on."""
        with (self.standby.data / "postgresql.conf").open("a") as config:
            config.write(f"recovery_min_apply_delay = {int(seconds * 1000)}ms\n")
        self.standby.execute("select pg_reload_conf()")


@contextmanager
def start_pair(settings: str = "") -> Iterator[Pair]:
    """Run a primary and its standby for as long as the block lasts."""
    with prepare_postgres(settings) as primary, prepare_postgres(copy_of=primary) as standby:
        _follow(primary, standby)
        primary.start()
        standby.start()
        pair = Pair(primary, standby)
        pair.catch_up()
        yield pair


def _follow(primary: PgServer, standby: PgServer) -> None:
    (standby.data / "standby.signal").touch()
    with (standby.data / "postgresql.conf").open("a") as config:
        config.write(f"primary_conninfo = 'host=127.0.0.1 port={primary.port} user=postgres'\n")
        # A standby of ours comes back at once when it lost its primary for a moment.
        config.write("wal_retrieve_retry_interval = 100ms\nwal_receiver_timeout = 2s\n")


PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_pgbouncer = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")


class Pooler:
    """One pooler for one database; it can be stopped and started again on the same port."""

    def __init__(self, url: str, folder: Path, pool_size: int) -> None:
        parts = urlsplit(url)
        database = parts.path[1:]
        self._folder = folder
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        self._reserved = reserve_port()
        port = int(self._reserved.getsockname()[1])
        self._config = folder / "pgbouncer.ini"
        self._config.write_text(
            f"[databases]\n{database} = user={parts.username} host=127.0.0.1 port={parts.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\nmax_client_conn = 100\ndefault_pool_size = {pool_size}\n[users]\n"
        )
        self.url = f"postgresql://{parts.username}@127.0.0.1:{port}/{database}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PGBOUNCER is not None
        process_logs.follow(self._folder / "log", (self._folder / "log").exists)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PGBOUNCER, self._config], stdout=log, stderr=log, cwd=self._folder, **as_account(self._account)
            )
        wait_for(self._answers, "pgbouncer to answer")

    def stop(self) -> None:
        """End it at once: every client loses its connection."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(10)
            self._process = None

    def close(self) -> None:
        self.stop()
        self._reserved.close()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def start_pooler(url: str, pool_size: int = 2) -> Iterator[Pooler]:
    """Run a pooler before the database of this URL for as long as the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix("pgb"), dir="/tmp"))
    pooler = Pooler(url, folder, pool_size)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.close()
        shutil.rmtree(folder)
