"""Too much, too deep, too slow, malformed, or with dots in its path: refused, and the door goes on serving."""

import json
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from tests.support.fleet import wait_for
from tests.support.http_server import PATIENCE_S, SecuredServer, guarded_door, make_token, raw, status_of
from tests.support.signals import OwnProcess

from unstuck.domain.api_tokens import Scope
from unstuck.http.dashboard.live import MAX_VIEWERS

MAX_BODY = 4096


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder: Path = tmp_path_factory.mktemp("guard")
    with guarded_door(f"sqlite:///{folder}/jobs.db", UNSTUCK_HTTP_MAX_BODY_BYTES=str(MAX_BODY)) as door:
        yield door
        assert door.ask("GET", "/api/v1/audit", door.all).status_code == 200
        assert "Traceback" not in door.served.said()


def head(door: SecuredServer, *lines: str, method: str = "POST", path: str = "/api/v1/jobs") -> bytes:
    said = [f"{method} {path} HTTP/1.1", f"Host: {door.host}", f"Authorization: Bearer {door.all}", *lines]
    return "\r\n".join([*said, "", ""]).encode("latin-1")


JSON = "Content-Type: application/json"


# Size -------------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(door: SecuredServer) -> None:
    answer = raw(door.url, head(door, JSON, f"Content-Length: {MAX_BODY + 1}"))
    assert status_of(answer) == 413
    assert b"connection: close" in answer.lower()


