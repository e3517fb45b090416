"""Authenticate each request: by token, by login, or as a local caller; refuse requests forged by other sites."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import quote

from starlette._utils import get_route_path
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unstuck.domain.api_tokens import LOCAL, NOBODY, Caller
from unstuck.errors import UnstuckError
from unstuck.http.auth import limits, sessions
from unstuck.http.auth.answers import AnswerBudget, AnswerRoom, AnswerSender
from unstuck.http.auth.limits import (
    MAX_FORM_BYTES,
    SMALL_BODY_BYTES,
    ConcurrencyLimit,
    RateLimiter,
    check_json,
    declared_bytes,
    has_body,
    read_body,
    replayed,
)
from unstuck.http.auth.memory_budget import BODIES, BODIES_EACH, LEAST_BYTES, MemoryBudget, Room
from unstuck.http.auth.origins import SAFE, Exposure, Host, Origin, judge, read_address
from unstuck.http.auth.route_scopes import KnownRoutes
from unstuck.http.auth.shared_counters import Member
from unstuck.http.auth.tokens import TokenCache
from unstuck.http.dashboard.rendering import refused
from unstuck.http.middleware import with_security_headers
from unstuck.http.problems import Problem, bug, problem_of
from unstuck.http.services import Services
from unstuck.http.streams import TokenWatch

PASSED_ON = ("forwarded", "via", "x-real-ip")
PASSED_ON_PREFIX = "x-forwarded-"
IPV6_NETWORK_BITS = 64


@dataclass(frozen=True)
class Identity:
    caller: Caller
    who: str
    """By which requests are counted."""
    by: Literal["token", "cookie", "address"]
    """What identified the caller. A website can make a browser send all but a token."""


async def identify(headers: Mapping[str, str], tokens: TokenCache, exposure: Exposure, address: str) -> Identity | None:
    """Give who asks; None for somebody who says nothing about it."""
    if (said := headers.get("authorization")) is not None:
        return await _by_token(said, tokens)
    if (cookie := cookie_of(headers)) is not None and (found := await _by_login(cookie, tokens)) is not None:
        return found
    if exposure.may_be_open and not (await tokens.keys()).any_ever:
        _refuse_proxies(headers)
        return Identity(LOCAL, f"address {address}", "address")
    return None


async def _by_token(said: str, tokens: TokenCache) -> Identity:
    scheme, _, text = said.partition(" ")
    key = await tokens.find(text.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise unauthenticated("This token is not valid: it never was, has expired, or was revoked.")
    return Identity(Caller(key.name, key.scopes, key.id), f"token {key.id}", "token")


async def _by_login(cookie: str, tokens: TokenCache) -> Identity | None:
    session = sessions.read(cookie)
    key = None if session is None else await tokens.by_id(session.token_id)
    if session is None or key is None or not sessions.stands(session, key, time.time()):
        return None
    return Identity(Caller(key.name, key.scopes, key.id, via="page"), f"token {key.id}", "cookie")


def at_the_page(identity: Identity) -> Identity:
    return replace(identity, caller=replace(identity.caller, via="page"))


def cookie_of(headers: Mapping[str, str]) -> str | None:
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == sessions.COOKIE:
            return value
    return None


def address_of(client: tuple[str, int] | None) -> str:
    """Give by which address a stranger is counted: of IPv6 the network, since everybody has a whole one."""
    name = client[0] if client else "unknown"
    address = read_address(name)
    if address is None or address.version == 4:
        return name if address is None else str(address)
    return f"{int(address) >> (128 - IPV6_NETWORK_BITS):x}/{IPV6_NETWORK_BITS}"


def unauthenticated(detail: str) -> Problem:
    return Problem(
        401,
        "unauthenticated",
        detail,
        cure="Send `Authorization: Bearer …` with a token of `unstuck tokens create NAME --scope …`.",
        headers={"WWW-Authenticate": 'Bearer realm="unstuck"'},
    )


def _refuse_proxies(headers: Mapping[str, str]) -> None:
    # Something in front passes others through to what was meant for this machine alone.
    if any(name in PASSED_ON or name.startswith(PASSED_ON_PREFIX) for name in headers):
        raise Problem(
            403,
            "token_needed",
            "This came through a proxy, and without tokens this door is for its own machine alone.",
            cure="Make a token: `unstuck tokens create NAME --scope all`.",
        )


def check_origin(origin: Origin) -> None:
    if origin.foreign:
        raise Problem(
            403,
            "foreign_origin",
            "Another website made your browser ask for this.",
            cure="Open the page by its own address. Behind a proxy, have it pass the Host header on unchanged.",
        )


def check_same_origin(identity: Identity, origin: Origin, method: str, *, api: bool) -> None:
    """Refuse an unsafe request that a website could make a browser send, unless it proves that our own page sent it."""
    if method in SAFE or origin.proven or identity.by == "token":
        return
    # A program on this machine, if no token is asked for, is not a browser and cannot be made to send anything.
    if api and identity.by == "address" and not origin.from_browser:
        return
    raise Problem(
        403,
        "foreign_origin",
        "The request does not say which page sent it.",
        cure="Use a browser that sends Origin or Sec-Fetch-Site. Programs use the API, with a token.",
    )


HEALTH = frozenset({"/healthz", "/readyz"})
LOGIN = "/login"
STATIC = "/static/"
BURST_S = 10
STRANGERS_PER_S = 20
STRANGERS_BURST = 200
MAX_LOGIN_BYTES = 4096
DRAINED_BYTES = 64 * 1024
DRAIN_S = 1.0


@dataclass(frozen=True)
class RequestHead:
    """One request, as far as its head says."""

    method: str
    path: str
    root: str
    query: str
    headers: Mapping[str, str]
    address: str

    @property
    def api(self) -> bool:
        return self.path.startswith("/api/") or self.path == "/metrics"

    @property
    def static(self) -> bool:
        return self.path.startswith(STATIC)


class AuthMiddleware:
    """Plain ASGI, so that streams pass through it unbuffered."""

    def __init__(
        self,
        app: ASGIApp,
        services: Services,
        tokens: TokenCache,
        exposure: Exposure,
        routes: KnownRoutes,
        member: Member,
    ) -> None:
        self._app = app
        self._http = services.http
        self._tokens = tokens
        self._exposure = exposure
        self._routes = routes
        body_bytes = max(services.http.max_body_bytes, LEAST_BYTES)
        self._bodies = MemoryBudget(BODIES * body_bytes, BODIES_EACH * body_bytes, "bodies that are worked on")
        # Apart: a heartbeat must not wait for clients that are slow to send a large body.
        self._small_bodies = MemoryBudget(BODIES * body_bytes, BODIES_EACH * body_bytes, "bodies that are worked on")
        self._answers = AnswerBudget()
        rate = services.http.requests_per_second
        self._rates = RateLimiter(rate, rate * BURST_S, shared=member.group.rates)
        self._strangers = RateLimiter(STRANGERS_PER_S, STRANGERS_BURST, shared=member.group.strangers)
        self._concurrency = ConcurrencyLimit(
            services.http.max_open_requests, services.http.max_open_requests_per_caller, member
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer_in_time(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _answer_in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer even a request that is cut off because the server ends: the ledger may be silent for longer."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        except asyncio.CancelledError:
            if begun:
                raise
            # Whoever cancelled it waits for the task to end, and hears of it by its end.
            await refused(scope, _leaving().response())(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        https = scope.get("scheme") == "https" or self._http.secure_cookies
        send = with_security_headers(send, static=get_route_path(scope).startswith(STATIC), https=https)
        heard = _Heard(receive)
        with ExitStack() as cleanup:
            try:
                identity, receive = await self._admit(_read(scope), heard, cleanup)
            except _Elsewhere as elsewhere:
                await RedirectResponse(elsewhere.url, 303)(scope, receive, send)
                return
            except Problem as problem:
                await _refuse(refused(scope, problem.response()), scope, heard, send)
                return
            except UnstuckError as error:
                await _refuse(refused(scope, _unsaid(error).response()), scope, heard, send)
                return
            scope.setdefault("state", {}).update(caller=identity.caller)
            await self._pass_on(identity, scope, receive, send)

    async def _admit(self, asked: RequestHead, receive: Receive, cleanup: ExitStack) -> tuple[Identity, Receive]:
        """Identify the caller. It counts as an open request until `cleanup` closes."""
        nobody = Identity(NOBODY, f"address {asked.address}", "address")
        if asked.path in HEALTH and asked.method in SAFE:
            return nobody, receive
        origin = judge(asked.headers, self._host(asked), asked.method)
        check_origin(origin)
        if asked.static and asked.method in SAFE:
            return nobody, receive
        if asked.path == LOGIN:
            return nobody, await self._admit_login(asked, origin, receive)
        identity = await self._identify(asked)
        if identity.by == "address" and (origin.from_browser or not asked.api):
            identity = at_the_page(identity)
        _wait_if_too_many(self._rates, identity.who)
        check_same_origin(identity, origin, asked.method, api=asked.api)
        if self._concurrency.is_full(identity.who):
            raise _too_many(1.0, "Too many requests are open at once.")
        # Before the body is read: it may take a minute to come, and is kept in memory meanwhile.
        cleanup.enter_context(self._concurrency.place_for(identity.who))
        if has_body(asked.headers):
            self._routes.check(asked.method, asked.path, identity.caller)
            body = await self._read(asked, identity, receive, cleanup)
            receive = replayed(body, receive)
            if asked.api and body:
                await check_json(asked.headers, body, self._http.max_body_bytes)
        return identity, receive

    async def _read(self, asked: RequestHead, identity: Identity, receive: Receive, cleanup: ExitStack) -> bytes:
        limit_bytes = self._http.max_body_bytes if asked.api else min(self._http.max_body_bytes, MAX_FORM_BYTES)
        declared = declared_bytes(asked.headers, limit_bytes)
        room: Room | None = None

        async def make_room() -> None:
            nonlocal room
            room = await self._bodies.take(identity.who, declared)
            cleanup.callback(room.release)

        if declared > SMALL_BODY_BYTES and "content-length" in asked.headers:
            await make_room()
        body = await read_body(
            receive, asked.headers, limit_bytes, self._http.body_timeout_s, make_room if room is None else None
        )
        if room is None:
            room = await self._small_bodies.take(identity.who, len(body))
            cleanup.callback(room.release)
        room.resize(len(body))
        return body

    async def _admit_login(self, asked: RequestHead, origin: Origin, receive: Receive) -> Receive:
        if self._exposure.may_be_open and not (await self._tokens.keys()).any_ever:
            raise _Elsewhere(f"{asked.root}/")
        _wait_if_too_many(self._strangers, f"address {asked.address}")
        if asked.method in SAFE:
            return receive
        # Else a website could log somebody in as somebody else.
        if not origin.proven:
            raise Problem(403, "foreign_origin", "Log in from the login page itself.")
        body = await read_body(receive, asked.headers, MAX_LOGIN_BYTES, self._http.body_timeout_s)
        return replayed(body, receive)

    async def _identify(self, asked: RequestHead) -> Identity:
        try:
            found = await identify(asked.headers, self._tokens, self._exposure, asked.address)
        except Problem:
            _wait_if_too_many(self._strangers, f"address {asked.address}")
            raise
        if found is not None:
            return found
        _wait_if_too_many(self._strangers, f"address {asked.address}")
        mode = asked.headers.get("sec-fetch-mode", "navigate")
        if asked.api or asked.method not in ("GET", "HEAD") or mode != "navigate":
            raise unauthenticated("This needs a token.")
        there = asked.path + (f"?{asked.query}" if asked.query else "")
        raise _Elsewhere(f"{asked.root}{LOGIN}" + ("" if there == "/" else f"?next={quote(there, safe='/')}"))

    def _host(self, asked: RequestHead) -> Host:
        host = limits.host_of(asked.headers)
        if not self._exposure.hosts.allows(host.name):
            raise Problem(
                421,
                "unknown_host",
                f"This door does not answer to the name {host.name!r}.",
                cure="Allow it: `http.allowed_hosts`, or UNSTUCK_HTTP_ALLOWED_HOSTS, with commas.",
            )
        return host

    async def _pass_on(self, identity: Identity, scope: Scope, receive: Receive, send: Send) -> None:
        with AnswerRoom(self._answers, identity.who) as room:
            scope["state"]["answer_room"] = room
            answer = AnswerSender(send, room, may_repeat=scope["method"] == "GET")
            await self._respond(identity, scope, receive, answer.send)
            if answer.dropped_bytes:
                try:
                    await room.take(answer.dropped_bytes)
                except Problem as problem:
                    await refused(scope, problem.response())(scope, receive, send)
                    return
                await self._respond(identity, scope, receive, AnswerSender(send, room, may_repeat=False).send)

    async def _respond(self, identity: Identity, scope: Scope, receive: Receive, send: Send) -> None:
        watch = TokenWatch(send, self._tokens, identity.caller.token_id)
        try:
            # Routing writes into what it is given, and an answer may be made twice.
            await self._app({**scope, "state": {**scope["state"]}}, receive, watch.send)
        except Exception as error:
            if watch.ended_by_us:
                return
            problem = bug(scope["path"], error)
            if watch.started:
                raise
            await refused(scope, problem.response())(scope, receive, send)


class _Elsewhere(Exception):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def _read(scope: Scope) -> RequestHead:
    limits.check_lengths(scope)
    return RequestHead(
        scope["method"],
        get_route_path(scope) or "/",
        scope.get("root_path", ""),
        scope.get("query_string", b"").decode("latin-1"),
        limits.headers_of(scope),
        address_of(scope.get("client")),
    )


def _unsaid(error: UnstuckError) -> Problem:
    """Give what a stranger hears of trouble with the ledger: not where it is."""
    problem = problem_of(error)
    problem.detail = "The ledger cannot be used; the log says why."
    return problem


def _wait_if_too_many(rates: RateLimiter, who: str) -> None:
    wait_s = rates.take(who)
    if wait_s > 0:
        raise _too_many(wait_s, "Too many requests in a short time.")


def _leaving() -> Problem:
    return Problem(
        503,
        "server_leaving",
        "This server ended before the ledger answered; what was asked for may have been done.",
        cure="Ask again: the next server answers.",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def _too_many(wait_s: float, detail: str) -> Problem:
    cure = "Wait a moment, and ask less often; `http.requests_per_second` and `http.max_open_requests` are the limits."
    return Problem(429, "too_many_requests", detail, cure=cure, headers={"Retry-After": str(int(wait_s) + 1)})


class _Heard:
    """What came of a request, and whether that was all of it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.all = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.all = self.all or not message.get("more_body")
        return message


async def _refuse(response: Response, scope: Scope, receive: _Heard, send: Send) -> None:
    """Answer without having read the body: a short one is thrown away, behind a long one the connection ends."""
    unread = 0 if receive.all else limits.unread_bytes(scope)
    if unread is not None and unread > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while (await receive()).get("more_body"):
                    pass
                unread = 0
    if unread != 0 and scope.get("http_version", "1.1").startswith("1"):
        response.headers["Connection"] = "close"
    await response(scope, receive, send)
