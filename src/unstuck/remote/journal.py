"""Let foreign workers write down what their jobs did on their way, and read it: the journal, fenced and repeatable."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain import payload
from unstuck.domain.endings import Suspended
from unstuck.domain.journal import (
    CHECKPOINT_SEQ,
    MAX_JOURNAL_BYTES,
    Kind,
    PendingSignal,
    RecordedEntry,
    StoredJournal,
    checked_name,
    entry_text,
)
from unstuck.domain.units import seconds
from unstuck.errors import PayloadError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JournalRecord, SignalRecord
from unstuck.ledger.contract.workers import Claimed, JournalEntry
from unstuck.remote.messages import PauseBody, StepItem


def journal_view(journal: StoredJournal) -> list[dict[str, Any]]:
    return [
        {
            "seq": line.seq,
            "kind": line.kind,
            "name": line.name,
            "value": msgspec.Raw(line.value),
            "age_s": round(line.age_s, 3),
        }
        for line in journal.lines
    ]


def signals_view(journal: StoredJournal) -> list[dict[str, Any]]:
    return [{"number": one.number, "name": one.name, "value": msgspec.Raw(one.value)} for one in journal.signals]


def journal_of(ledger: Ledger, job: Claimed) -> StoredJournal:
    """Read it from the ledger, for a job that is handed out again."""
    now = time.time()
    lines = [
        RecordedEntry(entry.seq, entry.kind, entry.name, entry.value, max(0.0, now - entry.at))
        for entry in ledger.jobs.journal(job.job_id)
    ]
    kept = [
        PendingSignal(one.number, one.name, one.value)
        for one in ledger.jobs.signals(job.job_id)
        if one.taken_seq is None
    ]
    return StoredJournal(tuple(lines), tuple(kept))


class Refused(Exception):
    """An entry cannot be written; `status` says why in one word."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class JobJournal:
    """What is written down of one job and sent to it, read once for all entries of a call.

    Each reading may be of megabytes, and a call may have a thousand entries."""

    def __init__(self, ledger: Ledger, job_id: int) -> None:
        self._ledger = ledger
        self._job_id = job_id
        self._entries: list[JournalRecord] | None = None
        self._signals: list[SignalRecord] | None = None

    @property
    def entries(self) -> list[JournalRecord]:
        if self._entries is None:
            self._entries = list(self._ledger.jobs.journal(self._job_id))
        return self._entries

    @property
    def signals(self) -> list[SignalRecord]:
        if self._signals is None:
            self._signals = list(self._ledger.jobs.signals(self._job_id))
        return self._signals

    def note(self, entry: JournalEntry) -> None:
        """Know of an entry that was just written."""
        if self._entries is not None:
            written = JournalRecord(entry.seq, entry.kind, entry.name, entry.value, time.time(), entry.token)
            self._entries = [*(one for one in self._entries if one.seq != entry.seq), written]
        if self._signals is not None and entry.signal is not None:
            self._signals = [
                msgspec.structs.replace(one, taken_seq=entry.seq) if one.number == entry.signal else one
                for one in self._signals
            ]


def entry_of(journal: JobJournal, item: StepItem, limit_bytes: int) -> JournalEntry | None:
    """Return the entry that is asked for; None if it is there already. Raise Refused for what does not fit."""
    if item.seq == CHECKPOINT_SEQ:
        return _entry(item, Kind.CHECKPOINT, "checkpoint", _value(item, limit_bytes))
    known = journal.entries
    if item.signal is not None:
        return _signal_entry(journal.signals, item, known)
    name = checked_name(item.name, "step")
    if _is_there(known, item.seq, Kind.STEP, name):
        return None
    value = _value(item, limit_bytes)
    _check_room(known, value)
    return _entry(item, Kind.STEP, name, value)


def pause_of(item: Any, pause: PauseBody) -> tuple[Suspended, JournalEntry]:
    """Give how an attempt is suspended, and the entry that is written with it."""
    if pause.signal is not None:
        name = checked_name(pause.signal, "signal")
        timeout_s = None if pause.timeout is None else seconds(pause.timeout, "timeout")
        value = payload.encode(timeout_s, "timeout", 100)
        return Suspended(timeout_s, name), JournalEntry(item.job_id, item.token, pause.seq, Kind.WAIT, name, value)
    delay_s = seconds(pause.sleep or 0, "sleep")
    value = payload.encode(delay_s, "sleep", 100)
    return Suspended(delay_s), JournalEntry(item.job_id, item.token, pause.seq, Kind.SLEEP, "sleep", value)


def _signal_entry(
    signals: Sequence[SignalRecord], item: StepItem, known: Sequence[JournalRecord]
) -> JournalEntry | None:
    found = next((one for one in signals if one.number == item.signal), None)
    if found is None:
        raise Refused("no_such_signal", f"Job {item.job_id} was sent no signal with the number {item.signal}.")
    if found.taken_seq == item.seq:
        return None
    if found.taken_seq is not None:
        raise Refused("taken", f"Signal {item.signal} was taken by entry {found.taken_seq} already.")
    there = next((one for one in known if one.seq == item.seq), None)
    if there is not None and there.kind != Kind.WAIT:
        raise _mismatch(item.seq, there)
    _check_room(known, found.value)
    entry = _entry(item, Kind.SIGNAL, found.name, found.value)
    return JournalEntry(entry.job_id, entry.token, entry.seq, entry.kind, entry.name, entry.value, found.number)


def _check_room(known: Sequence[JournalRecord], value: bytes) -> None:
    if sum(len(entry.value) for entry in known if entry.seq != CHECKPOINT_SEQ) + len(value) > MAX_JOURNAL_BYTES:
        raise Refused("too_large", f"The steps and signals of one job may hold {MAX_JOURNAL_BYTES:,} bytes together.")


def _is_there(known: Sequence[JournalRecord], seq: int, kind: Kind, name: str) -> bool:
    there = next((one for one in known if one.seq == seq), None)
    if there is None:
        return False
    if (there.kind, there.name) != (kind, name):
        raise _mismatch(seq, there)
    return True


def _mismatch(seq: int, there: JournalRecord) -> Refused:
    return Refused(
        "step_mismatch",
        f"Entry {seq} of its journal is {entry_text(there.kind, there.name)} already. Follow the journal that came "
        "with the claim: what is in it must not be done again, or by another name.",
    )


def _value(item: StepItem, limit_bytes: int) -> bytes:
    try:
        return payload.encode(item.value, f"Entry {item.seq} of job {item.job_id}", limit_bytes)
    except PayloadError as error:
        raise Refused("not_storable", str(error)) from None


def _entry(item: StepItem, kind: Kind, name: str, value: bytes) -> JournalEntry:
    return JournalEntry(item.job_id, item.token, item.seq, kind, name, value)
