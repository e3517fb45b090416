"""Room for bodies: bounded for everybody and for each caller, waited for in order, and always given back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from unstuck.http.auth import body_budget
from unstuck.http.auth.body_budget import BodyBudget, Room
from unstuck.http.problems import Problem

BODY = 1_000_000


def run(story: Callable[[BodyBudget], Awaitable[None]]) -> None:
    async def told() -> None:
        await story(BodyBudget(BODY))

    asyncio.run(told())


async def waits(bodies: BodyBudget, who: str) -> "asyncio.Task[Room]":
    task = asyncio.create_task(bodies.take(who, BODY))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def test_a_caller_who_has_its_share_waits_and_nobody_else_does() -> None:
    async def story(bodies: BodyBudget) -> None:
        first, second = await bodies.take("a", BODY), await bodies.take("a", BODY)
        third = await waits(bodies, "a")
        await bodies.take("b", BODY)
        second.release()
        second.release()
        await third
        fourth = await waits(bodies, "a")
        first.shrink(10)
        assert not fourth.done()
        first.release()
        await fourth

    run(story)


def test_all_callers_together_are_bounded() -> None:
    async def story(bodies: BodyBudget) -> None:
        rooms = [await bodies.take(who, BODY) for who in "aabb"]
        late = await waits(bodies, "c")
        rooms[0].release()
        (await late).release()

    run(story)


def test_whoever_goes_away_while_it_waits_takes_nothing_along() -> None:
    async def story(bodies: BodyBudget) -> None:
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
    monkeypatch.setattr(body_budget, "WAIT_S", 0.01)

    async def story(bodies: BodyBudget) -> None:
        for _ in range(2):
            await bodies.take("a", BODY)
        with pytest.raises(Problem) as refused:
            await bodies.take("a", BODY)
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"] == "1"

    run(story)
