"""Put together what the HTTP server keeps for foreign workers; it is opened when the first of them is heard."""

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Request

from unstuck.domain.api_tokens import Caller
from unstuck.domain.states import LIVE_STATES, WorkerState
from unstuck.http.problems import Problem
from unstuck.http.services import Services
from unstuck.http.workers.batching import HeartbeatBatcher
from unstuck.http.workers.claims import WakeUps
from unstuck.http.workers.turn_batcher import TurnBatcher
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import HeartbeatAnswer, RemoteHeartbeat
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.metrics.counters import Counters
from unstuck.notify.wakeups import WakeupListener
from unstuck.remote.attempts import RemoteAttempts
from unstuck.remote.explain import worker_gone_problem
from unstuck.remote.handed_out import HandedJobs
from unstuck.remote.registry import MAX_KEPT, Registry, RemoteWorker

Metadata = dict[str, Any]

STANDING_S = 1.0
"""How long a worker's standing is good for, unless a word for it comes."""
GIVEN_UP_AFTER = 3.0
"""A beat comes at least so often within the shortest timeout of what the worker holds."""


class WorkerService:
    def __init__(self, services: Services) -> None:
        self.services = services
        self.workers = Registry(services.settings, services.http)
        self.beats = HeartbeatBatcher(lambda: services.ledger)
        self.turns = TurnBatcher(lambda: services.ledger)
        self.handed = HandedJobs()
        self.compared_s: dict[str, float] = {}
        """When what a worker says it holds was last compared with the ledger."""
        self._standings: dict[str, tuple[float, HeartbeatAnswer]] = {}
        self.wakeups = WakeUps(services.settings.poll_interval_s)
        self.counters = Counters()
        self.metrics_writer: MetricsWriter | None = None
        """Writes what was counted; None where the door's reaper does."""
        self._lock = threading.Lock()
        self._listener: WakeupListener | None = None

    @property
    def ledger(self) -> Ledger:
        return self.services.ledger

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    async def ready(self) -> None:
        """Have everything open; the first call takes a moment."""
        if not self.is_open:
            loop = asyncio.get_running_loop()
            await anyio.to_thread.run_sync(self._open, loop)

    def worker(self, worker_id: str, caller: Caller) -> RemoteWorker:
        return self.workers.find(self.ledger, worker_id, caller)

    def attempts(self, worker: RemoteWorker, caller: Caller) -> RemoteAttempts:
        return RemoteAttempts(
            self.ledger,
            self.services.settings,
            self.services.runtime.services().wakeups.send,
            worker,
            caller,
            self.counters,
        )

    async def pulse(
        self, worker: RemoteWorker, metadata: Metadata | None = None, running: int | None = None
    ) -> HeartbeatAnswer:
        """Write a beat, with the metadata if they are new, and give the ledger's answer."""
        news = None if metadata is None else self.workers.news(worker, metadata)
        try:
            return await self.beats.beat(RemoteHeartbeat(worker.id, running=running, metadata=news))
        except BaseException:
            # Perhaps they were not written, and nobody may look for a change that was told already.
            self.workers.unsay(worker)
            raise

    async def beat(
        self, worker: RemoteWorker, metadata: Metadata | None = None, running: int | None = None
    ) -> HeartbeatAnswer:
        """Write a beat; a problem that says what happened where the worker is dead or stopped."""
        answer = await self.pulse(worker, metadata, running)
        if answer.state not in LIVE_STATES:
            await anyio.to_thread.run_sync(self.raise_gone, worker)
        return answer

    async def standing(self, worker: RemoteWorker) -> HeartbeatAnswer:
        """Return how a worker stands and what is asked of it. It counts as a beat, which is written at most once a
        second: a word for this worker that is heard meanwhile is looked at at once."""
        now_s = time.monotonic()
        known = self._standings.get(worker.id)
        if known is not None and now_s < known[0] + min(STANDING_S, worker.interval_s / 2):
            return known[1]
        answer = await self.beat(worker)
        if len(self._standings) >= MAX_KEPT:
            self._standings.clear()
            self.compared_s.clear()
        self._standings[worker.id] = (now_s, answer)
        return answer

    def look_again(self, worker: RemoteWorker) -> None:
        """Have the next turn beat, and compare what the worker holds, whenever it last did."""
        self._standings.pop(worker.id, None)
        self.compared_s.pop(worker.id, None)

    def note_settled(self, worker: RemoteWorker, keys: Sequence[tuple[int, int]]) -> None:
        """Forget jobs that were settled, and count them with the worker's next beat."""
        for key in keys:
            self.handed.forget(key)
        if keys:
            self.beats.note_settled(worker.id, len(keys))
        if self.metrics_writer is not None:
            self.metrics_writer.tend()

    def raise_gone(self, worker: RemoteWorker) -> None:
        self.workers.forget(worker)
        self._standings.pop(worker.id, None)
        record = self.ledger.workers.remote(worker.id)
        if record is None:
            raise Problem(
                409,
                "worker_gone",
                f"Worker {worker.name} ({worker.id}) ended so long ago that nothing is kept of it.",
                cure="Register anew: POST /api/v1/workers.",
            )
        if record.state not in LIVE_STATES:
            raise worker_gone_problem(record)

    def stop_waiting(self) -> None:
        """Let nobody wait any longer; from the event loop."""
        self.wakeups.stop_waiting()

    def close(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        if self.metrics_writer is not None:
            self.metrics_writer.flush()
        self.turns.close()
        self.beats.close()

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._listener is not None:
                return
            if not self.services.http.reap:
                self.metrics_writer = MetricsWriter(
                    self.ledger, self.counters, self.services.settings.recovery.heartbeat_interval_s
                )
            listener = WakeupListener(lambda: self.ledger, partial(self._wake_all, loop), partial(self._listen, loop))
            listener.start()
            self._listener = listener

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._standings.clear)
            loop.call_soon_threadsafe(self.wakeups.wake_all_to_check)

    def _wake_all(self, loop: asyncio.AbstractEventLoop, words: frozenset[str]) -> None:
        if words:
            # A loop that is closed has nobody who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_topics, words)

    def _on_topics(self, words: frozenset[str]) -> None:
        for word in words:
            if word.startswith("worker:"):
                self._standings.pop(word.removeprefix("worker:"), None)
        self.wakeups.heard(words)


