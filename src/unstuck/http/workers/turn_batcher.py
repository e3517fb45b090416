"""Write the turns of many remote workers in few commits: those that come while one is written go with the next.

A thread of its own takes them from a queue and hands the answers back in one call, as for heartbeats. Several turns
are one exchange; one that cannot be stored, or that a lock keeps back, is tried alone and harms nobody else.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from unstuck.errors import LedgerBusy, RefusedValue, UncertainCommit
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import Exchange, Turn, TurnAnswer

MAX_TURNS = 50
"""Turns in one commit."""

Answer = TurnAnswer | Exception
Waiting = tuple[Turn, "asyncio.Future[TurnAnswer]"]
Batch = tuple[asyncio.AbstractEventLoop, list[Waiting]]


class TurnBatcher:
    """Belongs to one event loop; to the next one when that is closed."""

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger
        self._waiting: list[Waiting] = []
        self._is_writing = False
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def take(self, turn: Turn) -> "asyncio.Future[TurnAnswer]":
        """Return what will be the ledger's answer when the turn is committed."""
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop, self._is_writing = loop, False
            self._waiting.clear()
        answered: asyncio.Future[TurnAnswer] = loop.create_future()
        self._waiting.append((turn, answered))
        if not self._is_writing:
            self._hand_over(loop)
        return answered

    def close(self) -> None:
        """End the thread. Not from the event loop."""
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
            self._thread = None

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_writing = True
        batch: list[Waiting] = []
        later: list[Waiting] = []
        workers: set[str] = set()
        for one in self._waiting:
            # Two turns of one worker have an order.
            fits = len(batch) < MAX_TURNS and one[0].worker_id not in workers
            (batch if fits else later).append(one)
            workers.add(one[0].worker_id)
        self._waiting = later
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unstuck-turns", daemon=True)
            self._thread.start()
        self._batches.put((loop, batch))

    def _run(self) -> None:
        while (given := self._batches.get()) is not None:
            loop, batch = given
            answers = self._write([turn for turn, _ in batch])
            # A loop that is closed has nobody who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._written, loop, batch, answers)

    def _written(self, loop: asyncio.AbstractEventLoop, batch: list[Waiting], answers: Sequence[Answer]) -> None:
        self._is_writing = False
        if self._waiting:
            self._hand_over(loop)
        for (_, answered), answer in zip(batch, answers, strict=True):
            if answered.done():
                continue
            if isinstance(answer, Exception):
                answered.set_exception(answer)
            else:
                answered.set_result(answer)

    def _write(self, turns: Sequence[Turn]) -> Sequence[Answer]:
        if len(turns) == 1:
            return [self._write_alone(turns[0])]
        try:
            answers = self._ledger().workers.exchange(Exchange(turns=tuple(turns))).turns
        except (RefusedValue, LedgerBusy):
            return [self._write_alone(turn) for turn in turns]
        except Exception as error:  # noqa: BLE001 - handed to everybody whose turn this was
            return [error] * len(turns)
        if answers is None:
            return [UncertainCommit("The answer of the database was lost. Ask again.")] * len(turns)
        return answers

    def _write_alone(self, turn: Turn) -> Answer:
        try:
            return self._ledger().workers.turn(turn)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for it
            return error
