"""One job: how it stands, how it ended, its story; cancel it, run it again."""

import asyncio
from typing import Annotated, Any

from fastapi import Depends, Query, Response
from starlette.concurrency import run_in_threadpool

from unstuck.client import views
from unstuck.client.operator import EVENTS_SHOWN, PAGE, Operator
from unstuck.client.why.story import story_view
from unstuck.domain import payload
from unstuck.domain.states import FINAL, JobState
from unstuck.http.answers import answer
from unstuck.http.api.ownership import JobId, of_job
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope
from unstuck.http.desk import AtDesk
from unstuck.http.models.jobs import (
    AttemptView,
    EventView,
    JobDetail,
    JobResult,
    JobUnfinished,
    OutputView,
    SignalAnswer,
    SignalBody,
    StoryView,
)
from unstuck.http.models.operating import FindingView, JobAnswer
from unstuck.http.problems import Problem
from unstuck.notify.waiting import Answer, Watcher
from unstuck.store.records import JobRecord

MAX_WAIT_S = 60.0
MAX_STACK_WAIT_S = 30.0
NO_ANSWER = "Look at its worker: workers over HTTP do not answer, nor those behind a pooler without `listen_url`."

router = api_router("jobs", "/jobs/{job_id}")

Reader = Annotated[Caller, Depends(of_job(Scope.READ))]
Changer = Annotated[Caller, Depends(of_job(Scope.OPERATE))]


@router.get("", summary="All of a job", response_model=JobDetail)
def show(job_id: JobId, desk: AtDesk, caller: Reader) -> Response:
    """State, call, result or error, every attempt and event, progress, and why it waits if it waits."""
    return answer(desk.operator(caller).job_view(job_id))


@router.get(
    "/result",
    summary="The result, waiting for it",
    response_model=JobResult,
    responses={202: {"model": JobUnfinished, "description": "It has not ended; what it is doing. Ask again."}},
)
async def result(
    job_id: JobId,
    desk: AtDesk,
    caller: Reader,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Wait so many seconds for the end.")] = 0.0,
) -> Response:
    """Return how the job ended: its `result`, or its `error`, even then with status 200, because the question was
    answered. A success whose result is not stored has the error `RESULT_NOT_AVAILABLE`. 202 if the job has not ended
    within `wait`."""
    operator = desk.operator(caller)
    record = await run_in_threadpool(operator.job, job_id)
    if record.state not in FINAL and wait:
        await _ended(desk.watcher, job_id, wait)
        record = await run_in_threadpool(operator.job, job_id)
    if record.state in FINAL:
        return answer(await run_in_threadpool(_result_view, record))
    return answer(await run_in_threadpool(_unfinished_view, operator, desk.ledger, record), 202)


