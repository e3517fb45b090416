"""Clients over HTTP: enqueue, once however often it is asked, follow, cancel, run again."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.fleet import Fleet
from tests.support.http_server import ApiClient, serve
from tests.support.postgres import PgServer

from unstuck.http.schemas import NewJobBody

OTHER_VALUES: dict[str, Any] = {
    "args": [1],
    "kwargs": {"depth": 2},
    "queue": "default",
    "priority": 1,
    "delay": "1h",
    "run_at": "2199-01-01T00:00:00Z",
    "unique_key": "another",
    "unique": "pending",
    "on_duplicate": "replace",
    "concurrency_key": "another",
    "concurrency_limit": 2,
    "expires": "1h",
    "keep": "1h",
}


class TestEnqueue:
    def test_a_job_is_stored_with_the_queue_and_the_rules_of_its_task(self, door: ApiClient) -> None:
        response = door.client.post(
            "/api/v1/jobs", json={"task": "crawl", "args": ["https://x", None], "kwargs": {"depth": 2}, "priority": 7}
        )
        assert response.status_code == 201
        stored = response.json()
        warning = stored.pop("warning")
        assert warning.startswith("No living worker takes task 'crawl' from queue 'scrapes'")
        assert stored == {"id": stored["id"], "task": "crawl", "queue": "scrapes", "fresh": True}
        assert response.headers["location"] == f"/api/v1/jobs/{stored['id']}"
        job = door.client.get(response.headers["location"]).json()
        assert (job["args"], job["kwargs"], job["priority"]) == (["https://x", None], {"depth": 2}, 7)
        assert (job["state"], job["policy"]["on_crash"], job["enqueued_by"]) == ("pending", "retry", "web")
        assert job == door.shop.run("job", str(job["id"]), "--json").json

    def test_later_by_delay_and_by_time(self, door: ApiClient) -> None:
        for later in ({"delay": "1h"}, {"delay": 3600}, {"run_at": "2199-01-01T00:00:00+02:00"}, {"run_at": 7e9}):
            job = door.get(f"/jobs/{door.enqueue(**later)}")
            assert job["run_at"] > job["enqueued_at"], later
        assert door.get(f"/jobs/{door.enqueue(run_at='2199-01-01T00:00:00+02:00')}")["run_at"].startswith(
            "2198-12-31T22"
        )

    def test_numbers_stay_as_exact_as_they_came(self, door: ApiClient) -> None:
        args = [2**70, -(2**64), 0.1, 1e300]
        assert door.get(f"/jobs/{door.enqueue(args=args)}")["args"] == args

    def test_an_unfinished_job_with_the_same_unique_key_is_given_back(self, door: ApiClient) -> None:
        first = door.enqueue(unique_key="u-1")
        again = door.post("/jobs", {"task": "add", "unique_key": "u-1"}, 200)
        assert (again["id"], again["fresh"]) == (first, False)
        door.post(f"/jobs/{first}/cancel")
        assert door.enqueue(unique_key="u-1") != first

    def test_an_unknown_task_is_told_with_what_may_have_been_meant(self, door: ApiClient) -> None:
        problem = door.problem("POST", "/jobs", 404, json={"task": "crwal"})
        assert "Did you mean 'crawl'?" in problem["detail"]

    def test_an_unknown_queue_is_told_too(self, door: ApiClient) -> None:
        problem = door.problem("POST", "/jobs", 404, json={"task": "add", "queue": "defualt"})
        assert "Did you mean 'default'?" in problem["detail"]

    @pytest.mark.parametrize(
        ("wrong", "word"),
        [
            ({"priority": 1001}, "priority"),
            ({"priority": "1"}, "priority"),
            ({"delay": "soon"}, "delay"),
            ({"delay": -1}, "delay"),
            ({"delay": "1s", "run_at": 7e9}, "delay"),
            ({"run_at": "2199-01-01T00:00:00"}, "run_at"),
            ({"run_at": 1e300}, "run_at"),
            ({"unique_key": ""}, "unique_key"),
            ({"unique_key": "a\0b"}, "unique_key"),
            ({"args": {"a": 1}}, "args"),
            ({"args": ["x" * 2_000_000]}, "1,048,576"),
            ({"argz": [1]}, "argz"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_by_name(self, door: ApiClient, wrong: dict[str, Any], word: str) -> None:
        before = len(door.get("/jobs?limit=1000")["jobs"])
        assert word in door.problem("POST", "/jobs", 422, json={"task": "add", **wrong})["detail"]
        assert len(door.get("/jobs?limit=1000")["jobs"]) == before


class TestBatch:
    def test_many_are_stored_in_their_order(self, door: ApiClient) -> None:
        stored = door.post("/jobs/batch", {"jobs": [{"task": "add", "args": [n]} for n in range(50)]}, 201)["jobs"]
        assert [item["id"] for item in stored] == sorted(item["id"] for item in stored)
        assert [door.get(f"/jobs/{item['id']}")["args"] for item in stored[:3]] == [[0], [1], [2]]

    def test_one_bad_job_and_none_is_stored(self, door: ApiClient) -> None:
        before = door.post("/jobs", {"task": "add"}, 201)["id"]
        jobs = [{"task": "add"}, {"task": "add", "delay": "soon"}, {"task": "add"}]
        assert door.problem("POST", "/jobs/batch", 422, json={"jobs": jobs})["at"] == 1
        jobs[1] = {"task": "nothing-like-it"}
        assert door.problem("POST", "/jobs/batch", 404, json={"jobs": jobs})["at"] == 1
        assert door.get("/jobs?limit=1")["jobs"][0]["id"] == before

    def test_a_batch_has_a_limit(self, door: ApiClient) -> None:
        problem = door.problem("POST", "/jobs/batch", 422, json={"jobs": [{"task": "add"}] * 1001})
        assert "1000" in problem["detail"]
        door.problem("POST", "/jobs/batch", 422, json={"jobs": []})


class TestIdempotency:
    def test_a_request_sent_again_gets_the_first_answer_also_after_the_job_ended(self, door: ApiClient) -> None:
        key = {"Idempotency-Key": "pay-invoice-4711"}
        first = door.client.post("/api/v1/jobs", json={"task": "add", "args": [1]}, headers=key)
        assert first.status_code == 201
        assert "idempotency-replayed" not in first.headers
        door.post(f"/jobs/{first.json()['id']}/cancel")
        again = door.client.post("/api/v1/jobs", json={"args": [1], "task": "add"}, headers=key)
        assert (again.status_code, again.json()) == (200, first.json())
        assert again.headers["idempotency-replayed"] == "true"

    def test_a_batch_sent_again_stores_nothing(self, door: ApiClient) -> None:
        body = {"jobs": [{"task": "add"}, {"task": "crawl", "unique_key": "of-batch"}]}
        key = {"Idempotency-Key": "batch"}
        first = door.post("/jobs/batch", body, 201, headers=key)
        assert door.post("/jobs/batch", body, 200, headers=key) == first

    def test_the_same_key_for_something_else_is_refused(self, door: ApiClient) -> None:
        key = {"Idempotency-Key": "mixed-up"}
        door.post("/jobs", {"task": "add", "args": [1]}, 201, headers=key)
        problem = door.problem("POST", "/jobs", 409, json={"task": "add", "args": [2]}, headers=key)
        assert problem["code"] == "key_used_before"
        assert "new key" in problem["cure"]

    @pytest.mark.parametrize("option", sorted(set(NewJobBody.model_fields) - {"task"}))
    def test_the_same_key_with_any_other_option_is_refused(self, door: ApiClient, option: str) -> None:
        body = {"task": "crawl", "unique_key": f"same-key-{option}", "concurrency_key": "site"}
        key = {"Idempotency-Key": f"option-{option}"}
        stored = door.post("/jobs", body, 201, headers=key)
        changed = {**body, option: OTHER_VALUES[option]}
        problem = door.problem("POST", "/jobs", 409, json=changed, headers=key)
        assert problem["code"] == "key_used_before"
        if option != "unique_key":
            batch = {"Idempotency-Key": f"option-{option}-of-batch"}
            door.post("/jobs/batch", {"jobs": [body]}, 201, headers=batch)
            problem = door.problem("POST", "/jobs/batch", 409, json={"jobs": [changed]}, headers=batch)
            assert problem["code"] == "key_used_before"
        assert door.post("/jobs", {"keep": None, "args": [], **body}, 200, headers=key) == stored

    def test_arguments_of_any_kind_can_be_sent_again(self, door: ApiClient) -> None:
        body = {"task": "add", "args": [10**30, -1.5, None, {"b": [1], "a": "é"}], "run_at": "2199-01-01T00:00:00Z"}
        key = {"Idempotency-Key": "of-any-kind"}
        stored = door.post("/jobs", body, 201, headers=key)
        again = {**body, "args": [10**30, -1.5, None, {"a": "é", "b": [1]}]}
        assert door.post("/jobs", again, 200, headers=key) == stored

    def test_many_tries_at_once_store_one_job(self, door: ApiClient) -> None:
        ids: list[int] = []

        def send() -> None:
            said = door.client.post("/api/v1/jobs", json={"task": "add"}, headers={"Idempotency-Key": "at-once"})
            ids.append(said.json()["id"])

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ids) == 8
        assert len(set(ids)) == 1


class TestFollow:
    def test_a_job_that_does_not_exist(self, door: ApiClient) -> None:
        for path in ("", "/result", "/why", "/doctor", "/logs", "/events"):
            assert "does not exist" in door.problem("GET", f"/jobs/999999999{path}", 404)["detail"]
            door.problem("GET", f"/jobs/{2**64}{path}", 404)
        for verb in ("cancel", "retry"):
            door.problem("POST", f"/jobs/999999999/{verb}", 404)

    def test_a_result_that_is_there(self, door: ApiClient) -> None:
        held = door.held()
        door.shop.succeed(held, b'{"sum": 3}', stdout=b"hello\n", stderr=b"\xff\n", worker_id=_owner(door, held.job_id))
        said = {"id": held.job_id, "state": "succeeded", "result": {"sum": 3}, "error": None}
        assert door.get(f"/jobs/{held.job_id}/result") == said
        logs = door.get(f"/jobs/{held.job_id}/logs")
        assert [(item["stdout"], item["stderr"]) for item in logs] == [("hello\n", "\ufffd\n")]

    def test_a_failure_is_an_answer_too(self, door: ApiClient) -> None:
        held = door.held()
        door.shop.fail(held, "boom", worker_id=_owner(door, held.job_id))
        said = door.get(f"/jobs/{held.job_id}/result?wait=60")
        assert (said["state"], said["result"], said["error"]["code"]) == ("failed", None, "TASK_FAILED")
        assert said["error"]["details"]["type"] == "ValueError"
        [attempt] = door.get(f"/jobs/{held.job_id}")["attempts"]
        assert (attempt["state"], attempt["token"]) == ("failed", held.token)

    def test_what_has_not_ended_says_what_it_does(self, door: ApiClient) -> None:
        waiting = door.enqueue(delay="1h")
        said = door.get(f"/jobs/{waiting}/result?wait=0.01", 202)
        assert said["state"] == "pending"
        assert "It is scheduled for" in said["doing"]
        held = door.held()
        said = door.get(f"/jobs/{held.job_id}/result", 202)
        assert said["state"] == "running"
        assert "worker-of-queue" in said["doing"]

    def test_the_story_is_the_one_of_the_command_line(self, door: ApiClient) -> None:
        job_id = door.enqueue(delay="1h")
        told, shown = door.get(f"/jobs/{job_id}/why"), door.shop.run("why", str(job_id), "--json").json
        assert {**told, "told_at": 0, "next": 0} == {**shown, "told_at": 0, "next": 0}
        door.post(f"/jobs/{job_id}/cancel")
        # Of a job that waits it looks at the whole fleet, and twice at whoever seems to do nothing.
        assert door.get(f"/jobs/{job_id}/doctor") == door.shop.run("doctor", str(job_id), "--json").json

    def test_cancel_and_run_again(self, door: ApiClient) -> None:
        job_id = door.enqueue()
        assert door.post(f"/jobs/{job_id}/cancel") == {"id": job_id, "answer": "cancelled"}
        assert door.get(f"/jobs/{job_id}/result")["error"]["code"] == "CANCELLED"
        problem = door.problem("POST", f"/jobs/{job_id}/cancel", 409)
        assert (problem["code"], problem["state"]) == ("finished", "cancelled")
        assert door.post(f"/jobs/{job_id}/retry") == {"id": job_id, "answer": "queued"}
        assert door.problem("POST", f"/jobs/{job_id}/retry", 409)["code"] == "live"
        events = door.get(f"/jobs/{job_id}/events")
        assert any("web" in event["message"] for event in events)
        assert door.get(f"/jobs/{job_id}/events?after={events[0]['id']}") == events[1:]

    def test_a_running_job_is_cancelled_through_its_worker(self, door: ApiClient) -> None:
        held = door.held()
        assert door.post(f"/jobs/{held.job_id}/cancel")["answer"] == "requested"
        assert door.get(f"/jobs/{held.job_id}")["cancel_requested"]


def _owner(door: ApiClient, job_id: int) -> str:
    return str(door.get(f"/jobs/{job_id}")["worker"])


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
        with serve(url) as served:
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
    [attempt] = place.client.get(f"{API}/jobs/{job_id}").json()["attempts"]
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
