"""What a worker over HTTP gets while it waits at the door, on every ledger."""

import asyncio
import threading
from typing import Any, cast

from tests.contract.hands import PATIENCE_S, QUEUE, TASK, birth, put

from unstuck.domain.states import Door, JobState
from unstuck.http.foreign.claiming import Presence, claim
from unstuck.http.foreign.seats import Seat
from unstuck.http.foreign.waking import Wakeups
from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed, Turn, TurnAnswer


class Watched:
    """A ledger that says when somebody has looked for jobs."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.looked = threading.Event()

    def turn(self, turn: Turn) -> TurnAnswer:
        try:
            return self._ledger.turn(turn)
        finally:
            self.looked.set()


async def never() -> Any:
    await asyncio.Event().wait()


def test_whoever_is_told_something_gets_no_job_of_the_same_moment(ledger: Ledger) -> None:
    """An operator switches a worker off while it waits: a job that comes just then is for somebody else."""
    ledger.register(birth("w1", door=Door.HTTP, suspect_after_s=600, running_stale_after_s=600))
    seat = Seat("w1", "name-of-w1", None, (QUEUE,), (TASK,), 30.0, 600.0)
    watched = Watched(ledger)

    async def scene() -> tuple[tuple[Claimed, ...], int]:
        wakeups, presence = Wakeups(PATIENCE_S), Presence(never)
        waiting = asyncio.create_task(
            claim(cast(Ledger, watched), wakeups, seat, presence, limit=1, wait_s=PATIENCE_S, start=False)
        )
        await asyncio.to_thread(watched.looked.wait, PATIENCE_S)
        # So that it rests; where it does not yet, it hears the word all the same.
        await asyncio.sleep(0.05)
        job_id = put(ledger)
        wakeups.heard(frozenset({"worker:w1", f"queue:{QUEUE}"}))
        got = await waiting
        presence.close()
        return got, job_id

    got, job_id = asyncio.run(scene())
    record = ledger.job(job_id)
    assert got == ()
    assert record is not None
    assert record.state is JobState.PENDING
