"""A door inside another app: closed unless that app says that it asks for itself; its links know where it stands."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from tests.support.http_server import PATIENCE_S, make_token

from unstuck.domain.api_tokens import Scope
from unstuck.http import create_app


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


def ask(door: FastAPI, *requests: httpx.Request) -> list[httpx.Response]:
    """Ask a door that is mounted at /jobs of another app."""
    outer = FastAPI()
    outer.mount("/ops", door)

    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(outer)
        async with httpx.AsyncClient(transport=transport) as client, door.router.lifespan_context(door):
            return [await client.send(request) for request in requests]

    return asyncio.run(all_of_them())


def get(path: str, host: str = "localhost", **headers: str) -> httpx.Request:
    return httpx.Request("GET", f"http://{host}/ops{path}", headers=headers)


def test_it_asks_for_a_token_although_there_is_none_yet(url: str) -> None:
    page, api, health = ask(create_app(url), get("/jobs"), get("/api/v1/audit"), get("/healthz"))
    assert page.headers["Location"] == "/ops/login?next=/jobs"
    assert api.status_code == 401
    assert health.status_code == 200


def test_it_is_open_where_the_app_around_it_says_so(url: str) -> None:
    page, api, strange = ask(
        create_app(url, open=True), get("/"), get("/api/v1/audit"), get("/api/v1/audit", "evil.example")
    )
    assert page.status_code == 200
    assert '"/ops/static/style.css"' in page.text
    assert api.status_code == 200
    assert strange.status_code == 421


def test_also_then_a_token_locks_it(url: str) -> None:
    _, token = make_token(url, Scope.READ)
    without, with_it = ask(
        create_app(url, open=True), get("/api/v1/audit"), get("/api/v1/audit", Authorization=f"Bearer {token}")
    )
    assert (without.status_code, with_it.status_code) == (401, 200)


def test_it_answers_to_the_names_that_were_allowed(url: str) -> None:
    _, token = make_token(url, Scope.READ)
    request = get("/api/v1/audit", "jobs.example.com", Authorization=f"Bearer {token}")
    assert ask(create_app(url), request)[0].status_code == 421
    assert ask(create_app(url, allowed_hosts="jobs.example.com"), request)[0].status_code == 200


def test_a_login_is_for_this_door_alone_and_leads_back_into_it(url: str) -> None:
    _, token = make_token(url, Scope.READ)
    form = httpx.Request(
        "POST",
        "http://localhost/ops/login",
        data={"token": token, "next": "/jobs"},
        headers={"Origin": "http://localhost"},
    )
    answer = ask(create_app(url), form)[0]
    assert answer.headers["Location"] == "/ops/jobs"
    assert "path=/ops/" in answer.headers["Set-Cookie"].lower()


def test_a_defect_is_a_page_for_people_and_a_problem_for_programs_and_tells_nothing_from_the_inside(url: str) -> None:
    door = create_app(url, open=True)

    def broken() -> None:
        raise RuntimeError("the password is hunter2")

    door.add_api_route("/broken", broken)
    person, program = ask(door, get("/broken", Accept="text/html"), get("/broken"))
    assert (person.status_code, person.headers["content-type"][:9]) == (500, "text/html")
    assert (program.status_code, program.json()["code"]) == (500, "internal_error")
    assert program.json()["cure"]
    assert "hunter2" not in person.text + program.text
    assert 'href="/ops/broken"' in person.text


HOST = """
import os
from fastapi import FastAPI
from unstuck.http import create_app

app = FastAPI()
app.mount("/ops", create_app(os.environ["LEDGER"], open=True))
"""


def test_a_server_that_is_asked_to_end_does_not_wait_for_open_pages(url: str, tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(HOST)
    command = [sys.executable, "-m", "uvicorn", "--port", "0", "--app-dir", str(tmp_path), "host:app"]
    with subprocess.Popen(command, env={**os.environ, "LEDGER": url}, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            found = next(match for line in server.stderr if (match := re.search(r"running on (\S+)", line)))
            streams = ("/ops/api/v1/events", "/ops/live?room=overview")
            with ExitStack() as stack:
                client = stack.enter_context(httpx.Client(base_url=found[1], timeout=PATIENCE_S, trust_env=False))
                answers = [stack.enter_context(client.stream("GET", path)) for path in streams]
                assert [answer.status_code for answer in answers] == [200, 200]
                server.send_signal(signal.SIGTERM)
                # Both end in order, and with them the server.
                assert [bool(answer.read()) for answer in answers] == [True, True]
            server.wait(PATIENCE_S)
        finally:
            server.kill()
