"""The hot routes of remote workers (heartbeat, claim, start, settle, turn), served before the framework.

Thousands of workers beat, and busy ones settle and claim a thousand times per second. Whatever is not quite plain goes
the usual way, which says what is wrong with it: so nothing is decided here that is not decided there too.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import anyio.to_thread
import msgspec
from fastapi import Depends, Request
from fastapi import Response as Response_
from fastapi.responses import JSONResponse
from starlette._utils import get_route_path
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.states import LIVE_STATES
from unstuck.domain.text import checked_name
from unstuck.errors import UnstuckError
from unstuck.http.auth.callers import Requires
from unstuck.http.auth.limits import LARGE_BYTES, replayed
from unstuck.http.openapi import json_response
from unstuck.http.problems import Problem, problem_of
from unstuck.http.routing import api_router
from unstuck.http.workers.claims import Requester
from unstuck.http.workers.service import WorkerService, WorkerServiceDep, instructions, plain
from unstuck.http.workers.turns import TurnRequest, claim_afresh, settle_plainly, take_turn
from unstuck.http.workers.turns import settle as settle_by_rules
from unstuck.http.workers.turns import start as turns_start
from unstuck.ledger.contract.workers import HeartbeatAnswer
from unstuck.remote.attempts import conflict_of, keys_of
from unstuck.remote.messages import (
    LARGEST,
    LONGEST_WAIT_S,
    MAX_BATCH,
    MAX_CLAIM,
    MAX_HELD,
    ClaimAnswer,
    ClaimBody,
    JobsBody,
    ProgressBody,
    Results,
    SettleBody,
    StepsBody,
    TurnBody,
    TurnTaken,
)
from unstuck.remote.registry import RemoteWorker, checked_metadata, may_speak_for

BEATS = frozenset({"/api/workers/heartbeat", "/api/v1/workers/heartbeat"})
_VERBS = re.compile(r"/api/v1/workers/([0-9a-z]{1,64})/(turn|settle|claim|start)")

_WholeNumber = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


class _Beat(msgspec.Struct):
    worker_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    metadata: dict[str, Any] | None = None


class _Success(msgspec.Struct, forbid_unknown_fields=True):
    """A plain success."""

    job_id: _WholeNumber
    token: _WholeNumber
    outcome: Literal["succeeded"]
    result: Any = None


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    settle: Annotated[list[_Success], msgspec.Meta(max_length=MAX_BATCH)] = []
    claim: Annotated[int, msgspec.Meta(ge=0, le=MAX_CLAIM)] = 0
    start: bool = True
    wait: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0
    have: Annotated[list[_WholeNumber], msgspec.Meta(max_length=MAX_HELD)] | None = None


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_CLAIM)] = 1
    wait: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0
    start: bool = False
    have: Annotated[list[_WholeNumber], msgspec.Meta(max_length=MAX_HELD)] | None = None


class _Held(msgspec.Struct, forbid_unknown_fields=True):
    job_id: _WholeNumber
    token: _WholeNumber


class _Start(msgspec.Struct, forbid_unknown_fields=True):
    jobs: Annotated[list[_Held], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


class _Settle(msgspec.Struct, forbid_unknown_fields=True):
    jobs: Annotated[list[_Success], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


_beat_decoder = msgspec.json.Decoder(_Beat)
_turn_decoder = msgspec.json.Decoder(_Turn)
_settle_decoder = msgspec.json.Decoder(_Settle)
_claim_decoder = msgspec.json.Decoder(_Claim)
_start_decoder = msgspec.json.Decoder(_Start)

T = TypeVar("T")
Answering = Callable[[Caller, bytes, Requester], Awaitable[bytes | None]]


class FastRoutes:
    """Plain ASGI, behind the guard: who asks is known, and the body has been read."""

    def __init__(self, app: ASGIApp, service: WorkerService) -> None:
        self._app = app
        self._service = service
        self._verbs = {"turn": self._turn, "settle": self._settle, "claim": self._claim, "start": self._start}

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        answering = self._answering(scope)
        if answering is None:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        try:
            requester = Requester(receive, scope["state"]["answer_room"], len(body) > LARGE_BYTES)
            answer = await self._quickly(answering, scope["state"]["caller"], body, requester)
        except _Refused as refused:
            await refused.problem.response()(scope, receive, send)
            return
        except UnstuckError as error:
            # Not tried the usual way: nobody knows whether the database wrote what it did not answer.
            await problem_of(error).response()(scope, receive, send)
            return
        if answer is None:
            await self._app(scope, replayed(body, receive), send)
        else:
            await Response(answer, media_type="application/json")(scope, receive, send)

    def _answering(self, scope: Connection) -> Answering | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path = get_route_path(scope)
        if path in BEATS:
            return self._beat
        found = _VERBS.fullmatch(path)
        if found is None:
            return None
        worker_id, verb = found[1], self._verbs[found[2]]

        async def speak_for(caller: Caller, body: bytes, requester: Requester) -> bytes | None:
            worker = self._service.workers.known_id(worker_id)
            if worker is None or not may_speak_for(worker, caller):
                return None
            answer = await verb(worker, caller, body, requester)
            return None if answer is None else msgspec.json.encode(answer, enc_hook=str)

        return speak_for

    async def _quickly(self, answering: Answering, caller: Caller, body: bytes, requester: Requester) -> bytes | None:
        """Return the answer; None if the usual way must be taken."""
        if Scope.WORKER not in caller.scopes or not self._service.is_open:
            return None
        try:
            return await answering(caller, body, requester)
        except (msgspec.MsgspecError, RecursionError, Problem) as error:
            if isinstance(error, Problem) and error.status == 429:
                raise _Refused(error) from None
            # Nothing was written, or only what may be written again: there it is said what is wrong.
            return None

    async def _beat(self, caller: Caller, body: bytes, requester: Requester) -> bytes | None:
        try:
            said = await _beside(requester, _read_beat, body)
            worker = self._service.workers.known(checked_name(said.worker_id, "Worker"))
            if worker is None or not may_speak_for(worker, caller):
                return None
            answer = await self._service.pulse(worker, said.metadata)
        except Exception:  # noqa: BLE001 - a beat may be written twice, and there it is said what is wrong
            return None
        return None if answer.state not in LIVE_STATES else msgspec.json.encode(heartbeat_answer(worker, answer))

    async def _turn(
        self, worker: RemoteWorker, caller: Caller, body: bytes, requester: Requester
    ) -> dict[str, Any] | None:
        said = await _beside(requester, _turn_decoder.decode, body)
        asked = TurnRequest(said.settle, said.claim, said.wait, said.start, said.have)
        return await take_turn(self._service, worker, caller, requester, asked)

    async def _claim(
        self, worker: RemoteWorker, caller: Caller, body: bytes, requester: Requester
    ) -> dict[str, Any] | None:
        said = await _beside(requester, _claim_decoder.decode, body)
        return await claim_afresh(
            self._service, worker, caller, requester, TurnRequest((), said.limit, said.wait, said.start, said.have)
        )

    async def _start(
        self, worker: RemoteWorker, caller: Caller, body: bytes, requester: Requester
    ) -> dict[str, Any] | None:
        said = await _beside(requester, _start_decoder.decode, body)
        results = await turns_start(self._service, worker, caller, keys_of(said.jobs))
        return _told(worker, results)

    async def _settle(
        self, worker: RemoteWorker, caller: Caller, body: bytes, requester: Requester
    ) -> dict[str, Any] | None:
        said = await _beside(requester, _settle_decoder.decode, body)
        results = await settle_plainly(self._service, worker, caller, requester, said.jobs)
        return _told(worker, results) if results else None


def _read_beat(body: bytes) -> _Beat:
    said = _beat_decoder.decode(body)
    if said.metadata is not None:
        said.metadata = checked_metadata(said.metadata)
    return said


async def _beside(requester: Requester, read: Callable[[bytes], T], body: bytes) -> T:
    """Read a body: a large one beside the loop that serves the others."""
    return await asyncio.to_thread(read, body) if requester.is_large else read(body)


def heartbeat_answer(worker: RemoteWorker, answer: HeartbeatAnswer) -> dict[str, Any]:
    """Say that a worker's beat was written, and what is asked of it."""
    told = {"success": True, "message": "Heartbeat recorded", "next_heartbeat_in": plain(worker.interval_s)}
    return {**told, **instructions(worker, answer), "declared_dead": None}


