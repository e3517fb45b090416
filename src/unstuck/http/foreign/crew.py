"""Put together what the web door keeps for foreign workers; it is opened when the first of them is heard."""

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Request

from unstuck.domain.states import LIVING, WorkerState
from unstuck.http.callers import Caller
from unstuck.http.desk import Desk
from unstuck.http.foreign.beating import Beats
from unstuck.http.foreign.deaths import gone_problem
from unstuck.http.foreign.handing import Hands
from unstuck.http.foreign.seats import Seat, Seats
from unstuck.http.foreign.waking import Wakeups
from unstuck.http.problems import Problem
from unstuck.metrics.tallies import Tallies
from unstuck.notify.ear import Ear
from unstuck.reaper.sweep import Reaper
from unstuck.reaper.watchman import Watchman
from unstuck.store import manners
from unstuck.store.bookkeeping import Bookkeeper
from unstuck.store.contract import Ledger
from unstuck.store.opening import ready_ledger
from unstuck.store.records import BeatAnswer, ForeignPulse

Metadata = dict[str, Any]

BY = "web"
GIVEN_UP_AFTER = 3.0
"""A beat comes at least so often within the shortest timeout of what the worker holds."""


class Crew:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.seats = Seats(desk.settings, desk.web)
        self.beats = Beats(lambda: desk.ledger)
        self.wakeups = Wakeups(desk.settings.poll_interval_s)
        self.tallies = Tallies()
        self.books: Bookkeeper | None = None
        self._lock = threading.Lock()
        self._ear: Ear | None = None
        self._watchman: Watchman | None = None
        self._own: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        return self.desk.ledger

    @property
    def is_open(self) -> bool:
        return self._ear is not None

    async def ready(self) -> None:
        """Have everything open; the first call takes a moment."""
        if not self.is_open:
            loop = asyncio.get_running_loop()
            await anyio.to_thread.run_sync(self._open, loop)

    def seat(self, worker_id: str, caller: Caller) -> Seat:
        return self.seats.find(self.ledger, worker_id, caller)

    def hands(self, seat: Seat) -> Hands:
        return Hands(self.ledger, self.desk.settings, self.desk.counter.parts().ringer.ring, seat, self.tallies)

    async def pulse(self, seat: Seat, metadata: Metadata | None = None, running: int | None = None) -> BeatAnswer:
        """Write a beat, with the metadata if they are new, and give the ledger's answer."""
        news = None if metadata is None else self.seats.news(seat, metadata)
        try:
            with manners.hurry():
                return await self.beats.beat(ForeignPulse(seat.id, running=running, metadata=news))
        except BaseException:
            # Perhaps they were not written, and nobody may look for a change that was told already.
            self.seats.unsay(seat)
            raise

    async def beat(self, seat: Seat, metadata: Metadata | None = None, running: int | None = None) -> BeatAnswer:
        """Write a beat; a problem that says what happened where the worker is dead or stopped."""
        answer = await self.pulse(seat, metadata, running)
        if answer.state not in LIVING:
            await anyio.to_thread.run_sync(self.say_gone, seat)
        return answer

    def say_gone(self, seat: Seat) -> None:
        self.seats.forget(seat)
        record = self.ledger.foreign_worker(seat.id)
        if record is None:
            raise Problem(
                409,
                "worker_gone",
                f"Worker {seat.name} ({seat.id}) ended so long ago that nothing is kept of it.",
                cure="Register anew: POST /api/v1/workers.",
            )
        if record.state not in LIVING:
            raise gone_problem(record)

    def hush(self) -> None:
        """Let nobody wait any longer; from the event loop."""
        self.wakeups.hush()

    def close(self) -> None:
        with self._lock:
            ear, self._ear = self._ear, None
            watchman, self._watchman = self._watchman, None
            own, self._own = self._own, None
        if watchman is not None:
            watchman.stop()
            watchman.join()
        if ear is not None:
            ear.stop()
        if own is not None:
            own.close()
        if self.books is not None:
            self.books.flush()
        self.beats.close()

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._ear is not None:
                return
            interval_s = self.desk.settings.recovery.heartbeat_interval_s
            self.books = Bookkeeper(self.ledger, self.tallies, interval_s)
            if self.desk.web.reap:
                # On connections of its own: a look at ten thousand workers must not stand before anybody's beat.
                self._own = ready_ledger(self.desk.settings)
                reaper = Reaper(self._own, self.desk.settings.recovery, by=BY, tallies=self.tallies)
                self._watchman = Watchman(reaper, self.books)
                self._watchman.start()
            ear = Ear(lambda: self.ledger, partial(self._heard, loop), partial(self._hears, loop))
            ear.start()
            self._ear = ear

    def _hears(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self.wakeups.doubt)

    def _heard(self, loop: asyncio.AbstractEventLoop, words: frozenset[str]) -> None:
        if words:
            # A loop that is closed has nobody who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.wakeups.heard, words)


def orders(seat: Seat, answer: BeatAnswer) -> dict[str, Any]:
    """Tell a worker how it stands and what is asked of it."""
    return {
        "id": seat.id,
        "name": seat.name,
        "state": answer.state.value,
        "next_heartbeat_in": plain(seat.interval_s),
        "drain": answer.request == "drain" or answer.state is WorkerState.DRAINING,
        "stop": answer.request == "stop",
        "disabled": answer.disabled,
        "cancel": [{"job_id": job_id, "token": token} for job_id, token in answer.cancel],
    }


def may_claim(answer: BeatAnswer) -> bool:
    return answer.state is WorkerState.ACTIVE and answer.request is None and not answer.disabled


def next_beat_s(seat: Seat, timeouts_s: Iterable[float]) -> float:
    """Give when to beat next, so that nothing is given up that has one of these timeouts: a job may have brought a
    tighter one than its worker's."""
    return plain(round(min([seat.interval_s, *(timeout_s / GIVEN_UP_AFTER for timeout_s in timeouts_s)]), 3))


def plain(value_s: float) -> float:
    """Write 30 and not 30.0, as the form of the heartbeat shows it."""
    return int(value_s) if value_s == int(value_s) else value_s


async def crew_of(request: Request) -> Crew:
    crew: Crew = request.app.state.crew
    await crew.ready()
    return crew


AtCrew = Annotated[Crew, Depends(crew_of)]
