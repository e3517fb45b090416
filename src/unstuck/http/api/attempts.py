"""Jobs in the hands of workers over HTTP: claim, start, progress, settle, release."""

from collections.abc import Sequence
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse

from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.foreign.answers import ClaimAnswer, Results, TurnTaken
from unstuck.http.foreign.bodies import (
    ClaimBody,
    JobsBody,
    ProgressBody,
    SettleBody,
    SettleItem,
    StepsBody,
    TurnBody,
)
from unstuck.http.foreign.crew import AtCrew
from unstuck.http.foreign.handing import conflict_of, keys_of
from unstuck.http.foreign.one_turn import Asked, claim_afresh, take_turn
from unstuck.http.foreign.one_turn import settle as settle_by_rules
from unstuck.http.foreign.one_turn import start as start_jobs
from unstuck.http.foreign.seats import Seat
from unstuck.http.problems import Problem

router = api_router("workers", "/workers/{worker_id}")

Working = Annotated[Caller, Depends(needs(Scope.WORKER))]


@router.post("/claim", response_model=ClaimAnswer, summary="Take jobs, waiting for them if asked to")
async def claim(request: Request, worker_id: str, body: ClaimBody, crew: AtCrew, caller: Working) -> Response:
    """Take up to `limit` jobs of its queues and tasks. With `wait` the answer comes as soon as there is one, or when
    somebody has a word for this worker. It counts as a beat. Send `have`, and one claim at a time, so that nothing is
    lost with an answer."""
    seat = await anyio.to_thread.run_sync(crew.seat, worker_id, caller)
    asked = Asked((), body.limit, body.wait, body.start, body.have)
    return answer(await claim_afresh(crew, seat, caller, request.receive, asked))


@router.post("/turn", response_model=TurnTaken, summary="Settle, claim and start in one request")
async def turn(request: Request, worker_id: str, body: TurnBody, crew: AtCrew, caller: Working) -> Response:
    """Say how jobs ended, and take up to `claim` jobs that run at once: one request and, for plain successes, one
    commit. It counts as a beat. The answer is 200 even if no result is `ok`: the jobs that came with it are the
    worker's. Send `have`, and one turn at a time, so that nothing is lost with an answer."""
    seat = await anyio.to_thread.run_sync(crew.seat, worker_id, caller)
    check_follow_up(caller, body.settle)
    asked = Asked(body.settle, body.claim, body.wait, body.start, body.have)
    return answer(await take_turn(crew, seat, caller, request.receive, asked))


@router.post("/start", response_model=Results, summary="Say that work on these jobs begins")
async def start(worker_id: str, body: JobsBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """Call it before the first line of work: what was never started goes back for free when the worker dies."""
    seat = await anyio.to_thread.run_sync(crew.seat, worker_id, caller)
    return _results(seat, await start_jobs(crew, seat, caller, keys_of(body.jobs)))


@router.post("/progress", response_model=Results, summary="Say how far these jobs are")
def progress(worker_id: str, body: ProgressBody, crew: AtCrew, caller: Working) -> JSONResponse:
    seat = crew.seat(worker_id, caller)
    return _results(seat, crew.hands(seat, caller).progress(body.jobs))


@router.post("/steps", response_model=Results, summary="Write down what these jobs did on their way")
def steps(worker_id: str, body: StepsBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """Durable when the answer comes: the next try gets it as `journal` with its claim, and must not do it again.
    Repeated with the same place and name it is answered as done; another name at that place is refused."""
    seat = crew.seat(worker_id, caller)
    return _results(seat, crew.hands(seat, caller).steps(body.jobs))


@router.post("/settle", response_model=Results, summary="Say how these jobs ended")
async def settle(worker_id: str, body: SettleBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """The rules that were stored with each job decide what becomes of it: done, tried again, failed. Repeated with the
    same token and outcome it is answered as done."""
    seat = await anyio.to_thread.run_sync(crew.seat, worker_id, caller)
    check_follow_up(caller, body.jobs)
    return _results(seat, await settle_by_rules(crew, seat, caller, body.jobs))


@router.post("/release", response_model=Results, summary="Give back jobs on which no work was begun")
def release(worker_id: str, body: JobsBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """They go back to their place in the queue and spend no attempt. What was started is not taken back: settle it as
    `interrupted`."""
    seat = crew.seat(worker_id, caller)
    return _results(seat, crew.hands(seat, caller).release(body.jobs))


def check_follow_up(caller: Caller, items: Sequence[SettleItem]) -> None:
    """Refuse jobs that follow others if the caller may not enqueue."""
    if any(item.follow_up for item in items) and Scope.ENQUEUE not in caller.scopes:
        raise Problem(
            403,
            "forbidden",
            "This token lacks the scope 'enqueue', so its jobs cannot be followed by others.",
            cure="Use a token that has both: `unstuck tokens create NAME --scope worker --scope enqueue`.",
        )


def _results(seat: Seat, results: Sequence[dict[str, Any]]) -> JSONResponse:
    """Answer for each job, or raise the conflict."""
    if conflict := conflict_of(seat, results):
        raise conflict
    return JSONResponse({"id": seat.id, "results": list(results)})
