"""What the reaper does: watch, judge, and settle what the dead held."""

from collections.abc import Sequence
from typing import Protocol

from unstuck.domain.autopsy import LastWords
from unstuck.domain.endings import Ending, Release
from unstuck.domain.rules import RecoveryRules
from unstuck.domain.watch import Tick
from unstuck.store.records import Guard, HeldJob, Ticked, WorkerVerdict, WorkerWatch


class ReaperVerbs(Protocol):
    def tick(self, tick: Tick, ticket: str | None = None, ttl_s: float = 0.0) -> Ticked:
        """Extend the watch over the workers, or begin a new watch period, and take the ticket of that name if it is
        free. Every reaper does this before it judges anyone: silence counts only within watch periods."""
        ...

    def take_ticket(self, name: str, ttl_s: float) -> bool:
        """Win the right to do one round; it expires by itself, so nobody can hold it while frozen."""
        ...

    def watch(self, host: str | None = None) -> list[WorkerWatch]:
        """Give every living worker, and every dead or stopped one that still holds jobs."""
        ...

    def to_judge(self) -> tuple[list[WorkerWatch], int]:
        """Like `watch`, without those foreign workers of whom nothing is to be judged: they live, and were heard within
        every timeout that concerns them. Of these only the number is given, so that a round looks at ten thousand in
        the time of a few."""
        ...

    def recovery_rules(self) -> list[RecoveryRules]:
        """Return the different recovery settings that Python workers stored, living or gone."""
        ...

    def ring_of(self, worker_id: str, host: str, size: int) -> list[WorkerWatch]:
        """Give the `size` living workers of this host that follow this one in the order of ids, going round."""
        ...

    def condemn(self, worker_id: str, verdict: WorkerVerdict, guard: Guard) -> bool:
        """Write SUSPECT or DEAD with its event, if the guard still holds; locks the identity row, so that no
        turn of a dead worker commits after it. False: somebody was faster, or it beat."""
        ...

    def amend(self, worker_id: str, verdict: WorkerVerdict) -> bool:
        """Write down more of how a worker ended that is dead already; False where it is not."""
        ...

    def held_by(self, worker_id: str, limit: int) -> list[HeldJob]:
        """Like `held`, bounded, oldest first, for the sweep."""
        ...

    def settle(
        self, worker_id: str, endings: Sequence[Ending], releases: Sequence[Release], guard: Guard
    ) -> set[tuple[int, int]]:
        """End attempts of someone else, if the guard still holds; give the (job_id, token) that were written."""
        ...

    def overdue(self, limit: int) -> list[HeldJob]:
        """Give RUNNING jobs that passed their hard deadline by a grace while their worker is not settling them:
        those of dead or suspect workers, and of any worker 30 s past the deadline. Left out are those whose outcome a
        living worker has in hand, and only a lock keeps from the ledger."""
        ...

    def add_last_words(self, words: Sequence[LastWords]) -> None:
        """Add what jobs said last to the reports of their deaths that were written without it."""
        ...

    def stale(self, older_than_s: float) -> list[HeldJob]:
        """Give held jobs whose worker has been silent for at least so long (or is dead)."""
        ...
