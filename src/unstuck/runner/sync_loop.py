"""Run one job at a time, and notice descriptors that jobs leave open.

The kernel always gives the lowest free number. So the number of a fresh descriptor tells how many are open at least:
what is leaked fills every gap in the end.
"""

import contextvars
import os
import resource
import select
import signal
import socket
from collections import deque
from os import close, dup

from unstuck import failpoints
from unstuck.runner import processes, stop_signal
from unstuck.runner.call import Caller, CannotCall, end_span, raised, refused
from unstuck.runner.context import set_context
from unstuck.runner.messages import (
    JOB,
    RAISED,
    RECEIVE_BYTES,
    REPORTS,
    RETIRE_TOKEN,
    TOKEN,
    FrameBuffer,
    JobMessage,
    Report,
    encoder,
    frame,
    job_decoder,
)
from unstuck.runner.monitor import JobSignals
from unstuck.runner.output import flush_standard_streams
from unstuck.runner.process_state import ProcessState
from unstuck.runner.status_page import StatusPage

LOOK_EVERY = 8
"""Jobs between two looks: a look costs two system calls. A job that failed is followed by a look in any case."""
MANY = 256
"""So many more than at first are a leak, and not somebody's pool of connections."""
SHARE = 4
"""Or this part of the limit, where that is less: the next job must not be the one to suffer."""


class LeakWatch:
    """Watches the descriptors of this process from now on."""

    def __init__(self, probe: int) -> None:
        self._probe = probe
        """A descriptor of our own that can be duplicated."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        many = MANY if limit == resource.RLIM_INFINITY else min(MANY, limit // SHARE)
        self._first = self._lowest() or 0
        self._most = self._first + max(1, many)
        self._jobs = 0

    def leaked(self, *, failed: bool) -> int:
        """Say after a job how many descriptors were left open, 0 for none worth a word; -1 when there are no more."""
        self._jobs += 1
        if self._jobs % LOOK_EVERY and not failed:
            return 0
        lowest = self._lowest()
        if lowest is None:
            return -1
        return lowest - self._first if lowest > self._most else 0

    def _lowest(self) -> int | None:
        try:
            found = dup(self._probe)
        except OSError:
            return None
        close(found)
        return found


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class SyncLoop:
    def __init__(
        self,
        stream: socket.socket,
        permits: socket.socket,
        outputs: tuple[int, int],
        caller: Caller,
        status_page: StatusPage,
        slot: int,
        signs: JobSignals,
    ) -> None:
        stream.setblocking(True)
        permits.setblocking(False)
        self._stream = stream
        self._permits = permits
        self._stdout, self._stderr = outputs
        self._caller = caller
        self._status_page = status_page
        self._slot = slot
        self._signals = signs
        self._buffer = FrameBuffer()
        self._frames: deque[JobMessage] = deque()
        self._pid = os.getpid()
        self._poller = select.poll()
        self._poller.register(permits, select.POLLIN)
        self._poller.register(stream, select.POLLIN)

    def run(self) -> None:
        """Serve until the worker retires us or closes the permits."""
        permits, status_page, slot = self._permits, self._status_page, self._slot
        stop_signal.heed(lambda: status_page.asked_to_stop(slot) == status_page.entered(slot) != 0)
        stdout_end = os.lseek(self._stdout, 0, os.SEEK_END)
        stderr_end = os.lseek(self._stderr, 0, os.SEEK_END)
        state = ProcessState()
        leaks = LeakWatch(self._stream.fileno())
        while True:
            try:
                packet = permits.recv(TOKEN.size)
            except BlockingIOError:
                if not self._wait():
                    return
                continue
            if len(packet) != TOKEN.size:
                return
            token = TOKEN.unpack(packet)[0]
            if token == RETIRE_TOKEN:
                return
            job = self._take(token)
            if job is None:
                return
            status_page.enter(slot, token)
            report = self._attempt(job)
            if os.getpid() != self._pid:
                os._exit(0)  # a fork of user code that came back to us: only the original may report
            self._signals.forget(token)
            changed, restored = state.restore()
            flush_standard_streams()
            # A job may have closed or redirected them, and the next one prints too.
            os.dup2(self._stdout, 1)
            os.dup2(self._stderr, 2)
            clean = not processes.has_children() or processes.kill_children()
            leaked = leaks.leaked(failed=report.kind == RAISED)
            if leaked:
                self._say_leaked(leaked)
            if changed or not restored:
                self._say_changed(changed, restored)
            report.stdout_from, report.stderr_from = stdout_end, stderr_end
            report.stdout_to = stdout_end = os.lseek(self._stdout, 0, os.SEEK_END)
            report.stderr_to = stderr_end = os.lseek(self._stderr, 0, os.SEEK_END)
            self._stream.sendall(frame(REPORTS, encoder.encode((report,))))
            status_page.enter(slot, 0)
            if not clean:
                # What outlives our patience is left to the fork server, which cleans up after a death.
                os.kill(self._pid, signal.SIGKILL)
            if leaked or not restored:
                return  # what was not entered goes to our successor

    def _say_leaked(self, count: int) -> None:
        left = f"{count} descriptors" if count > 0 else "so many descriptors that there are no more"
        text = f"unstuck: this job, or those before it in this runner, left {left} open; the runner is replaced.\n"
        os.write(self._stderr, text.encode())

    def _say_changed(self, changed: str, restored: bool) -> None:
        text = f"unstuck: this job changed {changed} of its process. " if changed else "unstuck: "
        text += "The next job finds them as before." if restored else "The runner is replaced: not all can be restored."
        text += "\n"
        os.write(self._stderr, text.encode(errors="backslashreplace"))

    def _wait(self) -> bool:
        """Wait for a permit, and read frames meanwhile: a frame larger than the socket comes in parts, and its
        permit only after the last. False when the worker is gone."""
        ready = {fd for fd, _ in self._poller.poll()}
        return self._stream.fileno() not in ready or self._receive()

    def _take(self, token: int) -> JobMessage | None:
        """Give the frame of a permit. Frames before it had their permits taken back: they are skipped."""
        while True:
            while self._frames:
                job = self._frames.popleft()
                if job.token == token:
                    return job
            if not self._receive():
                return None

    def _receive(self) -> bool:
        data = self._stream.recv(RECEIVE_BYTES)
        for kind, body in self._buffer.feed(data):
            if kind == JOB:
                self._frames.append(job_decoder.decode(body))
        return bool(data)

    def _attempt(self, job: JobMessage) -> Report:
        try:
            call = self._caller.prepare(job)
        except CannotCall as error:
            return refused(job.token, error)
        # A context of its own: variables that one job sets must not be seen by the next.
        variables = contextvars.copy_context()
        variables.run(set_context, call.context)
        span = call.span()
        if span is not None:
            variables.run(span.enter)
        caught: BaseException | None = None
        try:
            if failpoints.active:
                failpoints.reached("runner.before_user_code")
            try:
                stop_signal.enter()
                value = variables.run(call.function, *call.args, **call.kwargs)
            finally:
                # From here on nothing of ours can be interrupted.
                stop_signal.leave()
            report = self._caller.succeeded(job, value)
            if failpoints.active:
                failpoints.reached("runner.after_user_code")
        except BaseException as error:  # noqa: BLE001 - SystemExit of a job must not end the runner
            report, caught = raised(job.token, error), error
        report = self._caller.ended(report, caught)
        for timer in _TIMERS:
            signal.setitimer(timer, 0)  # an alarm that a job left armed must not hit the next one
        if span is not None and os.getpid() == self._pid:
            end_span(span, report)
        return report
