"""What another website makes a browser send is refused: by the Host it asks for, by its origin, by what it lacks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli import Cli
from tests.support.http_server import UNSAFE, Browser, Route, SecuredServer, guarded_door, raw, serve, status_of, ways

FORMS = [way for way in ways() if not way.api and way.method in UNSAFE and way.path != "/login"]
UNSAFE_API = [way for way in ways() if way.api and way.method in UNSAFE]
EVIL = "http://evil.example"


def name_of(way: Route) -> str:
    return f"{way.method} {way.path}"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder: Path = tmp_path_factory.mktemp("guard")
    with guarded_door(f"sqlite:///{folder}/jobs.db", UNSTUCK_WEB_ALLOWED_HOSTS="jobs.example.com,*.internal") as door:
        yield door


@pytest.fixture(scope="module")
def person(door: SecuredServer) -> Browser:
    return door.log_in()


@pytest.fixture(scope="module")
def csrf(person: Browser) -> str:
    return person.csrf()


# Origin and CSRF --------------------------------------------------------------------------------


def test_every_form_needs_the_origin_and_the_proof(
    door: SecuredServer, person: Browser, csrf: str, subtests: pytest.Subtests
) -> None:
    for way in FORMS:
        with subtests.test(name_of(way)):
            right = {"csrf": csrf}
            for form, origin in [
                ({}, ""),
                ({"csrf": "wrong"}, ""),
                ({"csrf": csrf[:-1]}, ""),
                (right, None),
                (right, EVIL),
                (right, "null"),
                (right, door.url.replace("http://127", "http://128")),
                (right, door.url + "1"),
            ]:
                assert person.post(way.filled, form, origin).status_code == 403, (form, origin)
            if way.path != "/logout":
                assert person.post(way.filled, right).status_code in (200, 303, 404, 422)
                assert person.post(way.filled, {}, **{"X-CSRF-Token": csrf}).status_code in (200, 303, 404, 422)


def test_the_proof_of_another_login_is_none(door: SecuredServer, person: Browser, csrf: str) -> None:
    other = door.log_in()
    assert other.post("/verbs/pause", {"csrf": csrf, "queue": "default"}).status_code == 403


def test_what_a_browser_says_of_itself_is_believed_only_against_it(person: Browser, csrf: str) -> None:
    for site in ("cross-site", "same-site", "none"):
        answer = person.post("/verbs/pause", {"csrf": csrf}, **{"Sec-Fetch-Site": site})
        assert answer.status_code == 403, site
    assert person.post("/verbs/pause", {"csrf": csrf}, **{"Sec-Fetch-Site": "same-origin"}).status_code == 303


def test_the_api_takes_a_login_only_with_the_proof(person: Browser, csrf: str, subtests: pytest.Subtests) -> None:
    for way in UNSAFE_API:
        with subtests.test(name_of(way)):
            for headers in (
                {},
                {"Origin": person.origin},
                {"X-CSRF-Token": csrf},
                {"Origin": EVIL, "X-CSRF-Token": csrf},
            ):
                assert person.client.request(way.method, way.filled, headers=headers, json={}).status_code == 403, (
                    headers
                )
            right = {"Origin": person.origin, "X-CSRF-Token": csrf}
            assert person.client.request(way.method, way.filled, headers=right, json={}).status_code != 403


def test_a_token_is_refused_from_another_website(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for way in UNSAFE_API:
        with subtests.test(name_of(way)):
            answer = door.ask(way.method, way.filled, door.all, json={}, headers={"Origin": EVIL})
            assert answer.status_code == 403
            assert answer.json()["code"] == "foreign_origin"
            assert not [name for name in answer.headers if name.startswith("access-control")]


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


def test_where_no_token_is_asked_for_a_website_is_refused_and_a_program_is_not(shop: Cli) -> None:
    with serve(shop.url) as served:
        client = served.client
        path = "/api/v1/queues/pause"
        assert client.post(path, json={}).status_code == 200
        assert client.post(path).status_code == 200
        for headers in (
            {"Origin": EVIL},
            {"Origin": "null"},
            {"Referer": EVIL},
            {"Sec-Fetch-Site": "cross-site"},
            # Our own page has to say that it is ours.
            {"Origin": served.url},
        ):
            assert client.post(path, json={}, headers=headers).status_code == 403, headers
        assert client.post(path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
        page = Browser(served.url)
        proof = page.csrf()
        own = {"Origin": served.url, "X-CSRF-Token": proof}
        assert client.post(path, json={}, headers=own).status_code == 200
        assert client.post("/verbs/pause", data={"queue": "x"}).status_code == 403
        assert page.post("/verbs/pause", {"csrf": proof, "queue": "x"}).status_code == 303
        page.client.close()


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
