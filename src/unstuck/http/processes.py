"""Serve from several processes on one socket: start them, replace those that die, and end them together.

The parent serves nothing and never opens the ledger, so that nothing stands between a signal and its children.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from unstuck.http.auth.shared_counters import Member, ServerGroup
from unstuck.logs import logger
from unstuck.runner.linux import die_with_parent

log = logger("unstuck.http")

ENDS_WITHIN_S = 15.0
"""How long children may take to end before they are killed; by themselves they take at most ten seconds."""
QUICK_S = 5.0
"""A child that ends sooner after its start than this is not replaced at once."""
LONGEST_PAUSE_S = 30.0
LOOK_S = 1.0
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass
class _Child:
    number: int
    pid: int = 0
    started_s: float = 0.0
    start_at_s: float = 0.0
    pause_s: float = 0.0


class Processes:
    """The children of one server. `work` serves in a child until it is asked to end."""

    def __init__(self, group: ServerGroup, work: Callable[[Member], None]) -> None:
        self._group = group
        self._work = work
        self._children = [_Child(number) for number in range(group.processes)]

    def run(self) -> int:
        """Serve until a signal ends it; return the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        # A blocked signal whose action is to be ignored is thrown away: SIGCHLD must have a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            now_s = time.monotonic()
            for child in self._children:
                if not child.pid and now_s >= child.start_at_s:
                    self._start(child)
            told = signal.sigtimedwait(_WATCHED, LOOK_S)
            self._collect()
            if told is not None and told.si_signo in (signal.SIGTERM, signal.SIGINT):
                return self._end()

    def _start(self, child: _Child) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be(child, parent)
        child.pid, child.started_s = pid, time.monotonic()
        log.info("Started a server process", number=child.number, pid=pid)

    def _be(self, child: _Child, parent: int) -> None:
        """Serve as a child, and never return."""
        code = 1
        try:
            if not die_with_parent(signal.SIGTERM, parent):
                os._exit(1)
            # Of its own: what a person types at the terminal is for the parent, which passes it on in order.
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            self._work(Member(self._group, child.number))
            code = 0
        except KeyboardInterrupt:
            code = 0
        except BaseException:
            log.exception("A server process failed", number=child.number)
        finally:
            os._exit(code)

    def _collect(self) -> None:
        """Take note of children that ended, and plan who comes in their place."""
        for child, status in self._ended():
            now_s = time.monotonic()
            lived_s = now_s - child.started_s
            child.pause_s = 0.0 if lived_s >= QUICK_S else min(LONGEST_PAUSE_S, max(1.0, 2 * child.pause_s))
            child.start_at_s = now_s + child.pause_s
            if self._group.open_requests is not None:
                self._group.open_requests.clear(child.number)
            log.error(
                "A server process ended unexpectedly. Its connections are lost; clients that ask again are served by "
                "the others, and a new process takes its place.",
                number=child.number,
                pid=child.pid,
                cause=_how(status),
                lived_s=round(lived_s, 1),
                starts_in_s=child.pause_s,
            )
            child.pid = 0

    def _ended(self) -> list[tuple[_Child, int]]:
        found = []
        for child in self._children:
            if child.pid:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    found.append((child, status))
        return found

    def _end(self) -> int:
        """End all children in order; kill those that do not."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        code = 0
        self._tell(signal.SIGTERM)
        while any(child.pid for child in self._children):
            signal.sigtimedwait([signal.SIGCHLD], max(0.01, min(LOOK_S, deadline_s - time.monotonic())))
            for child, status in self._ended():
                # One that has only just begun is ended by the signal itself.
                code = max(code, 0 if os.waitstatus_to_exitcode(status) in (0, -signal.SIGTERM) else 1)
                child.pid = 0
            if time.monotonic() >= deadline_s:
                log.warning("Server processes did not end in time and are killed")
                self._tell(signal.SIGKILL)
                deadline_s += ENDS_WITHIN_S
        return code

    def _tell(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.pid:
                os.kill(child.pid, number)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    more = " (perhaps out of memory: see the kernel's log)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{more}"
