"""Every way into the HTTP server asks for a token, and for the scope that it needs. The ways are found, not listed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.http_server import OPEN, UNSAFE, WITHOUT_SCOPE, Route, SecuredServer, guarded_door, ways

from unstuck.domain.api_tokens import Scope

WAYS = ways()
ASKING = [way for way in WAYS if (way.method, way.path) not in OPEN]
SCOPED = [way for way in WAYS if (way.method, way.path) not in WITHOUT_SCOPE]
EVERYTHING = tuple(Scope)


def name_of(way: Route) -> str:
    return f"{way.method} {way.path}"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder: Path = tmp_path_factory.mktemp("guard")
    with guarded_door(f"sqlite:///{folder}/jobs.db") as door:
        yield door


def test_no_way_stands_in_front_of_another() -> None:
    names = [name_of(way) for way in WAYS]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_way_forgets_to_ask_for_a_scope() -> None:
    assert [name_of(way) for way in SCOPED if not way.scopes] == []


def test_without_a_token_nobody_comes_in(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for way in ASKING:
        for headers in [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer ust_aaaaaaaa_" + "a" * 43},
            {"Authorization": "Basic dTpw"},
            {"Cookie": "unstuck_session=aaaaaaaa.9999999999.aaaaaaaaaaaaaaaa." + "a" * 43 + "." + "a" * 43},
        ]:
            with subtests.test(name_of(way), headers=headers):
                body = {"json": {}} if way.api and way.method in UNSAFE else {}
                answer = door.ask(way.method, way.filled, headers=headers, **body)
                if way.api or way.method != "GET" or "Authorization" in headers:
                    assert answer.status_code == 401, answer.text
                    assert answer.json()["code"] == "unauthenticated"
                    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                else:
                    assert answer.status_code == 303
                    assert answer.headers["Location"].startswith("/login")


def test_every_other_scope_together_is_not_enough(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for way in SCOPED:
        with subtests.test(name_of(way)):
            others = tuple(scope for scope in Scope if scope not in way.scopes)
            # A token may manage the jobs that it enqueued; this one was enqueued without a token.
            if "{job_id}" in way.path:
                others = tuple(scope for scope in others if scope is not Scope.ENQUEUE)
            body = {"json": {}} if way.method in UNSAFE else {}
            answer = door.ask(way.method, way.filled, door.token(*others), **body)
            assert answer.status_code == 403, answer.text
            assert answer.json()["code"] == "forbidden"
            assert f"--scope {way.scopes[0]}" in answer.json()["cure"]


def test_the_scope_alone_is_enough(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for way, scope in [(one, scope) for one in SCOPED for scope in one.scopes]:
        with subtests.test(name_of(way), scope=scope):
            body = {"json": {}} if way.api and way.method in UNSAFE else {}
            assert door.status(way.method, way.filled, door.token(scope), **body) not in (401, 403, *range(500, 600))


def test_a_way_that_does_not_exist_asks_for_a_token_too(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for path in ["/api/v1/nowhere", "/nowhere", "/api/v1/jobs/", "//", "/api//v1/jobs", "/metrics"]:
        with subtests.test(path=path):
            assert door.ask("GET", path).status_code in (401, 303)


def test_health_and_the_login_page_are_open(door: SecuredServer) -> None:
    assert door.ask("GET", "/healthz").json() == {"status": "ok"}
    assert door.ask("GET", "/readyz").status_code == 200
    assert "Token" in door.ask("GET", "/login").text
    assert door.ask("GET", "/static/style.css").status_code == 200


def test_a_token_in_the_address_is_not_looked_at(door: SecuredServer) -> None:
    for name in ("token", "access_token", "authorization"):
        assert door.ask("GET", f"/api/v1/audit?{name}={door.all}").status_code == 401


def test_other_methods_need_a_token_too_and_allow_no_website(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for method in ["OPTIONS", "HEAD", "TRACE", "DELETE", "PROPFIND"]:
        with subtests.test(method=method):
            answer = door.ask(method, "/api/v1/jobs")
            assert answer.status_code == 401
            allowed = door.ask(method, "/api/v1/jobs", door.all)
            assert not [name for name in (*answer.headers, *allowed.headers) if name.startswith("access-control")]