async def _ended(watcher: Watcher, job_id: int, wait_s: float) -> None:
    """Wait until the job has ended, or until patience has."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def tell(_: Answer) -> None:
        loop.call_soon_threadsafe(told.set)

    waiter = watcher.add(job_id, tell)
    try:
        async with asyncio.timeout(wait_s):
            await told.wait()
    except TimeoutError:
        pass
    finally:
        watcher.remove(waiter)


def _result_view(record: JobRecord) -> views.View:
    return {
        "id": record.id,
        "state": record.state.value,
        "result": views.whole_result(record),
        "error": views.error_view(record.error),
    }


def _unfinished_view(operator: Operator, ledger: Any, record: JobRecord) -> views.View:
    progress = ledger.progress([record.id]).get(record.id)
    return {
        "id": record.id,
        "state": record.state.value,
        "doing": operator.doing(record.id),
        # What an earlier try said says nothing of this one.
        "progress": views.progress_view(progress) if progress is not None and progress.token == record.token else None,
    }


@router.get("/why", summary="The story of a job in plain words", response_model=StoryView)
def why(job_id: JobId, desk: AtDesk, caller: Reader) -> Response:
    """What happened, by which rule, what is next, and what can be done."""
    return answer(story_view(desk.operator(caller).why(job_id)))


@router.get("/doctor", summary="Why this job is not running, or how it runs or ended", response_model=list[FindingView])
async def doctor(job_id: JobId, desk: AtDesk, caller: Reader) -> Response:
    return answer(await desk.slowly(lambda: desk.operator(caller).doctor_job(job_id)))


@router.get("/attempts", summary="Every try at a job, oldest first", response_model=list[AttemptView])
def attempts(job_id: JobId, desk: AtDesk, caller: Reader) -> Response:
    desk.operator(caller).job(job_id)
    names = {worker.id: worker.name for worker in desk.ledger.workers()}
    return answer([views.attempt_view(attempt, names) for attempt in desk.ledger.attempts(job_id)])


@router.get("/logs", summary="What a job printed, attempt by attempt", response_model=list[OutputView])
def logs(job_id: JobId, desk: AtDesk, caller: Reader) -> Response:
    """Output is handed in when an attempt ends."""
    return answer([views.output_view(output) for output in desk.operator(caller).outputs(job_id)])


@router.get("/events", summary="The history of a job, oldest first", response_model=list[EventView])
def events(
    job_id: JobId,
    desk: AtDesk,
    caller: Reader,
    after: Annotated[
        int | None, Query(ge=0, le=2**63 - 1, description="Those after this event; left out: the newest.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = EVENTS_SHOWN,
) -> Response:
    desk.operator(caller).job(job_id)
    return answer([views.event_view(event) for event in desk.ledger.events(job_id=job_id, after_id=after, limit=limit)])


@router.post("/cancel", summary="Cancel a job", response_model=JobAnswer)
def cancel(job_id: JobId, desk: AtDesk, caller: Changer) -> Response:
    """`cancelled`, or `requested` where it runs: its worker is told and ends it. 409 where it has ended already."""
    said = desk.operator(caller).cancel([job_id])[job_id]
    return _said(desk.operator(caller), job_id, said, {"cancelled", "requested"})


@router.post("/signals", summary="Send a signal to a job", response_model=SignalAnswer)
def signal(job_id: JobId, body: SignalBody, desk: AtDesk, caller: Changer) -> Response:
    """`woken` where it waited for this signal, `kept` until it does. 409 where it has ended, or too many wait."""
    value = payload.encode(body.value, f"The value of signal {body.name!r}", desk.settings.max_payload_bytes)
    said = desk.operator(caller).signal(job_id, body.name, value)
    return answer({"id": job_id, "name": body.name, "answer": said})


@router.post("/retry", summary="Run a finished job again, with fresh counters", response_model=JobAnswer)
def retry(job_id: JobId, desk: AtDesk, caller: Changer) -> Response:
    """`queued`. 409 where it has not ended, succeeded, or its unique key is in use by another."""
    said = desk.operator(caller).retry([job_id])[job_id]
    return _said(desk.operator(caller), job_id, said, {"queued"})


@router.post("/stack", summary="Where a running job stands at this moment", response_model=EventView)
async def stack(
    job_id: JobId,
    desk: AtDesk,
    caller: Changer,
    wait: Annotated[float, Query(gt=0, le=MAX_STACK_WAIT_S, description="Seconds to wait for the answer.")] = 10.0,
) -> Response:
    """Its worker has the stacks of its process written down, and it goes on undisturbed. 409 where it does not run, or
    its worker does not answer: one in another language does not."""
    operator = desk.operator(caller)
    told = await desk.slowly(lambda: operator.stack(job_id, wait))
    if told is not None:
        return answer(views.event_view(told))
    record = await run_in_threadpool(operator.job, job_id)
    if record.state is not JobState.RUNNING:
        raise Problem(409, "not_running", f"Job {job_id} is {record.state.value}: only one that runs has a stack.")
    raise Problem(409, "no_answer", f"The worker of job {job_id} did not answer within {wait:g}s.", cure=NO_ANSWER)


_WHY_NOT = {
    "finished": "it has ended already",
    "live": "it has not ended yet",
    "succeeded": "it succeeded, and a success is not run again",
    "duplicate": "its unique key is in use by another unfinished job",
}


def _said(operator: Operator, job_id: int, said: str, good: set[str]) -> Response:
    if said in good:
        return answer({"id": job_id, "answer": said})
    state = operator.job(job_id).state.value
    raise Problem(409, said, f"Nothing was done to job {job_id}: {_WHY_NOT[said]}.", state=state)
