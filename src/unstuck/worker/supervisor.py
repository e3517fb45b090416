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
from collections.abc import Iterator, Sequence
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
SWEEP_STUCK_S = 300.0
"""A sweep of the reaper that takes longer is taken to hang; an outage only makes it fail, again and again."""

log = logs.logger("unstuck.supervisor")


class Supervisor:
    """`command` is the worker's command line; it is run once per place."""

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        ledger: Ledger,
        recovery: Recovery,
        *,
        stop_grace_s: float = STOP_GRACE_S,
        sd_notifier: SdNotifier | None = None,
        companions: Sequence[SupervisedDashboard] = (),
    ) -> None:
        assert workers >= 1, workers
        self._command = list(command)
        self._workers = [SupervisedWorker(number + 1, RestartBackoff()) for number in range(workers)]
        reaper = Reaper(ledger, recovery, by="supervisor")
        self._metrics_writer = MetricsWriter(ledger, reaper.counters, recovery.heartbeat_interval_s)
        self._reaper_loop = Loop(reaper, self._metrics_writer)
        self._death_reporter = DeathReporter(reaper)
        self._sd_notifier = sd_notifier or SdNotifier()
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
        self._wake_fd = self._waker_fd = -1

    def run(self) -> int:
        """Supervise until told to stop; 0 when everybody ended in order."""
        # Whatever a dead worker leaves behind falls to us, and we end it.
        linux.adopt_orphans()
        with self._listening():
            self._death_reporter.start()
            self._reaper_loop.start()
            try:
                log.info("Supervisor started", workers=len(self._workers), pid=os.getpid())
                while self._step():
                    self._wait()
                return self._code or (1 if self._killed else 0)
            finally:
                self._sd_notifier.stopping()
                self._end_all()
                self._reaper_loop.stop()
                self._death_reporter.stop(BURIAL_GRACE_S)
                self._reaper_loop.join(BURIAL_GRACE_S)
                self._metrics_writer.flush()
                self._reports.close()

    # One step -----------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Reap, replace, stop; False when there is nobody left to look after."""
        now_s = host.boottime_s()
        self._hear(now_s)
        self._reap(now_s)
        self._oom.look(now_s)
        if self._asked_how:
            self._show_stacks()
        if self._wishes.count > self._forwarded:
            self._pass_on(now_s)
        if self._stop_s is None:
            if self._hopeless():
                return False
            for worker in self._workers:
                if worker.empty and now_s >= worker.replacing.at_s:
                    self._start(worker, now_s)
            self._end_the_silent(now_s)
        elif now_s >= self._stop_s and self._living():
            self._kill_all()
        self._tell(now_s)
        going_on = any(worker.pid for worker in self._workers) or (
            self._stop_s is None and not all(worker.retired for worker in self._workers)
        )
        for dashboard in self._companions:
            # To the last worker, so that people can see how it ends.
            dashboard.tend(now_s) if going_on else dashboard.stop(now_s)
        return going_on or any(dashboard.pid for dashboard in self._companions)

    def _wait(self) -> None:
        now_s = host.boottime_s()
        wait_s = LOOK_EVERY_S
        if self._sd_notifier.watchdog_s is not None:
            wait_s = min(wait_s, self._sd_notifier.watchdog_s / 4)
        if self._stop_s is None:
            wait_s = min([wait_s, *(worker.replacing.at_s - now_s for worker in self._workers if worker.empty)])
        else:
            wait_s = min(wait_s, max(self._stop_s - now_s, 0.0) if self._living() else LOOK_AT_LAST_S)
        heard = select.select([self._wake_fd, self._reports.fileno()], [], [], max(0.0, wait_s))[0]
        if self._wake_fd in heard:
            os.read(self._wake_fd, 4096)

    def _start(self, worker: SupervisedWorker, now_s: float) -> None:
        worker.fill(self._command, {**self._reports.environment(), **self._expected}, now_s)
        log.info("Worker process started", place=worker.number, pid=worker.pid)

    # Signs of life ------------------------------------------------------------------------------

    def _hear(self, now_s: float) -> None:
        by_pid = {worker.pid: worker for worker in self._workers if worker.pid}
        for pid, lines in self._reports.take():
            if worker := by_pid.get(pid):
                worker.heard_s = now_s
                if "READY=1" in lines and worker.ready_s is None:
                    worker.ready_s = now_s

    def _end_the_silent(self, now_s: float) -> None:
        """Kill who hangs as a whole. Its jobs were lost to its lease long ago; the place is wanted."""
        late, self._looked_s = now_s - self._looked_s > LATE_S, now_s
        for worker in self._workers:
            if late or host.is_stopped(worker.pid):
                # Frozen, with us or by somebody who holds it on purpose: what it did not say proves nothing.
                worker.heard_s = now_s
            elif worker.ready_s is not None and now_s - worker.heard_s > SILENT_S:
                worker.why = f"by its supervisor, after {brief(SILENT_S)} without any sign of life"
                log.error("A worker process hangs and is killed", place=worker.number, pid=worker.pid)
                worker.send(signal.SIGKILL)
                worker.heard_s = now_s

    def _tell(self, now_s: float) -> None:
        """Let systemd know; a sign of life only while our own reaper lives too."""
        line = summary(self._workers, now_s, stopping=self._stop_s is not None)
        if self._stop_s is not None:
            self._sd_notifier.stopping(line)
        elif any(worker.ready_s is not None and worker.pid for worker in self._workers):
            # One is enough: from here on jobs are served, and a place in trouble must not take the others down.
            self._sd_notifier.ready(line)
        self._sd_notifier.status(line)
        if self._reaper_loop.turns(now_s, SWEEP_STUCK_S):
            self._sd_notifier.alive()

    # Deaths -------------------------------------------------------------------------------------

    def _reap(self, now_s: float) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            if worker := next((worker for worker in self._workers if worker.pid == pid), None):
                why = worker.why
                if not why and was_sigkilled(status) and self._oom.explain("", 1, 0).struck:
                    why = OOM
                self._lost(worker, exit_of(status, usage, now_s - worker.born_s, why), now_s)
            elif dashboard := next((one for one in self._companions if one.pid == pid), None):
                dashboard.lost(exit_of(status, usage, 0.0, ""), now_s)
        self._end_strays()

    def _lost(self, worker: SupervisedWorker, end: Exit, now_s: float) -> None:
        facts = {"place": worker.number, "pid": worker.pid, "how": str(end), "registered": worker.ready_s is not None}
        self._death_reporter.report_death(
            worker.pid, worker.started, f"its supervisor saw it end: {end}", end.autopsy()
        )
        if end.code != 0 and worker.ready_s is None and self._stop_s is None:
            where = host.hostname()
            message = (
                f"Worker {worker.number} of the supervisor {os.getpid()} on {where} ended before it registered: {end}"
            )
            self._death_reporter.tell(EventKind.WORKER_STILLBORN, message, where)
        worked_s = worker.worked_s(now_s)
        worker.pid = 0
        if self._stop_s is not None:
            log.info("Worker process ended", **facts)
        elif end.code == 0:
            worker.retired = True
            log.warning("Worker process ended in order; somebody stopped it, so it is not replaced", **facts)
        else:
            wait_s = worker.replacing.after_death(now_s, lived_s=worked_s, code=end.code)
            if worker.replacing.braked:
                log.error(
                    "Worker keeps dying; slowing down", again_in_s=wait_s, deaths=worker.replacing.deaths, **facts
                )
                self._log_crash_loop(worker, end)
            else:
                log.error("Worker process died; replacing it", again_in_s=wait_s, **facts)

    def _log_crash_loop(self, worker: SupervisedWorker, end: Exit) -> None:
        # Once per series: from here on it only goes on.
        if worker.replacing.deaths == BRAKE_AT:
            where = host.hostname()
            message = (
                f"Worker {worker.number} of the supervisor {os.getpid()} on {where} died {BRAKE_AT} times in a row, "
                f"each time soon after its start; it is replaced ever more slowly. The last time: {end}"
            )
            self._death_reporter.tell(EventKind.CRASH_LOOP, message, where)

    def _hopeless(self) -> bool:
        """Say whether every place failed to start again and again, none ever having worked."""
        # While nobody reaches the ledger no worker can start, and that is not the workers' fault.
        if self._reaper_loop.cut_off or not all(worker.replacing.hopeless for worker in self._workers):
            return False
        code = self._workers[0].replacing.last_code
        log.error(
            "No worker stays up. Run the worker by hand to see why, mend it, and start again.",
            command=" ".join(self._command),
            last=f"exited with code {code}",
        )
        self._sd_notifier.status(f"gave up: no worker stays up (exited with code {code})")
        self._code = code if 0 < code < 126 else 1
        return True

    def _end_strays(self) -> None:
        """Kill what a dead worker left behind: as a subreaper we inherit whatever hid from its own parents."""
        ours = {worker.pid for worker in self._workers} | {dashboard.pid for dashboard in self._companions}
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
        for worker in self._workers:
            # A worker takes SIGTERM twice at once for one; SIGINT always counts.
            worker.send(signal.SIGTERM if first else signal.SIGINT)

    def _kill_all(self) -> None:
        if not self._killed:
            self._killed = True
            log.error("Workers did not end in time and are killed", workers=self._living())
        for worker in self._workers:
            worker.why = worker.why or "by its supervisor: it did not end within the grace"
            worker.send(signal.SIGKILL)

    def _end_all(self) -> None:
        """Leave nobody behind, however we got here: neither a process nor a zombie."""
        for worker in self._workers:
            if worker.pid:
                worker.send(signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                self._death_reporter.report_death(worker.pid, worker.started, "its supervisor ended and killed it")
                worker.pid = 0
        for dashboard in self._companions:
            dashboard.end()
        processes.kill_children()

    def _living(self) -> int:
        return sum(1 for worker in self._workers if worker.pid)

    def _show_stacks(self) -> None:
        """SIGUSR1 asks what everybody is doing: we and our workers print the stacks of all threads."""
        self._asked_how = False
        faulthandler.dump_traceback()
        for worker in self._workers:
            if worker.ready_s is not None:
                # One that is still starting might not listen yet, and would die of it.
                worker.send(signal.SIGUSR1)

    # Signals ------------------------------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            raise UnstuckError("Supervisor.run must be called in the main thread: it handles signals.")
        self._wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._waker_fd, False)
        before = {number: signal.signal(number, self._note) for number in (*heeded(), signal.SIGUSR1)}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        fd = signal.set_wakeup_fd(self._waker_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake_fd)
            os.close(self._waker_fd)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._asked_how = True
            return
        self._wishes.note(number)
