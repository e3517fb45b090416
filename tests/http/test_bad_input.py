"""What nobody should send: broken, endless, mistyped, unwritable. It is refused with a cure, and never a 5xx."""

import json
from typing import Any

import pytest
from tests.support.http_server import ApiClient

JSON = {"Content-Type": "application/json"}


def test_a_body_that_is_not_what_it_should_be(door: ApiClient, subtests: pytest.Subtests) -> None:
    for body, status, word in [
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"task": "add"} {}', 400, "not JSON"),
        (b'{"task": NaN}', 400, "NaN is not JSON"),
        (b'{"task": "add", "args": [Infinity]}', 400, "Infinity is not JSON"),
        (b'{"task": "add", "args": [1e999]}', 400, "out of range"),
        (b'{"task": "add", "args": [' + b"9" * 5000 + b"]}", 400, "at most 4,300 digits"),
        (b'{"task": "add", "args": [' + b"9" * 500_000 + b"]}", 400, "at most 4,300 digits"),
        (b'{"task": "add", "args": ["' + b"x" * 500_000 + b'", 1e999]}', 400, "out of range"),
        (b'{"task": "add", "args": ["\\ud800"]}', 400, "surrogate"),
        (b'{"\\ud800": 1}', 400, "surrogate"),
        (b'{"task": "add", "args": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 422, "deep"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 422, "deep"),
        (b"[]", 422, "body"),
        (b"null", 422, "body"),
        (b"1", 422, "body"),
        (b"", 422, "body"),
    ]:
        with subtests.test(word=word, body=body[:40]):
            problem = door.problem("POST", "/jobs", status, content=body, headers=JSON)
            assert word in problem["detail"]
            assert problem["cure"]
            assert "sys." not in problem["detail"], "what a Python programmer could do is nothing to a client"


def test_a_charset_beside_the_type_is_fine(door: ApiClient) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert door.client.post("/api/v1/jobs", content=b'{"task":"add"}', headers=headers).status_code == 201


def test_arguments_just_within_reach_come_back_in_some_form(door: ApiClient) -> None:
    """Whatever depth is taken in can be shown again."""
    for depth in (50, 200, 400, 600, 800, 900, 950, 990):
        nested = "[" * depth + "]" * depth
        response = door.client.post("/api/v1/jobs", content=f'{{"task":"add","args":{nested}}}', headers=JSON)
        assert response.status_code in (201, 422), response.text
        if response.status_code == 201:
            shown = door.client.get(response.headers["location"])
            assert shown.status_code == 200, (depth, shown.text[:500])


def test_odd_text_is_stored_as_it_is_or_refused(door: ApiClient, subtests: pytest.Subtests) -> None:
    for text in ["\0", "a\0b", "\ud800", "🦆" * 100, "'; drop table jobs; --", "../../etc/hosts"]:
        for field in ["args", "kwargs", "task", "queue", "unique_key"]:
            with subtests.test(field=field, text=text):
                values: dict[str, Any] = {"args": [text], "kwargs": {text: text}}
                body = json.dumps({"task": "add", field: values.get(field, text)})
                response = door.client.post("/api/v1/jobs", content=body, headers=JSON)
                assert response.status_code in (200, 201, 400, 404, 422), response.text
                if response.status_code in (200, 201):
                    assert door.get(f"/jobs/{response.json()['id']}")[field] == values.get(field, text)


def test_what_cannot_be_the_number_of_a_job(door: ApiClient, subtests: pytest.Subtests) -> None:
    for number in ["0", "-1", "1.5", "x", "%00", "9" * 5000, "1e3", "%F0%9F%A6%86", "../1"]:
        with subtests.test(number=number[:20]):
            for path in (f"/jobs/{number}", f"/jobs/{number}/result"):
                assert door.client.get(f"/api/v1{path}").status_code in (400, 404, 422)


def test_odd_conditions(door: ApiClient, subtests: pytest.Subtests) -> None:
    for name in ["queue", "task", "error", "worker", "state", "older_than", "before", "limit"]:
        for value in ["%00", "%ED%A0%80", "nan", "inf", "9" * 400, "", "-1"]:
            with subtests.test(name=name, value=value[:20]):
                response = door.client.get(f"/api/v1/jobs?{name}={value}")
                assert response.status_code in (200, 404, 422), response.text


def test_odd_names(door: ApiClient, subtests: pytest.Subtests) -> None:
    for name in ["%00", "%ED%A0%80", "%F0%9F%A6%86", "x" * 5000, "a%2F..%2Fb"]:
        with subtests.test(name=name[:20]):
            for path in (f"/queues/{name}/pause", f"/workers/{name}/drain", f"/hosts/{name}/disable"):
                assert door.client.post(f"/api/v1{path}").status_code in (400, 404)
            assert door.client.post(f"/api/v1/hosts/{name}/enable").status_code in (200, 400, 404, 422)


def test_odd_reasons_and_keys(door: ApiClient) -> None:
    door.problem("POST", "/workers/w1/disable", 422, json={"reason": "x" * 501})
    response = door.client.post("/api/v1/workers/w1/disable", json={"reason": "a\0b"})
    assert response.status_code in (200, 422), response.text
    door.post("/workers/w1/enable")
    for key in ("", "x" * 256):
        door.problem("POST", "/jobs", 422, json={"task": "add"}, headers={"Idempotency-Key": key})
    response = door.client.post("/api/v1/jobs", json={"task": "add"}, headers={"Idempotency-Key": "\xff\xfe".encode()})
    assert response.status_code == 201


def test_unknown_paths_and_methods_are_problems_too(door: ApiClient) -> None:
    door.problem("GET", "/nothing", 404)
    door.problem("DELETE", "/jobs/1", 405)
    door.problem("GET", "/jobs/1/cancel", 405)


BROKEN = (
    b"{",
    b"\xff",
    b'{"a": NaN}',
    b'{"\\ud800": "\\ud800"}',
    b"[" * 10_000 + b"]" * 10_000,
    b"9" * 5000,
    b'"\\u0000"',
    b"null",
)


# It never comes as far as the database.
@pytest.mark.parametrize("door", ["sqlite"], indirect=True)
def test_no_route_stumbles_over_a_broken_body(door: ApiClient) -> None:
    document = door.client.get("/api/v1/openapi.json").json()
    tried = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" not in operation:
                continue
            tried += 1
            for body in BROKEN:
                response = door.client.request(
                    method, path.replace("{", "").replace("}", ""), content=body, headers=JSON
                )
                # A body that may be left out may be null.
                allowed = {400, 404, 409, 415, 422, *([200] if body == b"null" else [])}
                assert response.status_code in allowed, (path, body[:30], response.text)
    assert tried > 10
