"""Wait for a result over HTTP, with a real worker behind it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fleet import Fleet
from tests.pg import PgServer
from tests.web import opened

API = "/api/v1"


class Place:
    """A door, and a worker behind it."""

    def __init__(self, fleet: Fleet, client: httpx.Client) -> None:
        self.fleet = fleet
        self.client = client

    def enqueue(self, task: str, *args: Any) -> int:
        response = self.client.post(f"{API}/jobs", json={"task": task, "args": args})
        assert response.status_code == 201, response.text
        return int(response.json()["id"])

    def result(self, job_id: int, wait: float = 60) -> httpx.Response:
        return self.client.get(f"{API}/jobs/{job_id}/result", params={"wait": wait})


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    if request.param == "sqlite":
        url = f"sqlite:///{folder}/jobs.db"
    else:
        server: PgServer = request.getfixturevalue("pg_server")
        url = server.new_ledger()
    fleet = Fleet(url, folder)
    try:
        fleet.start("--concurrency", "2")
        with opened(url) as served:
            yield Place(fleet, served.client)
    finally:
        fleet.close()


def test_the_result_comes_to_who_waits(place: Place) -> None:
    job_id = place.enqueue("add", 1, 2)
    response = place.result(job_id)
    assert response.status_code == 200
    assert response.json() == {"id": job_id, "state": "succeeded", "result": 3, "error": None}


def test_an_error_of_the_task_comes_with_its_traceback(place: Place) -> None:
    said = place.result(place.enqueue("add", 1, "2")).json()
    assert (said["state"], said["error"]["code"]) == ("failed", "TASK_FAILED")
    assert said["error"]["details"]["type"] == "TypeError"
    assert "Traceback" in said["error"]["details"]["traceback"]


def test_a_death_comes_with_its_cause(place: Place) -> None:
    job_id = place.enqueue("die")
    said = place.result(job_id).json()
    assert (said["error"]["code"], said["error"]["message"]) == ("WORKER_CRASHED", "Worker died unexpectedly")
    assert "SIGKILL" in said["error"]["cause"]
    [attempt] = place.client.get(f"{API}/jobs/{job_id}/attempts").json()
    assert attempt["autopsy"]["kind"] == "signal"
    story = place.client.get(f"{API}/jobs/{job_id}/why").json()
    assert "died" in [step["kind"] for step in story["story"]]


def test_patience_ends_and_says_what_the_job_does(place: Place, tmp_path: Path) -> None:
    job, _ = place.fleet.begin("nap", 3600)
    began = time.monotonic()
    response = place.result(job.id, 0.2)
    assert response.status_code == 202
    assert time.monotonic() - began >= 0.2
    assert response.json()["state"] == "running"
    assert "running on worker" in response.json()["doing"]
    assert place.client.post(f"{API}/jobs/{job.id}/cancel").json()["answer"] == "requested"
    assert place.result(job.id).json()["error"]["code"] == "CANCELLED"


def test_many_wait_at_once_and_hinder_nobody(place: Place) -> None:
    """More than there are threads for handlers: whoever waits holds none."""
    late = place.client.post(f"{API}/jobs", json={"task": "add", "args": [1, 1], "delay": "10m"}).json()["id"]
    codes: list[int] = []

    def wait() -> None:
        with httpx.Client(base_url=place.client.base_url, timeout=60, trust_env=False) as client:
            codes.append(client.get(f"{API}/jobs/{late}/result?wait=60").status_code)

    waiters = [threading.Thread(target=wait) for _ in range(60)]
    for waiter in waiters:
        waiter.start()
    assert place.result(place.enqueue("add", 2, 2)).json()["result"] == 4
    assert not codes
    place.client.post(f"{API}/jobs/{late}/cancel")
    for waiter in waiters:
        waiter.join()
    assert codes == [200] * 60
