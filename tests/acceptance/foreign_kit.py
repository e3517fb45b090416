"""A worker over HTTP for tests, a real door for it, and a look into the ledger behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.web import Served, opened

from unstuck.config import Settings
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.opening import ready_ledger
from unstuck.store.records import NewJob

LARGEST_RESULT = 20_000
LARGEST_OUTPUT = 1_000
PLAIN = Policy()
TIGHT = {"heartbeat_interval": 0.2, "heartbeat_timeout": 3}
"""Soon given up, yet not between two requests on a machine that others use too."""
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
    with opened(url, env={"UNSTUCK_CHECK_INTERVAL": "0.1", **limits}) as served:
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
    [stored] = ledger.enqueue([job])
    ledger.ring({f"queue:{queue}"})
    return stored.job_id


def state(ledger: Ledger, job_id: int) -> JobState:
    record = ledger.job(job_id)
    assert record is not None
    return record.state


def key(job: dict[str, Any]) -> dict[str, Any]:
    return {"job_id": job["job_id"], "token": job["token"]}


def done(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**key(job), "outcome": "succeeded", **more}
