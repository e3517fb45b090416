"""What another website makes a browser send is refused: by the Host it asks for, by its origin, by what it lacks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.cli import Cli
from tests.support.http_server import UNSAFE, Route, SecuredServer, guarded_door, raw, serve, status_of, ways

from unstuck.http.auth.sessions import COOKIE

UNSAFE_WAYS = [way for way in ways() if way.method in UNSAFE and way.path != "/login"]
UNSAFE_API = [way for way in UNSAFE_WAYS if way.api]
EVIL = "http://evil.example"


def name_of(way: Route) -> str:
    return f"{way.method} {way.path}"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder: Path = tmp_path_factory.mktemp("guard")
    with guarded_door(f"sqlite:///{folder}/jobs.db", UNSTUCK_HTTP_ALLOWED_HOSTS="jobs.example.com,*.internal") as door:
        yield door


# Origin ---------------------------------------------------------------------------------------------

FOREIGN = (
    {"Origin": EVIL},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": EVIL, "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": ""},
    {"Origin": "OURS", "Sec-Fetch-Site": "cross-site"},
    {"Referer": EVIL},
)
"""What browsers say of a request that another website made them send, and what no browser of today says."""
UNPROVEN = ({}, {"Referer": "OURS"})
"""Nothing, or nothing that proves whose page sent a request."""
PROVEN = ({"Origin": "OURS"}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": "OURS", "Sec-Fetch-Site": "same-origin"})


def send(client: httpx.Client, way: Route, said: dict[str, str], **more: str) -> httpx.Response:
    """Send an unsafe request of which the browser says this; OURS is the address of the server."""
    headers = {name: str(client.base_url).rstrip("/") if value == "OURS" else value for name, value in said.items()}
    body: dict[str, Any] = {"json": {}} if way.api else {"data": {"queue": "x", "confirmed": "yes"}}
    return client.request(way.method, way.filled, headers={**headers, **more}, **body)


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 403 and answer.json()["code"] == "foreign_origin"


def test_every_unsafe_way_takes_a_login_only_from_our_own_page(door: SecuredServer, subtests: pytest.Subtests) -> None:
    assert len(UNSAFE_WAYS) > 40
    login = {"Cookie": f"{COOKIE}={door.log_in().client.cookies[COOKIE]}"}
    for way in UNSAFE_WAYS:
        for said in (*FOREIGN, *UNPROVEN):
            with subtests.test(name_of(way), said=said):
                assert is_refused(send(door.served.client, way, said, **login))
        for said in PROVEN:
            with subtests.test(name_of(way), said=said):
                assert send(door.served.client, way, said, **login).status_code not in (401, 403, *range(500, 600))


def test_every_unsafe_way_without_tokens_is_closed_to_websites(shop: Cli, subtests: pytest.Subtests) -> None:
    with serve(shop.url) as served:
        for way in UNSAFE_WAYS:
            # A program may use the API: it is not a browser. Forms are for browsers, and those say where they are.
            for said in (*FOREIGN, {"Referer": "OURS"}, *(() if way.api else ({},))):
                with subtests.test(name_of(way), said=said):
                    assert is_refused(send(served.client, way, said))
            for said in (*PROVEN, *(({},) if way.api else ())):
                with subtests.test(name_of(way), said=said):
                    assert send(served.client, way, said).status_code not in (401, 403, *range(500, 600))


def test_every_unsafe_way_takes_a_token_from_programs_and_not_from_websites(
    door: SecuredServer, subtests: pytest.Subtests
) -> None:
    token = {"Authorization": f"Bearer {door.all}"}
    for way in UNSAFE_WAYS:
        for said in FOREIGN:
            with subtests.test(name_of(way), said=said):
                answer = send(door.served.client, way, said, **token)
                assert is_refused(answer)
                assert not [name for name in answer.headers if name.startswith("access-control")]
        for said in (*UNPROVEN, *PROVEN):
            with subtests.test(name_of(way), said=said):
                answer = send(door.served.client, way, said, **token)
                assert answer.status_code not in (401, 403, *range(500, 600))


def test_the_login_itself_is_taken_only_from_our_own_page(door: SecuredServer, subtests: pytest.Subtests) -> None:
    form = {"token": door.all, "next": ""}
    for said in (*FOREIGN, *UNPROVEN, *PROVEN):
        headers = {name: door.url if value == "OURS" else value for name, value in said.items()}
        with subtests.test(said=said), httpx.Client(base_url=door.url, trust_env=False) as stranger:
            answer = stranger.post("/login", data=form, headers=headers)
            assert ("Set-Cookie" in answer.headers) is (said in PROVEN)
            assert (answer.status_code == 303) if said in PROVEN else is_refused(answer)


def test_a_body_of_the_api_is_json_by_its_type(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "text/json",
        "application/jsonx",
    ]:
        for way in UNSAFE_API:
            with subtests.test(name_of(way), kind=kind):
                headers = {"Content-Type": kind} if kind else {}
                answer = door.ask(way.method, way.filled, door.all, content=b'{"a": 1}', headers=headers)
                assert answer.status_code == 415
                assert "application/json" in answer.json()["cure"]


def test_a_cross_site_look_is_refused_unless_somebody_followed_a_link(door: SecuredServer) -> None:
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert door.ask("GET", "/api/v1/audit", door.all, headers=image).status_code == 403
    assert door.ask("GET", "/jobs", door.all, headers=link).status_code == 200


def test_without_tokens_a_program_may_leave_the_body_out(shop: Cli) -> None:
    with serve(shop.url) as served:
        path = "/api/v1/queues/pause"
        assert served.client.post(path).status_code == 200
        assert served.client.post(path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


# Host -------------------------------------------------------------------------------------------


def test_a_strange_name_is_not_answered_to(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for host in [
        *("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "192.0.2.7"),
        *("internal", "evilinternal", "jobs.example.com.evil.example", "[2001:db8::1]"),
    ]:
        with subtests.test(host=host):
            answer = door.ask("GET", "/api/v1/audit", door.all, headers={"Host": host})
            assert answer.status_code == 421
            assert "allowed_hosts" in answer.json()["cure"]
            assert door.ask("GET", "/login", headers={"Host": host}).status_code == 421
            assert door.ask("GET", "/static/style.css", headers={"Host": host}).status_code == 421


def test_a_name_of_ours_is(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for host in [
        *("localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:8642"),
        *("jobs.example.com", "JOBS.example.com:443", "a.internal", "jobs.localhost"),
    ]:
        with subtests.test(host=host):
            assert door.ask("GET", "/api/v1/audit", door.all, headers={"Host": host}).status_code == 200


def test_what_is_no_name_is_refused(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for host in ["", "a b", "user@localhost", "localhost:x", "localhost,evil.example", "[::1", "ä"]:
        with subtests.test(host=host):
            head = b"GET /login HTTP/1.1\r\nHost: " + host.encode() + b"\r\nConnection: close\r\n\r\n"
            assert status_of(raw(door.url, head)) == 400


def test_no_name_and_two_names_are_refused(door: SecuredServer) -> None:
    assert status_of(raw(door.url, b"GET /login HTTP/1.0\r\n\r\n")) == 400
    assert status_of(raw(door.url, b"GET /login HTTP/1.1\r\nConnection: close\r\n\r\n")) == 400
    twice = b"GET /login HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert status_of(raw(door.url, twice)) == 400
    absolute = f"GET http://evil.example/login HTTP/1.1\r\nHost: {door.host}\r\n\r\n"
    assert status_of(raw(door.url, absolute.encode())) in (303, 400, 404, 421)


def test_health_answers_to_any_name_for_load_balancers(door: SecuredServer) -> None:
    assert door.ask("GET", "/healthz", headers={"Host": "10.0.0.1"}).status_code == 200


# Headers ----------------------------------------------------------------------------------------

PROTECTED = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def test_every_answer_has_the_headers(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for method, path in [
        *(("GET", path) for path in ("/", "/login", "/healthz", "/api/v1/audit", "/nowhere", "/static/nowhere")),
        *(("GET", path) for path in ("/static/style.css", "/api/v1/jobs/x", "/api/v1/openapi.json")),
        ("POST", "/api/v1/jobs"),
        ("DELETE", "/healthz"),
    ]:
        for with_token in [True, False]:
            with subtests.test(f"{method} {path}", with_token=with_token):
                answer = door.ask(method, path, door.all if with_token else None)
                assert {name: answer.headers.get(name) for name in PROTECTED} == PROTECTED
                assert answer.headers["cache-control"] == ("no-cache" if path.startswith("/static/") else "no-store")
                assert "server" not in answer.headers
