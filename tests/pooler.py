"""A PgBouncer in transaction mode before a server of ours."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from tests.fleet import wait_for
from tests.pg import as_account, free_port

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
        port = free_port()
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
    folder = Path(tempfile.mkdtemp(prefix="pgb"))
    pooler = Pooler(url, folder, pool_size)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.stop()
        shutil.rmtree(folder)
