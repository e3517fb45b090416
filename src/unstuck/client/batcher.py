"""Gather enqueues that happen at the same time into one commit.

Whoever comes first writes; those who come meanwhile hand their jobs to the next who writes. One
connection so serves many threads, and the slower the disk, the larger the batch.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unstuck.errors import LedgerBusy, LedgerUnavailable, UncertainCommit
from unstuck.ledger.contract.jobs import Enqueued, NewJob

MAX_BATCH = 2_000
PATIENCE_S = 10.0
"""How long an enqueue waits for an open transaction that holds its unique key."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
INTERRUPTED = (
    "The thread that stored these jobs was interrupted: they may or may not be stored. "
    "Look before enqueueing them again, or give them a unique_key."
)

Write = Callable[[Sequence[NewJob]], list[Enqueued]]


@dataclass(eq=False)
class _Entry:
    jobs: Sequence[NewJob]
    ready: threading.Lock
    """Held until there is an answer, or until its owner is to write."""
    answer: list[Enqueued] | None = None
    error: BaseException | None = None
    is_leader: bool = False


class EnqueueBatcher:
    """One thread writes at a time, for all who wait; then the first of those who came meanwhile does.

    Each waits for its own parcel and for nothing else: who has its answer goes, whatever is being written by then."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._gate = threading.Lock()
        self._writing = False
        self._waiting: list[_Entry] = []

    def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store the jobs; returns when they are durable. Others are not held up while a lock keeps ours waiting."""
        deadline_s = time.monotonic() + PATIENCE_S
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._enqueue(jobs)
            except LedgerBusy:
                if time.monotonic() + pause_s > deadline_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        entry = _Entry(jobs, threading.Lock())
        entry.ready.acquire()
        try:
            with self._gate:
                self._waiting.append(entry)
                if not self._writing:
                    self._writing = entry.is_leader = True
            if not entry.is_leader:
                entry.ready.acquire()
            if entry.is_leader:
                self._write_waiting()
        except BaseException:
            self._withdraw(entry)
            raise
        finally:
            if entry.is_leader:
                self._promote_next()
        if entry.error is not None:
            raise entry.error
        assert entry.answer is not None
        return entry.answer

    def _withdraw(self, entry: _Entry) -> None:
        """Ctrl-C while it waited: what nobody took is not stored."""
        with self._gate:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def _promote_next(self) -> None:
        """Let the first of those who came meanwhile write for the next batch."""
        with self._gate:
            self._writing = bool(self._waiting)
            if self._waiting:
                self._waiting[0].is_leader = True
                self._waiting[0].ready.release()

    def _write_waiting(self) -> None:
        taken: list[_Entry] = []
        try:
            with self._gate:
                count = 0
                while self._waiting and (not taken or count + len(self._waiting[0].jobs) <= MAX_BATCH):
                    taken.append(self._waiting.pop(0))
                    count += len(taken[-1].jobs)
            self._write_parcels(taken)
        finally:
            for entry in taken:
                # Ctrl-C in the thread that wrote for all: the others must not wait for an answer that never comes.
                if entry.answer is None and entry.error is None:
                    entry.error = UncertainCommit(INTERRUPTED)
                if not entry.is_leader:
                    entry.ready.release()

    def _write_parcels(self, entries: list[_Entry]) -> None:
        try:
            answers = self._write([job for entry in entries for job in entry.jobs])
        except LedgerBusy as error:
            # A unique key of one of them is held by an open transaction. Nothing was written: the others go alone.
            if len(entries) == 1:
                entries[0].error = error
            else:
                for entry in entries:
                    self._write_parcels([entry])
        except LedgerUnavailable as error:
            # Nobody's fault, and the same for all. Tried one by one, what was written after all would be there twice.
            for entry in entries:
                entry.error = error
        except Exception as error:  # noqa: BLE001 - handed to the caller whose jobs these are
            if len(entries) > 1:
                # One caller's bad job must not fail the others'.
                for entry in entries:
                    self._write_parcels([entry])
            else:
                entries[0].error = error
        else:
            at = 0
            for entry in entries:
                entry.answer = answers[at : at + len(entry.jobs)]
                at += len(entry.jobs)
