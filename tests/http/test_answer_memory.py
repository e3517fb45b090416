"""Answers that clients do not read: the memory of the server stays bounded, and others are served."""

import json
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.fleet import wait_for
from tests.support.http_server import PATIENCE_S, SecuredServer, guarded_door, make_token, put
from tests.support.signals import OwnProcess

from unstuck.config import Settings
from unstuck.domain.api_tokens import Scope
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import ready_ledger

CLIENTS = 200
ARGUMENT_BYTES = 2_000_000
UNREAD_BYTES = 100_000_000
"""Of these the budget of a token is a third. Without one it was 300 MB."""
KEPT_BYTES = 40_000_000
WARM = 50
"""Requests at once, so that every thread of the server has its connection and that has its cache."""
SETTLES_S = 15.0
"""Sooner than a request that waits for room is told to come again."""


@contextmanager
def guarded(folder: Path, *points: str) -> Iterator[tuple[SecuredServer, Ledger]]:
    url = f"sqlite:///{folder}/jobs.db"
    # Nobody is hung up on while the memory is looked at.
    with guarded_door(url, points=points, UNSTUCK_HTTP_UNREAD_TIMEOUT="300") as door:
        ledger = ready_ledger(Settings(url=url))
        try:
            yield door, ledger
        finally:
            ledger.close()


def ask(door: SecuredServer, method: str, path: str, token: str, body: bytes = b"") -> socket.socket:
    """Ask, and read nothing."""
    host, port = door.host.split(":")
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.settimeout(PATIENCE_S)
    line.connect((host, int(port)))
    head = [f"{method} {path} HTTP/1.1", f"Host: {door.host}", f"Authorization: Bearer {token}"]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
    line.sendall("\r\n".join([*head, "", ""]).encode() + body)
    return line


def read_all(line: socket.socket) -> int:
    """Read an answer to its end, and return its status."""
    with line.makefile("rb") as file:
        status = int(file.readline().split(b" ")[1])
        length = 0
        while header := file.readline().strip().lower():
            if header.startswith(b"content-length:"):
                length = int(header.partition(b":")[2])
        assert len(file.read(length)) == length
    return status


def met(door: SecuredServer, lines: list[socket.socket]) -> int:
    """Return how many answers have begun, and how many had to wait for room."""
    return len(select.select(lines, [], [], 0)[0]) + door.served.passed("http.answer_waiting")


def ask_many(door: SecuredServer, path: str, token: str, many: int) -> set[int]:
    def one(_: int) -> int:
        with ask(door, "GET", path, token) as line:
            return read_all(line)

    with ThreadPoolExecutor(many) as pool:
        return set(pool.map(one, range(many)))


def test_answers_that_are_not_read_take_bounded_memory_and_give_it_back(tmp_path: Path) -> None:
    with guarded(tmp_path, "http.answer_waiting") as (door, ledger):
        job_id = put(ledger, "q", payload=b'{"args":["' + b"a" * ARGUMENT_BYTES + b'"]}')
        path = f"/api/v1/jobs/{job_id}"
        token, other = door.token(Scope.READ), make_token(door.ledger_url, Scope.READ)[1]
        assert ask_many(door, path, token, WARM) == {200}
        server = OwnProcess(door.served.process.pid)
        before, waited = server.memory_info().rss, door.served.passed("http.answer_waiting")
        with ExitStack() as stack:
            lines = [stack.enter_context(ask(door, "GET", path, token)) for _ in range(CLIENTS)]
            wait_for(lambda: met(door, lines) - waited >= CLIENTS, "each to be answered or to wait")
            wait_for(lambda: server.memory_info().rss - before < UNREAD_BYTES, "less memory", SETTLES_S)
            # Small answers of the same token wait for nothing, and only its own large ones wait.
            assert door.ask("GET", "/api/v1/jobs", token).status_code == 200
            assert len(door.ask("GET", path, other).content) > ARGUMENT_BYTES
            # A client that waits is answered when others have read theirs, or is told to come again.
            with ThreadPoolExecutor(CLIENTS) as pool:
                told = set(pool.map(read_all, lines))
            assert told <= {200, 429}
            assert 200 in told
        with ExitStack() as stack:
            waited = door.served.passed("http.answer_waiting")
            lines = [stack.enter_context(ask(door, "GET", path, token)) for _ in range(CLIENTS)]
            wait_for(lambda: met(door, lines) - waited >= CLIENTS, "each to be answered or to wait")
        # All of them have hung up.
        assert len(door.ask("GET", path, token).content) > ARGUMENT_BYTES
        wait_for(lambda: server.memory_info().rss - before < KEPT_BYTES, "the memory to return")


JOBS_EACH = 7


def test_claims_that_are_not_read_take_bounded_memory_and_lose_no_job(tmp_path: Path) -> None:
    workers = 60
    with guarded(tmp_path, "http.answer_waiting") as (door, ledger):
        token = door.token(Scope.WORKER)
        payload = b'{"args":["' + b"a" * 1_000_000 + b'"]}'
        ids = [put(ledger, "q", payload=payload) for _ in range(workers * JOBS_EACH)]
        born = [
            door.ask("POST", "/api/v1/workers", token, json={"queues": ["q"], "tasks": ["resize"]}).json()["id"]
            for _ in range(workers)
        ]
        server = OwnProcess(door.served.process.pid)
        # The first answer says how large those of this token are.
        first = door.ask("POST", f"/api/v1/workers/{born[0]}/claim", token, json={"limit": JOBS_EACH}).json()["jobs"]
        assert len(first) == JOBS_EACH
        before = server.memory_info().rss
        body = json.dumps({"limit": JOBS_EACH, "have": []}).encode()
        with ExitStack() as stack:
            lines = [
                stack.enter_context(ask(door, "POST", f"/api/v1/workers/{worker}/claim", token, body))
                for worker in born[1:]
            ]
            wait_for(lambda: met(door, lines) >= workers - 1, "each to be answered or to wait")
            assert server.memory_info().rss - before < UNREAD_BYTES
            with ThreadPoolExecutor(workers) as pool:
                assert set(pool.map(read_all, lines)) <= {200, 429}
        held = {job.job_id for worker in born for job in ledger.workers.held(worker)}
        waiting = {job_id for job_id in ids if (job := ledger.jobs.get(job_id)) is not None and job.state == "pending"}
        assert held | waiting == set(ids)


def test_a_wait_for_a_result_keeps_nothing_of_the_job(tmp_path: Path) -> None:
    with guarded(tmp_path, "http.result_waiting") as (door, ledger):
        job_id = put(ledger, "q", payload=b'{"args":["' + b"a" * ARGUMENT_BYTES + b'"]}')
        token = door.token(Scope.READ)
        path = f"/api/v1/jobs/{job_id}/result"
        assert ask_many(door, path, token, WARM) == {202}
        server = OwnProcess(door.served.process.pid)
        before = server.memory_info().rss
        with ExitStack() as stack:
            lines = [stack.enter_context(ask(door, "GET", f"{path}?wait=60", token)) for _ in range(CLIENTS)]
            door.served.wait_passed("http.result_waiting", CLIENTS)
            assert server.memory_info().rss - before < UNREAD_BYTES
            ledger.jobs.cancel([job_id], "test")
            with ThreadPoolExecutor(CLIENTS) as pool:
                assert set(pool.map(read_all, lines)) == {200}
