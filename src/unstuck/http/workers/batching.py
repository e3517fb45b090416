"""Write the beats of many workers in one commit: those that come while one is being written go with the next.

If the ledger can, the event loop sends them and reads the answer itself. Otherwise one thread writes them, so that no
heartbeat waits for a claim or for a page. The thread takes them from a queue and returns all answers in one call: an
executor is too slow here, since it passes each one through futures and two kinds of locks.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from unstuck.errors import LedgerUnavailable, RefusedValue
from unstuck.ledger.contract import Ledger, PipelinedHeartbeats
from unstuck.ledger.contract.workers import HeartbeatAnswer, RemoteHeartbeat

MAX_BATCH = 500

Waiting = tuple[RemoteHeartbeat, "asyncio.Future[HeartbeatAnswer]"]
Batch = tuple[asyncio.AbstractEventLoop, list[Waiting], list[RemoteHeartbeat]]
"""Whose loop it is, who waits in it, and what is written for them."""


class HeartbeatBatcher:
    """Of one event loop; of the next one when that is closed."""

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger
        self._waiting: list[Waiting] = []
        self._is_writing = False
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: tuple[Batch, PipelinedHeartbeats] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._settled: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note_settled(self, worker_id: str, count: int) -> None:
        """Count what a worker settled; it is written with its next beat."""
        with self._lock:
            self._settled[worker_id] += count

    async def beat(self, heartbeat: RemoteHeartbeat) -> HeartbeatAnswer:
        """Give the ledger's answer, when the beat is written."""
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._begin_in(loop)
        answered: asyncio.Future[HeartbeatAnswer] = loop.create_future()
        self._waiting.append((heartbeat, answered))
        if not self._is_writing:
            self._is_writing = True
            # A moment later: what came together goes together.
            loop.call_soon(self._hand_over, loop)
        return await answered

    def close(self) -> None:
        """Not from the event loop, and when nobody beats any more."""
        if self._in_flight is not None and self._loop is not None:
            # Its loop may be taking in the answer at this moment. One that is closed takes in nothing.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._let_go)
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
            self._thread = None

    def _begin_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave a loop that is closed: nobody waits there, and nothing that was under way there ends."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight[1].drop()
        self._loop, self._is_writing = loop, False
        self._waiting.clear()

    def _let_go(self) -> None:
        """Give up what flies, and have nobody wait for it."""
        if self._in_flight is None:
            return
        (loop, waiting, _), in_flight = self._in_flight
        self._quit(loop, in_flight)
        in_flight.drop()
        waiting += self._waiting
        self._waiting = []
        self._written(loop, waiting, [LedgerUnavailable("This door is closing. Beat again.")] * len(waiting))

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        batch = loop, waiting, [self._with_settled(heartbeat) for heartbeat, _ in waiting]
        if not self._send(batch):
            self._fallback(batch)

    def _send(self, batch: Batch) -> bool:
        """Have it written without waiting, if that can be done now."""
        loop, _, heartbeats = batch
        try:
            in_flight = self._ledger().workers.beat_async(heartbeats)
        except Exception:  # noqa: BLE001 - whatever it is, it is said by who writes them again
            return False
        if in_flight is None:
            return False
        try:
            loop.add_reader(in_flight.fd, self._finish, batch, in_flight)
            if in_flight.unsent:
                loop.add_writer(in_flight.fd, self._push, batch, in_flight)
        except Exception:  # noqa: BLE001 - some loops cannot wait for what they did not open, or not for this
            with suppress(NotImplementedError):
                self._quit(loop, in_flight)
            in_flight.drop()
            return False
        self._in_flight = batch, in_flight
        self._deadline = loop.call_later(in_flight.limit_s, self._abandon, batch, in_flight)
        return True

    def _push(self, batch: Batch, in_flight: PipelinedHeartbeats) -> None:
        try:
            in_flight.push()
        except Exception:  # noqa: BLE001 - whatever it is, it is said by who writes them again
            self._abandon(batch, in_flight)
            return
        if not in_flight.unsent:
            batch[0].remove_writer(in_flight.fd)

    def _finish(self, batch: Batch, in_flight: PipelinedHeartbeats) -> None:
        loop, waiting, _ = batch
        try:
            answers = in_flight.land()
        except Exception:  # noqa: BLE001 - whatever it is, it is said by who writes them again
            self._abandon(batch, in_flight)
            return
        if answers is not None:
            self._quit(loop, in_flight)
            self._written(loop, waiting, answers)

    def _abandon(self, batch: Batch, in_flight: PipelinedHeartbeats) -> None:
        """Give a flight up. A beat may be written twice."""
        self._quit(batch[0], in_flight)
        in_flight.drop()
        self._fallback(batch)

    def _quit(self, loop: asyncio.AbstractEventLoop, in_flight: PipelinedHeartbeats) -> None:
        """Wait for it no longer. Also not to write: the driver may have sent the rest when it took something in, and
        who comes next may have the same descriptor."""
        self._in_flight = None
        if self._deadline is not None:
            self._deadline.cancel()
        loop.remove_reader(in_flight.fd)
        loop.remove_writer(in_flight.fd)

    def _fallback(self, batch: Batch) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unstuck-heartbeats", daemon=True)
            self._thread.start()
        self._batches.put(batch)

    def _run(self) -> None:
        while (given := self._batches.get()) is not None:
            loop, waiting, heartbeats = given
            answers = self._answer(heartbeats)
            # A loop that is closed has nobody who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._written, loop, waiting, answers)

    def _written(
        self, loop: asyncio.AbstractEventLoop, waiting: list[Waiting], answers: Sequence[HeartbeatAnswer | Exception]
    ) -> None:
        self._is_writing = bool(self._waiting)
        if self._is_writing:
            self._hand_over(loop)
        for (_, answered), answer in zip(waiting, answers, strict=True):
            if answered.done():
                # Whoever asked is gone.
                continue
            if isinstance(answer, Exception):
                answered.set_exception(answer)
            else:
                answered.set_result(answer)

    def _answer(self, heartbeats: Sequence[RemoteHeartbeat]) -> Sequence[HeartbeatAnswer | Exception]:
        try:
            return self._ledger().workers.record_heartbeats(heartbeats)
        except RefusedValue as error:
            # One worker's bad metadata must not cost another its life.
            return [error] if len(heartbeats) == 1 else [self._answer([heartbeat])[0] for heartbeat in heartbeats]
        except Exception as error:  # noqa: BLE001 - handed to everybody whose beat this was
            for heartbeat in heartbeats:
                if heartbeat.settled:
                    self.note_settled(heartbeat.worker_id, heartbeat.settled)
            return [error] * len(heartbeats)

    def _with_settled(self, heartbeat: RemoteHeartbeat) -> RemoteHeartbeat:
        with self._lock:
            count = self._settled.pop(heartbeat.worker_id, 0)
        if not count:
            return heartbeat
        return RemoteHeartbeat(heartbeat.worker_id, heartbeat.running, heartbeat.settled + count, heartbeat.metadata)
