"""Routes for workers and hosts: list, show, drain, stop, disable, enable; and what remote workers call."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from unstuck.client import views
from unstuck.client.operator import Operator
from unstuck.client.views import worker_view
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.policy import decode_policy
from unstuck.domain.states import LIVE_STATES, Transport, WorkerState
from unstuck.domain.text import checked_name, did_you_mean
from unstuck.http.auth.callers import Requires
from unstuck.http.openapi import json_response
from unstuck.http.operator_schemas import ReasonBody, SwitchedOff, SwitchedOn, WorkerAsked
from unstuck.http.problems import Problem
from unstuck.http.routing import JsonRoute, api_router
from unstuck.http.services import ServicesDep
from unstuck.http.workers.claims import heartbeat_timeout_s
from unstuck.http.workers.protocol import heartbeat_answer
from unstuck.http.workers.service import WorkerService, WorkerServiceDep, instructions, next_beat_s
from unstuck.ledger.contract.workers import HeartbeatAnswer, WorkerRecord
from unstuck.remote.attempts import may_look
from unstuck.remote.explain import death_of, superseded, worker_gone_problem
from unstuck.remote.messages import (
    BeatAnswerBody,
    BeatBody,
    Gone,
    HeartbeatBody,
    HeartbeatResponse,
    RegisterBody,
    Registered,
)
from unstuck.remote.registry import MAX_ID_CHARS, RemoteWorker, allowed, checked_metadata, could_be_id, may_speak_for

operator_router = api_router("workers")

Operating = Annotated[Caller, Depends(Requires(Scope.OPERATE))]
Who = Annotated[str, Path(min_length=1, description="A worker: its id, the beginning of its id, or its name.")]
HostName = Annotated[str, Path(min_length=1, description="A host, as workers name theirs.")]


@operator_router.post(
    "/workers/{worker}/stop", summary="Have a worker exit within its grace", response_model=WorkerAsked
)
def stop(worker: Who, services: ServicesDep, caller: Operating) -> Response:
    """What has not ended by then is killed and settled by `on_crash`, counting for nobody."""
    return ask(services.operator(caller), worker, "stop")


@operator_router.post(
    "/workers/{worker}/disable", summary="Have a worker take no more jobs", response_model=SwitchedOff
)
def disable(worker: Who, services: ServicesDep, caller: Operating, body: ReasonBody | None = None) -> Response:
    """It finishes what it runs, lives on, and can be enabled."""
    operator = services.operator(caller)
    _living(operator, worker)
    record, unserved = operator.workers.disable(worker, (body or ReasonBody()).reason)
    return _switched_off([record], None, unserved)


@operator_router.post("/workers/{worker}/enable", summary="Let a worker take jobs again", response_model=SwitchedOn)
def enable(worker: Who, services: ServicesDep, caller: Operating) -> Response:
    record, changed = services.operator(caller).workers.enable(worker)
    still = views.disabled_view(record.disabled)
    return json_response({"workers": [record.id], "host": None, "changed": changed, "disabled": still})


@operator_router.post(
    "/hosts/{host}/disable", summary="Have every worker of a host take no more jobs", response_model=SwitchedOff
)
def disable_host(host: HostName, services: ServicesDep, caller: Operating, body: ReasonBody | None = None) -> Response:
    """Also workers that are started there later."""
    here, unserved = services.operator(caller).workers.disable_host(host, (body or ReasonBody()).reason)
    return _switched_off(here, host, unserved)


@operator_router.post(
    "/hosts/{host}/enable", summary="Let the workers of a host take jobs again", response_model=SwitchedOn
)
def enable_host(host: HostName, services: ServicesDep, caller: Operating) -> Response:
    here, changed = services.operator(caller).workers.enable_host(host)
    return json_response(
        {"workers": [worker.id for worker in here], "host": host, "changed": changed, "disabled": None}
    )


def ask(operator: Operator, who: str, what: Literal["drain", "stop"]) -> Response:
    """Ask a living worker to go; the worker itself may ask to be drained too, see `workers`."""
    _living(operator, who)
    worker = operator.workers.stop(who) if what == "stop" else operator.workers.drain(who)
    return json_response({"id": worker.id, "name": worker.name, "request": what})


def _living(operator: Operator, who: str) -> None:
    worker = operator.workers.find(who)
    if worker.state not in LIVE_STATES:
        said = f"Worker {worker.name} ({worker.id}) is {worker.state}: there is nobody to ask."
        raise Problem(409, "worker_gone", said, state=worker.state.value)


def _switched_off(here: list[WorkerRecord], host: str | None, unserved: set[str]) -> Response:
    ids = [worker.id for worker in here]
    return json_response({"workers": ids, "host": host, "disabled": True, "unserved": sorted(unserved)})


router = APIRouter(tags=["workers"], route_class=JsonRoute)

Working = Annotated[Caller, Depends(Requires(Scope.WORKER))]
Draining = Annotated[Caller, Depends(Requires(Scope.WORKER, Scope.OPERATE))]
Reading = Annotated[Caller, Depends(Requires(Scope.READ))]
MAX_LISTED = 1_000
WORDS = {"stale": WorkerState.DEAD, "inactive": WorkerState.STOPPED}
"""Other words for our states."""


@router.post("/api/workers/heartbeat", response_model=HeartbeatResponse, summary="Beat, by name")
@router.post("/api/v1/workers/heartbeat", response_model=HeartbeatResponse, include_in_schema=False)
async def heartbeat(request: Request, body: HeartbeatBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """Say that a worker lives. A name that nobody knows is registered by its first beat; a beat after the worker's
    death opens a new incarnation with a new id, and says so in `declared_dead`."""
    metadata = None if body.metadata is None else checked_metadata(body.metadata)
    worker = service.workers.known(checked_name(body.worker_id, "Worker"))
    dead: WorkerRecord | None = None
    answer = None
    # Of a stranger's we only remember that it lived once: the ledger knows whether it still does.
    if worker is not None and may_speak_for(worker, caller):
        answer = await service.pulse(worker, metadata)
    if worker is None or answer is None or answer.state not in LIVE_STATES:
        worker, answer, dead = await _come_in(request, service, body.worker_id, metadata, caller, worker)
    return JSONResponse({**heartbeat_answer(worker, answer), "declared_dead": death_of(dead) if dead else None})


@router.get("/api/workers", include_in_schema=False, response_model=None)
@router.get(
    "/api/v1/workers", summary="List workers, through whichever door they came", response_model=list[dict[str, Any]]
)
def workers(
    request: Request,
    services: ServicesDep,
    caller: Reading,
    state: Annotated[
        list[str] | None,
        Query(description="Of these states only; `stale` is another word for dead, `inactive` for stopped."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="At most this many.")] = MAX_LISTED,
    after: Annotated[
        str | None, Query(max_length=MAX_ID_CHARS, description="Only those after the worker with this id.")
    ] = None,
) -> Response:
    """Oldest first. If there are more than `limit`, the header `Link` (`rel="next"`) leads to the next page."""
    wanted = {_state(word) for given in state or () for word in given.split(",")}
    living_only = bool(wanted) and wanted <= LIVE_STATES
    every = services.ledger.workers.list(living_only and after is None)
    start = 0 if after is None else _place_behind(every, after)
    found = [worker for worker in every[start:] if not wanted or worker.state in wanted]
    headers = {}
    if len(found) > limit:
        there = request.url.include_query_params(after=found[limit - 1].id, limit=limit)
        headers["Link"] = f'<{there.path}?{there.query}>; rel="next"'
    return json_response([worker_view(worker) for worker in found[:limit]], headers=headers)


@router.get("/api/v1/workers/{worker}", summary="One worker, by id, name or the beginning of its id")
def worker(worker: str, services: ServicesDep, caller: Reading) -> dict[str, Any]:
    return worker_view(services.operator(caller).workers.find(worker))


@router.post("/api/v1/workers", response_model=Registered, status_code=201, summary="Register a worker")
def register(request: Request, body: RegisterBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """Say who it is, which tasks it knows and which queues it serves. Whoever enqueues may use these tasks from then
    on. Repeated with the same `instance` it gives the same worker."""
    record = service.workers.register(service.ledger, body, caller, _address(request))
    worker = service.workers.keep(record)
    answer = HeartbeatAnswer(record.state, request=record.request, disabled=record.disabled is not None)
    return JSONResponse(
        {
            **instructions(worker, answer),
            "heartbeat_interval_s": worker.interval_s,
            "heartbeat_timeout_s": worker.timeout_s,
            "queues": list(worker.queues),
            "tasks": list(worker.tasks),
        },
        status_code=201,
    )


@router.post(
    "/api/v1/workers/{worker_id}/beat", response_model=BeatAnswerBody, summary="Beat, and compare what is held"
)
async def beat(worker_id: str, body: BeatBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """Keep everything alive that it holds. The answer says which of the named jobs are no longer its own, and which
    to cancel."""
    worker = await anyio.to_thread.run_sync(service.worker, worker_id, caller)
    metadata = None if body.metadata is None else checked_metadata(body.metadata)
    answer = await service.beat(worker, metadata, running=len(body.jobs))
    # Also a worker that knows of no job may hold one: the answer that gave it was lost.
    compares = "jobs" in body.model_fields_set
    compared = await anyio.to_thread.run_sync(_compare, service, worker, caller, body) if compares else _NOTHING
    return JSONResponse({**instructions(worker, answer), **compared})


@router.post(
    "/api/v1/workers/{worker}/drain", summary="Claim nothing more, finish what runs", response_model=WorkerAsked
)
async def drain(worker: Who, service: WorkerServiceDep, caller: Draining) -> Response:
    """Of a worker over HTTP, by itself or by an operator: claims give nothing from now on. Any other worker is asked by
    an operator, and hears it with its next beat."""
    return await anyio.to_thread.run_sync(_drain, service, worker, caller)


@router.post("/api/v1/workers/{worker_id}/shutdown", response_model=Gone, summary="Leave in order")
def shutdown(worker_id: str, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """What it only claimed goes back to its queue and spends no attempt; what it still runs is settled by the reaper as
    drained. Repeated, it says the same."""
    worker = service.worker(worker_id, caller)
    released, left = service.attempts(worker, caller).release_claimed()
    service.ledger.workers.stop(worker.id)
    service.ledger.notify({"workers"})
    service.workers.forget(worker)
    record = service.ledger.workers.remote(worker.id)
    state = WorkerState.STOPPED if record is None else record.state
    return JSONResponse({"id": worker.id, "state": state.value, "released": released, "left_running": left})


# ----------------------------------------------------------------------------------------------


async def _come_in(
    request: Request,
    service: WorkerService,
    key: str,
    metadata: dict[str, Any] | None,
    caller: Caller,
    before: RemoteWorker | None,
) -> tuple[RemoteWorker, HeartbeatAnswer, WorkerRecord | None]:
    """Find who beats under this name, or open a new life for it."""

    def look() -> tuple[RemoteWorker, WorkerRecord | None]:
        if before is not None:
            service.workers.forget(before)
        ledger = service.ledger
        found = ledger.workers.remote(key) or ledger.workers.find_remote(key)
        if found is not None and found.state not in LIVE_STATES and found.id == key:
            # Known by its id: its name may live on already.
            found = ledger.workers.find_remote(found.name)
        if found is not None and found.state not in LIVE_STATES and not may_speak_for(found, caller):
            # A name is free again when its worker is dead, as in a registration: tokens are changed now and then.
            found = None
        if found is None:
            return service.workers.keep(
                service.workers.reopen(ledger, key, None, metadata, caller, _address(request))
            ), None
        allowed(service.workers.keep(found), caller)
        if found.state in LIVE_STATES:
            return service.workers.keep(found), None
        born = service.workers.reopen(ledger, found.name, found, metadata, caller, _address(request))
        service.workers.forget(service.workers.keep(found))
        return service.workers.keep(born), found

    worker, dead = await anyio.to_thread.run_sync(look)
    answer = await service.beat(worker, metadata)
    return worker, answer, dead


_NOTHING: dict[str, Any] = {"lost": [], "unknown": []}


def _compare(service: WorkerService, worker: RemoteWorker, caller: Caller, body: BeatBody) -> dict[str, Any]:
    held = {(job.job_id, job.token): job for job in service.ledger.workers.held(worker.id)}
    named = {(job.job_id, job.token) for job in body.jobs}
    gone = sorted(named - held.keys())
    fates = service.ledger.jobs.fates(gone) if gone else []
    lost = [superseded(fate, None, may_look=may_look(fate, worker, caller)) for fate in fates]
    unknown = [{"job_id": job_id, "token": token} for job_id, token in sorted(held.keys() - named)]
    timeouts = [heartbeat_timeout_s(decode_policy(job.policy), worker) for job in held.values()]
    return {"lost": lost, "unknown": unknown, "next_heartbeat_in": next_beat_s(worker, timeouts)}


def _drain(service: WorkerService, who: str, caller: Caller) -> Response:
    record = service.ledger.workers.remote(who) if could_be_id(who) else None
    if record is None or record.transport is not Transport.HTTP:
        if Scope.OPERATE not in caller.scopes:
            raise Problem(404, "not_found", f"There is no worker {who!r} over HTTP.")
        return ask(service.services.operator(caller), who, "drain")
    allowed(service.workers.keep(record), caller)
    if record.state not in LIVE_STATES:
        raise worker_gone_problem(record)
    if record.owner != caller.token_id or caller.token_id is None:
        # Somebody else than the worker itself, or perhaps so: an operator, whose deeds are written down.
        service.services.operator(caller).workers.drain(record.id)
    service.ledger.workers.drain(record.id)
    service.ledger.notify({f"worker:{record.id}"})
    return json_response({"id": record.id, "name": record.name, "request": "drain"})


def _place_behind(workers: Sequence[WorkerRecord], worker_id: str) -> int:
    for place, worker in enumerate(workers):
        if worker.id == worker_id:
            return place + 1
    raise Problem(
        404,
        "not_found",
        f"There is no worker {worker_id!r} any more.",
        cure="Begin again with the first page, without `after`.",
    )


def _state(word: str) -> WorkerState:
    known = {**WORDS, **{state.value: state for state in WorkerState}}
    if word not in known:
        raise Problem(
            422,
            "not_valid",
            f"There is no state {word!r} of workers.{did_you_mean(word, known)}",
            cure=", ".join(known),
        )
    return known[word]


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"