def test_a_body_that_does_not_say_is_counted(door: SecuredServer) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(MAX_BODY // 100 + 2):
            yield b"[" + b" " * 98 + b"]"

    answer = door.ask("POST", "/api/v1/jobs", door.all, content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "max_body_bytes" in answer.json()["cure"]


def test_a_body_of_just_the_size_is_read(door: SecuredServer) -> None:
    body = b'"' + b"a" * (MAX_BODY - 2) + b'"'
    answer = door.ask("POST", "/api/v1/jobs", door.all, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.parametrize("said", ["-1", "x", "1e3", "99999999999999999999999", "5, 6", "+5"])
def test_a_length_that_is_none_is_refused(door: SecuredServer, said: str) -> None:
    assert status_of(raw(door.url, head(door, JSON, f"Content-Length: {said}"))) in (400, 413)


def test_two_lengths_are_refused(door: SecuredServer) -> None:
    both = raw(door.url, head(door, JSON, "Content-Length: 2", "Transfer-Encoding: chunked") + b"{}")
    assert status_of(both) == 400
    assert status_of(raw(door.url, head(door, JSON, "Content-Length: 2", "Content-Length: 3") + b"{}")) == 400
    # Even if both say the same: whoever stands in front may have read only one of them.
    for same in (("Content-Length: 2", "content-length: 2"), ("Content-Length: 2, 2",)):
        assert status_of(raw(door.url, head(door, JSON, *same) + b"{}")) == 400
        first = head(door, method="GET", path="/api/v1/audit")
        answer = raw(door.url, first + head(door, JSON, *same, "Connection: close") + b"{}", to_the_end=True)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"not_http" in answer


def test_a_stranger_sends_no_body_at_all(door: SecuredServer) -> None:
    lines = f"POST /api/v1/jobs HTTP/1.1\r\nHost: {door.host}\r\nContent-Length: 4000\r\n{JSON}\r\n\r\n"
    assert status_of(raw(door.url, lines.encode())) == 401


NEVER_READ = [
    ("/api/v1/jobs", Scope.READ, 403),
    ("/api/v1/jobs/1/cancel", Scope.READ, 403),
    ("/api/v1/workers/abc/settle", Scope.ENQUEUE, 403),
    ("/verbs/cancel", Scope.READ, 403),
    ("/api/v1/nowhere", Scope.READ, 404),
    ("/api/v1/audit", Scope.READ, 405),
]


def test_a_body_that_will_be_refused_is_never_read(door: SecuredServer) -> None:
    def ask(path: str, scope: Scope) -> int:
        bearer = f"Authorization: Bearer {door.token(scope)}"
        lines = (f"POST {path} HTTP/1.1", f"Host: {door.host}", bearer, JSON, "Content-Length: 4000", "", "")
        return status_of(raw(door.url, "\r\n".join(lines).encode()))

    with ThreadPoolExecutor(len(NEVER_READ)) as pool:
        answers = list(pool.map(lambda way: ask(*way[:2]), NEVER_READ))
    assert answers == [status for _, _, status in NEVER_READ]


def test_bodies_that_grow_in_memory_are_worked_on_a_few_at_a_time_and_their_memory_returns(tmp_path: Path) -> None:
    large = b'{"task": "no-such-task", "args": ["' + b"a" * 8_000_000 + b'"]}'
    with guarded_door(f"sqlite:///{tmp_path}/jobs.db") as door:
        token = door.token(Scope.ENQUEUE)
        headers = {"Content-Type": "application/json"}

        def send() -> int:
            return door.ask("POST", "/api/v1/jobs", token, content=large, headers=headers).status_code

        assert send() in (404, 422)
        server = OwnProcess(door.served.process.pid)
        before = server.memory_info().rss
        with ThreadPoolExecutor(40) as pool:
            answers = [pool.submit(send) for _ in range(40)]
        assert {answer.result() for answer in answers} <= {404, 422, 429}
        # One of them takes up to 40 MB: forty at once were more than half a gigabyte.
        assert peak_bytes(server.pid) - before < 250_000_000
        wait_for(lambda: server.memory_info().rss - before < 50_000_000, "the memory to return")


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_a_login_is_small(door: SecuredServer) -> None:
    answer = door.browser().post("/login", {"token": "a" * 5000})
    assert answer.status_code == 413


def test_a_long_address_and_long_headers_are_refused(door: SecuredServer) -> None:
    assert door.ask("GET", "/api/v1/jobs?queue=" + "a" * 9000, door.all).status_code == 414
    assert door.ask("GET", "/" + "a" * 9000).status_code == 414
    assert door.ask("GET", "/login", headers={"X-Long": "a" * 40_000}).status_code == 431
    many = [(f"X-{number}", "a") for number in range(150)]
    assert door.served.client.get("/login", headers=many).status_code in (400, 431)
    endless = b"GET /login HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000
    answer = raw(door.url, endless)
    assert answer == b"" or status_of(answer) in (400, 431)


# Depth and form ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"[" * 2000, b"[" * 1000 + b"]" * 1000, b'{"a":' * 500 + b"1" + b"}" * 500, b'{"task":"a","args":' + b"[" * 70],
)
def test_json_that_is_too_deep_is_refused(door: SecuredServer, body: bytes) -> None:
    answer = door.ask("POST", "/api/v1/jobs", door.all, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["code"] == "too_deep"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"nul", b"\xff\xfe", b"\x00", b"{}{}", b'{"task": NaN}', b'{"task": "\\ud800"}', b"[1]", b'"x"'),
        *(b'{"task": "a\\u0000b"}', b'{"task": {"a": 1}}', b'{"task": null}', b"\xef\xbb\xbf{}", b"1" * 4000),
    ],
)
def test_json_that_is_none_of_ours_is_a_problem_with_a_cure(door: SecuredServer, body: bytes) -> None:
    for path in ("/api/v1/jobs", "/api/v1/jobs/cancel", "/api/v1/queues/pause"):
        answer = door.ask("POST", path, door.all, content=body, headers={"Content-Type": "application/json"})
        assert 200 <= answer.status_code < 500, (path, answer.text)
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json"


