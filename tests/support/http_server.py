"""Open a real HTTP server for tests: `unstuck serve` in a process of its own, and a client that knows its address."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from tests.support import processes
from tests.support.backdoor import Backdoor
from tests.support.cli import Cli
from tests.support.fleet import wait_for
from tests.support.points import PassedPoints

from unstuck import config
from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.domain.api_tokens import Scope
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.states import JobState, WorkerState
from unstuck.http import create_app
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.contract.workers import AttemptRef
from unstuck.ledger.open import ready_ledger

PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Served:
    """An HTTP server that is open."""

    url: str
    client: httpx.Client
    process: subprocess.Popen[str]
    log: Path
    signals: PassedPoints

    def said(self) -> str:
        """Give what it logged so far."""
        return self.log.read_text(errors="replace")

    def passed(self, point: str) -> int:
        """Return how often it has passed this point, which it was started to report."""
        return self.signals.count(point, self.process.pid)

    def wait_passed(self, point: str, times: int = 1) -> None:
        self.signals.wait(point, self.process.pid, times)


@contextmanager
def serving(
    url: str, *arguments: str, env: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    """Serve the ledger at this address and give a client of it; everything ends with the block."""
    with serve(url, *arguments, env=env, headers=headers) as served:
        yield served.client


@contextmanager
def serve(
    url: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    points: Sequence[str] = (),
) -> Iterator[Served]:
    """Like `serving`, with the process and its log; it reports whenever it passes one of these points."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNSTUCK_")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        signals = PassedPoints(Path(folder))
        with log.open("wb") as file:
            process = processes.start(
                "unstuck.cli.main",
                "serve",
                "--port",
                "0",
                "--json",
                *arguments,
                cwd=ROOT,
                env={**kept, "UNSTUCK_URL": url, **(signals.of(*points) if points else {}), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        try:
            address = _address(process, log)
            with httpx.Client(base_url=address, timeout=PATIENCE_S, headers=headers, trust_env=False) as client:
                yield Served(address, client, process, log, signals)
        finally:
            _end(process)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    text = ""
    while True:
        line = process.stdout.readline()
        assert line, f"the server ended with {process.wait(PATIENCE_S)}:\n{log.read_text(errors='replace')}"
        text += line
        said: Any = None
        try:
            said = json.loads(text)
        except ValueError:
            continue
        return str(said["url"])


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE_S)
    assert process.stdout is not None
    process.stdout.close()


OPEN = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/login"), ("POST", "/login")}
WITHOUT_SCOPE = {("GET", "/api/v1/openapi.json"), ("POST", "/logout"), *OPEN}
UNSAFE = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Route:
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
def ways() -> tuple[Route, ...]:
    """Give every way into the door, found by asking it: a new one cannot be forgotten."""
    door = create_app("sqlite:///never-opened.db")
    found = [
        Route(method, str(route.path), _scopes_of(getattr(route, "dependant", None)))
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


class SecuredServer:
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

    def post(self, path: str, form: dict[str, str], origin: str | None = "", **headers: str) -> httpx.Response:
        said = self.origin if origin == "" else origin
        return self.client.post(path, data=form, headers={**({} if said is None else {"Origin": said}), **headers})


def make_token(url: str, *scopes: Scope, expires_in_s: float | None = None) -> tuple[str, str]:
    """Make a token; give its id and its text."""
    settings = config.build({"url": url})
    ledger = ready_ledger(settings)
    try:
        text, kept = Operator(ledger, settings).access.create_token("test", [*scopes], expires_in_s)
        return kept.id, text
    finally:
        ledger.close()


@contextmanager
def guarded_door(url: str, *arguments: str, points: Sequence[str] = (), **env: str) -> Iterator[SecuredServer]:
    first = make_token(url, *Scope)[1]
    with serve(url, *arguments, env=env, points=points) as served:
        door = SecuredServer(url, served, first)
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


API = "/api/v1"


@dataclass(frozen=True)
class ApiClient:
    """An HTTP server, and the ledger behind it."""

    shop: Cli
    client: httpx.Client
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def get(self, path: str, status: int = 200, **more: Any) -> Any:
        return self._said(self.client.get(API + path, **more), status)

    def post(self, path: str, body: Any = None, status: int = 200, **more: Any) -> Any:
        return self._said(self.client.post(API + path, json=body, **more), status)

    def problem(self, method: str, path: str, status: int, **more: Any) -> dict[str, Any]:
        """Ask for something that must be refused; give the problem."""
        response = self.client.request(method, API + path, **more)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        problem: dict[str, Any] = response.json()
        assert problem["status"] == status
        assert problem["type"] == f"urn:unstuck:problem:{problem['code']}"
        assert problem["detail"]
        assert problem["cure"]
        return problem

    def enqueue(self, **body: Any) -> int:
        return int(self.post("/jobs", {"task": "add", "args": [1, 2], **body}, 201)["id"])

    def queue(self) -> str:
        """Give a queue that no other test uses, served by a worker that is only written down."""
        name = f"queue-{next(self._numbers)}"
        self.shop.worker(f"of-{name}", f"worker-of-{name}", queues=(name,))
        return name

    def held(self, *, start: bool = True) -> AttemptRef:
        """Give a job that the worker of a queue of its own has in its hands."""
        queue = self.queue()
        self.enqueue(queue=queue)
        return self.shop.claim(f"of-{queue}", start=start, queue=queue)[0]

    def _said(self, response: httpx.Response, status: int) -> Any:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        return response.json()


SILENT_S = 3600.0
"""Longer than the longest lease that a worker over HTTP may ask for."""
LARGEST_RESULT = 20_000
LARGEST_OUTPUT = 1_000
PLAIN = Policy()
DATABASES = ("sqlite", "postgresql")


@contextmanager
def empty_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the address of a database of the kind that the fixture's parameter names."""
    if request.param == "sqlite":
        folder = request.getfixturevalue("tmp_path_factory").mktemp("ledger")
        yield f"sqlite:///{folder}/jobs.db"
        return
    server = request.getfixturevalue("pg_server")
    url = server.new_ledger()
    yield url
    server.drop_database(url)


@contextmanager
def door(url: str) -> Iterator[tuple[Served, Ledger]]:
    """Open a door with low limits and a quick reaper, and the ledger behind it."""
    limits = {"UNSTUCK_MAX_PAYLOAD_BYTES": str(LARGEST_RESULT), "UNSTUCK_MAX_OUTPUT_BYTES": str(LARGEST_OUTPUT)}
    with serve(url, env={"UNSTUCK_CHECK_INTERVAL": "0.1", **limits}, points=["http.claim_waiting"]) as served:
        ledger = ready_ledger(Settings(url=url))
        try:
            yield served, ledger
        finally:
            ledger.close()


class Worker:
    def __init__(self, http: httpx.Client, queue: str, **more: Any) -> None:
        self.http = http
        self.queue = queue
        answer = http.post("/api/v1/workers", json={"queues": [queue], "tasks": ["resize"], **more})
        assert answer.status_code == 201, answer.text
        self.born: dict[str, Any] = answer.json()
        self.id: str = self.born["id"]

    def call(self, verb: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/workers/{self.id}/{verb}", json=body)

    def claim(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.call("claim", **body)
        assert answer.status_code == 200, answer.text
        jobs: list[dict[str, Any]] = answer.json()["jobs"]
        return jobs


def fall_silent(ledger: Ledger, backdoor: Backdoor, worker_id: str) -> None:
    """Let the last heartbeat of a worker lie longer ago than any lease, and wait until the reaper declares it dead.

    Its lease is the default: no worker of a test is given up because the machine is slow."""

    def is_dead() -> bool:
        # Again with each look: a reaper that ticks in the same moment may begin a new watch.
        backdoor.age_beat(worker_id, SILENT_S)
        record = ledger.workers.remote(worker_id)
        return record is not None and record.state is WorkerState.DEAD

    wait_for(is_dead, f"worker {worker_id} to be declared dead", every_s=0.1)


def put(ledger: Ledger, queue: str, policy: Policy = PLAIN, **more: Any) -> int:
    job = NewJob(
        "resize",
        queue,
        more.pop("payload", b'{"args":["a.png"]}'),
        policy=encode_policy(policy),
        on_crash=policy.on_crash,
        timeout_s=policy.timeout_s,
        **more,
    )
    [stored] = ledger.jobs.enqueue([job])
    ledger.notify({f"queue:{queue}"})
    return stored.job_id


def state(ledger: Ledger, job_id: int) -> JobState:
    record = ledger.jobs.get(job_id)
    assert record is not None
    return record.state


def key(job: dict[str, Any]) -> dict[str, Any]:
    return {"job_id": job["job_id"], "token": job["token"]}


def done(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**key(job), "outcome": "succeeded", **more}
