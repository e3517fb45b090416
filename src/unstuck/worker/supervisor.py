"""Keep N workers running: start them, see them die, tell the reaper at once, replace them, and end with them.

The supervisor runs no jobs. Its workers stand in process groups of their own, so a Ctrl-C at the terminal reaches
them once, through us. They get SIGTERM from the kernel when the supervisor itself is killed, and then drain. It may
be process 1 of a container: whatever is orphaned falls to it, is ended and reaped.
"""

import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from unstuck import host, logs
from unstuck.config import Recovery
from unstuck.domain.events import EventKind
from unstuck.domain.units import brief
from unstuck.errors import UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.ledger.open import EXPECTED_LEDGER
from unstuck.maintenance.loop import Loop
from unstuck.metrics.counters import Counters
from unstuck.recovery.death_watch import DeathReporter
from unstuck.recovery.reap import Reaper
from unstuck.runner import linux, processes
from unstuck.runner.oom import OomWatch, shared_counter
from unstuck.worker.exit_status import OOM, Exit, exit_of, was_sigkilled
from unstuck.worker.sd_notify import SdListener, SdNotifier
from unstuck.worker.signals import StopRequests, heeded
from unstuck.worker.supervised import BRAKE_AT, RestartBackoff, SupervisedDashboard, SupervisedWorker, summary

STOP_GRACE_S = 40.0
"""Longer than a worker's own grace: it should have ended by itself long before."""
HURRY_GRACE_S = 15.0
BURIAL_GRACE_S = 5.0
LOOK_EVERY_S = 1.0
LOOK_AT_LAST_S = 0.1
SILENT_S = 180.0
"""A worker without any sign of life for so long is hung as a whole, its own watchdog included."""
LATE_S = 10.0
"""Who looks so late was frozen or asleep himself, and accuses nobody of silence."""
WATCHMAN_STUCK_S = 300.0
"""A round of the watchman that takes longer hangs; an outage only makes it fail, again and again."""

log = logs.logger("unstuck.supervisor")


