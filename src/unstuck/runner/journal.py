"""The journal of an attempt: steps, checkpoints, sleeps and signals, and how user code is left to wait.

`Suspended` and `Superseded` derive from BaseException, as StopRequested does: `except Exception` does not catch them,
and `finally` runs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from unstuck.domain.journal import (
    CHECKPOINT_SEQ,
    MAX_ENTRIES,
    MAX_JOURNAL_BYTES,
    Kind,
    Names,
    PendingSignal,
    RecordedEntry,
    checked_name,
    entry_text,
    left_over,
    mismatch,
    unpack_journal,
)
from unstuck.domain.payload import decode, encode
from unstuck.domain.units import brief
from unstuck.errors import LedgerError, PayloadError, SignalTimeout, TooManySteps
from unstuck.runner import messages, monitor
from unstuck.runner.messages import SUCCEEDED, SUSPENDED, Extras, JobMessage, NewEntry, Report, Suspension
from unstuck.runner.monitor import JournalChannel


class Suspended(BaseException):
    """The job gives its slot back, and begins again when its time or its signal has come: let it pass."""

    def __init__(self, pause: Suspension) -> None:
        super().__init__("the job waits, and gives its slot back; let this pass")
        self.pause = pause


class Superseded(BaseException):
    """Somebody else has this job by now, so nothing can be written down any more: this attempt is about to end."""


def suspension_in(error: BaseException) -> Suspended | None:
    """Find a suspension in what user code raised; a TaskGroup wraps it."""
    if isinstance(error, Suspended):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := suspension_in(one)) is not None), None)
    return None


MAX_FOLLOW_UPS = 1_000
CHECKPOINT_GAP_S = 0.05
"""A loop that calls `ctx.checkpoint()` a hundred thousand times a second must not pay for as many packets."""

_WAITS = frozenset({Kind.WAIT, Kind.SIGNAL, Kind.TIMEOUT})


class Place(NamedTuple):
    seq: int
    name: str
    found: RecordedEntry | None
    """What an earlier attempt wrote down here."""


class Journal:
    """Used by the threads and coroutines of one job."""

    def __init__(self, job_id: int, token: int, journal: bytes, wire: monitor.JournalChannel, limit_bytes: int) -> None:
        known = unpack_journal(journal)
        self._job_id = job_id
        self._token = token
        self._wire = wire
        self._limit_bytes = limit_bytes
        self._opened_s = time.monotonic()
        self._lines = {one.seq: one for one in known.lines if one.seq != CHECKPOINT_SEQ}
        self._signals: deque[PendingSignal] = deque(known.signals)
        self._size_bytes = sum(len(one.value) for one in self._lines.values())
        first = known.lines[0] if known.lines and known.lines[0].seq == CHECKPOINT_SEQ else None
        self._checkpoint = None if first is None else first.value
        self._unsent_checkpoint: bytes = b""
        """The newest one, until all of it was sent."""
        self._on_its_way: tuple[bytes, monitor.Unsent] | None = None
        self._checkpoint_s = -CHECKPOINT_GAP_S
        self._names = Names()
        self._seq = 0
        self._follow: list[bytes] = []
        # Taken again by a handler of a signal that comes while it is held.
        self._lock = threading.RLock()
        self._closed = False
        self.leaving: Suspended | Superseded | None = None
        """Raised once; whatever code swallows it meets it again."""

    # Steps ------------------------------------------------------------------------------------

    def begin_step(self, name: str) -> Place:
        """Take the place of a step, under its numbered name; `found` is its result, if an earlier attempt has it."""
        checked_name(name, "step")
        with self._lock:
            return self._enter(Kind.STEP, self._names.next(name))

    def step_entry(self, place: Place, value: Any) -> NewEntry:
        data = encode(value, f"The result of step {place.name!r}", self._limit_bytes)
        self._make_room(len(data), f"The result of step {place.name!r}")
        return NewEntry(place.seq, Kind.STEP, place.name, data)

    # Waiting ----------------------------------------------------------------------------------

    def sleep(self, delay_s: float) -> None:
        """Return when it was slept out; else leave."""
        with self._lock:
            place = self._enter(Kind.SLEEP, "sleep")
        if place.found is None:
            entry = NewEntry(place.seq, Kind.SLEEP, place.name, msgspec.json.encode(delay_s))
            raise self._leave(Suspension(delay_s, entry=entry))
        left_s = float(decode(place.found.value)) - self._age_s(place.found)
        if left_s > 0:
            raise self._leave(Suspension(left_s))

    def wait(self, name: str, timeout_s: float | None) -> NewEntry | RecordedEntry:
        """Give the signal that an earlier attempt took, or the entry by which this one takes what came; else leave."""
        checked_name(name, "signal")
        with self._lock:
            place = self._enter(Kind.WAIT, name)
            found = place.found
            if found is not None and found.kind != Kind.WAIT:
                return found
            kept = next((one for one in self._signals if one.name == name), None)
            if kept is not None:
                self._signals.remove(kept)
        if kept is not None:
            self._make_room(len(kept.value), f"The signal {name!r}")
            return NewEntry(place.seq, Kind.SIGNAL, name, kept.value, kept.number)
        if found is None:
            entry = NewEntry(place.seq, Kind.WAIT, name, msgspec.json.encode(timeout_s))
            raise self._leave(Suspension(timeout_s, name, entry))
        # What the first one said counts: by how long it waited already.
        asked_s = decode(found.value)
        left_s = None if asked_s is None else asked_s - self._age_s(found)
        if left_s is None or left_s > 0:
            raise self._leave(Suspension(left_s, name))
        return NewEntry(place.seq, Kind.TIMEOUT, name, found.value)

    def received(self, entry: NewEntry | RecordedEntry) -> Any:
        """Give what came with a signal, or raise SignalTimeout."""
        if entry.kind == Kind.TIMEOUT:
            asked_s = decode(entry.value)
            raise SignalTimeout(f"Signal {entry.name!r} did not come to job {self._job_id} within {brief(asked_s)}.")
        return decode(entry.value)

    # Writing ----------------------------------------------------------------------------------

    def write(self, entry: NewEntry) -> None:
        """Have it written; it is durable when this returns."""
        self._heed(self._wire.ask(self._token, entry), entry)

    async def write_async(self, entry: NewEntry) -> None:
        self._heed(await self._wire.ask_async(self._token, entry), entry)

    # Checkpoints ------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Any:
        return decode(self._checkpoint)

    def set_checkpoint(self, state: Any) -> None:
        data = encode(state, f"The checkpoint of job {self._job_id}", self._limit_bytes)
        now_s = time.monotonic()
        with self._lock:
            self._check_open()
            self._checkpoint = self._unsent_checkpoint = data
            if now_s - self._checkpoint_s < CHECKPOINT_GAP_S:
                return  # The pulse sends it, or the next one.
            self._checkpoint_s = now_s
        sent = self.flush()
        if sent is not None:
            self._wire.wait_for(sent)

    def flush(self) -> monitor.Unsent | None:
        """Hand over the newest checkpoint if the worker does not have it, and the one before it is not on its way."""
        with self._lock:
            self._forget_sent()
            if self._on_its_way is not None:
                self._wire.wake()
                return None
            data = self._unsent_checkpoint
            if not data:
                return None
            unsent = self._wire.tell(self._token, checkpoint_entry(data))
            # If a handler of a signal sent one in between, the newest is sent again: it may be before an older one.
            self._on_its_way = (data, unsent) if unsent is not None and self._on_its_way is None else None
            return unsent

    def _forget_sent(self) -> None:
        if self._on_its_way is not None and self._on_its_way[1].is_sent:
            if self._unsent_checkpoint is self._on_its_way[0]:
                self._unsent_checkpoint = b""
            self._on_its_way = None

    # What follows -----------------------------------------------------------------------------

    def follow(self, job: bytes) -> None:
        with self._lock:
            self._check_open()
            if len(self._follow) >= MAX_FOLLOW_UPS:
                raise TooManySteps(
                    f"One attempt may ask for {MAX_FOLLOW_UPS:,} jobs to follow it with ctx.enqueue, and job "
                    f"{self._job_id} asked for more. Let one that follows enqueue the others with enqueue_many."
                )
            self._follow.append(job)

    # The end ----------------------------------------------------------------------------------

    def close(self, pause: Suspension | None, *, succeeded: bool) -> Extras | None:
        """Nothing can be written any more; give what goes with the report."""
        with self._lock:
            self._closed = True
            self._forget_sent()
            follow = tuple(self._follow) if succeeded else ()
            rest = Extras(pause, self._unsent_checkpoint, follow)
        return rest if pause is not None or rest.checkpoint or follow else None

    def check_complete(self) -> None:
        """Raise StepMismatch if the code ended before it came to all that earlier attempts had done."""
        more = [seq for seq in self._lines if seq > self._seq]
        if more:
            found = self._lines[min(more)]
            raise left_over(self._job_id, found.seq, entry_text(found.kind, found.name))

    # ------------------------------------------------------------------------------------------

    def _enter(self, kind: Kind, name: str) -> Place:
        self._check_open()
        self._seq += 1
        seq = self._seq
        if seq > MAX_ENTRIES:
            raise TooManySteps(
                f"A job may write down {MAX_ENTRIES:,} steps, sleeps and signals, and job {self._job_id} comes to "
                "more. Use ctx.checkpoint for a loop over many items, or make several jobs of it."
            )
        found = self._lines.get(seq)
        if found is not None:
            same = found.kind in _WAITS if kind is Kind.WAIT else found.kind == kind
            if not same or found.name != name:
                raise mismatch(self._job_id, seq, entry_text(kind, name), entry_text(found.kind, found.name))
        return Place(seq, name, found)

    def _check_open(self) -> None:
        if self.leaving is not None:
            raise self.leaving
        if self._closed:
            raise RuntimeError(
                f"This attempt at job {self._job_id} is over: nothing of it can be written down any more."
            )

    def _leave(self, pause: Suspension) -> Suspended:
        self.leaving = Suspended(pause)
        return self.leaving

    def _make_room(self, size_bytes: int, what: str) -> None:
        with self._lock:
            if self._size_bytes + size_bytes > MAX_JOURNAL_BYTES:
                raise PayloadError(
                    f"{what} cannot be stored: with it the steps of job {self._job_id} would hold more than "
                    f"{MAX_JOURNAL_BYTES:,} bytes. Store the data elsewhere and return a reference."
                )
            self._size_bytes += size_bytes

    def _age_s(self, found: RecordedEntry) -> float:
        """Since it was written: as old as the ledger said, and the time since."""
        return found.age_s + time.monotonic() - self._opened_s

    def _heed(self, answer: messages.JournalAnswer, entry: NewEntry) -> None:
        if answer.verdict == messages.SUPERSEDED:
            self.leaving = Superseded("somebody else has this job by now; this attempt is about to be ended")
            raise self.leaving
        if answer.verdict == messages.REFUSED:
            raise LedgerError(f"{entry_text(entry.kind, entry.name)} cannot be written down: {answer.reason}")


def checkpoint_entry(data: bytes) -> NewEntry:
    return NewEntry(CHECKPOINT_SEQ, Kind.CHECKPOINT, "checkpoint", data)


Packing = Callable[[Any, tuple[Any, ...], dict[str, Any], int], bytes]
"""Packs a job that follows: the task or its name, its arguments, and the id of the job that asks for it."""


class Journals:
    """Of one runner. Most jobs never open theirs, and pay one entry in a dict."""

    def __init__(self, channel: JournalChannel, limit_bytes: int, pack: Packing) -> None:
        self._channel = channel
        self._limit_bytes = limit_bytes
        self._frames: dict[int, JobMessage] = {}
        self._open: dict[int, Journal] = {}
        self.pack = pack

    def expect(self, frame: JobMessage) -> None:
        """An attempt begins."""
        self._frames[frame.token] = frame

    def of(self, token: int) -> Journal | None:
        found = self._open.get(token)
        if found is None:
            frame = self._frames.get(token)
            if frame is None:
                return None
            opened = Journal(frame.job_id, token, frame.journal, self._channel, self._limit_bytes)
            # Two threads of a job may come here at once.
            found = self._open.setdefault(token, opened)
        return found

    def close(self, token: int, report: Report, error: BaseException | None, raised: "Raised") -> Report:
        """An attempt ended, with what it raised: give the report that is right for what it wrote down."""
        frame = self._frames.pop(token, None)
        journal = self._open.pop(token, None)
        if journal is None:
            if frame is None or not frame.journal:
                return report
            # It wrote something down once, and now comes to nothing of it.
            journal = Journal(frame.job_id, token, frame.journal, self._channel, self._limit_bytes)
        suspended = None if error is None else suspension_in(error)
        if error is None and isinstance(journal.leaving, Suspended):
            # Code that catches everything swallowed it: it waits all the same, and what it returned is done again.
            suspended = journal.leaving
        if suspended is not None:
            report = Report(token, SUSPENDED)
        elif report.kind == SUCCEEDED:
            try:
                journal.check_complete()
            except Exception as mismatch:  # noqa: BLE001 - becomes the report
                report = raised(token, mismatch)
        pause = None if suspended is None else suspended.pause
        report.extras = journal.close(pause, succeeded=report.kind == SUCCEEDED)
        return report

    def flush(self) -> None:
        """Hand over checkpoints that came too soon after the last; called with every pulse."""
        if self._open:
            for journal in list(self._open.values()):
                journal.flush()


Raised = Callable[[int, BaseException], Report]
