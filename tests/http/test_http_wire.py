"""Requests that two servers in a row might understand in two ways, in any number, and cut off anywhere."""

import json
import re
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.http_server import PATIENCE_S, SecuredServer, guarded_door, raw, status_of
from tests.support.signals import OwnProcess

from unstuck.domain.api_tokens import Scope
from unstuck.http.server import MAX_PIPELINED

ENDLESS_BYTES = 64 * 1024 * 1024
MEMORY_BYTES = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    with guarded_door(f"sqlite:///{tmp_path_factory.mktemp('wire')}/jobs.db") as door:
        yield door
        assert door.ask("GET", "/api/v1/audit", door.all).status_code == 200
        assert "Traceback" not in door.served.said()


def head(door: SecuredServer, first: str, *lines: str, token: str | None = "") -> bytes:
    said = [first, f"Host: {door.host}"] + ([] if token is None else [f"Authorization: Bearer {token or door.all}"])
    return "\r\n".join([*said, *lines, "", ""]).encode("latin-1")


def connected(door: SecuredServer) -> socket.socket:
    host, port = door.host.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def statuses(answers: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", answers)]


def heard_until(line: socket.socket, end: bytes) -> bytes:
    said = b""
    while end not in said:
        part = line.recv(65536)
        assert part, said
        said += part
    return said


BEAT = b'{"worker_id": "java"}'
OFFER = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAA",
    "Content-Type: application/json",
)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_comes_with_an_offer_to_upgrade_is_read(door: SecuredServer, chunked: bool) -> None:
    """Java's client offers HTTP/2 with every first request."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(BEAT)}"
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BEAT), BEAT) if chunked else BEAT
    asked = head(door, "POST /api/workers/heartbeat HTTP/1.1", *OFFER, length)
    with connected(door) as line:
        line.sendall(asked + body)
        assert status_of(heard_until(line, b"Heartbeat recorded")) == 200
        # The body in a packet of its own: it looks like a request, and is none.
        hidden = head(door, "GET /api/v1/audit HTTP/1.1")
        lines = (*OFFER, f"Content-Length: {len(hidden)}", "Expect: 100-continue")
        line.sendall(head(door, "POST /api/v1/jobs HTTP/1.1", *lines))
        heard_until(line, b"100 Continue\r\n\r\n")
        line.sendall(hidden + head(door, "GET /healthz HTTP/1.1", "Connection: close"))
        answers = b"".join(iter(lambda: line.recv(65536), b""))
        assert statuses(answers) == [400, 200]
        assert b"not_http" not in answers


def test_what_follows_a_body_in_chunks_is_no_header(door: SecuredServer) -> None:
    asked = head(door, "POST /api/v1/jobs HTTP/1.1", "Transfer-Encoding: chunked", token=None)
    answer = raw(door.url, asked + b"0\r\nAuthorization: Bearer " + door.all.encode() + b"\r\n\r\n")
    assert status_of(answer) == 401


@pytest.mark.parametrize(
    ("first", "lines"),
    [
        ("POST /api/v1/jobs HTTP/1.1", ["Transfer-Encoding: gzip, chunked"]),
        ("POST /api/v1/jobs HTTP/1.1", ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"]),
        ("POST /api/v1/jobs HTTP/1.1", ["Transfer-Encoding: xchunked"]),
        ("POST /api/v1/jobs HTTP/1.1", ["Transfer-Encoding : chunked"]),
        ("POST /api/v1/jobs HTTP/1.0", ["Transfer-Encoding: chunked"]),
        ("POST /api/v1/jobs HTTP/1.1", ["X: a", " Content-Length: 2"]),
        ("GET /api/v1/audit HTTP/2.0", []),
        ("CONNECT localhost:80 HTTP/1.1", []),
        ("GET http://elsewhere.example/api/v1/audit HTTP/1.1", []),
        ("GET /api/v1/audit\x0bx HTTP/1.1", []),
        ("GET /api/v1/audit HTTP/1.1", ["X: a\x00b"]),
        ("GET /api/v1/audit HTTP/1.1", ["X: a\nY: b"]),
    ],
)
def test_what_two_servers_might_understand_in_two_ways_is_refused(
    door: SecuredServer, first: str, lines: list[str]
) -> None:
    answer = raw(door.url, head(door, first, *lines) + b"0\r\n\r\n", to_the_end=True)
    assert statuses(answer) == [400]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "not_http"


ENDLESS = {
    "a header": ("GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"a"),
    "headers": ("GET / HTTP/1.1\r\nHost: localhost\r\n", b"X: a\r\n"),
    "an address": ("GET /", b"a"),
    "the rest of a chunk's first line": ("chunks", b";a=b"),
    "headers behind the last chunk": ("trailers", b"X: a\r\n"),
    "a header behind the last chunk": ("trailer", b"a"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_never_ends_is_cut_off_and_takes_no_memory(door: SecuredServer, what: str) -> None:
    begin, piece = ENDLESS[what]
    begun = begin.encode()
    if begin.startswith(("chunk", "trailer")):
        begun = head(door, "POST /api/v1/jobs HTTP/1.1", "Content-Type: application/json", "Transfer-Encoding: chunked")
        begun += {"chunks": b"1", "trailers": b"0\r\n", "trailer": b"0\r\nX: "}[begin]
    process = OwnProcess(door.served.process.pid)
    before = process.memory_info().rss
    sent = 0
    with connected(door) as line:
        line.sendall(begun)
        data = piece * (64 * 1024 // len(piece))
        try:
            while sent < ENDLESS_BYTES:
                line.sendall(data)
                sent += len(data)
        except OSError:
            pass
        assert sent < ENDLESS_BYTES
    assert process.memory_info().rss < before + MEMORY_BYTES


def test_requests_that_come_together_are_answered_in_their_order(door: SecuredServer) -> None:
    paths = ["/healthz", "/api/v1/nowhere", "/api/v1/audit", "/api/v1/jobs/0/x"] * 4
    asked = b"".join(head(door, f"GET {path} HTTP/1.1") for path in paths)
    answer = raw(door.url, asked + head(door, "GET /login HTTP/1.1", "Connection: close"), to_the_end=True)
    told = statuses(answer)
    assert told == [200, 404, 200, 404] * 4 + [told[-1]]


def test_only_some_requests_wait_behind_another(door: SecuredServer) -> None:
    answer = raw(door.url, head(door, "GET /healthz HTTP/1.1") * (10 * MAX_PIPELINED), to_the_end=True)
    told = statuses(answer)
    assert told == [200] * (MAX_PIPELINED + 1) + [400]


def test_a_request_that_others_wait_behind_ends_with_its_connection(tmp_path: Path) -> None:
    limit = {"UNSTUCK_HTTP_MAX_OPEN_REQUESTS_PER_CALLER": "1"}
    with guarded_door(f"sqlite:///{tmp_path}/jobs.db", **limit) as door:
        body = {"name": "w", "queues": ["q"], "tasks": ["t"]}
        token = door.token(Scope.WORKER)
        worker = door.ask("POST", "/api/v1/workers", token, json=body).json()["id"]
        wish = b'{"claim": 1, "wait": 30}'
        lines = ("Content-Type: application/json", f"Content-Length: {len(wish)}")
        turn = head(door, f"POST /api/v1/workers/{worker}/turn HTTP/1.1", *lines, token=token) + wish

        def begin() -> socket.socket:
            line = connected(door)
            line.sendall(turn + head(door, "GET /api/v1/audit HTTP/1.1") * 3)
            return line

        def asked_now() -> int:
            return door.ask("POST", "/api/workers/heartbeat", token, json={"worker_id": "w"}).status_code

        waiting = [begin()]

        def waits() -> bool:
            if select.select(waiting, [], [], 0)[0]:
                # It was refused itself: the question below came first. Try again.
                waiting.pop().close()
                waiting.append(begin())
            return asked_now() == 429

        try:
            wait_for(waits, "it waits")
        finally:
            waiting.pop().close()
        # Sooner than it would end by itself.
        wait_for(lambda: asked_now() == 200, "it has ended", patience_s=20)
