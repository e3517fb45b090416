"""See from another thread whether the event loop turns, and if it does not, which job keeps it from turning.

A job that computes, or calls something that blocks, stops every other job of the loop. The others are not to blame.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from unstuck.runner.context import current_token

BLOCKED_S = 0.5
"""A loop that did not come round for so long is blocked."""


class Blocked(NamedTuple):
    """The loop has not turned since then (boot time); token 0 where no job is known to be at work in it."""

    token: int
    since_s: float


class LoopWatch:
    """Belongs to the loop's thread, but for `look`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._owners: WeakKeyDictionary[asyncio.Future[Any], int] = WeakKeyDictionary()
        self._asked = self._answered = 0
        self._asked_s = 0.0
        # Tasks that a job starts are its own: blocked in one of them, it is the job that blocks.
        loop.set_task_factory(self._make_task)

    def own(self, task: "asyncio.Task[Any]", token: int) -> None:
        self._owners[task] = token

    def tasks_of(self, token: int) -> "list[asyncio.Task[Any]]":
        """Give the living tasks of a job, those too that it started."""
        return [task for task in asyncio.all_tasks(self._loop) if self._owners.get(task) == token]

    def look(self, now_s: float) -> Blocked | None:
        """Ask the loop for a sign, and say whether the last one is overdue. Called from the pulse's thread."""
        if self._asked != self._answered:
            if now_s - self._asked_s < BLOCKED_S:
                return None
            task = asyncio.current_task(self._loop)
            return Blocked(self._owners.get(task, 0) if task is not None else 0, self._asked_s)
        if self._owners:
            self._asked += 1
            self._asked_s = now_s
            try:
                self._loop.call_soon_threadsafe(self._answer, self._asked)
            except RuntimeError:
                self._answered = self._asked  # user code closed the loop: there is nothing left to watch
        return None

    def _answer(self, number: int) -> None:
        self._answered = number

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        if token := current_token():
            self._owners[task] = token
        return task