def test_no_other_alphabet_hides_how_deep_json_is(door: SecuredServer) -> None:
    """Half of this letter looks like a quote in UTF-16, and whatever stands between two of them like a string."""
    said = '{"x": "\u2201", "worker_id": "deep", "metadata": ' + '{"a":' * 300 + "1" + "}" * 300 + ', "y": "\u2201"}'
    headers = {"Content-Type": "application/json"}
    answer = door.ask("POST", "/api/workers/heartbeat", door.all, content=said.encode("utf-16"), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "not_json")
    assert door.ask("GET", "/api/v1/workers", door.all).status_code == 200


@pytest.mark.parametrize("query", ["limit=0", "limit=-1", "limit=1001", "limit=x", "before_id=0", f"before_id={2**63}"])
def test_pages_have_bounds(door: SecuredServer, query: str) -> None:
    assert door.ask("GET", f"/api/v1/audit?{query}", door.all).status_code == 422


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(door: SecuredServer, data: bytes) -> None:
    answer = raw(door.url, data + b"Host: localhost\r\n\r\n")
    assert answer == b"" or status_of(answer) == 400


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_who_speaks_no_http_is_told_so_like_of_every_other_problem(door: SecuredServer, data: bytes) -> None:
    head, _, body = raw(door.url, data, to_the_end=True).partition(b"\r\n\r\n")
    assert status_of(head) == 400
    assert b"content-type: application/problem+json" in head.lower()
    problem = json.loads(body)
    assert (problem["code"], problem["status"]) == ("not_http", 400)
    assert problem["cure"]


def test_rubbish_in_a_body_behind_an_answer_hangs_up_and_breaks_nothing(door: SecuredServer) -> None:
    lines = (b"POST /api/v1/jobs HTTP/1.1", f"Host: {door.host}".encode(), b"Transfer-Encoding: chunked", b"", b"")
    # It lacks a token, and what follows is no chunk: whichever is seen first, one answer is given.
    answer = raw(door.url, b"\r\n".join(lines) + b"zz\r\nrubbish\r\n\r\n", to_the_end=True)
    assert status_of(answer) in (400, 401)
    assert answer.count(b"HTTP/1.1 4") == 1


def test_a_person_who_is_refused_sees_a_page_and_nothing_that_is_for_others(door: SecuredServer) -> None:
    asked = {"Accept": "text/html,*/*;q=0.8", "Host": "elsewhere.example"}
    for path in ("/jobs", "//elsewhere.example/"):
        shown = door.served.client.get(path, headers=asked)
        assert (shown.status_code, shown.headers["content-type"][:9]) == (421, "text/html")
        assert "allowed_hosts" in shown.text
        assert "<form" not in shown.text
        assert 'href="//' not in shown.text
    back = door.served.client.get('/jobs?state=failed&x="><script>', headers=asked).text
    assert 'href="/jobs?state=failed&amp;x=' in back
    assert "<script>" not in back
    assert door.served.client.get("/api/v1/jobs", headers=asked).headers["content-type"] == "application/problem+json"


# Paths ------------------------------------------------------------------------------------------


def test_no_path_leads_around_the_guard_or_out_of_the_folder(door: SecuredServer, subtests: pytest.Subtests) -> None:
    for path in [
        *("/static/../api/v1/audit", "/static/..%2fapi/v1/audit", "/static/%2e%2e/%2e%2e/door.py"),
        *(
            "/static/....//....//etc/passwd",
            "/static//etc/passwd",
            "/static/%2fetc%2fpasswd",
            "/static/..\\..\\door.py",
        ),
        *("/static/%2e%2e%2f%2e%2e%2ftemplates%2fbase.html", "/static/../templates/base.html", "/static/%00"),
        *("/static/style.css%00.png", "/static/", "/static", "/static/.", "/static/%252e%252e/door.py", "/healthz%00"),
        *("/healthz/../api/v1/audit", "/login/../api/v1/audit", "/login%2f..%2fapi%2fv1%2faudit", "/;/api/v1/audit"),
        *("//api/v1/audit", "/%2fapi/v1/audit", "/API/v1/audit", "/api/v1/audit/", "/./api/v1/audit"),
    ]:
        with subtests.test(path=path):
            request = f"GET {path} HTTP/1.1\r\nHost: {door.host}\r\nConnection: close\r\n\r\n"
            answer = raw(door.url, request.encode())
            assert status_of(answer) in (303, 400, 401, 404, 405), answer
            for secret in (b"root:", b"build_app", b"{% ", b"create_token"):
                assert secret not in answer


