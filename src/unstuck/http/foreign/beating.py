"""Write the beats of many workers in one commit: those that come while one is being written go with the next.

A thread of its own writes them, so that no beat waits for a claim or for somebody's page. It takes them from a queue
and hands all answers back in one call: an executor would pass each through futures and locks of two kinds, and beside a
thread that draws a page every pass is a wait.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from unstuck.domain.errors import RefusedValue
from unstuck.store.contract import Ledger
from unstuck.store.records import BeatAnswer, ForeignPulse

MAX_BATCH = 500

Waiting = tuple[ForeignPulse, "asyncio.Future[BeatAnswer]"]
Batch = tuple[asyncio.AbstractEventLoop, list[Waiting]]


class Beats:
    """Of one event loop."""

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger
        self._waiting: list[Waiting] = []
        self._is_writing = False
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._settled: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note_settled(self, worker_id: str, count: int) -> None:
        """Count what a worker settled; it is written with its next beat."""
        with self._lock:
            self._settled[worker_id] += count

    async def beat(self, pulse: ForeignPulse) -> BeatAnswer:
        """Give the ledger's answer, when the beat is written."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[BeatAnswer] = loop.create_future()
        self._waiting.append((pulse, answered))
        if not self._is_writing:
            self._is_writing = True
            # A moment later: what came together goes together.
            loop.call_soon(self._hand_over, loop)
        return await answered

    def close(self) -> None:
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
            self._thread = None

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unstuck-beats", daemon=True)
            self._thread.start()
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        self._batches.put((loop, batch))

    def _run(self) -> None:
        while (given := self._batches.get()) is not None:
            loop, batch = given
            answers = self._answer([pulse for pulse, _ in batch])
            try:
                loop.call_soon_threadsafe(self._written, loop, batch, answers)
            except RuntimeError:
                # A loop that is closed has nobody who waits.
                self._is_writing = False

    def _written(
        self, loop: asyncio.AbstractEventLoop, batch: list[Waiting], answers: Sequence[BeatAnswer | Exception]
    ) -> None:
        self._is_writing = bool(self._waiting)
        if self._is_writing:
            self._hand_over(loop)
        for (_, answered), answer in zip(batch, answers, strict=True):
            if answered.done():
                # Whoever asked is gone.
                continue
            if isinstance(answer, Exception):
                answered.set_exception(answer)
            else:
                answered.set_result(answer)

    def _answer(self, pulses: Sequence[ForeignPulse]) -> Sequence[BeatAnswer | Exception]:
        counted = [self._with_settled(pulse) for pulse in pulses]
        try:
            return self._ledger().beat_foreign(counted)
        except RefusedValue as error:
            # One worker's bad metadata must not cost another its life.
            return [error] if len(counted) == 1 else [self._answer([pulse])[0] for pulse in counted]
        except Exception as error:  # noqa: BLE001 - handed to everybody whose beat this was
            for pulse in counted:
                if pulse.settled:
                    self.note_settled(pulse.worker_id, pulse.settled)
            return [error] * len(pulses)

    def _with_settled(self, pulse: ForeignPulse) -> ForeignPulse:
        with self._lock:
            count = self._settled.pop(pulse.worker_id, 0)
        if not count:
            return pulse
        return ForeignPulse(pulse.worker_id, pulse.running, pulse.settled + count, pulse.metadata)
