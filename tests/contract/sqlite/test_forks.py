"""A fork in the middle of things: neither side carries the other's connections, and no lock outlives its owner."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.builders import put
from tests.support.signals import send_signal

from unstuck.config import Settings
from unstuck.errors import LedgerError
from unstuck.ledger.sqlite import database
from unstuck.ledger.sqlite.ledger import SqliteLedger

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")


@pytest.fixture
def ledger(tmp_path: Path) -> SqliteLedger:
    ledger = SqliteLedger(Settings(url=f"sqlite:///{tmp_path}/jobs.db"))
    ledger.migrate()
    return ledger


def in_child(action: Callable[[], object]) -> int:
    """Run something in a forked child and give its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@contextmanager
def writing(ledger: SqliteLedger) -> Iterator[threading.Event]:
    """Have a write under way in another thread; it ends when told to, at the latest with the block."""
    inside, go = threading.Event(), threading.Event()

    def write() -> None:
        with ledger.db.write() as cursor:
            cursor.execute("INSERT INTO unstuck_queues (name) VALUES ('slow')")
            inside.set()
            go.wait()

    thread = threading.Thread(target=write)
    thread.start()
    inside.wait()
    try:
        yield go
    finally:
        go.set()
        thread.join()


def test_parent_and_child_both_go_on_with_connections_of_their_own(ledger: SqliteLedger) -> None:
    put(ledger)
    assert in_child(lambda: [put(ledger) for _ in range(5)]) == 0
    put(ledger)
    assert ledger.jobs.count() == {"pending": 7}


def test_nothing_is_open_at_the_moment_of_the_fork(ledger: SqliteLedger) -> None:
    put(ledger)

    def look() -> None:
        mine = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        assert not [name for name in mine if name.startswith(str(ledger.db.path))], mine

    assert in_child(look) == 0


def test_a_fork_waits_for_the_write_that_is_under_way(ledger: SqliteLedger) -> None:
    with writing(ledger) as go:
        threading.Timer(0.2, go.set).start()
        assert in_child(lambda: put(ledger)) == 0
    put(ledger)
    assert ledger.jobs.count() == {"pending": 2}


def test_a_child_torn_from_a_write_that_does_not_end_is_refused_and_harms_nobody(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "FORK_PATIENCE_S", 0.1)

    def refused() -> None:
        with pytest.raises(LedgerError, match="forked in the middle of a write"):
            put(ledger)

    with writing(ledger):
        assert in_child(refused) == 0
    put(ledger)
    assert ledger.jobs.count() == {"pending": 1}


def test_a_child_does_not_keep_the_lock_of_a_parent_that_was_killed(ledger: SqliteLedger) -> None:
    """The lock belongs to the open file, which a fork shares: without care it would outlive its owner."""
    put(ledger)
    read, write = os.pipe()
    until, end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(end)
        inside = threading.Event()

        def hold() -> None:
            ledger.db.lock.acquire(time.monotonic() + 10)
            inside.set()

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        grandchild = os.fork()
        if grandchild == 0:
            os.write(write, b"forked")
            os.read(until, 1)
            os._exit(0)
        os.read(until, 1)
    os.close(until)
    assert os.read(read, 100) == b"forked"
    send_signal(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        before = time.monotonic()
        put(ledger)
        assert time.monotonic() - before < 5
    finally:
        for fd in (read, write, end):
            os.close(fd)