# Rates, crowds, slowness ------------------------------------------------------------------------


def test_a_caller_that_asks_too_often_is_told_when_to_come_again(tmp_path: Path) -> None:
    with guarded_door(f"sqlite:///{tmp_path}/jobs.db", UNSTUCK_HTTP_REQUESTS_PER_SECOND="1") as door:
        answers = [door.ask("GET", "/api/v1/nowhere", door.all) for _ in range(40)]
        assert answers[0].status_code == 404
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["Retry-After"]) >= 1
        # Others are not slowed by it, and health is not counted.
        assert door.ask("GET", "/api/v1/audit", door.token(Scope.READ)).status_code == 200
        assert all(door.ask("GET", "/healthz").status_code == 200 for _ in range(20))


def test_requests_that_wait_are_bounded(tmp_path: Path) -> None:
    limits = {"UNSTUCK_HTTP_MAX_OPEN_REQUESTS_PER_CALLER": "2", "UNSTUCK_HTTP_MAX_OPEN_REQUESTS": "3"}
    with guarded_door(f"sqlite:///{tmp_path}/jobs.db", **limits) as door:
        client = door.served.client
        bearer = {"Authorization": f"Bearer {door.all}"}
        other = door.token(Scope.READ)
        live = ("GET", "/live?room=overview")
        with client.stream(*live, headers=bearer), client.stream(*live, headers=bearer):
            assert door.ask("GET", "/api/v1/audit", door.all).status_code == 429
            assert door.ask("GET", "/api/v1/audit", other).status_code == 200
            assert door.ask("GET", "/healthz").status_code == 200
        wait_for(lambda: door.ask("GET", "/api/v1/audit", door.all).status_code == 200, "room again")


def test_one_token_cannot_take_all_places_of_live_pages(tmp_path: Path) -> None:
    with guarded_door(f"sqlite:///{tmp_path}/jobs.db") as door, ExitStack() as pages:
        host, port = door.host.split(":")
        # Not through the client: it has a limit of its own.
        for _ in range(MAX_VIEWERS):
            page = pages.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            page.sendall(head(door, method="GET", path="/live?room=overview"))
            said = b""
            while b"retry:" not in said and b"too_many_viewers" not in said:
                part = page.recv(65536)
                assert part, said
                said += part
            if b"too_many_viewers" in said:
                break
        assert door.status("GET", "/live?room=overview", door.all) == 503
        assert door.status("GET", "/live?room=overview", door.token(Scope.READ)) == 200


def test_a_body_that_is_still_on_its_way_counts_as_a_request_that_waits(tmp_path: Path) -> None:
    with guarded_door(f"sqlite:///{tmp_path}/jobs.db", UNSTUCK_HTTP_MAX_OPEN_REQUESTS_PER_CALLER="2") as door:
        host, port = door.host.split(":")

        def begin_a_body() -> socket.socket:
            line = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
            line.sendall(head(door, JSON, "Content-Length: 100") + b"{")
            return line

        lines = [begin_a_body(), begin_a_body()]

        def is_full() -> bool:
            for n, line in enumerate(lines):
                if select.select([line], [], [], 0)[0]:
                    # It was refused itself: the question below came first. Try again.
                    line.close()
                    lines[n] = begin_a_body()
            return door.ask("GET", "/api/v1/audit", door.all).status_code == 429

        try:
            wait_for(is_full, "no room")
        finally:
            for line in lines:
                line.close()
        wait_for(lambda: door.ask("GET", "/api/v1/audit", door.all).status_code == 200, "room again")


