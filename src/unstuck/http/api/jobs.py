"""Routes for jobs: list, show, result, why, logs, events, cancel, retry, signal, stack."""

import asyncio
import itertools
from collections import Counter as Tally
from collections.abc import Callable, Collection
from typing import Annotated

import msgspec
from fastapi import Depends, Query, Response
from starlette.concurrency import run_in_threadpool

from unstuck import failpoints
from unstuck.client import views
from unstuck.client.operator import Operator
from unstuck.client.operator.jobs import CANCELLED_BY_DEFAULT, EVENTS_SHOWN, PAGE, RETRIED_BY_DEFAULT
from unstuck.client.why.story import story_view
from unstuck.domain import payload
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.domain.text import did_you_mean
from unstuck.domain.units import seconds
from unstuck.errors import ConfigError
from unstuck.http.auth.callers import JobId, Requires, RequiresJob
from unstuck.http.openapi import json_response
from unstuck.http.operator_schemas import BulkAnswer, BulkBody, FindingView, JobAnswer, PruneBody, Pruned, Where
from unstuck.http.problems import Problem
from unstuck.http.routing import api_router
from unstuck.http.schemas import (
    EventView,
    JobDetail,
    JobPage,
    JobResult,
    JobUnfinished,
    OutputView,
    SignalAnswer,
    SignalBody,
    StoryView,
)
from unstuck.http.services import Services, ServicesDep
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.notify.results import Answer, ResultWatcher

list_router = api_router("jobs")


ListReader = Annotated[Caller, Depends(Requires(Scope.READ))]
Operating = Annotated[Caller, Depends(Requires(Scope.OPERATE))]
Age = Annotated[str | None, Query(description="A duration like `10m`, or a number of seconds.")]