def instructions(worker: RemoteWorker, answer: HeartbeatAnswer) -> dict[str, Any]:
    """Tell a worker how it stands and what is asked of it."""
    return {
        "id": worker.id,
        "name": worker.name,
        "state": answer.state.value,
        "next_heartbeat_in": plain(worker.interval_s),
        "drain": answer.request == "drain" or answer.state is WorkerState.DRAINING,
        "stop": answer.request == "stop",
        "disabled": answer.disabled,
        "cancel": [{"job_id": job_id, "token": token} for job_id, token in answer.cancel],
    }


def may_claim(answer: HeartbeatAnswer) -> bool:
    return answer.state is WorkerState.ACTIVE and answer.request is None and not answer.disabled


def next_beat_s(worker: RemoteWorker, timeouts_s: Iterable[float]) -> float:
    """Give when to beat next, so that nothing is given up that has one of these timeouts: a job may have brought a
    tighter one than its worker's."""
    return plain(round(min([worker.interval_s, *(timeout_s / GIVEN_UP_AFTER for timeout_s in timeouts_s)]), 3))


def plain(value_s: float) -> float:
    """Write 30 and not 30.0, as the form of the heartbeat shows it."""
    return int(value_s) if value_s == int(value_s) else value_s


async def get_worker_service(request: Request) -> WorkerService:
    service: WorkerService = request.app.state.worker_service
    await service.ready()
    return service


WorkerServiceDep = Annotated[WorkerService, Depends(get_worker_service)]
