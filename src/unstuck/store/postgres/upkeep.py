"""Do the chores: due jobs and retention."""

from collections.abc import Collection

from unstuck.domain.states import FINAL
from unstuck.store.postgres import arrays
from unstuck.store.postgres.base import Verbs
from unstuck.store.records import Promoted, Swept

LOOK_PER_REMOVED = 5
"""How many jobs a step of retention looks at for each that it may remove."""
PRUNE_LOOK = 10_000


class UpkeepVerbs(Verbs):
    def promote_due(self, limit: int) -> Promoted:
        counts: dict[str, int] = dict(self.serve_once("promote_due", limit=limit))
        next_due = self.serve("next_due")
        return Promoted(sum(counts.values()), frozenset(counts), next_due[0][0] if next_due else None)

    def sweep_old(self, jobs_s: float, events_s: float, workers_s: float, limit: int) -> Swept:
        """Walk on from where the last sweep stopped: what is not old yet, or not finished, is met again later."""
        position = self.serve("sweep_position")[0][0]
        after, jobs = self.serve_once(
            "prune_batch", after=position, older_than_s=jobs_s, states=None, look=limit * LOOK_PER_REMOVED
        )[0]
        if (after or 0) != position:
            self.serve("set_sweep_position", position=after or 0)
        events = self.serve_once("sweep_events", older_than_s=events_s, limit=limit)[0][0]
        workers = self.serve_once("sweep_workers", older_than_s=workers_s, limit=limit)[0][0]
        return Swept(jobs, events, workers)

    def prune(self, older_than_s: float, states: Collection[str] = ()) -> int:
        wanted = arrays.texts(sorted(FINAL.intersection(states))) if states else None
        removed = 0
        after: int | None = 0
        while after is not None:
            # Many short transactions: a prune of millions must not make the workers wait.
            after, count = self.read_lane.write(
                self.sql["prune_batch"],
                {"after": after, "older_than_s": older_than_s, "states": wanted, "look": PRUNE_LOOK},
            )[0]
            removed += count
        return removed
