"""The worker's end of one runner: send jobs, receive reports and journal entries, signal, close. Never blocks."""

import os
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from unstuck import host
from unstuck.domain.endings import Cancelled, NotStorable, Raised, Succeeded, Suspended
from unstuck.ledger.contract.jobs import NewJob
from unstuck.runner import linux, messages
from unstuck.runner.messages import (
    NO_ANSWER,
    JobMessage,
    JournalAnswer,
    JournalRequest,
    Kind,
    NewEntry,
    Report,
    answer_frame,
    journal_request_decoder,
)
from unstuck.runner.monitor import JobSignal, read_job_signals
from unstuck.runner.output import OutputFile
from unstuck.runner.stacks import ALL_STACKS_SIGNAL, STACK_SIGNAL
from unstuck.worker.stack_file import StackFile

MAX_READ_BYTES = 64 * 1024 * 1024
"""Read at one time: a flood waits for the next."""


class JournalConnection:
    def __init__(self) -> None:
        self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self._buffer = messages.FrameBuffer()
        self._unsent: deque[memoryview] = deque()
        self.closed = False

    @property
    def their_fd(self) -> int:
        return self._theirs.fileno()

    def handed_over(self) -> None:
        self._theirs.close()

    def read(self) -> list[JournalRequest]:
        """Give what came; what is no request ends the line, for user code wrote into our descriptor."""
        found: list[JournalRequest] = []
        size_bytes = 0
        while not self.closed and size_bytes < MAX_READ_BYTES:
            try:
                data = self.socket.recv(messages.RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            size_bytes += len(data)
            try:
                found += [
                    journal_request_decoder.decode(body)
                    for kind, body in self._buffer.feed(data)
                    if kind == messages.ENTRY
                ]
            except (messages.CorruptStream, msgspec.MsgspecError, struct.error):
                self.closed = True
        return found

    def answer(self, number: int, verdict: int, reason: str = "") -> None:
        if number != NO_ANSWER and not self.closed:
            self._unsent.append(memoryview(answer_frame(JournalAnswer(number, verdict, reason))))
            self.flush()

    def wants_write(self) -> bool:
        return bool(self._unsent) and not self.closed

    def flush(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def close(self) -> None:
        self.closed = True
        self.socket.close()
        self._theirs.close()


_PACK_HEADER = messages.HEADER.pack
_PACK_TOKEN = messages.TOKEN.pack
_follow_up = msgspec.msgpack.Decoder(NewJob)
MAX_SIGNS = 200
"""Signs read at one time: a flood of them waits for the next."""


class Finished(msgspec.Struct, gc=False):
    """An attempt whose user code ended while its runner lived."""

    token: int
    outcome: Succeeded | Raised | NotStorable | Cancelled | Suspended
    stdout: bytes
    stderr: bytes
    stack: str = ""
    """Where an async job was when it was asked to stop."""
    entry: NewEntry | None = None
    """Written in the commit that suspends it."""
    checkpoint: bytes = b""
    follow: tuple[NewJob, ...] = ()
    """To be enqueued with its success."""


class RunnerProcess:
    """The worker's end of a runner. `pid` is None until the fork server has told it."""

    def __init__(
        self, runner_id: int, slot: int, kind: Kind, limit_bytes: int, kill_through_fork_server: Callable[[], None]
    ) -> None:
        self.runner_id = runner_id
        self.slot = slot
        self.kind: Kind = kind
        self.pid: int | None = None
        self.closed = False
        """End of stream seen: the runner's process is gone, or has let go."""
        self.gone = False
        """The fork server (or its death) told us that the process is gone."""
        self._kill_through_fork_server = kill_through_fork_server
        self._pidfd: int | None = None
        self._stream, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._permits, self._permits_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The runner's end of the permits stays open here: taking a packet out of it takes the job back.
        self.signals, self._signals_of_runner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.journal_connection = JournalConnection()
        for end in (self._stream, self._permits, self.signals):
            end.setblocking(False)
        self.stdout = OutputFile("unstuck-stdout", limit_bytes)
        self.stderr = OutputFile("unstuck-stderr", limit_bytes)
        self.stacks = StackFile(self.signals)
        self._buffer = messages.FrameBuffer()
        self._unsent: deque[tuple[int | None, memoryview]] = deque()
        """(token, frame) that the stream did not take yet; the token is None for what is no job."""
        self._unpermitted: deque[int] = deque()
        """Tokens whose frames are in the stream and whose permits the socket did not take yet."""
        self._retiring = False

    def descriptors(self) -> list[int]:
        """Return the descriptors for the runner: stream, permits, stdout, stderr, stacks, signals, journal."""
        ends = [self._theirs.fileno(), self._permits_theirs.fileno()]
        return [
            *ends,
            self.stdout.fd,
            self.stderr.fd,
            self.stacks.fd,
            self._signals_of_runner.fileno(),
            self.journal_connection.their_fd,
        ]

    def handed_over(self) -> None:
        """Let go of the runner's ends, so that we see the end of them."""
        self._theirs.close()
        self._signals_of_runner.close()
        self.journal_connection.handed_over()

    def born(self, pid: int, pidfd: int | None) -> None:
        self.pid = pid
        if self.fileno() < 0 and pidfd is not None:
            os.close(pidfd)  # buried already: nobody will ask
            return
        self._pidfd = pidfd

    def fileno(self) -> int:
        return self._stream.fileno()

    def pidfd(self) -> int | None:
        """Give a descriptor that is readable when the process is gone."""
        return self._pidfd

    def lives(self) -> bool:
        """Ask the kernel whether the process lives; False where that cannot be known."""
        if self._pidfd is None:
            return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return not poller.poll(0)

    # Jobs out ---------------------------------------------------------------------------------

    def send(self, jobs: Sequence[JobMessage]) -> None:
        """Hand jobs over. What the sockets do not take waits here."""
        encode = messages.encoder.encode
        parts = []
        for job in jobs:
            body = encode(job)
            parts.append(_PACK_HEADER(len(body), messages.JOB) + body)
        if not self._unsent and not self.closed:
            data = b"".join(parts)
            sent = self._write(data)
            if sent == len(data):
                self._unpermitted.extend([job.token for job in jobs])
                self._permit()
                return
            at = 0
            for job, part in zip(jobs, parts, strict=True):
                end = at + len(part)
                if end <= sent:
                    self._unpermitted.append(job.token)
                else:
                    self._unsent.append((job.token, memoryview(part)[max(sent - at, 0) :]))
                at = end
            self._permit()
            return
        self._unsent.extend([(job.token, memoryview(part)) for job, part in zip(jobs, parts, strict=True)])

    def cancel(self, token: int) -> None:
        """Ask an async job to stop; its outcome tells what became of it."""
        if self.kind == "async":
            self._enqueue(messages.frame(messages.CANCEL, messages.TOKEN.pack(token)))

    def retire(self) -> None:
        """Ask the runner to end by itself when it has done what it was given."""
        self._retiring = True
        if self.kind == "async":
            self._enqueue(messages.frame(messages.RETIRE, b""))
        else:
            self._permit()

    def wants_write(self) -> bool:
        # Permits alone are no reason: they go out when reports come in, and the stream would always be ready.
        return bool(self._unsent) and not self.closed

    def flush(self) -> None:
        while self._unsent and not self.closed:
            token, part = self._unsent[0]
            sent = self._write(part)
            if sent < len(part):
                self._unsent[0] = (token, part[sent:])
                break
            self._unsent.popleft()
            if token is not None:
                self._unpermitted.append(token)
        self._permit()

    def take_back(self) -> list[int]:
        """Take back every job that was not entered. After the death of the runner this is all that never was."""
        tokens: list[int] = []
        if self.kind == "sync":
            while True:
                try:
                    packet = self._permits_theirs.recv(messages.TOKEN.size, socket.MSG_DONTWAIT)
                except OSError:
                    break
                if len(packet) != messages.TOKEN.size:
                    break
                token = messages.TOKEN.unpack(packet)[0]
                if token != messages.RETIRE_TOKEN:
                    tokens.append(token)
            tokens += self._unpermitted
        self._unpermitted.clear()
        kept: deque[tuple[int | None, memoryview]] = deque()
        for token_or_none, part in self._unsent:
            if token_or_none is None:
                kept.append((None, part))
                continue
            begun = not self.closed and self._is_begun(part)
            if begun and self.kind == "async":
                kept.append((token_or_none, part))  # the rest of it must follow, and then it runs
                continue
            tokens.append(token_or_none)
            if begun:
                kept.append((None, part))  # without a permit the runner skips it
        self._unsent = kept
        if self._retiring:
            self._permit()
        return tokens

    # Outcomes in ------------------------------------------------------------------------------

    def read(self) -> list[Finished]:
        """Give everything that ended and was reported until now."""
        finished: list[Finished] = []
        while not self.closed:
            try:
                data = self._stream.recv(messages.RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            try:
                for kind, body in self._buffer.feed(data):
                    if kind == messages.REPORTS:
                        finished += map(self._finished, messages.reports_decoder.decode(body))
            except (messages.CorruptStream, msgspec.MsgspecError, struct.error):
                # User code wrote into our descriptor: nothing that follows can be trusted.
                self.closed = True
                self.kill()
            if len(data) < messages.RECEIVE_BYTES and not self.gone:
                break  # drained: asking again would cost a system call per round
        if self._unpermitted:
            self._permit()
        return finished

    def last_output(self) -> tuple[bytes, bytes]:
        """Give what the job printed in which the runner died; for async, the last that belongs to no job."""
        return self.peek_output()

    def peek_output(self) -> tuple[bytes, bytes]:
        """Give what the current job printed so far, bounded."""
        tail_only = self.kind == "async"
        return self.stdout.peek(tail_only=tail_only), self.stderr.peek(tail_only=tail_only)

    def output_news(self, limit_bytes: int) -> tuple[bytes | None, bytes | None]:
        """Return the end of what the current job printed to stdout and stderr; None for what did not change."""
        return self.stdout.news(limit_bytes), self.stderr.news(limit_bytes)

    def trim_output(self) -> None:
        """Bound the memory that a flood of output takes; to be called often while a job runs."""
        tail_only = self.kind == "async"
        self.stdout.trim(tail_only=tail_only)
        self.stderr.trim(tail_only=tail_only)

    # Ends -------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the process, now; through the fork server while we do not know it yet."""
        if self.gone:
            return
        if not self._signal(signal.SIGKILL):
            self._kill_through_fork_server()

    def terminate(self) -> None:
        """Send SIGTERM: user code that handles it can clean up; all other code does not notice."""
        self._signal_job(signal.SIGTERM)

    def interrupt(self, *, silent: bool = False) -> bool:
        """Have a signal note the stack (`dump_stack`) and, in the same moment, send SIGTERM; False where there is no
        stack to show. A C call that waits is cut short by either: what it returns must find the job asked to stop."""
        # Stopped meanwhile, it takes both at once and runs nothing in between; the later one is handled first.
        self._signal(signal.SIGSTOP)
        self._signal_job(signal.SIGTERM)
        noted = self.dump_stack(silent=silent)
        self._signal(signal.SIGCONT)
        return noted

    def wake(self) -> bool:
        """Let a process go on that was stopped (SIGSTOP), by itself or from outside; False where it was not."""
        if self.pid is None or not host.is_stopped(self.pid):
            return False
        return self._signal(signal.SIGCONT)

    def dump_stack(self, *, silent: bool = False) -> bool:
        """Have a signal write down where the job's thread stands, even inside C code; False where it cannot. Where the
        interpreter is `silent`, all threads: while it is not, reading the stacks of others may kill the process."""
        number = ALL_STACKS_SIGNAL if silent else STACK_SIGNAL
        # Without its handler the signal would kill: user code may have reset all of them.
        if self.pid is None or not host.catches(self.pid, number):
            return False
        self.stacks.expect()
        return self._signal_job(number)

    def ask_stack(self, token: int) -> bool:
        """Have the event loop write down where an async job waits; if it cannot turn, nothing is written."""
        if self.kind != "async" or self.pid is None:
            return False
        self.stacks.expect()
        self._enqueue(messages.frame(messages.STACK, messages.TOKEN.pack(token)))
        return True

    def memory_bytes(self) -> int:
        return 0 if self.pid is None else host.memory_bytes(self.pid)

    def read_signals(self) -> list[JobSignal]:
        return read_job_signals(self.signals, MAX_SIGNS)

    def close(self) -> None:
        """Let go of everything; a runner that still lives ends itself when it sees this."""
        if self.fileno() >= 0 and not self.gone:
            self.kill()
        self.closed = True
        ends = (self._stream, self._theirs, self._permits, self._permits_theirs, self.signals, self._signals_of_runner)
        for end in ends:
            end.close()
        self.journal_connection.close()
        for file in (self.stdout, self.stderr, self.stacks):
            file.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    # ------------------------------------------------------------------------------------------

    def _finished(self, report: Report) -> Finished:
        finished = self._understood(report)
        rest = report.extras
        if rest is not None:
            finished.checkpoint = rest.checkpoint
            finished.follow = tuple(map(_follow_up.decode, rest.follow))
            if rest.pause is not None:
                finished.outcome = Suspended(rest.pause.delay_s, rest.pause.awaits)
                finished.entry = rest.pause.entry
        return finished

    def _understood(self, report: Report) -> Finished:
        kind = report.kind
        outcome: Succeeded | Raised | NotStorable | Cancelled
        if kind == messages.SUCCEEDED:
            outcome = Succeeded(report.result)
        else:
            words = report.words or ("", "", "")
            if kind == messages.RAISED:
                outcome = Raised(*words)
            elif kind == messages.NOT_STORABLE:
                outcome = NotStorable(words[0])
            else:
                outcome = Cancelled(words[0])
        if self.kind == "async":
            return Finished(report.token, outcome, report.stdout, report.stderr, report.stack)
        stdout = stderr = b""
        if report.stdout_from != report.stdout_to:
            stdout = self.stdout.take(report.stdout_from, report.stdout_to)
        if report.stderr_from != report.stderr_to:
            stderr = self.stderr.take(report.stderr_from, report.stderr_to)
        return Finished(report.token, outcome, stdout, stderr)

    def _enqueue(self, data: bytes) -> None:
        self._unsent.append((None, memoryview(data)))
        self.flush()

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._stream.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # The runner is gone. What it finished may still be read, so the stream is not closed for reading.
            return 0

    def _permit(self) -> None:
        """Send permits for frames that are in the stream, in order, as far as the socket takes them."""
        if self.kind == "async":
            self._unpermitted.clear()
            return
        waiting, send = self._unpermitted, self._permits.send
        try:
            while waiting:
                send(_PACK_TOKEN(waiting[0]))
                waiting.popleft()
            if self._retiring and not self._unsent:
                send(_PACK_TOKEN(messages.RETIRE_TOKEN))
        except OSError:
            return

    def _is_begun(self, part: memoryview) -> bool:
        return part.obj is not None and len(part) < len(part.obj)  # type: ignore[arg-type]

    def _signal_job(self, number: int) -> bool:
        """Signal the main thread, where the job is: what is for a whole process falls to any thread of one that was
        stopped."""
        if self.pid is not None and self.lives() and linux.signal_main_thread(self.pid, number):
            return True
        return self._signal(number)

    def _signal(self, number: int) -> bool:
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
                return True
        except OSError:
            return True  # gone already
        return False
