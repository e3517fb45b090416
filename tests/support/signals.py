"""Send signals to processes of this run, and to no others.

    runner = OwnProcess(pid)            # raises psutil.NoSuchProcess if it has ended
    runner.send_signal(signal.SIGSTOP)
    runner.kill()

The kernel gives the number of a process that has ended to another one, sooner or later. So a process is held by a
pidfd, and is checked after that: it descends from this process, or from one that has the mark of this run in its
environment. Children of `subprocess` need no such care: their number stays theirs until they are
waited for.
"""

import os
import select
import signal
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from tests.support.run_guard import MARK, note_memory_of


class OwnProcess(psutil.Process):
    """A process of this run. Every signal goes through its pidfd."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise psutil.NoSuchProcess(pid) from None
        weakref.finalize(self, os.close, self._pidfd)
        # After it is held: what is read now is about the process behind the pidfd, or about none.
        if not _is_of_this_run(pid) or not self.is_running():
            raise psutil.NoSuchProcess(pid, msg="no process of this run has this number")

    @property
    def ended(self) -> bool:
        """Whether it has ended, though nothing may have waited for it yet."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def send_signal(self, sig: int) -> None:
        if sig == signal.SIGKILL:
            note_memory_of(self.pid)
        try:
            signal.pidfd_send_signal(self._pidfd, sig)
        except ProcessLookupError:
            raise psutil.NoSuchProcess(self.pid) from None

    def suspend(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def children(self, recursive: bool = False) -> list["OwnProcess"]:
        return [*descendants(self.pid)] if recursive else [*_children(self.pid)]


def descendants(pid: int) -> Iterator[OwnProcess]:
    """Yield what descends from a process, parents before their children."""
    found = [*_children(pid)]
    # Grows while it is read.
    for process in found:
        yield process
        found += _children(process.pid)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process of this run."""
    OwnProcess(pid).send_signal(number)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to each process of this run that is in the group of this leader, which may have ended."""
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(pid) == leader:
                send_signal(pid, number)


def _children(pid: int) -> Iterator[OwnProcess]:
    # The kernel knows them: to look for them among all processes of a busy machine takes a hundred times as long.
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (thread / "children").read_text().split()]
    for child in sorted(found):
        with suppress(psutil.NoSuchProcess):
            yield OwnProcess(child)


def _is_of_this_run(pid: int) -> bool:
    mark = os.environ.get(MARK)
    wanted = f"\0{MARK}={mark}".encode()
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            if mark and wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False
