"""Keep N workers running: start them, see them die, tell the reaper at once, replace them, and end with them.

The supervisor runs no jobs. Its workers stand in process groups of their own, so a Ctrl-C at the terminal reaches
them once, through us. They get SIGTERM from the kernel when the supervisor itself is killed, and then drain.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import msgspec

from unstuck import host, logs
from unstuck.config import Recovery
from unstuck.domain.errors import UnstuckError
from unstuck.reaper.sweep import Reaper
from unstuck.reaper.undertaker import Undertaker
from unstuck.reaper.watchman import Watchman
from unstuck.runner import kernel
from unstuck.store.contract import Ledger
from unstuck.worker.replacing import Replacing

STOP_GRACE_S = 40.0
"""Longer than a worker's own grace: it should have ended by itself long before."""
HURRY_GRACE_S = 15.0
BURIAL_GRACE_S = 5.0
LOOK_EVERY_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Run in the child before it becomes the worker: another signal from the kernel when the supervisor is gone, and the
# question whether it is gone already. A program of its own, since nothing may run between fork and exec with threads.
_LEASH = (
    "import ctypes, os, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(143); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)

log = logs.logger("unstuck.supervisor")


class Child(msgspec.Struct):
    """One place in the fleet and who stands in it."""

    number: int
    replacing: Replacing
    pid: int = 0
    started: str = ""
    born_s: float = 0.0
    retired: bool = False
    """It ended in order without being asked by us: an operator stopped it, and it is not replaced."""


class Supervisor:
    """`command` is the worker's command line; it is run once per place, as it is."""

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        ledger: Ledger,
        recovery: Recovery,
        *,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        assert workers >= 1, workers
        self._command = list(command)
        self._children = [Child(number + 1, Replacing()) for number in range(workers)]
        reaper = Reaper(ledger, recovery, by="supervisor")
        self._watchman = Watchman(reaper)
        self._undertaker = Undertaker(reaper)
        self._stop_grace_s = stop_grace_s
        self._signals = 0
        self._forwarded = 0
        self._stop_s: float | None = None
        self._killed = False
        self._code = 0
        self._ear = self._bell = -1

    def run(self) -> int:
        """Supervise until told to stop; 0 when everybody ended in order."""
        # Whatever a dead worker leaves behind falls to us, and we end it.
        kernel.adopt_orphans()
        with self._listening():
            self._undertaker.start()
            self._watchman.start()
            try:
                log.info("Supervisor started", workers=len(self._children), pid=os.getpid())
                while self._step():
                    self._wait()
                return self._code or (1 if self._killed else 0)
            finally:
                self._end_all()
                self._watchman.stop()
                self._undertaker.stop(BURIAL_GRACE_S)
                self._watchman.join(BURIAL_GRACE_S)

    # One step -----------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Reap, replace, stop; False when there is nobody left to look after."""
        now_s = host.boottime_s()
        self._reap(now_s)
        if self._signals > self._forwarded:
            self._pass_on(now_s)
        if self._stop_s is None:
            if self._hopeless():
                return False
            for child in self._children:
                if child.pid == 0 and not child.retired and now_s >= child.replacing.at_s:
                    self._start(child, now_s)
        elif now_s >= self._stop_s:
            self._kill_all()
        return any(child.pid for child in self._children) or (
            self._stop_s is None and not all(child.retired for child in self._children)
        )

    def _wait(self) -> None:
        now_s = host.boottime_s()
        wait_s = LOOK_EVERY_S
        if self._stop_s is None:
            waiting = [child.replacing.at_s for child in self._children if not child.pid and not child.retired]
            wait_s = min([wait_s, *(at_s - now_s for at_s in waiting)])
        else:
            wait_s = min(wait_s, self._stop_s - now_s)
        if select.select([self._ear], [], [], max(0.0, wait_s))[0]:
            os.read(self._ear, 4096)

    def _start(self, child: Child, now_s: float) -> None:
        command = [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *self._command]
        child.pid = os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setpgroup=0,
            setsigmask=[],
            setsigdef=[*STOP_SIGNALS, signal.SIGCHLD, signal.SIGPIPE],
        )
        # The child is not reaped yet, so this pid is still his, whatever happened to him.
        child.started = host.process_started(child.pid)
        child.born_s = now_s
        log.info("Worker process started", place=child.number, pid=child.pid)

    # Deaths -------------------------------------------------------------------------------------

    def _reap(self, now_s: float) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            if child := next((child for child in self._children if child.pid == pid), None):
                self._lost(child, os.waitstatus_to_exitcode(status), now_s)
        self._end_strays()

    def _lost(self, child: Child, code: int, now_s: float) -> None:
        how = _how_it_ended(code)
        facts = {"place": child.number, "pid": child.pid, "lived_s": round(now_s - child.born_s, 1), "how": how}
        self._undertaker.bury(child.pid, child.started, f"its supervisor saw it end: {how}")
        child.pid = 0
        if self._stop_s is not None:
            log.info("Worker process ended", **facts)
        elif code == 0:
            child.retired = True
            log.warning("Worker process ended in order; somebody stopped it, so it is not replaced", **facts)
        else:
            wait_s = child.replacing.after_death(now_s, lived_s=now_s - child.born_s, code=code)
            if child.replacing.braked:
                log.error("Worker keeps dying; slowing down", again_in_s=wait_s, deaths=child.replacing.deaths, **facts)
            else:
                log.error("Worker process died; replacing it", again_in_s=wait_s, **facts)

    def _hopeless(self) -> bool:
        """Say whether every place failed to start again and again, none ever having worked."""
        if not all(child.replacing.hopeless for child in self._children):
            return False
        code = self._children[0].replacing.last_code
        log.error(
            "No worker stays up. Run the worker by hand to see why, mend it, and start again.",
            command=" ".join(self._command),
            last=_how_it_ended(code),
        )
        self._code = code if 0 < code < 126 else 1
        return True

    def _end_strays(self) -> None:
        """Kill what a dead worker left behind: as a subreaper we inherit whatever hid from its own parents."""
        ours = {child.pid for child in self._children}
        for pid in kernel.children():
            if pid not in ours:
                _send(pid, signal.SIGKILL)

    # Stopping -----------------------------------------------------------------------------------

    def _pass_on(self, now_s: float) -> None:
        """Hand every signal on: the first asks the workers to drain, the next ones to hurry."""
        first = self._forwarded == 0
        self._forwarded = self._signals
        if first:
            log.info("Received shutdown signal, gracefully exiting...", workers=self._living())
            self._stop_s = now_s + self._stop_grace_s
        else:
            log.warning("Received another shutdown signal, hurrying", workers=self._living())
            # Whoever asks a third time does not want to wait at all.
            grace_s = HURRY_GRACE_S if self._signals == 2 else 0.0
            self._stop_s = min(self._stop_s or now_s, now_s + grace_s)
        for child in self._children:
            if child.pid:
                # A worker takes SIGTERM twice at once for one; SIGINT always counts.
                _send(child.pid, signal.SIGTERM if first else signal.SIGINT)

    def _kill_all(self) -> None:
        if not self._killed:
            self._killed = True
            log.error("Workers did not end in time and are killed", workers=self._living())
        for child in self._children:
            if child.pid:
                _send(child.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Leave nobody behind, however we got here."""
        for child in self._children:
            if child.pid:
                _send(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                self._undertaker.bury(child.pid, child.started, "its supervisor ended and killed it")
                child.pid = 0
        self._end_strays()

    def _living(self) -> int:
        return sum(1 for child in self._children if child.pid)

    # Signals ------------------------------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            raise UnstuckError("Supervisor.run must be called in the main thread: it handles signals.")
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        fd = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._ear)
            os.close(self._bell)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1


def _send(pid: int, number: int) -> None:
    # Only to children that are not reaped yet: their pids cannot belong to anybody else.
    try:
        os.kill(pid, number)
    except OSError:
        pass


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
