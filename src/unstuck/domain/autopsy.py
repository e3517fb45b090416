"""Record why a process died or had to be ended: kept with the attempt and the worker, shown at every door."""

from enum import StrEnum
from typing import Any

import msgspec

from unstuck.domain.liveness import Detector

MAX_STACK_CHARS = 20_000
MAX_TAIL_CHARS = 4_000
MAX_TAIL_LINES = 20
MAX_BESIDE = 20


class DeathKind(StrEnum):
    """What ended it, as one word for machines; the sentence for people is in `summary`."""

    SIGNAL = "signal"
    EXIT = "exit"
    """It ended itself: `os._exit`, an exit code of C code."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed it for want of memory."""
    MEMORY_LIMIT = "memory_limit"
    """It grew over the `memory_limit` of its task."""
    PROCESS_LIMIT = "process_limit"
    DEADLINE = "deadline"
    STALL = "stall"
    """No sign of the logic for its `stall_timeout`."""
    INTERPRETER = "interpreter"
    """No Python code ran for its `interpreter_timeout`."""
    LOST_HEARTBEAT = "lost_heartbeat"
    LOST_SESSION = "lost_session"
    LOST_CONNECTION = "lost_connection"
    """Its connection to the broker ended; how its process fared is not known."""
    HOST_REBOOTED = "host_rebooted"
    WORKER_GONE = "worker_gone"
    """The process of the worker is known to be gone; how it ended is not."""
    WATCHDOG = "watchdog"
    """The worker's own watchdog found it alive but doing nothing."""
    LEASE = "lease"
    """We stopped it ourselves before its lease ended: the ledger could not be reached."""
    DRAIN = "drain"
    OPERATOR = "operator"
    """Somebody asked for it: a cancel, or a verdict by hand."""
    SHARED = "shared"
    """Its process was ended because of another job in it."""
    BLOCKED_LOOP = "blocked_loop"
    """It kept the event loop that it shared from turning, and another job of it had to be ended."""
    UNKNOWN = "unknown"


class ProgressMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a job said it was."""

    done: float | None = None
    total: float | None = None
    message: str = ""
    at: float | None = None
    """Seconds since 1970."""


class Autopsy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why one process died. What is not known is left out, and nothing is guessed without saying so."""

    kind: DeathKind
    summary: str
    """One sentence: "killed by SIGSEGV (signal 11)"."""
    detector: Detector
    seen_after_s: float | None = None
    """How soon the detector knew, where that can be measured."""
    signal: str | None = None
    exit_code: int | None = None
    pid: int | None = None
    host: str | None = None
    sure: bool = True
    doubt: str = ""
    """Where it is not sure: what else it may have been, and why that cannot be told."""
    memory_bytes: int | None = None
    """The last that was seen."""
    max_memory_bytes: int | None = None
    cpu_s: float | None = None
    ran_s: float | None = None
    """How long this attempt had run."""
    stack: str = ""
    """Of every thread, the most recent call first; empty where there was nothing to read."""
    stdout: str = ""
    stderr: str = ""
    """The last lines of each."""
    progress: ProgressMark | None = None
    beside: tuple[int, ...] = ()
    """Other jobs that were in the same process, the first few."""
    beside_count: int = 0
    signals: tuple[str, ...] = ()
    """What was tried to end it, in order."""
    rule: str = ""
    """Which rule decided what became of the job, and why."""
    missing: str = ""
    """Why what it printed last is not here, if it may have printed something."""


class LastWords(msgspec.Struct, frozen=True):
    """What a job said before its whole worker was killed, as a neighbour found it."""

    job_id: int
    token: int
    progress: ProgressMark | None = None
    stdout: str = ""
    stderr: str = ""
    """The last lines of each."""
    memory_bytes: int | None = None


def said_fields(words: LastWords) -> dict[str, Any]:
    """Return what was said as fields of an autopsy; what is not known is left out."""
    said = {
        "progress": None if words.progress is None else msgspec.to_builtins(words.progress),
        "stdout": words.stdout,
        "stderr": words.stderr,
        "memory_bytes": words.memory_bytes,
    }
    return {name: value for name, value in said.items() if value}


_decoder = msgspec.json.Decoder(Autopsy)


def encode_autopsy(autopsy: Autopsy) -> str:
    return msgspec.json.encode(autopsy).decode()


def decode_autopsy(stored: str | bytes | None) -> Autopsy | None:
    """Give a stored autopsy; None where there is none, or where a version that we do not know wrote it."""
    try:
        return _decoder.decode(stored) if stored else None
    except msgspec.MsgspecError:
        return None


KIND_OF_DETECTOR = {
    Detector.LEASE: DeathKind.LOST_HEARTBEAT,
    Detector.SESSION: DeathKind.LOST_SESSION,
    Detector.BOOT: DeathKind.HOST_REBOOTED,
    Detector.OPERATOR: DeathKind.OPERATOR,
    Detector.PEER: DeathKind.WORKER_GONE,
    Detector.SUPERVISOR: DeathKind.WORKER_GONE,
    Detector.WATCHDOG: DeathKind.WATCHDOG,
    Detector.CONNECTION: DeathKind.LOST_CONNECTION,
    Detector.RUNNER: DeathKind.UNKNOWN,
}
"""What is known of a death by who saw it, where nobody has the exit status."""


def last_lines(text: str) -> str:
    """Give the end of an output: what was printed just before a death says most about it."""
    tail = "\n".join(text.rstrip().splitlines()[-MAX_TAIL_LINES:])
    return tail if len(tail) <= MAX_TAIL_CHARS else f"…{tail[-MAX_TAIL_CHARS:]}"
