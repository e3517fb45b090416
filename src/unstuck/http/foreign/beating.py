"""Write the beats of many workers in one commit: those that come while one is being written go with the next.

A thread of its own writes them, so that no beat waits for a claim or for somebody's page.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from unstuck.domain.errors import RefusedValue
from unstuck.store.contract import Ledger
from unstuck.store.records import BeatAnswer, ForeignPulse

MAX_BATCH = 500

Waiting = tuple[ForeignPulse, "asyncio.Future[BeatAnswer]"]


class Beats:
    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger
        self._waiting: list[Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unstuck-beats")
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
        if self._writing is None:
            self._writing = loop.create_task(self._write())
        return await answered

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                answers = await loop.run_in_executor(self._thread, self._answer, [pulse for pulse, _ in batch])
                for (_, answered), answer in zip(batch, answers, strict=True):
                    if answered.done():
                        # Whoever asked is gone.
                        continue
                    if isinstance(answer, BaseException):
                        answered.set_exception(answer)
                    else:
                        answered.set_result(answer)
        finally:
            self._writing = None

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
