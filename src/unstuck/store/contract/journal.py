"""What jobs wrote down on their way, and the signals that they are sent. Entries are written by turns."""

from typing import Protocol

from unstuck.store.records import JournalRecord, SignalRecord


class JournalVerbs(Protocol):
    def signal(self, job_id: int, name: str, value: bytes, by: str) -> str:
        """Keep a signal for a job: 'woken' (it waited for this one), 'kept' (until it does), 'finished' (too late),
        'full' (too many wait for it already), 'workflow' (it stands for one, and takes none), 'missing'. Several of one
        name are taken in their order, each once."""
        ...

    def journal(self, job_id: int) -> list[JournalRecord]:
        """Give what the job wrote down, in order; the checkpoint, if there is one, comes first."""
        ...

    def signals(self, job_id: int) -> list[SignalRecord]:
        """Give all signals that it was sent, oldest first, taken or not."""
        ...
