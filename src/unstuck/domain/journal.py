"""What a job wrote down on its way, and the signals that it was sent: the limits, the names, and one way to pack it."""

import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from unstuck.errors import ConfigError, StepMismatch

MAX_ENTRIES = 1_000
"""Steps, sleeps and signals that one job may write down."""
MAX_JOURNAL_BYTES = 16 * 1024 * 1024
"""All results of one job's steps together: every new attempt is given all of them."""
MAX_SIGNALS = 1_000
"""Signals that wait for one job to take them."""
MAX_SIGNAL_BYTES = 16 * 1024 * 1024
"""Their values together: each attempt is given all of them, and so is the page of the job. Also in `signals.sql`."""
MAX_NAME_CHARS = 200
CHECKPOINT_SEQ = 0
"""The place of the one entry that is written over."""

_NUMBERED = re.compile(r"#\d+$")


class Kind(StrEnum):
    """What an entry is. Entries are numbered from 1 in the order in which the job came to them."""

    STEP = "step"
    SLEEP = "sleep"
    """The value is how long, in seconds."""
    WAIT = "wait"
    """It began to wait for a signal; the value is how long, in seconds, or null."""
    SIGNAL = "signal"
    """It took a signal; the value is what came with it."""
    TIMEOUT = "timeout"
    """No signal came in time."""
    CHECKPOINT = "checkpoint"


class RecordedEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry as a new attempt reads it."""

    seq: int
    kind: str
    name: str
    value: bytes
    """JSON."""
    age_s: float
    """Since it was written, by the ledger's clock."""


class PendingSignal(msgspec.Struct, frozen=True, array_like=True):
    """A signal that nobody took yet."""

    number: int
    name: str
    value: bytes
    """JSON."""


class StoredJournal(msgspec.Struct, frozen=True, array_like=True):
    lines: tuple[RecordedEntry, ...] = ()
    signals: tuple[PendingSignal, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the size of all values."""
        return sum(len(line.value) for line in self.lines) + sum(len(signal.value) for signal in self.signals)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredJournal)


def pack_journal(lines: Iterable[RecordedEntry], signals: Iterable[PendingSignal]) -> bytes:
    return _encoder.encode(StoredJournal(tuple(lines), tuple(signals)))


def unpack_journal(data: bytes) -> StoredJournal:
    return _decoder.decode(data) if data else StoredJournal()


def checked_name(name: object, what: str) -> str:
    """Give a name that can be stored and told from a numbered one, or raise ConfigError with the cure."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or "\0" in name:
        raise ConfigError(f"The name of a {what} must be text of 1 to {MAX_NAME_CHARS} characters, not {name!r:.80}.")
    if _NUMBERED.search(name):
        raise ConfigError(
            f"The name of a {what} must not end like {name!r:.80}: so the second of one name is numbered. "
            "Write the number without '#'."
        )
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"The name of a {what} holds a lone surrogate, which is no text.") from None
    return name


class Names:
    """Numbers what comes more than once under one name: `charge`, `charge#2`, `charge#3`."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, name: str) -> str:
        self._seen[name] += 1
        count = self._seen[name]
        return name if count == 1 else f"{name}#{count}"


def mismatch(job_id: int, seq: int, found: str, recorded: str) -> StepMismatch:
    """Say that the code comes to something else than an earlier attempt wrote down."""
    return StepMismatch(
        f"Entry {seq} in the journal of job {job_id} is {recorded}, and the code now comes to {found} there: the steps "
        "were renamed, removed or put in another order while the job was on its way. Results would be mixed up, so it "
        f"was stopped. Deploy code that has {recorded} at this place and retry the job "
        f"(`unstuck retry {job_id}`), or enqueue it anew."
    )


def left_over(job_id: int, seq: int, recorded: str) -> StepMismatch:
    """Say that the code came to its end, and an earlier attempt had done more."""
    return StepMismatch(
        f"Entry {seq} in the journal of job {job_id} is {recorded}, and the code now ends before it: it was removed "
        "while the job was on its way, and its effect happened. Deploy code that has it and retry the job "
        f"(`unstuck retry {job_id}`), or enqueue it anew."
    )


def entry_text(kind: str, name: str) -> str:
    """Name an entry for people."""
    if kind == Kind.SLEEP:
        return f"a sleep ({name!r})" if name != "sleep" else "a sleep"
    if kind in (Kind.WAIT, Kind.SIGNAL, Kind.TIMEOUT):
        return f"the signal {name!r}"
    return f"step {name!r}"
