"""Attacks with a valid token: guess the jobs of others, and speak for a worker that another process is."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.support.http_server import DATABASES, SecuredServer, done, empty_database, guarded_door, key, make_token

from unstuck.domain.api_tokens import Scope

SECRET = "a-word-that-is-in-the-job-alone"
NOBODY_S_ID = 999_999_999
OPEN = ("/api/v1/openapi.json",)
"""Paths that tell nothing of jobs and workers."""
STREAM = "/api/v1/events"


@pytest.fixture(params=DATABASES, scope="module")
def guarded(request: pytest.FixtureRequest) -> Iterator[SecuredServer]:
    with empty_database(request) as url, guarded_door(url) as guarded:
        yield guarded


@pytest.fixture(scope="module")
def theirs(guarded: SecuredServer) -> dict[str, Any]:
    """A job of somebody else, in the hands of their worker, with a word in it that no other token may read."""
    worker = {"name": f"worker-{SECRET}", "queues": ["theirs"], "tasks": ["resize"]}
    born = guarded.ask("POST", "/api/v1/workers", guarded.all, json=worker).json()
    body = {"task": "resize", "queue": "theirs", "args": [SECRET]}
    assert guarded.ask("POST", "/api/v1/jobs", guarded.all, json=body).status_code == 201
    claimed = guarded.ask("POST", f"/api/v1/workers/{born['id']}/claim", guarded.all, json={"start": True}).json()
    return {"worker": born["id"], **claimed["jobs"][0]}


def reads(guarded: SecuredServer) -> list[str]:
    """Return every path that can be read, as the API describes itself."""
    paths = guarded.ask("GET", "/api/v1/openapi.json", guarded.all).json()["paths"]
    return [path for path, verbs in paths.items() if "get" in verbs and path not in OPEN]


@pytest.mark.parametrize("scope", [Scope.WORKER, Scope.ENQUEUE])
def test_a_token_that_may_not_read_sees_no_job_of_others_at_any_path(
    guarded: SecuredServer, theirs: dict[str, Any], scope: Scope
) -> None:
    token = make_token(guarded.ledger_url, scope)[1]
    tried = 0
    for path in [*reads(guarded), "/metrics"]:
        if path in ("/healthz", "/readyz"):
            continue
        answers = []
        for job_id, worker_id in ((theirs["job_id"], theirs["worker"]), (NOBODY_S_ID, "0123456789ab")):
            filled = path.replace("{worker_id}", str(worker_id)).replace("{name}", "theirs")
            filled = re.sub(r"\{\w*id\}", str(job_id), filled)
            for query in ("", f"?job={job_id}", f"?worker={worker_id}") if path == STREAM else ("",):
                # A stream would not end: a refusal comes at once.
                answer = guarded.ask("GET", filled + query, token)
                assert answer.status_code in (401, 403, 404), (path, answer.status_code, answer.text[:200])
                assert SECRET not in answer.text, path
                answers.append((answer.status_code, answer.json()["code"]))
                tried += 1
        # Whether it exists cannot be told from the answer.
        assert len(set(answers)) == 1, (path, answers)
    assert tried > 40


def test_a_worker_learns_nothing_of_a_job_by_naming_its_id(guarded: SecuredServer, theirs: dict[str, Any]) -> None:
    token = make_token(guarded.ledger_url, Scope.WORKER)[1]
    spy = guarded.ask("POST", "/api/v1/workers", token, json={"queues": ["spy"], "tasks": ["spy"]}).json()["id"]

    def said(verb: str, job_id: int, attempt: int, more: dict[str, Any]) -> str:
        jobs = [{"job_id": job_id, "token": attempt, **more}]
        body = {"settle": jobs} if verb == "turn" else {"jobs": jobs}
        answer = guarded.ask("POST", f"/api/v1/workers/{spy}/{verb}", token, json=body)
        assert answer.status_code in (200, 409), answer.text
        # Numbers that the spy sent itself are no news.
        return re.sub(rf"\b({job_id}|{attempt})\b", "N", json.dumps(answer.json()))

    for verb, more in (
        ("beat", {}),
        ("start", {}),
        ("progress", {"done": 1}),
        ("steps", {"seq": 1}),
        ("settle", {"outcome": "succeeded"}),
        ("settle", {"outcome": "failed"}),
        ("turn", {"outcome": "succeeded"}),
        ("release", {}),
    ):
        told = {
            said(verb, job_id, attempt, more)
            for job_id in (theirs["job_id"], NOBODY_S_ID)
            for attempt in (theirs["token"], NOBODY_S_ID + 1)
        }
        assert len(told) == 1, (verb, told)
        assert theirs["worker"] not in told.pop()
    state = guarded.ask("GET", f"/api/v1/jobs/{theirs['job_id']}", guarded.all).json()
    assert (state["state"], state["attempt"]) == ("running", 1)


def test_two_processes_under_one_id_cannot_end_a_job_twice(guarded: SecuredServer) -> None:
    token = make_token(guarded.ledger_url, Scope.WORKER)[1]
    queue = "twins"
    body = {"name": queue, "instance": "the-same", "queues": [queue], "tasks": ["resize"], "concurrency": 9}
    first, second = (guarded.ask("POST", "/api/v1/workers", token, json=body).json() for _ in range(2))
    assert first["id"] == second["id"]
    other = guarded.ask("POST", "/api/v1/workers", token, json={**body, "instance": "another"})
    assert (other.status_code, other.json()["code"]) == (409, "name_taken")
    worker = f"/api/v1/workers/{first['id']}"

    def post(verb: str, **said: Any) -> httpx.Response:
        return guarded.ask("POST", f"{worker}/{verb}", token, json=said)

    for _ in range(8):
        assert (
            guarded.ask("POST", "/api/v1/jobs", guarded.all, json={"task": "resize", "queue": queue}).status_code == 201
        )
    with ThreadPoolExecutor(4) as pool:
        claims = list(pool.map(lambda _: post("claim", start=True, limit=2).json()["jobs"], range(4)))
    jobs = [job for claimed in claims for job in claimed]
    # No job is handed out twice, however many speak under one id at once.
    assert len({job["job_id"] for job in jobs}) == len(jobs) == 8
    with ThreadPoolExecutor(4) as pool:
        beats = list(pool.map(lambda _: post("beat", jobs=[key(job) for job in jobs]).status_code, range(4)))
        assert beats == [200] * 4
        # Both hand in another result of the same attempts: one of them counts.
        results = list(pool.map(lambda n: post("settle", jobs=[done(job, result=n) for job in jobs]).json(), range(4)))
    for place, job in enumerate(jobs):
        statuses = sorted(said["results"][place]["status"] for said in results)
        assert statuses == ["already", "already", "already", "succeeded"]
        winner = next(n for n, said in enumerate(results) if said["results"][place]["status"] == "succeeded")
        told = guarded.ask("GET", f"/api/v1/jobs/{job['job_id']}/result", guarded.all).json()
        assert told["result"] == winner
    failed = post("settle", jobs=[{**key(jobs[0]), "outcome": "failed"}])
    assert (failed.status_code, failed.json()["code"]) == (409, "superseded")


def test_a_sibling_of_the_same_token_settles_nothing_that_it_does_not_hold(guarded: SecuredServer) -> None:
    token = make_token(guarded.ledger_url, Scope.WORKER)[1]
    body = {"queues": ["siblings"], "tasks": ["resize"]}
    one, two = (guarded.ask("POST", "/api/v1/workers", token, json=body).json()["id"] for _ in range(2))
    for _ in range(2):
        guarded.ask("POST", "/api/v1/jobs", guarded.all, json={"task": "resize", "queue": "siblings"})
    [job] = guarded.ask("POST", f"/api/v1/workers/{one}/claim", token, json={"start": True}).json()["jobs"]
    wrong = guarded.ask("POST", f"/api/v1/workers/{two}/turn", token, json={"settle": [done(job)], "claim": 1}).json()
    assert [result["status"] for result in wrong["results"]] == ["superseded"]
    assert [taken["job_id"] for taken in wrong["jobs"]] == [job["job_id"] + 1]
    for verb in ("settle", "start", "progress"):
        more = {"outcome": "failed"} if verb == "settle" else {}
        answer = guarded.ask("POST", f"/api/v1/workers/{two}/{verb}", token, json={"jobs": [{**key(job), **more}]})
        assert (verb, answer.status_code) == (verb, 409)
    right = guarded.ask("POST", f"/api/v1/workers/{one}/settle", token, json={"jobs": [done(job)]})
    assert right.json()["results"][0]["status"] == "succeeded"
