"""Jobs in the hands of workers over HTTP: claim, start, progress, settle, release."""

from collections.abc import Sequence
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Request
from fastapi.responses import JSONResponse

from unstuck.domain.journal import unpack
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.foreign import claiming
from unstuck.http.foreign.answers import ClaimAnswer, Results
from unstuck.http.foreign.bodies import ClaimBody, JobsBody, ProgressBody, SettleBody, StepsBody
from unstuck.http.foreign.counting import count_claimed
from unstuck.http.foreign.crew import AtCrew, may_claim, next_beat_s, orders
from unstuck.http.foreign.seats import Seat
from unstuck.http.problems import Problem

router = api_router("workers", "/workers/{worker_id}")

Working = Annotated[Caller, Depends(needs(Scope.WORKER))]
CLIENT_CLOSED = 499


@router.post("/claim", response_model=ClaimAnswer, summary="Take jobs, waiting for them if asked to")
async def claim(request: Request, worker_id: str, body: ClaimBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """Take up to `limit` jobs of its queues and tasks. With `wait` the answer comes as soon as there is one, or when
    somebody has a word for this worker. It counts as a beat. Send `have`, and one claim at a time, so that nothing is
    lost with an answer."""
    seat = await anyio.to_thread.run_sync(crew.seat, worker_id, caller)
    if not seat.queues or not seat.tasks:
        raise Problem(
            409,
            "serves_nothing",
            f"Worker {seat.name!r} has registered no tasks, so there is nothing for it to claim.",
            cure="Register with POST /api/v1/workers, naming its tasks and queues.",
        )
    # In line from here: whoever asks it to drain while its beat is written is heard.
    with crew.wakeups.line(claiming.line_of(seat), seat.id) as waiter:
        answer = await crew.beat(seat)
        jobs: list[dict[str, Any]] = []
        if body.have is not None:
            known = frozenset(body.have)
            jobs = await anyio.to_thread.run_sync(claiming.handed_out_again, crew.ledger, seat, known, body.limit)
        if not jobs and may_claim(answer):
            presence = claiming.Presence(request.receive)
            try:
                taken = await claiming.claim(
                    crew.ledger,
                    crew.wakeups,
                    waiter,
                    seat,
                    presence,
                    limit=body.limit,
                    wait_s=body.wait,
                    start=body.start,
                )
            except claiming.Gone:
                raise Problem(CLIENT_CLOSED, "client_gone", "The client closed its connection.") from None
            except claiming.Dead:
                await anyio.to_thread.run_sync(crew.say_gone, seat)
                taken = ()
            finally:
                presence.close()
            count_claimed(crew.tallies, taken)
            jobs = [claiming.job_view(job, seat, unpack(job.journal)) for job in taken]
            if not jobs and body.wait:
                # It may have been woken for a word: to drain, to stop, to cancel.
                answer = await crew.beat(seat)
    soon_s = next_beat_s(seat, [job["heartbeat_timeout_s"] for job in jobs])
    return JSONResponse({**orders(seat, answer), "next_heartbeat_in": soon_s, "jobs": jobs})


@router.post("/start", response_model=Results, summary="Say that work on these jobs begins")
def start(worker_id: str, body: JobsBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """Call it before the first line of work: what was never started goes back for free when the worker dies."""
    seat = crew.seat(worker_id, caller)
    return _results(seat, crew.hands(seat).start(body.jobs))


@router.post("/progress", response_model=Results, summary="Say how far these jobs are")
def progress(worker_id: str, body: ProgressBody, crew: AtCrew, caller: Working) -> JSONResponse:
    seat = crew.seat(worker_id, caller)
    return _results(seat, crew.hands(seat).progress(body.jobs))


@router.post("/steps", response_model=Results, summary="Write down what these jobs did on their way")
def steps(worker_id: str, body: StepsBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """Durable when the answer comes: the next try gets it as `journal` with its claim, and must not do it again.
    Repeated with the same place and name it is answered as done; another name at that place is refused."""
    seat = crew.seat(worker_id, caller)
    return _results(seat, crew.hands(seat).steps(body.jobs))


@router.post("/settle", response_model=Results, summary="Say how these jobs ended")
def settle(worker_id: str, body: SettleBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """The rules that were stored with each job decide what becomes of it: done, tried again, failed. Repeated with the
    same token and outcome it is answered as done."""
    seat = crew.seat(worker_id, caller)
    if any(item.follow_up for item in body.jobs) and Scope.ENQUEUE not in caller.scopes:
        raise Problem(
            403,
            "forbidden",
            "This token lacks the scope 'enqueue', so its jobs cannot be followed by others.",
            cure="Use a token that has both: `unstuck tokens create NAME --scope worker --scope enqueue`.",
        )
    results = crew.hands(seat).settle(body.jobs)
    if crew.books is not None:
        crew.books.tend()
    crew.beats.note_settled(seat.id, sum(1 for result in results if result["ok"] and result["status"] != "already"))
    return _results(seat, results)


@router.post("/release", response_model=Results, summary="Give back jobs on which no work was begun")
def release(worker_id: str, body: JobsBody, crew: AtCrew, caller: Working) -> JSONResponse:
    """They go back to their place in the queue and spend no attempt. What was started is not taken back: settle it as
    `interrupted`."""
    seat = crew.seat(worker_id, caller)
    return _results(seat, crew.hands(seat).release(body.jobs))


def _results(seat: Seat, results: Sequence[dict[str, Any]]) -> JSONResponse:
    """Answer for each job. Where not one of them was the worker's to write, the whole call is a conflict."""
    if any(result["ok"] for result in results):
        return JSONResponse({"id": seat.id, "results": list(results)})
    first = results[0]
    code = "superseded" if first["status"] == "superseded" else first["status"]
    more = f" ({len(results) - 1} more likewise, see results)" if len(results) > 1 else ""
    raise Problem(
        409,
        code,
        f"{first['detail']}{more}",
        cure="Stop working on it: whatever it does now counts for nobody." if code == "superseded" else "",
        id=seat.id,
        results=list(results),
    )
