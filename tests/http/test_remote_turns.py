"""A worker over HTTP settles what it did, takes the next jobs and starts them, all in one request."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.support.backdoor import Backdoor
from tests.support.fleet import wait_for
from tests.support.http_server import Worker, done, fall_silent, key, put, state

from unstuck.domain.policy import Policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import JobState
from unstuck.ledger.contract import Ledger


def turn(worker: Worker, **body: Any) -> dict[str, Any]:
    answer = worker.call("turn", **body)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_one_request_settles_claims_and_starts(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    ids = [put(ledger, queue) for _ in range(3)]
    last: list[dict[str, Any]] = []
    seen = []
    for _ in range(4):
        said = turn(worker, claim=1, settle=[done(job, result={"n": job["job_id"]}) for job in last])
        assert [result["status"] for result in said["results"]] == ["succeeded"] * len(last)
        last = said["jobs"]
        seen += [job["job_id"] for job in last]
        assert [state(ledger, job["job_id"]) for job in last] == [JobState.RUNNING] * len(last)
        assert (said["state"], said["drain"], said["cancel"]) == ("active", False, [])
    assert seen == ids
    record = ledger.jobs.get(ids[0])
    assert record is not None
    assert (record.state, record.result) == (JobState.SUCCEEDED, b'{"n":%d}' % ids[0])


def test_a_turn_that_is_sent_again_finds_its_outcomes_written_and_its_jobs_waiting(
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    worker = Worker(http, queue)
    put(ledger, queue)
    put(ledger, queue)
    [first] = turn(worker, claim=1)["jobs"]
    body = {"claim": 1, "settle": [done(first, result=1)], "have": []}
    [second] = turn(worker, **body)["jobs"]
    # The answer was lost.
    again = turn(worker, **body)
    assert again["results"] == [{**key(first), "ok": True, "status": "already"}]
    assert [(job["job_id"], job["token"], job["again"]) for job in again["jobs"]] == [
        (second["job_id"], second["token"], True)
    ]


def test_an_answer_holds_eight_megabytes_and_the_rest_comes_with_the_next(
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    worker = Worker(http, queue)
    text = "x" * 1_000_000
    ids = [put(ledger, queue, payload=b'{"args":["%s"]}' % text.encode()) for _ in range(12)]
    first, rest = turn(worker, claim=100)["jobs"], turn(worker, claim=100)["jobs"]
    assert (len(first), len(rest)) == (8, 4)
    assert [job["job_id"] for job in [*first, *rest]] == ids
    # Both answers were lost.
    again = turn(worker, claim=100, have=[])["jobs"]
    assert len(again) == 8
    more = turn(worker, claim=100, have=[job["token"] for job in again])["jobs"]
    assert sorted(job["job_id"] for job in [*again, *more]) == ids


def test_what_is_no_longer_its_own_is_told_and_keeps_nothing_else_back(
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    worker = Worker(http, queue)
    for _ in range(2):
        put(ledger, queue)
    jobs = turn(worker, claim=2)["jobs"]
    number = put(ledger, queue)
    strange = {**done(jobs[0]), "token": jobs[0]["token"] + 1_000_000}
    said = turn(worker, claim=1, settle=[strange, done(jobs[1])])
    assert [result["status"] for result in said["results"]] == ["superseded", "succeeded"]
    assert [job["job_id"] for job in said["jobs"]] == [number]
    assert state(ledger, jobs[0]["job_id"]) is JobState.RUNNING


def test_failures_and_all_other_outcomes_follow_their_rules(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    put(ledger, queue, Policy(retry=RetryRule(max_attempts=2, delay_s=3600)))
    put(ledger, queue)
    first, second = turn(worker, claim=2)["jobs"]
    number = put(ledger, queue)
    settle = [
        {**key(first), "outcome": "failed", "error": {"type": "OSError", "message": "disk"}},
        done(second, stdout="said"),
    ]
    said = turn(worker, claim=1, settle=settle)
    assert [result["status"] for result in said["results"]] == ["retrying", "succeeded"]
    assert [job["job_id"] for job in said["jobs"]] == [number]
    assert ledger.jobs.outputs(second["job_id"])[0].stdout == b"said"


def test_a_result_that_cannot_be_stored_fails_alone(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    for _ in range(2):
        put(ledger, queue)
    first, second = turn(worker, claim=2)["jobs"]
    said = turn(worker, settle=[done(first, result="x" * 30_000), done(second)])
    assert [result["status"] for result in said["results"]] == ["failed", "succeeded"]
    assert said["jobs"] == []


def test_it_waits_for_a_job_if_asked_to(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turn, worker, claim=1, wait=30)
        number = put(ledger, queue)
        assert [job["job_id"] for job in waiting.result()["jobs"]] == [number]


def test_a_worker_that_drains_settles_and_gets_nothing(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    for _ in range(2):
        put(ledger, queue)
    [job] = turn(worker, claim=1)["jobs"]
    assert worker.call("drain").status_code == 200
    wait_for(lambda: turn(worker)["drain"], "the order to drain")
    said = turn(worker, claim=1, settle=[done(job)])
    assert (said["results"][0]["status"], said["jobs"], said["drain"]) == ("succeeded", [], True)


def test_a_dead_worker_is_told_what_happened_and_gets_nothing(
    http: httpx.Client, ledger: Ledger, backdoor: Backdoor, queue: str
) -> None:
    worker = Worker(http, queue)
    put(ledger, queue)
    [job] = turn(worker, claim=1)["jobs"]
    other = put(ledger, queue)
    fall_silent(ledger, backdoor, worker.id)
    refused = worker.call("turn", claim=1, settle=[done(job)])
    assert (refused.status_code, refused.json()["code"]) == (409, "worker_gone")
    assert state(ledger, other) is JobState.PENDING


def test_what_is_wrong_with_a_turn_is_said(http: httpx.Client, queue: str) -> None:
    worker = Worker(http, queue)
    for wrong in ({"claim": -1}, {"claim": 1001}, {"settle": [{"job_id": 1}]}, {"nonsense": 1}, {"wait": 61}):
        refused = worker.call("turn", **wrong)
        assert (refused.status_code, refused.json()["code"]) == (422, "not_valid"), wrong
    assert http.post("/api/v1/workers/nobody/turn", json={}).status_code == 404
    idle = http.post("/api/v1/workers", json={}).json()["id"]
    refused = http.post(f"/api/v1/workers/{idle}/turn", json={"claim": 1})
    assert (refused.status_code, refused.json()["code"]) == (409, "serves_nothing")


@pytest.mark.parametrize("verb", ["turn", "claim"])
def test_many_workers_at_once_run_each_job_once(http: httpx.Client, ledger: Ledger, queue: str, verb: str) -> None:
    jobs = {put(ledger, queue) for _ in range(60)}
    seen: list[int] = []
    lock = threading.Lock()

    def work(_: int) -> None:
        worker = Worker(http, queue)
        held: list[dict[str, Any]] = []
        while True:
            if verb == "turn":
                held = turn(worker, claim=2, settle=[done(job) for job in held])["jobs"]
            else:
                if held:
                    assert worker.call("settle", jobs=[done(job) for job in held]).status_code == 200
                held = worker.claim(limit=2)
                if held:
                    assert worker.call("start", jobs=[key(job) for job in held]).status_code == 200
            if not held:
                return
            with lock:
                seen.extend(job["job_id"] for job in held)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert sorted(seen) == sorted(jobs)
    assert {state(ledger, number) for number in jobs} == {JobState.SUCCEEDED}
