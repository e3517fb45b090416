"""What a worker over HTTP gets while it waits at the door, on every ledger."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from tests.contract.hands import QUEUE, TASK, birth, put
from tests.fleet import PATIENCE_S

from unstuck.domain.states import Door, JobState
from unstuck.http.foreign.claiming import Presence, claim, line_of
from unstuck.http.foreign.seats import Seat
from unstuck.http.foreign.turning import Turns
from unstuck.http.foreign.waking import Wakeups
from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed


async def never() -> Any:
    await asyncio.Event().wait()


async def wanted() -> bool:
    return True


class Watched(Presence):
    """A client that stays, and says when it has found nothing and rests."""

    def __init__(self) -> None:
        super().__init__(never)
        self.resting = asyncio.Event()

    async def rest(self, waiting: Awaitable[None], timeout_s: float) -> None:
        self.resting.set()
        await super().rest(waiting, timeout_s)


def test_whoever_is_told_something_gets_no_job_of_the_same_moment(ledger: Ledger) -> None:
    """An operator switches a worker off while it waits: a job that comes just then is for somebody else."""
    ledger.register(birth("w1", door=Door.HTTP, suspect_after_s=600, running_stale_after_s=600))
    seat = Seat("w1", "name-of-w1", None, (QUEUE,), (TASK,), 30.0, 600.0)

    turns = Turns(lambda: ledger)

    async def scene() -> tuple[tuple[Claimed, ...], int]:
        wakeups, presence = Wakeups(PATIENCE_S), Watched()
        with wakeups.line(line_of(seat), seat.id) as waiter:
            claiming = claim(
                turns.take, ledger, wakeups, waiter, seat, presence, wanted, limit=1, wait_s=PATIENCE_S, start=False
            )
            waiting = asyncio.create_task(claiming)
            await asyncio.wait_for(presence.resting.wait(), PATIENCE_S)
            job_id = put(ledger)
            wakeups.heard(frozenset({"worker:w1", f"queue:{QUEUE}"}))
            got = await waiting
        presence.close()
        return got, job_id

    got, job_id = asyncio.run(scene())
    turns.close()
    record = ledger.job(job_id)
    assert got == ()
    assert record is not None
    assert record.state is JobState.PENDING
