"""Do the chores: due jobs and retention."""

import time
from collections.abc import Collection

from unstuck.domain.states import FINAL_STATES
from unstuck.ledger.contract.maintenance import Promoted, Swept
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Verbs

PRUNE_LOOK = 10_000


class UpkeepVerbs(Verbs):
    def promote_due(self, limit: int) -> Promoted:
        counts: dict[str, int] = dict(self.serve_once("promote_due", limit=limit))
        next_due = self.serve("next_due")
        return Promoted(sum(counts.values()), frozenset(counts), next_due[0][0] if next_due else None)

    def follow_clock(self, limit: int) -> float:
        return float(self.serve_once("follow_clock", limit=limit)[0][0])

    def sweep_old(self, jobs_s: float, events_s: float, workers_s: float, limit: int) -> Swept:
        began_s = time.monotonic()
        [(moved,)] = self.serve("sweep_moved_events", limit=limit)
        jobs, events, workers, more = self.serve_once(
            "sweep_old", jobs_s=jobs_s, events_s=events_s, workers_s=workers_s, limit=limit
        )[0]
        more = more or max(events, workers, moved) >= limit
        return Swept(jobs, events, workers, more=more, took_s=time.monotonic() - began_s)

    def sweep_kept(self, limit: int) -> Swept:
        began_s = time.monotonic()
        jobs, keys = self.serve_once("sweep_kept", limit=limit)[0]
        return Swept(jobs, keys=keys, more=max(jobs, keys) >= limit, took_s=time.monotonic() - began_s)

    def prune(self, older_than_s: float, states: Collection[str] = ()) -> int:
        wanted = arrays.texts(sorted(FINAL_STATES.intersection(states))) if states else None
        removed = 0
        after: int | None = 0
        while after is not None:
            # Many short transactions: a prune of millions must not make the workers wait.
            after, count = self.read_connection.write(
                self.sql["prune_batch"],
                {"after": after, "older_than_s": older_than_s, "states": wanted, "look": PRUNE_LOOK},
            )[0]
            removed += count
        return removed
