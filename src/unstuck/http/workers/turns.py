"""Take one turn for a remote worker: settle what it did, claim the next jobs and start them, in one commit.

Plain successes of jobs that this process handed out go with the claim. Any other outcome is settled first, by its own
rules. A turn may be repeated: what it settled is answered as done, and `have` brings back what it claimed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread

from unstuck.domain import payload
from unstuck.domain.api_tokens import Caller
from unstuck.domain.journal import unpack_journal
from unstuck.domain.states import JobState
from unstuck.errors import LedgerUnavailable, PayloadError, RefusedValue
from unstuck.http.auth.answers import AnswerRoom
from unstuck.http.problems import Problem
from unstuck.http.workers import claims
from unstuck.http.workers.service import WorkerService, instructions, may_claim, next_beat_s
from unstuck.ledger.contract.workers import (
    AttemptRef,
    Claimed,
    ClaimRequest,
    HeartbeatAnswer,
    Success,
    Turn,
    TurnAnswer,
)
from unstuck.remote.attempts import Outcomes, count_claimed, count_succeeded, in_full, settled_plainly
from unstuck.remote.registry import RemoteWorker

COMPARE_EVERY_S = 5.0
"""How often `have` is compared with the ledger if nothing says that an answer was lost."""
CLIENT_CLOSED = 499

Key = tuple[int, int]
Result = dict[str, Any]


@dataclass(frozen=True)
class TurnRequest:
    """What a worker asks for in one turn."""

    settle: Sequence[Outcomes] = ()
    limit: int = 0
    wait_s: float = 0.0
    start: bool = True
    have: Sequence[int] | None = None


async def take_turn(
    service: WorkerService, worker: RemoteWorker, caller: Caller, requester: claims.Requester, asked: TurnRequest
) -> dict[str, Any]:
    """Return the answer to a turn; raise the problem of a worker that is gone or serves nothing."""
    if asked.limit:
        check_serves(worker)
    # In line from here: whoever asks it to drain while its beat is written is heard.
    with service.wakeups.wait_in(claims.line_of(worker), worker.id) as waiter:
        standing = await service.standing(worker)
        done = await _plain(service, worker, requester, asked.settle)
        results = [] if done is not None else await settle(service, worker, caller, asked.settle)
        has_room = await _has_room(requester.room, asked)
        again = await _lost_answers(service, worker, asked) if has_room else []
        if waiter.told:
            # Somebody may have a word for it: what is asked of it is looked up before it gets a job.
            waiter.told = False
            standing = await service.beat(worker)
        wants = has_room and not again and may_claim(standing) and not waiter.told
        wish = (
            ClaimRequest(worker.queues, worker.tasks, asked.limit, start=asked.limit if asked.start else 0)
            if wants
            else None
        )
        claimed: tuple[Claimed, ...] = ()
        more = False
        presence = claims.ClientConnection(requester.receive) if wants else None
        try:
            if done or wish is not None:
                answer = await _one_commit(service, worker, caller, asked.settle, done or {}, wish, results)
                claimed, more = ((), False) if answer is None else (answer.claimed, answer.more)
                if presence is not None and await presence.left():
                    await claims.give_back(service.turns.take, service.ledger, worker, claimed)
                    raise claims.ClientGone
            if presence is not None and not claimed and asked.wait_s > 0:
                requester.room.release()
                claimed = await _wait(service, worker, waiter, presence, requester.room, asked)
                standing = standing if claimed else await service.beat(worker)
        except claims.ClientGone:
            raise Problem(CLIENT_CLOSED, "client_gone", "The client closed its connection.") from None
        finally:
            if presence is not None:
                presence.close()
        if more or len(claimed) == asked.limit > 0:
            service.wakeups.wake_one(claims.line_of(worker))
    return {**_told(service, worker, standing, claimed, again), "results": results}


async def claim_afresh(
    service: WorkerService, worker: RemoteWorker, caller: Caller, requester: claims.Requester, asked: TurnRequest
) -> dict[str, Any]:
    """Claim with a fresh look at what is asked of the worker, and at what it holds if it says what it knows of."""
    check_serves(worker)
    service.look_again(worker)
    taken = await take_turn(service, worker, caller, requester, asked)
    del taken["results"]
    return taken


async def start(service: WorkerService, worker: RemoteWorker, caller: Caller, keys: Sequence[Key]) -> list[Result]:
    """Mark claimed jobs as running."""
    answer = await service.turns.take(Turn(worker.id, start=tuple(AttemptRef(*key) for key in keys)))
    if answer.alive and not answer.superseded:
        return [{"job_id": key[0], "token": key[1], "ok": True, "status": "running"} for key in keys]
    return await anyio.to_thread.run_sync(service.attempts(worker, caller).started, keys, answer)


async def settle(
    service: WorkerService, worker: RemoteWorker, caller: Caller, items: Sequence[Outcomes]
) -> list[Result]:
    """Settle jobs by their rules, in a commit of their own."""
    if not items:
        return []
    results = await anyio.to_thread.run_sync(service.attempts(worker, caller).settle, [in_full(item) for item in items])
    settled = [result for result in results if result["ok"] and result["status"] != "already"]
    service.note_settled(worker, [(result["job_id"], result["token"]) for result in settled])
    return results


def check_serves(worker: RemoteWorker) -> None:
    """Refuse a claim of a worker that has registered no tasks."""
    if not worker.queues or not worker.tasks:
        raise Problem(
            409,
            "serves_nothing",
            f"Worker {worker.name!r} has registered no tasks, so there is nothing for it to claim.",
            cure="Register with POST /api/v1/workers, naming its tasks and queues.",
        )


async def settle_plainly(
    service: WorkerService,
    worker: RemoteWorker,
    caller: Caller,
    requester: claims.Requester,
    items: Sequence[Outcomes],
) -> list[Result] | None:
    """Settle plain successes without looking into the ledger first; None if they are not, or could not be written."""
    done = await _plain(service, worker, requester, items)
    if not done:
        return None
    results: list[Result] = []
    answer = await _one_commit(service, worker, caller, items, done, None, results)
    return results if answer is not None else None


async def _plain(
    service: WorkerService, worker: RemoteWorker, requester: claims.Requester, items: Sequence[Outcomes]
) -> dict[Key, Success] | None:
    """Return what is to be written if all of them are plain successes of jobs that were handed out here."""
    for item in items:
        if service.handed.get(worker.id, (item.job_id, item.token)) is None or not settled_plainly(item):
            return None
    encode = partial(_successes, items, service.services.settings.max_payload_bytes)
    try:
        return await anyio.to_thread.run_sync(encode) if requester.is_large else encode()
    except PayloadError:
        return None


def _successes(items: Sequence[Outcomes], limit_bytes: int) -> dict[Key, Success]:
    done: dict[Key, Success] = {}
    for item in items:
        key = (item.job_id, item.token)
        done[key] = Success(*key, payload.encode(item.result, f"The result of job {item.job_id}", limit_bytes))
    return done


async def _one_commit(
    service: WorkerService,
    worker: RemoteWorker,
    caller: Caller,
    items: Sequence[Outcomes],
    done: dict[Key, Success],
    wish: ClaimRequest | None,
    results: list[Result],
) -> TurnAnswer | None:
    """Write all of it; fill `results`. None: it could not be written as one, and the outcomes were settled alone."""
    try:
        answer = await claims.turned(
            service.turns.take, service.ledger, worker, Turn(worker.id, tuple(done.values()), claim_request=wish)
        )
    except (LedgerUnavailable, RefusedValue):
        if not done:
            raise
        # Perhaps one of them alone is to blame, and perhaps they were written: both are found out there.
        results += await settle(service, worker, caller, items)
        return None
    if not answer.alive:
        await anyio.to_thread.run_sync(service.raise_gone, worker)
        return None
    lost = [item for item in items if (item.job_id, item.token) in answer.superseded]
    told = {(one["job_id"], one["token"]): one for one in await settle(service, worker, caller, lost)}
    for item in items if done else ():
        key = (item.job_id, item.token)
        succeeded = {"job_id": key[0], "token": key[1], "ok": True, "status": JobState.SUCCEEDED.value}
        results.append(told.get(key, succeeded))
    written = [key for key in done if key not in answer.superseded]
    count_succeeded(
        service.counters, [job for key in written if (job := service.handed.get(worker.id, key)) is not None]
    )
    service.note_settled(worker, written)
    service.handed.add(worker.id, answer.claimed)
    return answer


async def _wait(
    service: WorkerService,
    worker: RemoteWorker,
    waiter: claims.Waiter,
    presence: claims.ClientConnection,
    room: AnswerRoom,
    asked: TurnRequest,
) -> tuple[Claimed, ...]:
    try:
        claimed = await claims.claim(
            service.turns.take,
            service.ledger,
            service.wakeups,
            waiter,
            worker,
            presence,
            room,
            partial(_may_claim_still, service, worker),
            limit=asked.limit,
            wait_s=asked.wait_s,
            start=asked.start,
        )
    except claims.WorkerGone:
        await anyio.to_thread.run_sync(service.raise_gone, worker)
        return ()
    service.handed.add(worker.id, claimed)
    return claimed


async def _may_claim_still(service: WorkerService, worker: RemoteWorker) -> bool:
    return may_claim(await service.beat(worker))


async def _has_room(room: AnswerRoom, asked: TurnRequest) -> bool:
    """Return whether there is room for jobs in the answer. What was done is not kept waiting for it."""
    if asked.limit == 0:
        return False
    if asked.settle:
        return room.try_take_for_claim()
    await room.take_for_claim()
    return True


async def _lost_answers(service: WorkerService, worker: RemoteWorker, asked: TurnRequest) -> list[dict[str, Any]]:
    """Return the jobs that an earlier answer was to bring and the worker does not know of."""
    if asked.have is None:
        return []
    known = {*asked.have, *(item.token for item in asked.settle)}
    now_s = time.monotonic()
    if service.handed.tokens(worker.id) <= known and now_s < service.compared_s.get(worker.id, 0.0) + COMPARE_EVERY_S:
        return []
    service.compared_s[worker.id] = now_s
    found = partial(claims.handed_out_again, service.ledger, worker, frozenset(known), asked.limit)
    return await anyio.to_thread.run_sync(found)


def _told(
    service: WorkerService,
    worker: RemoteWorker,
    standing: HeartbeatAnswer,
    claimed: Sequence[Claimed],
    again: list[dict[str, Any]],
) -> dict[str, Any]:
    count_claimed(service.counters, claimed)
    jobs = again or [claims.job_view(job, worker, unpack_journal(job.journal)) for job in claimed]
    soon_s = next_beat_s(worker, [job["heartbeat_timeout_s"] for job in jobs])
    return {**instructions(worker, standing), "next_heartbeat_in": soon_s, "jobs": jobs}
