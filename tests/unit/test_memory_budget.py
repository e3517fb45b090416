"""Room for bodies and answers: bounded for all and for each caller, waited for in order, and always given back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from unstuck.http.auth import memory_budget
from unstuck.http.auth.memory_budget import MemoryBudget, Room
from unstuck.http.problems import Problem

BODY = 1_000_000


def run(story: Callable[[MemoryBudget], Awaitable[None]]) -> None:
    async def told() -> None:
        await story(MemoryBudget(4 * BODY, 2 * BODY, "bodies"))

    asyncio.run(told())


async def waits(bodies: MemoryBudget, who: str) -> "asyncio.Task[Room]":
    task = asyncio.create_task(bodies.take(who, BODY))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def test_a_caller_who_has_its_share_waits_and_nobody_else_does() -> None:
    async def story(bodies: MemoryBudget) -> None:
        first, second = await bodies.take("a", BODY), await bodies.take("a", BODY)
        third = await waits(bodies, "a")
        await bodies.take("b", BODY)
        second.release()
        second.release()
        await third
        fourth = await waits(bodies, "a")
        first.resize(10)
        assert not fourth.done()
        first.release()
        await fourth

    run(story)


def test_all_callers_together_are_bounded() -> None:
    async def story(bodies: MemoryBudget) -> None:
        rooms = [await bodies.take(who, BODY) for who in "aabb"]
        late = await waits(bodies, "c")
        rooms[0].release()
        (await late).release()

    run(story)


def test_whoever_goes_away_while_it_waits_takes_nothing_along() -> None:
    async def story(bodies: MemoryBudget) -> None:
        rooms = [await bodies.take("a", BODY) for _ in range(2)]
        gone, patient = await waits(bodies, "a"), await waits(bodies, "a")
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        rooms[0].release()
        (await patient).release()
        rooms[1].release()
        for _ in range(2):
            await bodies.take("a", BODY)

    run(story)


def test_whoever_waits_too_long_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "WAIT_S", 0.01)

    async def story(bodies: MemoryBudget) -> None:
        for _ in range(2):
            await bodies.take("a", BODY)
        with pytest.raises(Problem) as refused:
            await bodies.take("a", BODY)
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"] == "1"

    run(story)


def test_what_is_larger_than_a_share_gets_all_of_it_and_what_grows_is_counted() -> None:
    async def story(bodies: MemoryBudget) -> None:
        whole = await bodies.take("a", 10 * BODY)
        assert bodies.try_take("a", 1) is None
        whole.resize(10 * BODY)
        other = await waits(bodies, "b")
        whole.release()
        (await other).release()

    run(story)


def test_callers_who_wait_for_the_total_are_let_in_by_turns() -> None:
    async def story(bodies: MemoryBudget) -> None:
        rooms = [await bodies.take(who, BODY) for who in "aabb"]
        eager = [await waits(bodies, "c") for _ in range(2)]
        late = await waits(bodies, "d")
        for room in rooms[:2]:
            room.release()
        (await eager[0]).release()
        (await late).release()
        (await eager[1]).release()

    run(story)