class Supervisor:
    """`command` is the worker's command line; it is run once per place, with what `own` adds for that place."""

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        ledger: Ledger,
        recovery: Recovery,
        *,
        stop_grace_s: float = STOP_GRACE_S,
        herald: SdNotifier | None = None,
        companions: Sequence[SupervisedDashboard] = (),
        tallies: Counters | None = None,
        own: Callable[[int], Sequence[str]] = lambda number: (),
    ) -> None:
        assert workers >= 1, workers
        self._command = list(command)
        self._own = own
        self._places = [SupervisedWorker(number + 1, RestartBackoff()) for number in range(workers)]
        reaper = Reaper(ledger, recovery, by="supervisor", tallies=tallies)
        self._books = MetricsWriter(ledger, reaper.tallies, recovery.heartbeat_interval_s)
        self._watchman = Loop(reaper, self._books)
        self._undertaker = DeathReporter(reaper)
        self._herald = herald or SdNotifier()
        self._companions = list(companions)
        self._reports = SdListener()
        self._expected = {EXPECTED_LEDGER: ledger.ledger_id()}
        self._oom = OomWatch(shared_counter())
        self._stop_grace_s = stop_grace_s
        self._wishes = StopRequests()
        self._forwarded = 0
        self._asked_how = False
        self._stop_s: float | None = None
        self._killed = False
        self._code = 0
        self._looked_s = host.boottime_s()
        self._ear = self._bell = -1

    def run(self) -> int:
        """Supervise until told to stop; 0 when everybody ended in order."""
        # Whatever a dead worker leaves behind falls to us, and we end it.
        linux.adopt_orphans()
        with self._listening():
            self._undertaker.start()
            self._watchman.start()
            try:
                log.info("Supervisor started", workers=len(self._places), pid=os.getpid())
                while self._step():
                    self._wait()
                return self._code or (1 if self._killed else 0)
            finally:
                self._herald.stopping()
                self._end_all()
                self._watchman.stop()
                self._undertaker.stop(BURIAL_GRACE_S)
                self._watchman.join(BURIAL_GRACE_S)
                self._books.flush()
                self._reports.close()

    # One step -----------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Reap, replace, stop; False when there is nobody left to look after."""
        now_s = host.boottime_s()
        self._hear(now_s)
        self._reap(now_s)
        self._oom.look(now_s, frozenset())
        if self._asked_how:
            self._show_stacks()
        if self._wishes.count > self._forwarded:
            self._pass_on(now_s)
        if self._stop_s is None:
            if self._hopeless():
                return False
            for place in self._places:
                if place.empty and now_s >= place.replacing.at_s:
                    self._start(place, now_s)
            self._end_the_silent(now_s)
        elif now_s >= self._stop_s and self._living():
            self._kill_all()
        self._tell(now_s)
        going_on = any(place.pid for place in self._places) or (
            self._stop_s is None and not all(place.retired for place in self._places)
        )
        for companion in self._companions:
            # To the last worker, so that people can see how it ends.
            companion.tend(now_s) if going_on else companion.stop(now_s)
        return going_on or any(companion.pid for companion in self._companions)

    def _wait(self) -> None:
        now_s = host.boottime_s()
        wait_s = LOOK_EVERY_S
        if self._herald.watchdog_s is not None:
            wait_s = min(wait_s, self._herald.watchdog_s / 4)
        if self._stop_s is None:
            wait_s = min([wait_s, *(place.replacing.at_s - now_s for place in self._places if place.empty)])
        else:
            wait_s = min(wait_s, max(self._stop_s - now_s, 0.0) if self._living() else LOOK_AT_LAST_S)
        heard = select.select([self._ear, *self._reports.descriptors()], [], [], max(0.0, wait_s))[0]
        if self._ear in heard:
            os.read(self._ear, 4096)

    def _start(self, place: SupervisedWorker, now_s: float) -> None:
        place.fill([*self._command, *self._own(place.number)], {**self._reports.environment(), **self._expected}, now_s)
        if not self._reports.possible:
            place.ready_s = now_s
        log.info("Worker process started", place=place.number, pid=place.pid)

    # Signs of life ------------------------------------------------------------------------------

    def _hear(self, now_s: float) -> None:
        by_pid = {place.pid: place for place in self._places if place.pid}
        for pid, lines in self._reports.take():
            if place := by_pid.get(pid):
                place.heard_s = now_s
                if "READY=1" in lines and place.ready_s is None:
                    place.ready_s = now_s

    def _end_the_silent(self, now_s: float) -> None:
        """Kill who hangs as a whole. Its jobs were lost to its lease long ago; the place is wanted."""
        late, self._looked_s = now_s - self._looked_s > LATE_S, now_s
        for place in self._places:
            if late or host.is_stopped(place.pid):
                # Frozen, with us or by somebody who holds it on purpose: what it did not say proves nothing.
                place.heard_s = now_s
            elif place.ready_s is not None and now_s - place.heard_s > SILENT_S and self._reports.possible:
                place.why = f"by its supervisor, after {brief(SILENT_S)} without any sign of life"
                log.error("A worker process hangs and is killed", place=place.number, pid=place.pid)
                place.send(signal.SIGKILL)
                place.heard_s = now_s

    def _tell(self, now_s: float) -> None:
        """Let systemd know; a sign of life only while our own reaper lives too."""
        line = summary(self._places, now_s, stopping=self._stop_s is not None)
        if self._stop_s is not None:
            self._herald.stopping(line)
        elif any(place.ready_s is not None and place.pid for place in self._places):
            # One is enough: from here on jobs are served, and a place in trouble must not take the others down.
            self._herald.ready(line)
        self._herald.status(line)
        if self._watchman.turns(now_s, WATCHMAN_STUCK_S):
            self._herald.alive()

    # Deaths -------------------------------------------------------------------------------------

    def _reap(self, now_s: float) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            if place := next((place for place in self._places if place.pid == pid), None):
                why = place.why
                if not why and was_sigkilled(status) and self._oom.explain("", frozenset(), 1, 0).struck:
                    why = OOM
                self._lost(place, exit_of(status, usage, now_s - place.born_s, why), now_s)
            elif companion := next((one for one in self._companions if one.pid == pid), None):
                companion.lost(exit_of(status, usage, 0.0, ""), now_s)
        self._end_strays()

    def _lost(self, place: SupervisedWorker, end: Exit, now_s: float) -> None:
        facts = {"place": place.number, "pid": place.pid, "how": str(end), "registered": place.ready_s is not None}
        self._undertaker.report_death(place.pid, place.started, f"its supervisor saw it end: {end}", end.autopsy())
        if end.code != 0 and place.ready_s is None and self._stop_s is None:
            where = host.hostname()
            message = (
                f"Worker {place.number} of the supervisor {os.getpid()} on {where} ended before it registered: {end}"
            )
            self._undertaker.tell(EventKind.WORKER_STILLBORN, message, where)
        worked_s = place.worked_s(now_s)
        place.pid = 0
        if self._stop_s is not None:
            log.info("Worker process ended", **facts)
        elif end.code == 0:
            place.retired = True
            log.warning("Worker process ended in order; somebody stopped it, so it is not replaced", **facts)
        else:
            wait_s = place.replacing.after_death(now_s, lived_s=worked_s, code=end.code)
            if place.replacing.braked:
                log.error("Worker keeps dying; slowing down", again_in_s=wait_s, deaths=place.replacing.deaths, **facts)
                self._tell_crash_loop(place, end)
            else:
                log.error("Worker process died; replacing it", again_in_s=wait_s, **facts)

    def _tell_crash_loop(self, place: SupervisedWorker, end: Exit) -> None:
        # Once per series: from here on it only goes on.
        if place.replacing.deaths == BRAKE_AT:
            where = host.hostname()
            message = (
                f"Worker {place.number} of the supervisor {os.getpid()} on {where} died {BRAKE_AT} times in a row, "
                f"each time soon after its start; it is replaced ever more slowly. The last time: {end}"
            )
            self._undertaker.tell(EventKind.CRASH_LOOP, message, where)

    def _hopeless(self) -> bool:
        """Say whether every place failed to start again and again, none ever having worked."""
        # While nobody reaches the ledger no worker can start, and that is not the workers' fault.
        if self._watchman.cut_off or not all(place.replacing.hopeless for place in self._places):
            return False
        code = self._places[0].replacing.last_code
        log.error(
            "No worker stays up. Run the worker by hand to see why, mend it, and start again.",
            command=" ".join(self._command),
            last=f"exited with code {code}",
        )
        self._herald.status(f"gave up: no worker stays up (exited with code {code})")
        self._code = code if 0 < code < 126 else 1
        return True

    def _end_strays(self) -> None:
        """Kill what a dead worker left behind: as a subreaper we inherit whatever hid from its own parents."""
        ours = {place.pid for place in self._places} | {companion.pid for companion in self._companions}
        for pid in processes.children():
            if pid not in ours:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass

    # Stopping -----------------------------------------------------------------------------------

    def _pass_on(self, now_s: float) -> None:
        """Hand every signal on: the first asks the workers to drain, the next ones to hurry."""
        first = self._forwarded == 0
        self._forwarded = self._wishes.count
        if first:
            log.info("Received shutdown signal, gracefully exiting...", workers=self._living())
            self._stop_s = now_s + self._stop_grace_s
        else:
            log.warning("Received another shutdown signal, hurrying", workers=self._living())
            # Whoever asks a third time does not want to wait at all.
            grace_s = HURRY_GRACE_S if self._wishes.count == 2 else 0.0
            self._stop_s = min(self._stop_s or now_s, now_s + grace_s)
        for place in self._places:
            # A worker takes SIGTERM twice at once for one; SIGINT always counts.
            place.send(signal.SIGTERM if first else signal.SIGINT)

    def _kill_all(self) -> None:
        if not self._killed:
            self._killed = True
            log.error("Workers did not end in time and are killed", workers=self._living())
        for place in self._places:
            place.why = place.why or "by its supervisor: it did not end within the grace"
            place.send(signal.SIGKILL)

    def _end_all(self) -> None:
        """Leave nobody behind, however we got here: neither a process nor a zombie."""
        for place in self._places:
            if place.pid:
                place.send(signal.SIGKILL)
                os.waitpid(place.pid, 0)
                self._undertaker.report_death(place.pid, place.started, "its supervisor ended and killed it")
                place.pid = 0
        for companion in self._companions:
            companion.end()
        processes.kill_children()

    def _living(self) -> int:
        return sum(1 for place in self._places if place.pid)

    def _show_stacks(self) -> None:
        """SIGUSR1 asks what everybody is doing: we and our workers print the stacks of all threads."""
        self._asked_how = False
        faulthandler.dump_traceback()
        for place in self._places:
            if place.ready_s is not None:
                # One that is still starting might not listen yet, and would die of it.
                place.send(signal.SIGUSR1)

    # Signals ------------------------------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            raise UnstuckError("Supervisor.run must be called in the main thread: it handles signals.")
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)
        before = {number: signal.signal(number, self._note) for number in (*heeded(), signal.SIGUSR1)}
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

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._asked_how = True
            return
        self._wishes.note(number)
