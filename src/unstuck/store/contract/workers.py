"""What a worker does from its birth to its end."""

from collections.abc import Collection, Sequence
from typing import Protocol

from unstuck.store.contract.bell import Bell
from unstuck.store.records import BeatAnswer, DeferredOutcome, HeldJob, Progress, Pulse, Turn, TurnAnswer, WorkerBirth


class WorkerVerbs(Protocol):
    def register(self, birth: WorkerBirth) -> bool:
        """Write the worker down as ACTIVE with its first beat, and the tasks that it knows. True: its host is
        disabled, and it must not claim."""
        ...

    def listen(self, worker_id: str) -> Bell:
        """Open the bell of a worker; call it after `register`."""
        ...

    def beat(self, pulse: Pulse) -> BeatAnswer:
        """Push the worker's deadline forward: one narrow UPDATE, never an insert. A missing row means dead."""
        ...

    def turn(self, turn: Turn) -> TurnAnswer:
        """Do one turn of the wheel in one commit and one round trip."""
        ...

    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        """Return those of these jobs that cannot be ended now, because another session holds their rows: which one."""
        ...

    def held(self, worker_id: str) -> list[HeldJob]:
        """Give all that the ledger believes this worker holds."""
        ...

    def note_progress(self, worker_id: str, notes: Sequence[Progress]) -> None:
        """Write how far running jobs are; what is not this worker's any more is passed over."""
        ...

    def note_deferred(
        self, worker_id: str, outcomes: Sequence[DeferredOutcome], good_for_s: float | None = None
    ) -> None:
        """Write down that the worker is done with these attempts, though a lock keeps their outcomes from the ledger:
        they do not count as late while it lives. `good_for_s`: for so long only, unless it is repeated."""
        ...

    def drain(self, worker_id: str) -> None:
        """Write ACTIVE → DRAINING."""
        ...

    def retire(self, worker_id: str) -> None:
        """Write the end of a worker that shut down in order: STOPPED. What it still holds is left to the reaper."""
        ...