@list_router.get("/jobs", summary="List jobs, newest first", response_model=JobPage)
def jobs(
    services: ServicesDep,
    caller: ListReader,
    state: Annotated[
        list[str] | None, Query(description="Of these states; repeat it or use commas.", examples=["failed"])
    ] = None,
    queue: str | None = None,
    task: str | None = None,
    error: Annotated[str | None, Query(examples=["WORKER_CRASHED"])] = None,
    older_than: Age = None,
    newer_than: Age = None,
    worker: Annotated[str | None, Query(description="In the hands of this worker (id or name).")] = None,
    before: Annotated[
        int | None, Query(ge=1, le=2**63 - 1, description="Older than this job: `next` of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
) -> Response:
    """The same conditions as `unstuck jobs`. Pages are cut by number of job, so that they stay as fast however deep.
    Where few of very many match, a page may hold less than `limit`, or nothing, and have a `next`: go on there."""
    operator = services.operator(caller)
    where = JobFilter(
        states=_states(state or []),
        queue=queue,
        task=task,
        error=error.upper() if error is not None else None,
        older_than_s=_age_s(older_than, "older_than"),
        newer_than_s=_age_s(newer_than, "newer_than"),
        worker_id=operator.workers.find(worker).id if worker is not None else None,
        before_id=before,
        limit=limit,
    )
    found = operator.jobs.search(where)
    return json_response({"jobs": [views.job_summary(job) for job in found.jobs], "next": found.before_id})


@list_router.post("/jobs/cancel", summary="Cancel many jobs", response_model=BulkAnswer)
def cancel_many(body: BulkBody, services: ServicesDep, caller: Operating) -> Response:
    """By number, or all that match: without `state` those that have not ended. Newest first, `limit` at a time."""
    operator = services.operator(caller)
    ids, more = _chosen(operator, body, CANCELLED_BY_DEFAULT)
    return bulk(ids, more, body.dry_run, operator.jobs.cancel)


@list_router.post("/jobs/retry", summary="Run many finished jobs again", response_model=BulkAnswer)
def retry_many(body: BulkBody, services: ServicesDep, caller: Operating) -> Response:
    """By number, or all that match: without `state` those that failed or are quarantined."""
    operator = services.operator(caller)
    ids, more = _chosen(operator, body, RETRIED_BY_DEFAULT)
    return bulk(ids, more, body.dry_run, operator.jobs.retry)


@list_router.post("/prune", summary="Remove finished jobs now", response_model=Pruned, tags=["care"])
def prune(services: ServicesDep, caller: Operating, body: PruneBody | None = None) -> Response:
    """The reaper does it by itself by retention."""
    asked = body or PruneBody()
    age_s = None if asked.older_than is None else seconds(asked.older_than, "older_than")
    return json_response(
        {"pruned": services.operator(caller).jobs.prune(age_s, [JobState(state) for state in asked.state])}
    )


def bulk(ids: list[int], more: bool, dry_run: bool, act: Callable[[Collection[int]], dict[int, str]]) -> Response:
    """Do it, or only say which it would be, and give what became of each."""
    done = dict.fromkeys(ids, "matched") if dry_run else act(ids)
    return json_response(
        {
            "dry_run": dry_run,
            "matched": len(done),
            "more": more,
            "counts": dict(sorted(Tally(done.values()).items())),
            "answers": [{"id": job_id, "answer": said} for job_id, said in done.items()],
        }
    )


def first_matching(operator: Operator, where: JobFilter, limit: int) -> tuple[list[int], bool]:
    """Give the newest `limit` that match, and whether there are more."""
    # All of them before anything is done: what is done changes what matches.
    ids = list(itertools.islice(operator.jobs.matching(where), limit + 1))
    return ids[:limit], len(ids) > limit


def _chosen(operator: Operator, body: BulkBody, default: tuple[JobState, ...]) -> tuple[list[int], bool]:
    if body.ids is not None:
        return list(dict.fromkeys(body.ids)), False
    assert body.where is not None
    where = _filter(operator, body.where)
    return first_matching(operator, msgspec.structs.replace(where, states=where.states or default), body.limit)


def _filter(operator: Operator, where: Where) -> JobFilter:
    return JobFilter(
        states=tuple(where.state),
        queue=where.queue,
        task=where.task,
        error=where.error.upper() if where.error is not None else None,
        older_than_s=None if where.older_than is None else seconds(where.older_than, "older_than"),
        newer_than_s=None if where.newer_than is None else seconds(where.newer_than, "newer_than"),
        worker_id=operator.workers.find(where.worker).id if where.worker is not None else None,
    )


def _states(given: list[str]) -> tuple[JobState, ...]:
    known = [state.value for state in JobState]
    words = [word.strip().lower() for text in given for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ConfigError(f"There is no state {word!r}.{did_you_mean(word, known)} States: {', '.join(known)}.")
    return tuple(JobState(word) for word in words)


def _age_s(text: str | None, what: str) -> float | None:
    return None if text is None else seconds(text, what)


MAX_WAIT_S = 60.0
MAX_STACK_WAIT_S = 30.0
NO_ANSWER = "Look at its worker: workers over HTTP do not answer, nor those behind a pooler without `listen_url`."

router = api_router("jobs", "/jobs/{job_id}")

Reader = Annotated[Caller, Depends(RequiresJob(Scope.READ))]
Changer = Annotated[Caller, Depends(RequiresJob(Scope.OPERATE))]


@router.get("", summary="All of a job", response_model=JobDetail)
def show(job_id: JobId, services: ServicesDep, caller: Reader) -> Response:
    """State, call, result or error, every attempt and event, progress, and why it waits if it waits."""
    return json_response(services.operator(caller).jobs.detail(job_id))


@router.get(
    "/result",
    summary="The result, waiting for it",
    response_model=JobResult,
    responses={202: {"model": JobUnfinished, "description": "It has not ended; what it is doing. Ask again."}},
)
async def result(
    job_id: JobId,
    services: ServicesDep,
    caller: Reader,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Wait so many seconds for the end.")] = 0.0,
) -> Response:
    """Return how the job ended: its `result`, or its `error`, even then with status 200, because the question was
    answered. A success whose result is not stored has the error `RESULT_NOT_AVAILABLE`. 202 if the job has not ended
    within `wait`."""
    if wait and not await run_in_threadpool(services.ledger.jobs.missing, (job_id,)):
        await _ended(services.watcher, job_id, wait)
    return await run_in_threadpool(_result_now, services, caller, job_id)


async def _ended(watcher: ResultWatcher, job_id: int, wait_s: float) -> None:
    """Wait until the job has ended, or until patience has."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def tell(_: Answer) -> None:
        loop.call_soon_threadsafe(told.set)

    waiter = watcher.wait(job_id, tell)
    if failpoints.active:
        failpoints.reached("http.result_waiting")
    try:
        async with asyncio.timeout(wait_s):
            await told.wait()
    except TimeoutError:
        pass
    finally:
        watcher.remove(waiter)


def _result_now(services: Services, caller: Caller, job_id: int) -> Response:
    """Answer with what is there. The job is read and its answer made in one go: many may end at the same moment."""
    operator = services.operator(caller)
    record = operator.jobs.get(job_id)
    view: views.View = {"id": record.id, "state": record.state.value}
    if record.state in FINAL_STATES:
        result = {"result": views.whole_result(record), "error": views.error_view(record.error)}
        return json_response({**view, **result})
    progress = services.ledger.jobs.progress([record.id]).get(record.id)
    # What an earlier try said says nothing of this one.
    known = views.progress_view(progress) if progress is not None and progress.token == record.token else None
    return json_response({**view, "doing": operator.doing(record.id), "progress": known}, 202)


@router.get("/why", summary="The story of a job in plain words", response_model=StoryView)
def why(job_id: JobId, services: ServicesDep, caller: Reader) -> Response:
    """What happened, by which rule, what is next, and what can be done."""
    return json_response(story_view(services.operator(caller).why(job_id)))


@router.get("/doctor", summary="Why this job is not running, or how it runs or ended", response_model=list[FindingView])
async def doctor(job_id: JobId, services: ServicesDep, caller: Reader) -> Response:
    return json_response(await services.run_slow(lambda: services.operator(caller).doctor_job(job_id)))


@router.get("/logs", summary="What a job printed, attempt by attempt", response_model=list[OutputView])
def logs(job_id: JobId, services: ServicesDep, caller: Reader) -> Response:
    """Output is handed in when an attempt ends."""
    return json_response([views.output_view(output) for output in services.operator(caller).jobs.outputs(job_id)])


@router.get("/events", summary="The history of a job, oldest first", response_model=list[EventView])
def events(
    job_id: JobId,
    services: ServicesDep,
    caller: Reader,
    after: Annotated[
        int | None, Query(ge=0, le=2**63 - 1, description="Those after this event; left out: the newest.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = EVENTS_SHOWN,
) -> Response:
    services.operator(caller).jobs.get(job_id)
    return json_response(
        [views.event_view(event) for event in services.ledger.events.list(job_id=job_id, after_id=after, limit=limit)]
    )


@router.post("/cancel", summary="Cancel a job", response_model=JobAnswer)
def cancel(job_id: JobId, services: ServicesDep, caller: Changer) -> Response:
    """`cancelled`, or `requested` where it runs: its worker is told and ends it. 409 where it has ended already."""
    said = services.operator(caller).jobs.cancel([job_id])[job_id]
    return _said(services.operator(caller), job_id, said, {"cancelled", "requested"})


@router.post("/signals", summary="Send a signal to a job", response_model=SignalAnswer)
def signal(job_id: JobId, body: SignalBody, services: ServicesDep, caller: Changer) -> Response:
    """`woken` where it waited for this signal, `kept` until it does. 409 where it has ended, or too many wait."""
    value = payload.encode(body.value, f"The value of signal {body.name!r}", services.settings.max_payload_bytes)
    said = services.operator(caller).jobs.signal(job_id, body.name, value)
    return json_response({"id": job_id, "name": body.name, "answer": said})


@router.post("/retry", summary="Run a finished job again, with fresh counters", response_model=JobAnswer)
def retry(job_id: JobId, services: ServicesDep, caller: Changer) -> Response:
    """`queued`. 409 where it has not ended, succeeded, or its unique key is in use by another."""
    said = services.operator(caller).jobs.retry([job_id])[job_id]
    return _said(services.operator(caller), job_id, said, {"queued"})


@router.post("/stack", summary="Where a running job stands at this moment", response_model=EventView)
async def stack(
    job_id: JobId,
    services: ServicesDep,
    caller: Changer,
    wait: Annotated[float, Query(gt=0, le=MAX_STACK_WAIT_S, description="Seconds to wait for the answer.")] = 10.0,
) -> Response:
    """Its worker has the stacks of its process written down, and it goes on undisturbed. 409 where it does not run, or
    its worker does not answer: one in another language does not."""
    operator = services.operator(caller)
    told = await services.run_slow(lambda: operator.jobs.stack(job_id, wait))
    if told is not None:
        return json_response(views.event_view(told))
    record = await run_in_threadpool(operator.jobs.get, job_id)
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
        return json_response({"id": job_id, "answer": said})
    state = operator.jobs.get(job_id).state.value
    raise Problem(409, said, f"Nothing was done to job {job_id}: {_WHY_NOT[said]}.", state=state)