@pytest.mark.parametrize("length", ["Content-Length: 8000000", "Transfer-Encoding: chunked"])
def test_large_bodies_that_are_slow_to_come_keep_no_heartbeat_waiting(tmp_path: Path, length: str) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with guarded_door(url, UNSTUCK_HTTP_BODY_TIMEOUT="10m") as door, ExitStack() as stack:
        host, port = door.host.split(":")
        worker = door.token(Scope.WORKER)
        for _ in range(2):
            _, token = make_token(url, Scope.ENQUEUE)
            for _ in range(2):
                line = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
                said = head(door, JSON, length, "Expect: 100-continue").replace(door.all.encode(), token.encode())
                line.sendall(said)
                # The server asks for the body when it has made room for it.
                assert b"100 Continue" in line.recv(1000)
                line.sendall(b"20000\r\n" + b" " * 131_072)
        # All the room for large bodies is taken.
        for path, body in (
            ("/api/workers/heartbeat", {"worker_id": "w1"}),
            ("/api/v1/workers", {"name": "w2", "tasks": ["add"], "metadata": {"note": "x" * 10_000}}),
        ):
            assert door.ask("POST", path, worker, json=body).status_code in (200, 201)


HEAD_S = 2.0
IMPATIENT = {
    "UNSTUCK_HTTP_HEAD_TIMEOUT": f"{HEAD_S}s",
    "UNSTUCK_HTTP_BODY_TIMEOUT": "500ms",
    "UNSTUCK_HTTP_UNREAD_TIMEOUT": "500ms",
}


@pytest.fixture(scope="module")
def impatient_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    """A server that hangs up soon, so that a test need not wait long for the order of events."""
    url = f"sqlite:///{tmp_path_factory.mktemp('impatient')}/jobs.db"
    with guarded_door(url, points=["http.request_received"], **IMPATIENT) as door:
        yield door
        assert "Traceback" not in door.served.said()


def said_at_once(door: SecuredServer, data: bytes) -> socket.socket:
    """Connect and send. If this process stood still in between, the server may have hung up before: begin again."""
    host, port = door.host.split(":")
    while True:
        begun_s = time.monotonic()
        line = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        line.sendall(data)
        if time.monotonic() - begun_s < HEAD_S / 2:
            return line
        line.close()


def test_a_client_that_is_slow_to_send_its_request_is_hung_up_on_and_others_are_served(
    impatient_door: SecuredServer,
) -> None:
    door = impatient_door

    def is_served() -> bool:
        with suppress(httpx.TransportError):
            return door.ask("GET", "/api/v1/audit", door.all).status_code == 200
        return False

    with (
        said_at_once(door, head(door, JSON, "Content-Length: 100") + b"{") as body,
        said_at_once(door, b"GET / HTTP/1.1\r\nHost: loc") as unsaid,
        said_at_once(door, head(door, method="GET", path="/healthz")) as blank,
    ):
        assert status_of(blank.recv(65536)) == 200
        # Nothing but empty lines, which may stand in front of a request.
        blank.sendall(b"\r\n")
        wait_for(is_served, "another client to be served")
        assert status_of(body.recv(65536)) == 408
        assert unsaid.recv(65536) == b""
        assert blank.recv(65536) == b""


def test_a_client_that_never_reads_its_answer_is_hung_up_on(impatient_door: SecuredServer) -> None:
    door = impatient_door
    host, port = door.host.split(":")
    server = OwnProcess(door.served.process.pid)
    before = door.served.passed("http.request_received")
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        line.connect((host, int(port)))
        mine = line.getsockname()[1]

        def is_connected() -> bool:
            return any(one.raddr and one.raddr.port == mine for one in server.net_connections("tcp"))

        line.sendall(head(door, method="GET", path="/api/v1/openapi.json") * 30)
        door.served.wait_passed("http.request_received", before + 1)
        wait_for(lambda: not is_connected(), "it was hung up on")
