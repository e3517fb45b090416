"""Run many async jobs on one event loop, and see which job blocks it.

A job that computes, or calls something that blocks, stops every other job of the loop. The others are not to blame.
"""

import asyncio
import os
import socket
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from unstuck import failpoints
from unstuck.domain.autopsy import MAX_STACK_CHARS
from unstuck.domain.endings import storable_text
from unstuck.runner import stacks
from unstuck.runner.call import Caller, CannotCall, end_span, raised, refused, user_traceback
from unstuck.runner.context import current_token, set_context
from unstuck.runner.messages import (
    CANCEL,
    CANCELLED,
    JOB,
    RECEIVE_BYTES,
    REPORTS,
    RETIRE,
    STACK,
    TOKEN,
    FrameBuffer,
    JobMessage,
    Report,
    encoder,
    frame,
    job_decoder,
)
from unstuck.runner.monitor import Blocked, JobSignals
from unstuck.runner.output import Sink, flush_standard_streams, set_sink
from unstuck.runner.process_state import ProcessState

BLOCKED_S = 0.5
"""A loop that did not come round for so long is blocked."""


class LoopMonitor:
    """Belongs to the loop's thread, but for `look`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._owners: WeakKeyDictionary[asyncio.Future[Any], int] = WeakKeyDictionary()
        self._asked = self._answered = 0
        self._asked_s = 0.0
        # Tasks that a job starts are its own: blocked in one of them, it is the job that blocks.
        loop.set_task_factory(self._make_task)

    def own(self, task: "asyncio.Task[Any]", token: int) -> None:
        self._owners[task] = token

    def tasks_of(self, token: int) -> "list[asyncio.Task[Any]]":
        """Give the living tasks of a job, those too that it started."""
        return [task for task in asyncio.all_tasks(self._loop) if self._owners.get(task) == token]

    def look(self, now_s: float) -> Blocked | None:
        """Ask the loop for a sign, and say whether the last one is overdue. Called from the pulse's thread."""
        if self._asked != self._answered:
            if now_s - self._asked_s < BLOCKED_S:
                return None
            task = asyncio.current_task(self._loop)
            return Blocked(self._owners.get(task, 0) if task is not None else 0, self._asked_s)
        if self._owners:
            self._asked += 1
            self._asked_s = now_s
            try:
                self._loop.call_soon_threadsafe(self._answer, self._asked)
            except RuntimeError:
                self._answered = self._asked  # user code closed the loop: there is nothing left to watch
        return None

    def _answer(self, number: int) -> None:
        self._answered = number

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        if token := current_token():
            self._owners[task] = token
        return task


MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Above this no new jobs are read until the worker has taken the reports."""


class AsyncLoop:
    def __init__(
        self, stream: socket.socket, stack_fd: int, caller: Caller, max_output_bytes: int, signs: JobSignals
    ) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._stack_fd = stack_fd
        self._caller = caller
        self._max_output_bytes = max_output_bytes
        self._signals = signs
        self._buffer = FrameBuffer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._job_ids: dict[int, int] = {}
        self._cancelled: dict[int, str] = {}
        """Where each job that was asked to stop was at that moment."""
        self._reports: list[Report] = []
        self._unsent = bytearray()
        self._retiring = False
        self._reading = False
        self._pid = os.getpid()
        self._state: ProcessState | None = None
        self._loop = asyncio.new_event_loop()
        self.watch = LoopMonitor(self._loop)

    def run(self) -> None:
        """Serve until the worker retires us or closes the stream."""
        asyncio.set_event_loop(self._loop)
        self._state = ProcessState()
        self._read_on()
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt) as error:
                # A task that a job left behind; the others go on.
                os.write(2, f"A stray task raised, and was ignored:\n{user_traceback(error)}\n".encode())

    def _readable(self) -> None:
        try:
            data = self._stream.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.stop()
            return
        for kind, body in self._buffer.feed(data):
            if kind == JOB:
                job = job_decoder.decode(body)
                task = self._tasks[job.token] = self._loop.create_task(self._attempt(job))
                self._job_ids[job.token] = job.job_id
                self.watch.own(task, job.token)
            elif kind == CANCEL:
                # Later in the same queue: a task must have begun before it can be cancelled and report it.
                self._loop.call_soon(self._cancel, TOKEN.unpack(body)[0])
            elif kind == STACK:
                self._loop.call_soon(self._write_stack, TOKEN.unpack(body)[0])
            elif kind == RETIRE:
                self._retiring = True
                self._loop.call_soon(self._flush)

    def _cancel(self, token: int) -> None:
        task = self._tasks.get(token)
        if task is not None:
            # Written down too: if it does not obey, this is what its autopsy shows.
            self._cancelled[token] = self._write_stack(token)
            task.cancel()

    def _write_stack(self, token: int) -> str:
        """Write down where a job waits, for the worker to read."""
        task = self._tasks.get(token)
        if task is None:
            return ""
        text = stacks.of_job(self._job_ids[token], task, self.watch.tasks_of(token))
        text = storable_text(text, MAX_STACK_CHARS)
        with suppress(OSError):  # user code closed it: then the worker has only what the report tells
            os.write(self._stack_fd, f"\n{text}\n".encode())
        return text

    async def _attempt(self, job: JobMessage) -> None:
        token = job.token
        sink = Sink(self._max_output_bytes)
        span = None
        caught: BaseException | None = None
        try:
            call = self._caller.prepare(job)
            set_context(call.context)
            set_sink(sink)
            span = call.span()
            if span is not None:
                span.enter()
            if failpoints.active:
                failpoints.reached("runner.before_user_code")
            report = self._caller.succeeded(job, await call.function(*call.args, **call.kwargs))
            if failpoints.active:
                failpoints.reached("runner.after_user_code")
        except CannotCall as error:
            report = refused(token, error)
        except asyncio.CancelledError as error:
            if token in self._cancelled:
                report = Report(token, CANCELLED, words=("cancelled by request while it ran", "", ""))
            else:
                report = raised(token, error)
            caught = error
        except BaseException as error:  # noqa: BLE001 - SystemExit of a job must not end its siblings
            report, caught = raised(token, error), error
        report = self._caller.ended(report, caught)
        if os.getpid() != self._pid:
            os._exit(0)  # a fork of user code that came back to us: only the original may report
        if span is not None:
            end_span(span, report)
        report.stdout, report.stderr = sink.content(0), sink.content(1)
        del self._tasks[token], self._job_ids[token]
        self._signals.forget(token)
        if not self._tasks and self._state is not None:
            # Jobs that overlap share the process; one that finds it idle finds it as the first did.
            self._state.restore()
        if self._cancelled:
            report.stack = self._cancelled.pop(token, "")
        if not self._reports:
            self._loop.call_soon(self._flush)
        self._reports.append(report)

    def _flush(self) -> None:
        if self._reports:
            self._unsent += frame(REPORTS, encoder.encode(self._reports))
            self._reports = []
        waiting = bool(self._unsent)
        while self._unsent:
            try:
                sent = self._stream.send(self._unsent)
            except BlockingIOError:
                self._loop.add_writer(self._stream, self._flush)
                if len(self._unsent) > MAX_UNSENT_BYTES and self._reading:
                    self._loop.remove_reader(self._stream)
                    self._reading = False
                return
            except OSError:
                self._loop.stop()
                return
            del self._unsent[:sent]
        if waiting:
            self._loop.remove_writer(self._stream)
        self._read_on()
        if self._retiring and not self._tasks and not self._reports:
            flush_standard_streams()
            self._loop.stop()

    def _read_on(self) -> None:
        if not self._reading:
            self._loop.add_reader(self._stream, self._readable)
            self._reading = True
