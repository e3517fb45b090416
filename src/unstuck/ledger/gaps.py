"""Remember where in a queue there is nothing that a worker may take, so that not every claim reads past it again.

A queue is read in the order of rank and id. Where thousands of ready jobs of a task stand that this worker does not
know (or, on PostgreSQL, dead index entries that an old snapshot keeps), every claim would read all of them. A *gap* is
such a stretch, found by a look that had to read past it. Claims go around it: they read what is before it and after it.

A gap is a hint of this process. What comes in before or after it is seen at once; what comes in *inside* it (an older
job that goes back to the queue, or a priority in between) is seen when the gap is looked into again. That happens
after a time in proportion to what the look costs, so looks take a bounded share of the time.
"""

import msgspec

from unstuck.ledger.contract.workers import ClaimRequest

LOOK_AGAIN_AFTER_TIMES = 20
"""A look that cost so much is made again after so many times as much: a twentieth of the time at most."""
SOONEST_S = 0.05
LATEST_S = 60.0
MAX_GAPS = 1_000
"""Of tasks and queues asked for through one ledger object; past this all are forgotten, which costs one look each."""


class Gap(msgspec.Struct, frozen=True):
    """All places from the first of a rank up to a job's (rank and id), and that one too."""

    queue: str
    from_rank: int
    to_rank: int
    to_id: int


def look_again_after_s(cost_s: float) -> float:
    return min(max(cost_s * LOOK_AGAIN_AFTER_TIMES, SOONEST_S), LATEST_S)


class Gaps:
    """The gaps that one process knows, by who asks (the tasks it knows) and in which queue.

    Threads may use it at the same time: each step is one operation on a dict, and a lost one costs a look.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], str], tuple[Gap, float]] = {}

    def of(self, claim_request: ClaimRequest, now_s: float) -> tuple[Gap, ...]:
        """Give the gaps to go around; one whose time is over is forgotten, so the next look goes through it."""
        if not self._known:
            return ()
        self.due(claim_request, now_s)
        entries = (self._known.get((claim_request.tasks, queue)) for queue in claim_request.queues)
        return tuple({entry[0].queue: entry[0] for entry in entries if entry is not None}.values())

    def due(self, claim_request: ClaimRequest, now_s: float) -> list[Gap]:
        """Forget the gaps whose time is over, and give them to a caller that wants to look into them alone."""
        over = []
        for queue in claim_request.queues if self._known else ():
            entry = self._known.get((claim_request.tasks, queue))
            if entry is not None and entry[1] <= now_s:
                self._known.pop((claim_request.tasks, queue), None)
                over.append(entry[0])
        return over

    def note(self, tasks: tuple[str, ...], gap: Gap, cost_s: float, now_s: float) -> None:
        """Remember a gap. One that grew at its end is looked into as early as if it had not: its middle is as old."""
        entry = self._known.get((tasks, gap.queue))
        again_at_s = now_s + look_again_after_s(cost_s) if entry is None else entry[1]
        if len(self._known) >= MAX_GAPS:
            self._known.clear()
        self._known[(tasks, gap.queue)] = (gap, again_at_s)
