"""What is done for foreign workers: those through another door than Python's own."""

from collections.abc import Collection, Sequence
from typing import Protocol

from unstuck.store.contract.bell import Bell
from unstuck.store.records import BeatAnswer, Fate, ForeignPulse, WorkerRecord


class BeatsInFlight(Protocol):
    """Beats that were sent and are not answered yet. Whatever goes wrong (any exception): drop it, and beat again with
    `beat_foreign`, which says what is wrong."""

    @property
    def fd(self) -> int:
        """What to wait for: it can be read when there is something to take in."""
        ...

    @property
    def unsent(self) -> bool:
        """Some of it could not be sent yet: `push` when `fd` can be written."""
        ...

    @property
    def limit_s(self) -> float:
        """How long to wait for the answer before it is given up: a hung server says nothing at all."""
        ...

    def push(self) -> None: ...

    def land(self) -> list[BeatAnswer] | None:
        """Take in what has come; None while that is not all of it."""
        ...

    def drop(self) -> None:
        """Give it up; nobody knows whether they were written."""
        ...


class ForeignVerbs(Protocol):
    def foreign_worker(self, worker_id: str) -> WorkerRecord | None:
        """Give one of them, whatever its state."""
        ...

    def foreign_worker_named(self, name: str) -> WorkerRecord | None:
        """Give the living one of this name, else the last that had it. `register` refuses, by writing nothing, a second
        living one of the same name."""
        ...

    def living_python_worker(self, name: str) -> str | None:
        """Return the id of a living worker of Python's own with this name, if there is one."""
        ...

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        """Return what became of attempts, each named by job and token, in the same order: one read for all of them."""
        ...

    def blocked_workers(self, worker_ids: Collection[str]) -> set[str]:
        """Return those of these workers whose turns cannot be written now, because another session holds their rows."""
        ...

    def beat_foreign(self, pulses: Sequence[ForeignPulse]) -> list[BeatAnswer]:
        """Like `beat`, for many in one commit; the answers are in the same order. That one of them is late says nothing
        of the ledger, so nobody is forgiven for it. No disk is waited for: a beat that a crash forgets is forgiven by
        the restart."""
        ...

    def launch_beats(self, pulses: Sequence[ForeignPulse]) -> BeatsInFlight | None:
        """Begin to do the same without waiting, for an event loop; None where `beat_foreign` must be called."""
        ...

    def overhear(self) -> Bell:
        """Open a bell that hears every word, for a process that speaks for many workers."""
        ...
