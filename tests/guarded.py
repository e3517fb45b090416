"""A web door with tokens for tests, every way into it, and requests that no proper client would send."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
from fastapi.routing import iter_route_contexts
from tests.web import PATIENCE_S, Served, opened

from unstuck import config
from unstuck.client.operator import Operator
from unstuck.domain.api_tokens import Scope
from unstuck.http import create_app
from unstuck.store.opening import ready_ledger

OPEN = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/login"), ("POST", "/login")}
WITHOUT_SCOPE = {("GET", "/api/v1/openapi.json"), ("POST", "/logout"), *OPEN}
UNSAFE = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Way:
    """One method of one path, and the scopes of which it asks for one."""

    method: str
    path: str
    scopes: tuple[Scope, ...]

    @property
    def api(self) -> bool:
        return self.path.startswith("/api/") or self.path == "/metrics"

    @property
    def filled(self) -> str:
        """The path with something in each of its gaps."""
        return re.sub(r"\{[^}]+\}", "1", self.path)


@cache
def ways() -> tuple[Way, ...]:
    """Give every way into the door, found by asking it: a new one cannot be forgotten."""
    door = create_app("sqlite:///never-opened.db")
    found = [
        Way(method, str(route.path), _scopes_of(getattr(route, "dependant", None)))
        for route in iter_route_contexts(door.routes)
        for method in sorted(set(route.methods or ()) - {"HEAD"})
    ]
    assert len(found) > 20
    return tuple(found)


def _scopes_of(dependant: Any) -> tuple[Scope, ...]:
    for inner in dependant.dependencies if dependant is not None else ():
        if scopes := getattr(inner.call, "scopes", ()) or _scopes_of(inner):
            return tuple(scopes)
    return ()


class Guarded:
    """A door that is open to those who have one of its tokens."""

    def __init__(self, url: str, served: Served, first: str) -> None:
        self.ledger_url = url
        self.served = served
        self.url = served.url.replace("0.0.0.0", "127.0.0.1")
        self.all = first
        self.host = urlsplit(self.url).netloc
        self._tokens: dict[tuple[Scope, ...], str] = {}
        self._browsers: list[Browser] = []

    def token(self, *scopes: Scope) -> str:
        """Give a token with exactly these scopes."""
        if scopes not in self._tokens:
            self._tokens[scopes] = make_token(self.ledger_url, *scopes)[1]
        return self._tokens[scopes]

    def ask(self, method: str, path: str, token: str | None = None, **more: Any) -> httpx.Response:
        headers = {**({} if token is None else {"Authorization": f"Bearer {token}"}), **more.pop("headers", {})}
        return self.served.client.request(method, path, headers=headers, **more)

    def status(self, method: str, path: str, token: str, **more: Any) -> int:
        """Ask without waiting for the end of the answer: some are streams that have none."""
        headers = {"Authorization": f"Bearer {token}"}
        with self.served.client.stream(method, path, headers=headers, **more) as answer:
            return answer.status_code

    def log_in(self, token: str | None = None, next: str = "") -> "Browser":
        browser = self.browser()
        answer = browser.log_in(token or self.all, next)
        assert answer.status_code == 303, answer.text
        return browser

    def browser(self) -> "Browser":
        self._browsers.append(Browser(self.url))
        return self._browsers[-1]

    def close(self) -> None:
        for browser in self._browsers:
            browser.client.close()


class Browser:
    """A person's browser: it keeps cookies, and says where its requests come from."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)
        self.origin = url

    def log_in(self, token: str, next: str = "") -> httpx.Response:
        return self.post("/login", {"token": token, "next": next})

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def csrf(self) -> str:
        found = re.search(r'name="csrf" content="([^"]+)"', self.get("/").text)
        assert found is not None
        return found[1]

    def post(self, path: str, form: dict[str, str], origin: str | None = "", **headers: str) -> httpx.Response:
        said = self.origin if origin == "" else origin
        return self.client.post(path, data=form, headers={**({} if said is None else {"Origin": said}), **headers})


def make_token(url: str, *scopes: Scope, expires_in_s: float | None = None) -> tuple[str, str]:
    """Make a token; give its id and its text."""
    settings = config.build({"url": url})
    ledger = ready_ledger(settings)
    try:
        text, kept = Operator(ledger, settings).create_token("test", [*scopes], expires_in_s)
        return kept.id, text
    finally:
        ledger.close()


@contextmanager
def guarded_door(url: str, *arguments: str, **env: str) -> Iterator[Guarded]:
    first = make_token(url, *Scope)[1]
    with opened(url, *arguments, env=env) as served:
        door = Guarded(url, served, first)
        yield door
        door.close()


def raw(url: str, data: bytes, *, then_wait: bool = True, to_the_end: bool = False) -> bytes:
    """Send bytes as they are, and give what comes back until the other side hangs up or has answered."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as line:
        line.sendall(data)
        answer = b""
        while then_wait:
            try:
                part = line.recv(65536)
            except ConnectionResetError:
                break
            answer += part
            if not part or (b"\r\n\r\n" in answer and not to_the_end):
                break
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
