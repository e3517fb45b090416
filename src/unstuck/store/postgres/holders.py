"""Name the sessions that hold a lock which a call waited for in vain."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from unstuck.domain.durations import brief
from unstuck.domain.errors import LedgerBusy, LedgerError
from unstuck.store.postgres import arrays
from unstuck.store.postgres.base import Verbs
from unstuck.store.postgres.lanes import Lane

OPEN_S = 0.05
"""Transactions of our own are shorter than this, unless they wait themselves."""
PATIENCE_S = 10.0
"""How long a caller who needs an answer waits for other sessions to end their transactions."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
UNKNOWN = "blocked by another session of the database"

T = TypeVar("T")


class HolderVerbs(Verbs):
    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        found = self.turn_lane.ask(self.sql["blocked_outcomes"], {"ids": arrays.int8s(list(job_ids))})
        pids = {pid for _, pid in found if pid is not None}
        told = {pid: self.lock_holders(self.turn_lane, [pid]) for pid in pids}
        unknown = self.lock_holders(self.turn_lane) if any(pid is None for _, pid in found) else ""
        return {job_id: unknown if pid is None else told[pid] for job_id, pid in found}

    def lock_holders(self, lane: Lane, pids: Sequence[int] = ()) -> str:
        """Describe these sessions, or those that may hold what we wait for."""
        rows = lane.ask(self.sql["lock_holders"], {"pids": arrays.int4s(list(pids)), "open_s": OPEN_S})
        if not rows:
            return UNKNOWN
        return "blocked by " + " or ".join(
            f"session {pid} ({name}, {state or 'state unknown'}, in a transaction for {brief(age_s or 0.0)})"
            for pid, name, state, age_s in rows
        )

    def past_locks(self, lane: Lane, call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
        """Call again while another session holds a lock that it needs, then raise LedgerBusy and name that session.

        Each call waits for a moment only, and others use the connection in between."""
        deadline_s = time.monotonic() + patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return call()
            except LedgerBusy as error:
                if time.monotonic() + pause_s > deadline_s:
                    who = UNKNOWN
                    with suppress(LedgerError):
                        who = self.lock_holders(lane)
                    raise LedgerBusy(
                        f"PostgreSQL at {self.address.where} could not do it: {who}. Nothing was written. End that "
                        "transaction, or try again later."
                    ) from error
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
