"""Answer what remote workers ask most often without going through all that other requests need.

Thousands of workers beat, and busy ones settle and claim a thousand times per second. Whatever is not quite plain goes
the usual way, which says what is wrong with it: so nothing is decided here that is not decided there too.
"""

import re
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Annotated, Any, Literal

import msgspec
from starlette._utils import get_route_path
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from unstuck.domain.errors import UnstuckError
from unstuck.domain.names import checked_name
from unstuck.domain.states import LIVING
from unstuck.http.callers import Caller, Scope
from unstuck.http.foreign.bodies import LARGEST, LONGEST_WAIT_S, MAX_BATCH, MAX_CLAIM, MAX_HELD
from unstuck.http.foreign.crew import Crew, orders, plain
from unstuck.http.foreign.handing import conflict_of, keys_of
from unstuck.http.foreign.one_turn import Asked, claim_afresh, settle_plainly, start, take_turn
from unstuck.http.foreign.seats import Seat, checked_metadata, may_speak_for
from unstuck.http.guard.bodies import replayed
from unstuck.http.problems import Problem, problem_of
from unstuck.store import manners
from unstuck.store.records import BeatAnswer

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

Answering = Callable[[Caller, bytes, Receive], Awaitable[bytes | None]]


class QuickRoutes:
    """Plain ASGI, behind the guard: who asks is known, and the body has been read."""

    def __init__(self, app: ASGIApp, crew: Crew) -> None:
        self._app = app
        self._crew = crew
        self._verbs = {"turn": self._turn, "settle": self._settle, "claim": self._claim, "start": self._start}

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        answering = self._answering(scope)
        if answering is None:
            await self._app(scope, receive, send)
            return
        # A beat all the way, and not only while it is written: beside a page that is drawn each step of it would wait.
        # A turn may wait a minute for a job, and nothing may give way to it for as long.
        with manners.hurry() if answering == self._beat else nullcontext():
            body = await _whole(receive)
            try:
                answer = await self._quickly(answering, scope["state"]["caller"], body, receive)
            except _Conflict as conflict:
                await conflict.problem.response()(scope, receive, send)
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

        async def speak_for(caller: Caller, body: bytes, receive: Receive) -> bytes | None:
            seat = self._crew.seats.known_id(worker_id)
            if seat is None or not may_speak_for(seat, caller):
                return None
            answer = await verb(seat, caller, body, receive)
            return None if answer is None else msgspec.json.encode(answer, enc_hook=str)

        return speak_for

    async def _quickly(self, answering: Answering, caller: Caller, body: bytes, receive: Receive) -> bytes | None:
        """Return the answer; None if the usual way must be taken."""
        if Scope.WORKER not in caller.scopes or not self._crew.is_open:
            return None
        try:
            return await answering(caller, body, receive)
        except (msgspec.MsgspecError, RecursionError, Problem):
            # Nothing was written, or only what may be written again: there it is said what is wrong.
            return None

    async def _beat(self, caller: Caller, body: bytes, receive: Receive) -> bytes | None:
        try:
            said = _beat_decoder.decode(body)
            metadata = None if said.metadata is None else checked_metadata(said.metadata)
            seat = self._crew.seats.known(checked_name(said.worker_id, "Worker"))
            if seat is None or not may_speak_for(seat, caller):
                return None
            answer = await self._crew.pulse(seat, metadata)
        except Exception:  # noqa: BLE001 - a beat may be written twice, and there it is said what is wrong
            return None
        return None if answer.state not in LIVING else msgspec.json.encode(recorded(seat, answer))

    async def _turn(self, seat: Seat, caller: Caller, body: bytes, receive: Receive) -> dict[str, Any] | None:
        said = _turn_decoder.decode(body)
        asked = Asked(said.settle, said.claim, said.wait, said.start, said.have)
        return await take_turn(self._crew, seat, caller, receive, asked)

    async def _claim(self, seat: Seat, caller: Caller, body: bytes, receive: Receive) -> dict[str, Any] | None:
        said = _claim_decoder.decode(body)
        return await claim_afresh(
            self._crew, seat, caller, receive, Asked((), said.limit, said.wait, said.start, said.have)
        )

    async def _start(self, seat: Seat, caller: Caller, body: bytes, receive: Receive) -> dict[str, Any] | None:
        results = await start(self._crew, seat, caller, keys_of(_start_decoder.decode(body).jobs))
        return _told(seat, results)

    async def _settle(self, seat: Seat, caller: Caller, body: bytes, receive: Receive) -> dict[str, Any] | None:
        results = await settle_plainly(self._crew, seat, caller, _settle_decoder.decode(body).jobs)
        return _told(seat, results) if results else None


def recorded(seat: Seat, answer: BeatAnswer) -> dict[str, Any]:
    """Say that a worker's beat was written, and what is asked of it."""
    told = {"success": True, "message": "Heartbeat recorded", "next_heartbeat_in": plain(seat.interval_s)}
    return {**told, **orders(seat, answer), "declared_dead": None}


def _told(seat: Seat, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer for each job. A conflict is said here: asked again, the usual way would count it twice."""
    if conflict := conflict_of(seat, results):
        raise _Conflict(conflict)
    return {"id": seat.id, "results": results}


class _Conflict(Exception):
    """Not one job of a call was the worker's to write."""

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
