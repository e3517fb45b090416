"""Do the chores: due jobs and retention."""

import time
from collections.abc import Collection

from unstuck.domain.states import FINAL_STATES
from unstuck.ledger.contract.maintenance import Expired, KeysChecked, Promoted, Repaired, Swept
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Database

PRUNE_LOOK = 10_000
REPAIR_LOOK = 20_000
"""How many nodes one round of repair looks at; the next goes on behind them."""


class Maintenance:
    """See `unstuck.ledger.contract.maintenance.Maintenance`."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._repaired_up_to = 0

    def take_ticket(self, name: str, ttl_s: float) -> bool:
        return bool(self._db.serve_once("take_ticket", name=name, ttl_s=ttl_s))

    def promote_due(self, limit: int) -> Promoted:
        counts: dict[str, int] = dict(self._db.serve_once("promote_due", limit=limit))
        next_due = self._db.serve("next_due")
        return Promoted(sum(counts.values()), frozenset(counts), next_due[0][0] if next_due else None)

    def expire_due(self, limit: int) -> Expired:
        count, queues, next_in_s = self._db.serve_once("expire_due", limit=limit)[0]
        if queues:
            self._db.notify(f"queue:{queue}" for queue in set(queues))
        return Expired(count, frozenset(queues), next_in_s)

    def follow_clock(self, limit: int) -> float:
        return float(self._db.serve_once("follow_clock", limit=limit)[0][0])

    def check_keys(self, after: str, limit: int) -> KeysChecked:
        next_after, repaired, removed, queues = self._db.serve_once("tend_lines", after=after, limit=limit)[0]
        if queues:
            self._db.notify(f"queue:{queue}" for queue in set(queues))
        return KeysChecked(next_after, repaired, removed, frozenset(queues))

    def repair_workflows(self, limit: int) -> list[Repaired]:
        rows = self._db.serve_once("repair_workflows", after=self._repaired_up_to, look=REPAIR_LOOK, limit=limit)
        self._repaired_up_to = rows[-1][3] or 0
        self._db.notify({f"queue:{queue}" for _, _, queues, _ in rows for queue in queues or ()})
        return [Repaired(workflow_id, what) for workflow_id, what, _, _ in rows[:-1]]

    def sweep_old(self, jobs_s: float, events_s: float, workers_s: float, limit: int) -> Swept:
        began_s = time.monotonic()
        [(moved,)] = self._db.serve("sweep_moved_events", limit=limit)
        jobs, events, workers, more = self._db.serve_once(
            "sweep_old", jobs_s=jobs_s, events_s=events_s, workers_s=workers_s, limit=limit
        )[0]
        more = more or max(events, workers, moved) >= limit
        return Swept(jobs, events, workers, more=more, took_s=time.monotonic() - began_s)

    def sweep_kept(self, limit: int) -> Swept:
        began_s = time.monotonic()
        jobs, keys = self._db.serve_once("sweep_kept", limit=limit)[0]
        return Swept(jobs, keys=keys, more=max(jobs, keys) >= limit, took_s=time.monotonic() - began_s)

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        return int(self._db.serve_once("sweep_audit", older_than_s=older_than_s, limit=limit)[0][0])

    def sweep_counters(self, kept_minutes: int, limit: int) -> int:
        return int(self._db.serve_once("sweep_counters", kept=kept_minutes, limit=limit)[0][0])

    def prune(self, older_than_s: float, states: Collection[str] = ()) -> int:
        wanted = arrays.texts(sorted(FINAL_STATES.intersection(states))) if states else None
        removed = 0
        after: int | None = 0
        while after is not None:
            # Many short transactions: a prune of millions must not make the workers wait.
            after, count = self._db.read_connection.write(
                self._db.sql["prune_batch"],
                {"after": after, "older_than_s": older_than_s, "states": wanted, "look": PRUNE_LOOK},
            )[0]
            removed += count
        return removed
