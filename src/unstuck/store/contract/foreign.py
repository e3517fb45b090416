"""What is done for foreign workers: those through another door than Python's own."""

from collections.abc import Sequence
from typing import Protocol

from unstuck.store.contract.bell import Bell
from unstuck.store.records import BeatAnswer, ForeignPulse, WorkerRecord


class ForeignVerbs(Protocol):
    def foreign_worker(self, worker_id: str) -> WorkerRecord | None:
        """Give one of them, whatever its state."""
        ...

    def foreign_worker_named(self, name: str) -> WorkerRecord | None:
        """Give the living one of this name, else the last that had it. `register` refuses, by writing nothing, a second
        living one of the same name."""
        ...

    def beat_foreign(self, pulses: Sequence[ForeignPulse]) -> list[BeatAnswer]:
        """Like `beat`, for many in one commit; the answers are in the same order. That one of them is late says nothing
        of the ledger, so nobody is forgiven for it. No disk is waited for: a beat that a crash forgets is forgiven by
        the restart."""
        ...

    def overhear(self) -> Bell:
        """Open a bell that hears every word, for a process that speaks for many workers."""
        ...
