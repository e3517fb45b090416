"""What the loops of a worker show of themselves, for the watchdog to see: written by one thread, read by another."""

from unstuck import failpoints


class Movement:
    """One loop. Plain attributes: a glance that is a moment old is good enough."""

    def __init__(self) -> None:
        self.rounds = 0
        """Goes up with each round, and with each try to reach the ledger."""
        self.busy = False
        """It is at work. Of a loop that speaks to the ledger: it waits for the ledger."""
        self.leaving = False
        """It takes nothing new any more."""

    def moved(self, point: str = "") -> None:
        """Note a round; `point` is the failpoint at which a test may hang it."""
        self.rounds += 1
        if point and failpoints.active:
            failpoints.reached(point)
