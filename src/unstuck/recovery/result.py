"""Count what one sweep of the reaper did."""

from collections import Counter
from dataclasses import dataclass, field

from unstuck.domain.liveness import Detector


@dataclass
class SweepResult:
    """The answer of one round, or of one burial."""

    skipped: str = ""
    """'ticket': somebody else does this round. 'late': we were paused ourselves, and accused nobody by silence."""
    watched: int = 0
    suspected: int = 0
    deaths: Counter[Detector] = field(default_factory=Counter)
    """Workers declared dead, by who saw it."""
    requeued: int = 0
    failed: int = 0
    quarantined: int = 0
    cancelled: int = 0
    left: int = 0
    """Stale jobs that wait for an operator, because recovery is switched off."""
    disabled: int = 0
    """Workers disabled because they keep crashing."""
    promoted: int = 0
    expired: int = 0
    """Jobs cancelled because they were not begun in time."""
    repaired: int = 0
    """Workflows that could not have gone on, and lines with a free place to which nobody had been let in."""
    pruned: int = 0
    """Finished jobs, events and dead workers removed by retention."""
    deferred: int = 0
    """Parts of the round that a lock of another session held up. The next round tries them again."""
    queues: set[str] = field(default_factory=set)
    """Queues that got something to do."""
    next_due_in_s: float | None = None
    """When the next scheduled job, or a job put back with a delay, becomes due."""
    next_batch_in_s: float | None = None
    """When retention wants to remove the next batch; None: it has removed all that there was."""

    @property
    def settled(self) -> int:
        return self.requeued + self.failed + self.quarantined + self.cancelled

    def due_in(self, delay_s: float | None) -> None:
        """Remember the earliest moment at which something becomes due."""
        if delay_s is not None:
            self.next_due_in_s = delay_s if self.next_due_in_s is None else min(self.next_due_in_s, delay_s)

    def counts(self) -> dict[str, int]:
        """Give what is not zero, for a log line or a table."""
        every = {
            "suspected": self.suspected,
            "buried": self.deaths.total(),
            "requeued": self.requeued,
            "failed": self.failed,
            "quarantined": self.quarantined,
            "cancelled": self.cancelled,
            "left": self.left,
            "disabled": self.disabled,
            "promoted": self.promoted,
            "expired": self.expired,
            "repaired": self.repaired,
            "pruned": self.pruned,
            "deferred": self.deferred,
        }
        return {name: count for name, count in every.items() if count}
