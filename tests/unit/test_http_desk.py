"""Those who ask for what takes seconds wait for each other; everybody else has their threads as before."""

import asyncio
import threading

import anyio.to_thread

from unstuck.client.counter import Counter
from unstuck.config import Settings, Web
from unstuck.http.api import jobs, looking
from unstuck.http.desk import SLOW_AT_ONCE, Desk

MANY = 60
"""More than there are threads for handlers."""
PATIENCE_S = 20.0


def test_nobody_waits_for_those_who_ask_for_what_takes_long() -> None:
    desk = Desk(Counter(Settings(url="sqlite:///never-opened.db")), Web())
    enough, crowded, lock = threading.Event(), threading.Event(), threading.Lock()
    at_work = most = 0

    def visit() -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
            if at_work == SLOW_AT_ONCE:
                crowded.set()
        enough.wait(PATIENCE_S)
        with lock:
            at_work -= 1

    async def scene() -> str:
        visits = [asyncio.create_task(desk.slowly(visit)) for _ in range(MANY)]
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                await asyncio.to_thread(crowded.wait, PATIENCE_S / 4)
                return await anyio.to_thread.run_sync(lambda: "a beat")
        finally:
            enough.set()
            await asyncio.gather(*visits)

    assert asyncio.run(scene()) == "a beat"
    assert most == SLOW_AT_ONCE


def test_visits_of_the_doctor_are_such() -> None:
    # A plain function would be run in the threads of everybody.
    assert asyncio.iscoroutinefunction(looking.doctor)
    assert asyncio.iscoroutinefunction(jobs.doctor)
