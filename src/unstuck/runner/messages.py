"""Every message between worker, fork server and runner: framed, bounded, no pickle.

On a runner's stream each frame is `length, kind` and a body. Worker to runner: a job, a cancel, a retirement, a
question where a job stands. Runner to worker: a batch of reports. Nobody here decodes what user code was given or gave.
"""

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

from unstuck.runner.tasks import Manifest


class NewEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the journal on its way to the worker."""

    seq: int
    kind: str
    name: str
    value: bytes
    """JSON."""
    signal: int | None = None
    """The number of the signal that is taken by it."""


class Suspension(msgspec.Struct, frozen=True, array_like=True):
    """How an attempt gave its slot back."""

    delay_s: float | None
    """It goes on after so long; None: with the signal alone."""
    awaits: str | None = None
    entry: NewEntry | None = None
    """Written in the commit that suspends it; None where it is written already."""


NO_ANSWER = 0
"""The number of a request whose answer nobody waits for."""
WRITTEN, SUPERSEDED, REFUSED = 0, 1, 2


class JournalRequest(msgspec.Struct, array_like=True, gc=False):
    number: int
    token: int
    entry: NewEntry


class JournalAnswer(msgspec.Struct, array_like=True, gc=False):
    number: int
    verdict: int
    reason: str = ""


_encode_journal = msgspec.msgpack.Encoder().encode
journal_request_decoder = msgspec.msgpack.Decoder(JournalRequest)


def request_frame(request: JournalRequest) -> bytes:
    return frame(ENTRY, _encode_journal(request))


def answer_frame(answer: JournalAnswer) -> bytes:
    return frame(ANSWER, _encode_journal(answer))


HEADER = struct.Struct("=IB")
TOKEN = struct.Struct("=q")
RETIRE_TOKEN = 0
"""The permit that asks a sync runner to end; tokens of attempts are never 0."""
MAX_FRAME_BYTES = 1 << 30
RECEIVE_BYTES = 256 * 1024

JOB, CANCEL, RETIRE, REPORTS, STACK = 0, 1, 2, 3, 4
ENTRY, ANSWER = 5, 6
"""On a line of their own: what a job writes down, and what became of it."""
SUCCEEDED, RAISED, NOT_STORABLE, CANCELLED, SUSPENDED = 0, 1, 2, 3, 4

Kind = Literal["sync", "async"]


class JobMessage(msgspec.Struct, array_like=True, gc=False):
    """One attempt, as the runner needs it."""

    token: int
    job_id: int
    task: str
    queue: str
    payload: bytes
    payload_type: str
    attempt: int
    crashes: int
    inputs: bytes = b""
    """How those ended that it depends on in its workflow."""
    journal: bytes = b""
    """Packed as `domain.journal` does."""


class Extras(msgspec.Struct, array_like=True, gc=False):
    """What few reports have."""

    pause: Suspension | None = None
    checkpoint: bytes = b""
    """The last one, where it was not sent yet."""
    follow: tuple[bytes, ...] = ()
    """Jobs to be enqueued with its success; each a packed `NewJob`."""


class Report(msgspec.Struct, array_like=True, gc=False):
    """How one attempt ended. A sync runner names ranges of its output files, an async one sends the bytes."""

    token: int
    kind: int
    result: bytes = b""
    words: tuple[str, str, str] | None = None
    """Type, message and traceback of what was raised; the reason alone (first) for the other kinds."""
    stdout_from: int = 0
    stdout_to: int = 0
    stderr_from: int = 0
    stderr_to: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    stack: str = ""
    """Where an async job was when it was cancelled."""
    extras: Extras | None = None


class Limits(msgspec.Struct, frozen=True):
    max_output_bytes: int
    max_payload_bytes: int
    pulse_interval_s: float
    max_processes: int = 0
    """Of one runner and all that it started; 0 for no limit."""


# Worker → fork server ---------------------------------------------------------------------------


class Configure(msgspec.Struct, tag="equip", rename={"status_page": "trace"}):
    """Use this shared page from now on."""

    status_page: str
    worker_id: str
    limits: Limits


class StartRunner(msgspec.Struct, tag="open", rename={"runner_id": "serial"}):
    """Start a runner; its stream, permits, stdout, stderr, stacks, signs and line come along as descriptors."""

    runner_id: int
    slot: int
    kind: Kind


class KillRunner(msgspec.Struct, tag="kill", rename={"runner_id": "serial"}):
    runner_id: int


class Shutdown(msgspec.Struct, tag="disband"):
    """Kill all runners and end."""


# Fork server → worker ---------------------------------------------------------------------------


class Ready(msgspec.Struct, tag="ready"):
    manifest: Manifest


class ImportFailed(msgspec.Struct, tag="unusable"):
    """The app cannot be imported; the reason is for the user to read."""

    reason: str


class RunnerStarted(msgspec.Struct, tag="born", rename={"runner_id": "serial", "cgroup": "room"}):
    """A runner lives; its pidfd comes along where the system has such."""

    runner_id: int
    pid: int
    cgroup: str = ""
    """The cgroup in which its memory can be bounded (`cgroups.MemoryLimits`); empty where there is none."""


class RunnerExited(msgspec.Struct, tag="exited", rename={"runner_id": "serial"}):
    runner_id: int
    pid: int
    status: int | None
    """As `waitpid` gives it; None when the runner could not even be started."""
    entered: int = 0
    max_rss_bytes: int = 0
    cpu_s: float = 0.0
    why: str = ""
    """What the fork server knows of it beyond the status."""
    oom: bool = False
    """There is evidence that the kernel killed it for want of memory (`oom.py`)."""
    oom_sure: bool = False
    """The evidence can mean nothing else."""
    oom_words: str = ""


ToForkServer = Configure | StartRunner | KillRunner | Shutdown
ToWorker = Ready | ImportFailed | RunnerStarted | RunnerExited

encoder = msgspec.msgpack.Encoder()
to_fork_server = msgspec.msgpack.Decoder(ToForkServer)
to_worker = msgspec.msgpack.Decoder(ToWorker)
job_decoder = msgspec.msgpack.Decoder(JobMessage)
reports_decoder = msgspec.msgpack.Decoder(list[Report])


class CorruptStream(Exception):
    """The other side sent what is no frame: user code wrote into our descriptor."""


def frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind) + body


class FrameBuffer:
    """Cut a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._needed = 0
        """How many bytes must be there before another look is worth it."""

    def feed(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        """Take more bytes and give every frame that is now complete; consume it before feeding again."""
        if self._pieces:
            # Put together once, when all of it is there: a large frame comes in many pieces.
            self._pieces.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data = b"".join(self._pieces)
            self._pieces = []
        view = memoryview(data)
        at, end = 0, len(data)
        self._needed = HEADER.size
        while end - at >= HEADER.size:
            length, kind = HEADER.unpack_from(data, at)
            if length > MAX_FRAME_BYTES or kind > ANSWER:
                raise CorruptStream(f"a frame of kind {kind} and {length} bytes")
            stop = at + HEADER.size + length
            if stop > end:
                self._needed = HEADER.size + length
                break
            yield kind, view[at + HEADER.size : stop]
            at = stop
        if at < end:
            self._pieces = [data[at:]]
            self._size = end - at
