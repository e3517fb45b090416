"""Claims that wait for a job: the order in which waiting workers are woken, and what happens if a client is gone.

Those that serve the same queues and know the same tasks are one line. One ring wakes the first of each line that it
concerns; who finds as much as it asked for wakes the next. So a thousand who wait do not all run for one job.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import msgspec

from unstuck import failpoints, logs
from unstuck.domain.endings import Release
from unstuck.domain.journal import StoredJournal
from unstuck.domain.payload import JSON
from unstuck.domain.policy import Policy, decode_policy
from unstuck.domain.workflows import call_with_results
from unstuck.errors import UnstuckError
from unstuck.http.auth.answers import AnswerRoom
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import CLAIM_BYTES, Claimed, ClaimRequest, Turn, TurnAnswer
from unstuck.remote.journal import journal_of, journal_view, signals_view
from unstuck.remote.redelivery import claimed_again
from unstuck.remote.registry import RemoteWorker

Key = tuple[tuple[str, ...], tuple[str, ...]]
"""Queues and tasks."""


class Waiter:
    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.told = False
        """Somebody has a word for this very worker."""
        self._woken = asyncio.Event()

    @property
    def woken(self) -> bool:
        return self._woken.is_set()

    def wake(self) -> None:
        self._woken.set()

    def rest(self) -> None:
        self._woken.clear()

    async def wait(self) -> None:
        if failpoints.active:
            failpoints.reached("http.claim_waiting")
        await self._woken.wait()


class WakeUps:
    """The lines of those who wait. Everything but `heard` belongs to the event loop."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._waiting: dict[Key, dict[Waiter, None]] = {}
        self._polling: asyncio.Task[None] | None = None
        self.hushed = False
        """Nobody waits any more: the door is being closed."""

    @contextmanager
    def wait_in(self, key: Key, worker_id: str) -> Iterator[Waiter]:
        """Stand in line; what is rung meanwhile is not lost, whether one waits or looks."""
        waiter = Waiter(worker_id)
        self._waiting.setdefault(key, {})[waiter] = None
        if self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield waiter
        finally:
            waiting = self._waiting[key]
            del waiting[waiter]
            if not waiting:
                del self._waiting[key]
            elif waiter.woken:
                # It leaves with what it found before: the ring was for whoever comes next.
                self.wake_one(key)

    def wake_one(self, key: Key) -> None:
        for waiter in self._waiting.get(key, ()):
            if not waiter.woken:
                waiter.wake()
                return

    def wake_all_to_check(self) -> None:
        """A word for anybody may have been lost: let all who wait ask what is wanted of them."""
        for waiting in self._waiting.values():
            for waiter in waiting:
                waiter.told = True
                waiter.wake()

    def heard(self, words: frozenset[str]) -> None:
        """Wake whom these words concern."""
        queues = {word.partition(":")[2] for word in words if word.startswith("queue:")}
        workers = {word.partition(":")[2] for word in words if word.startswith("worker:")}
        for key, waiting in self._waiting.items():
            if not queues.isdisjoint(key[0]):
                self.wake_one(key)
            for waiter in waiting if workers else ():
                if waiter.worker_id in workers:
                    waiter.told = True
                    waiter.wake()

    def stop_waiting(self) -> None:
        """Have everybody go home with what they have."""
        self.hushed = True
        for waiting in self._waiting.values():
            for waiter in waiting:
                waiter.wake()

    async def _poll(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(self._poll_s)
                for key in list(self._waiting):
                    self.wake_one(key)
        finally:
            self._polling = None


Receive = Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class Requester:
    """Who waits for the answer to a request."""

    receive: Receive
    room: AnswerRoom
    is_large: bool = False
    """Its body is: what is made of it is made beside the event loop."""


TakeTurn = Callable[[Turn], Awaitable[TurnAnswer]]

log = logs.logger("unstuck.http")


class ClientGone(Exception):
    """The client went away; whatever was claimed for it was given back."""


class WorkerGone(Exception):
    """The worker is dead or stopped in the ledger."""


class ClientConnection:
    """Knows whether the client is still there, as far as its connection tells."""

    def __init__(self, receive: Receive) -> None:
        self._task = asyncio.ensure_future(_until_gone(receive))

    @property
    def gone(self) -> bool:
        return self._task.done()

    async def left(self) -> bool:
        """Return whether the client is gone, after one round of the loop, in which its end would be seen."""
        await asyncio.sleep(0)
        return self.gone

    async def rest(self, waiting: Awaitable[None], timeout_s: float) -> None:
        """Wait for something, for the client's end, or for the time to be up."""
        other = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({other, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            other.cancel()

    def close(self) -> None:
        self._task.cancel()


async def claim(
    take: TakeTurn,
    ledger: Ledger,
    wakeups: WakeUps,
    waiter: Waiter,
    worker: RemoteWorker,
    presence: ClientConnection,
    room: AnswerRoom,
    still_wanted: Callable[[], Awaitable[bool]],
    *,
    limit: int,
    wait_s: float,
    start: bool,
) -> tuple[Claimed, ...]:
    """Claim what is there, waiting for it if need be; nothing when the time is up or somebody has a word for it.

    It stands in line already, from before it was asked whether it may claim: a word in between is heard. A word may
    also be lost on its way, so `still_wanted` is asked once per heartbeat interval."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + wait_s
    ask_at_s = loop.time() + worker.interval_s
    wish = ClaimRequest(worker.queues, worker.tasks, limit, start=limit if start else 0)
    while True:
        if waiter.told:
            # Asked to drain or switched off, it must get no job that came in the same moment.
            return ()
        waiter.rest()
        await room.take_for_claim()
        answer = await turned(take, ledger, worker, Turn(worker.id, claim_request=wish))
        if not answer.alive:
            raise WorkerGone
        # One round of the loop, so that an end of the connection is seen.
        await asyncio.sleep(0)
        if presence.gone:
            await give_back(take, ledger, worker, answer.claimed)
            raise ClientGone
        if answer.claimed:
            if answer.more or len(answer.claimed) == limit:
                wakeups.wake_one(line_of(worker))
            return answer.claimed
        room.release()
        now_s = loop.time()
        left_s = until_s - now_s
        if left_s <= 0 or waiter.told or wakeups.hushed:
            return ()
        if now_s >= ask_at_s:
            if not await still_wanted():
                return ()
            ask_at_s = loop.time() + worker.interval_s
        left_s = min(left_s, max(ask_at_s - now_s, 0.0))
        if answer.next_due_in_s is not None:
            left_s = min(left_s, max(answer.next_due_in_s, LEAST_NAP_S))
        await presence.rest(waiter.wait(), left_s)


def line_of(worker: RemoteWorker) -> Key:
    return (worker.queues, worker.tasks)


LEAST_NAP_S = 0.05
"""The reaper makes due jobs ready; this covers the time between two sweeps."""


async def turned(take: TakeTurn, ledger: Ledger, worker: RemoteWorker, turn: Turn) -> TurnAnswer:
    """Take a turn. If the request is cut off meanwhile, what it claimed is given back."""
    turning = asyncio.ensure_future(take(turn))
    try:
        return await asyncio.shield(turning)
    except asyncio.CancelledError:
        # The door is closing on us. The turn may be written all the same, and nobody would know of its jobs.
        giving_back = asyncio.ensure_future(_give_back_all(turning, take, ledger, worker))
        while not giving_back.done():
            # Whoever cuts us off again must wait for that as well.
            with suppress(asyncio.CancelledError):
                await asyncio.shield(giving_back)
        raise


async def _give_back_all(turning: Awaitable[TurnAnswer], take: TakeTurn, ledger: Ledger, worker: RemoteWorker) -> None:
    try:
        answer = await turning
    except UnstuckError as error:
        log.info("The turn of a client that is gone was not written", worker=worker.id, error=str(error))
        return
    await give_back(take, ledger, worker, answer.claimed)


async def give_back(take: TakeTurn, ledger: Ledger, worker: RemoteWorker, jobs: Sequence[Claimed]) -> None:
    if not jobs:
        return
    releases = tuple(Release(job.job_id, job.token) for job in jobs)
    try:
        await take(Turn(worker.id, release=releases))
        await anyio.to_thread.run_sync(ledger.notify, {f"queue:{job.queue}" for job in jobs})
    except UnstuckError as error:
        # Its next claim with `have` is handed them again; else its lease ends.
        log.warning("Jobs of a client that is gone could not be given back", worker=worker.id, error=str(error))
    else:
        log.info("A client was gone before its jobs could be handed over", worker=worker.id, jobs=len(jobs))


def handed_out_again(ledger: Ledger, worker: RemoteWorker, known: frozenset[int], limit: int) -> list[dict[str, Any]]:
    """Give what the worker holds and does not know of: the answer to an earlier claim was lost."""
    jobs: list[dict[str, Any]] = []
    size_bytes = 0
    for held in ledger.workers.held(worker.id):
        if held.token in known:
            continue
        if len(jobs) == limit:
            break
        record = ledger.jobs.get(held.job_id)
        if record is not None and record.token == held.token and record.worker_id == worker.id:
            inputs = ledger.workflows.inputs([held.job_id]).get(held.job_id, b"")
            job = msgspec.structs.replace(claimed_again(held, record), inputs=inputs)
            journal = journal_of(ledger, job)
            size_bytes += len(job.payload) + len(inputs) + journal.size_bytes
            if jobs and size_bytes > CLAIM_BYTES:
                break
            jobs.append(job_view(job, worker, journal, again=True))
    return jobs


def job_view(job: Claimed, worker: RemoteWorker, journal: StoredJournal, *, again: bool = False) -> dict[str, Any]:
    policy = decode_policy(job.policy)
    value, encoded = _payload(job)
    return {
        "job_id": job.job_id,
        "token": job.token,
        "task": job.task,
        "queue": job.queue,
        "state": "running" if job.running else "claimed",
        "attempt": job.attempt,
        "failures": job.failures,
        "crashes": job.crashes,
        "payload": value,
        "payload_type": job.payload_type,
        "payload_base64": encoded,
        "on_crash": policy.on_crash,
        "timeout_s": policy.timeout_s,
        "heartbeat_timeout_s": heartbeat_timeout_s(policy, worker),
        "journal": journal_view(journal),
        "signals": signals_view(journal),
        "again": again,
    }


def heartbeat_timeout_s(policy: Policy, worker: RemoteWorker) -> float:
    return worker.timeout_s if policy.heartbeat_timeout_s is None else policy.heartbeat_timeout_s


def _payload(job: Claimed) -> tuple[Any, str | None]:
    """Return a JSON payload, with both members of a call; anything else as base64.

    Arguments stay the JSON that they are: nothing is built of them in the loop that serves all workers."""
    if job.payload_type == JSON:
        try:
            members = _members(job.payload)
            if isinstance(members, msgspec.Raw):
                return members, None
            if "refs" in members and bytes(members["refs"]) != b"[]":
                return call_with_results(job.payload, job.inputs), None
        except (msgspec.DecodeError, RecursionError):
            return None, base64.b64encode(job.payload).decode("ascii")
        if members.keys() <= {"args", "kwargs"}:
            return {"args": members.get("args", _NO_ARGS), "kwargs": members.get("kwargs", _NO_KWARGS)}, None
        return members, None
    return None, base64.b64encode(job.payload).decode("ascii")


_NO_ARGS, _NO_KWARGS = msgspec.Raw(b"[]"), msgspec.Raw(b"{}")


def _members(payload: bytes) -> dict[str, msgspec.Raw] | msgspec.Raw:
    """Return the members of a JSON object, each as the JSON that it is, or whatever else the payload is."""
    try:
        return msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return msgspec.json.decode(payload, type=msgspec.Raw)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