def _told(worker: RemoteWorker, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer for each job. A conflict is said here: asked again, the usual way would count it twice."""
    if conflict := conflict_of(worker, results):
        raise _Refused(conflict)
    return {"id": worker.id, "results": results}


class _Refused(Exception):
    """Not one job of a call was the worker's to write, or there is no room for more. It is not asked again."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


async def _whole(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return b"".join(parts)


router = api_router("workers", "/workers/{worker_id}")

Working = Annotated[Caller, Depends(Requires(Scope.WORKER))]


@router.post("/claim", response_model=ClaimAnswer, summary="Take jobs, waiting for them if asked to")
async def claim(
    request: Request, worker_id: str, body: ClaimBody, service: WorkerServiceDep, caller: Working
) -> Response_:
    """Take up to `limit` jobs of its queues and tasks. With `wait` the answer comes as soon as there is one, or when
    somebody has a word for this worker. It counts as a beat. Send `have`, and one claim at a time, so that nothing is
    lost with an answer."""
    worker = await anyio.to_thread.run_sync(service.worker, worker_id, caller)
    asked = TurnRequest((), body.limit, body.wait, body.start, body.have)
    return json_response(await claim_afresh(service, worker, caller, await _requester(request), asked))


@router.post("/turn", response_model=TurnTaken, summary="Settle, claim and start in one request")
async def turn(
    request: Request, worker_id: str, body: TurnBody, service: WorkerServiceDep, caller: Working
) -> Response_:
    """Say how jobs ended, and take up to `claim` jobs that run at once: one request and, for plain successes, one
    commit. It counts as a beat. The answer is 200 even if no result is `ok`: the jobs that came with it are the
    worker's. Send `have`, and one turn at a time, so that nothing is lost with an answer."""
    worker = await anyio.to_thread.run_sync(service.worker, worker_id, caller)
    asked = TurnRequest(body.settle, body.claim, body.wait, body.start, body.have)
    return json_response(await take_turn(service, worker, caller, await _requester(request), asked))


@router.post("/start", response_model=Results, summary="Say that work on these jobs begins")
async def start(worker_id: str, body: JobsBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """Call it before the first line of work: what was never started goes back for free when the worker dies."""
    worker = await anyio.to_thread.run_sync(service.worker, worker_id, caller)
    return _results(worker, await turns_start(service, worker, caller, keys_of(body.jobs)))


@router.post("/progress", response_model=Results, summary="Say how far these jobs are")
def progress(worker_id: str, body: ProgressBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    worker = service.worker(worker_id, caller)
    return _results(worker, service.attempts(worker, caller).progress(body.jobs))


@router.post("/steps", response_model=Results, summary="Write down what these jobs did on their way")
def steps(worker_id: str, body: StepsBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """Durable when the answer comes: the next try gets it as `journal` with its claim, and must not do it again.
    Repeated with the same place and name it is answered as done; another name at that place is refused."""
    worker = service.worker(worker_id, caller)
    return _results(worker, service.attempts(worker, caller).steps(body.jobs))


@router.post("/settle", response_model=Results, summary="Say how these jobs ended")
async def settle(worker_id: str, body: SettleBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """The rules that were stored with each job decide what becomes of it: done, tried again, failed. Repeated with the
    same token and outcome it is answered as done."""
    worker = await anyio.to_thread.run_sync(service.worker, worker_id, caller)
    return _results(worker, await settle_by_rules(service, worker, caller, body.jobs))


@router.post("/release", response_model=Results, summary="Give back jobs on which no work was begun")
def release(worker_id: str, body: JobsBody, service: WorkerServiceDep, caller: Working) -> JSONResponse:
    """They go back to their place in the queue and spend no attempt. What was started is not taken back: settle it as
    `interrupted`."""
    worker = service.worker(worker_id, caller)
    return _results(worker, service.attempts(worker, caller).release(body.jobs))


async def _requester(request: Request) -> Requester:
    # The body has been read, and is kept.
    return Requester(request.receive, request.state.answer_room, len(await request.body()) > LARGE_BYTES)


def _results(worker: RemoteWorker, results: Sequence[dict[str, Any]]) -> JSONResponse:
    """Answer for each job, or raise the conflict."""
    if conflict := conflict_of(worker, results):
        raise conflict
    return JSONResponse({"id": worker.id, "results": list(results)})
