"""Workers over HTTP, at a real `unstuck serve`: the heartbeat, registering, and the life of a job in their hands."""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import birth
from tests.support.fleet import wait_for
from tests.support.http_server import LARGEST_OUTPUT, LARGEST_RESULT, Served, Worker, done, fall_silent, key, put, state

from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import NewWorker

# The heartbeat ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/workers/heartbeat", "/api/v1/workers/heartbeat"])
def test_the_first_beat_of_a_name_registers_it(http: httpx.Client, ledger: Ledger, path: str) -> None:
    name = f"worker-youtube-{path.count('/')}"
    metadata = {"hostname": "server-01", "pid": 12345, "version": "1.0.0", "tasks_processed": 42}
    answer = http.post(path, json={"worker_id": name, "metadata": metadata})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert {name: said[name] for name in ("success", "message", "next_heartbeat_in")} == {
        "success": True,
        "message": "Heartbeat recorded",
        "next_heartbeat_in": 30,
    }
    assert '"next_heartbeat_in":30,' in answer.text
    worker = ledger.workers.find_remote(name)
    assert worker is not None
    assert (worker.id, worker.host, worker.version) == (said["id"], "server-01", "1.0.0")
    assert (worker.metadata, worker.suspect_after_s, worker.heartbeat_interval_s) == (metadata, 300, 30)
    again = http.post(path, json={"worker_id": name, "metadata": {**metadata, "tasks_processed": 43}}).json()
    assert (again["id"], again["declared_dead"]) == (said["id"], None)
    seen = ledger.workers.find_remote(name)
    assert seen is not None
    assert seen.metadata["tasks_processed"] == 43


@pytest.mark.parametrize("path", ["/api/workers/heartbeat", "/api/v1/workers/heartbeat"])
def test_later_beats_are_answered_as_the_first_and_bring_news_and_orders(
    http: httpx.Client, ledger: Ledger, path: str
) -> None:
    name = f"steady-{path.count('/')}"
    first = http.post(path, json={"worker_id": name, "metadata": {"n": 1}})
    second = http.post(path, json={"worker_id": name, "metadata": {"n": 2}})
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.json() == first.json()
    assert second.headers["content-type"] == first.headers["content-type"]
    worker_id = first.json()["id"]
    record = ledger.workers.remote(worker_id)
    assert record is not None
    assert record.metadata["n"] == 2
    ledger.workers.disable(worker_id, "sick", "ops")
    assert http.post(path, json={"worker_id": name}).json()["disabled"] is True
    # What is wrong is said as before, also to one that is known.
    wrong = http.post(path, json={"worker_id": name, "metadata": {"n": "x" * 20_000}})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "not_valid")


@pytest.mark.parametrize("quick", [False, True])
def test_a_beat_without_metadata_keeps_the_last(http: httpx.Client, ledger: Ledger, quick: bool) -> None:
    name, path = f"terse-{quick}", "/api/workers/heartbeat"
    told = {"hostname": "server-01", "n": 1}
    worker_id = http.post(path, json={"worker_id": name, "metadata": told}).json()["id"]

    def metadata() -> dict[str, Any]:
        record = ledger.workers.remote(worker_id)
        assert record is not None
        return record.metadata

    # What is not plain goes the long way: both must keep it.
    silent = [{"worker_id": name}] if quick else [{"worker_id": name, "metadata": None}, {"worker_id": name, "x": 1}]
    for body in silent:
        assert http.post(path, json=body).status_code == 200
        assert http.post(f"/api/v1/workers/{worker_id}/beat", json={}).status_code == 200
        assert metadata() == told
    assert http.post(path, json={"worker_id": name, "metadata": {}}).status_code == 200
    assert metadata() == {}


def test_a_new_life_without_metadata_keeps_those_of_the_last(
    http: httpx.Client, ledger: Ledger, backdoor: Backdoor, queue: str
) -> None:
    told = {"hostname": "server-02", "n": 2}
    fall_silent(ledger, backdoor, Worker(http, queue, name=queue, metadata=told).id)
    said = http.post("/api/workers/heartbeat", json={"worker_id": queue}).json()
    assert said["declared_dead"] is not None
    record = ledger.workers.find_remote(queue)
    assert record is not None
    assert (record.metadata, record.host) == (told, "server-02")


def test_the_name_of_a_living_python_worker_is_taken(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    ledger.workers.register(python_worker(f"py{abs(hash(queue)) % 10**9}", queue))
    for more in ({}, {"replace": True}, {"instance": "a"}):
        refused = http.post("/api/v1/workers", json={"name": queue, **more})
        assert (refused.status_code, refused.json()["code"]) == (409, "name_taken")
    refused = http.post("/api/workers/heartbeat", json={"worker_id": queue})
    assert (refused.status_code, refused.json()["code"]) == (409, "name_taken")
    assert "Python" in refused.json()["detail"]
    assert ledger.workers.find_remote(queue) is None
    ledger.workers.stop(f"py{abs(hash(queue)) % 10**9}")
    assert http.post("/api/v1/workers", json={"name": queue}).status_code == 201


def python_worker(worker_id: str, name: str) -> NewWorker:
    return birth(
        worker_id,
        name=name,
        queues=("of-python",),
        tasks=(),
        concurrency=1,
        version="0.1.0",
        heartbeat_interval_s=5,
        suspect_after_s=300,
        running_stale_after_s=300,
    )


def test_workers_are_listed_in_pages(http: httpx.Client, queue: str) -> None:
    mine = {http.post("/api/v1/workers", json={"name": f"{queue}-{number}"}).json()["id"] for number in range(3)}
    seen: list[str] = []
    path: str | None = "/api/v1/workers?limit=2&state=active"
    while path is not None:
        page = http.get(path)
        assert page.status_code == 200, page.text
        assert len(page.json()) <= 2
        seen += [worker["id"] for worker in page.json()]
        path = page.links["next"]["url"] if "next" in page.links else None
    assert mine <= set(seen)
    assert len(seen) == len(set(seen)) == len(http.get("/api/v1/workers?state=active").json())
    for wrong in ("limit=0", "limit=1001", "after=nobody"):
        assert http.get(f"/api/v1/workers?{wrong}").status_code in (404, 422)


def test_an_unknown_kind_of_event_is_refused(http: httpx.Client) -> None:
    refused = http.get("/api/v1/events?kind=worker_dead,worker_died")
    assert (refused.status_code, refused.json()["code"]) == (422, "not_valid")
    assert "worker_died" in refused.json()["detail"]
    assert "worker_dead" in refused.json()["detail"]
    assert "Did you mean 'worker_dead'?" in refused.json()["detail"]
    assert http.get("/api/v1/events?job=1&kind=nonsense").status_code in (404, 422)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("events?kinds=worker_dead", "kind"),
        ("jobs?stat=failed", "state"),
        ("workers?limitt=1", "limit"),
        ("queues?x=1", ""),
    ],
)
def test_an_unknown_parameter_of_a_query_is_refused(http: httpx.Client, path: str, meant: str) -> None:
    refused = http.get(f"/api/v1/{path}")
    assert (refused.status_code, refused.json()["code"]) == (422, "not_valid")
    assert not meant or f"Did you mean '{meant}'?" in refused.json()["detail"]


def test_a_beat_after_death_opens_a_new_life_and_never_revives_the_old(
    http: httpx.Client, ledger: Ledger, backdoor: Backdoor, queue: str
) -> None:
    lease = {"heartbeat_interval": 20, "heartbeat_timeout": 240}
    worker = Worker(http, queue, name=f"phoenix-{queue}", concurrency=3, **lease)
    put(ledger, queue)
    [job] = worker.claim(start=True)
    fall_silent(ledger, backdoor, worker.id)
    said = http.post("/api/workers/heartbeat", json={"worker_id": f"phoenix-{queue}"}).json()
    assert said["id"] != worker.id
    assert said["declared_dead"]["id"] == worker.id
    assert (said["declared_dead"]["detector"], said["success"]) == ("lease", True)
    assert "no heartbeat for" in said["declared_dead"]["evidence"]
    old, new = ledger.workers.remote(worker.id), ledger.workers.remote(said["id"])
    assert old is not None
    assert new is not None
    assert (old.state, new.state) == (WorkerState.DEAD, WorkerState.ACTIVE)
    assert (new.queues, new.tasks, new.concurrency) == ((queue,), ("resize",), 3)
    assert new.suspect_after_s == lease["heartbeat_timeout"]
    assert worker.call("settle", jobs=[done(job)]).status_code == 409
    # A beat by the old id comes to the new life too.
    assert http.post("/api/workers/heartbeat", json={"worker_id": worker.id}).json()["id"] == said["id"]


def test_a_beat_after_an_orderly_end_opens_a_new_life_too(http: httpx.Client, queue: str) -> None:
    worker = Worker(http, queue, name=f"back-{queue}")
    assert worker.call("shutdown").json()["state"] == "stopped"
    said = http.post("/api/workers/heartbeat", json={"worker_id": f"back-{queue}"}).json()
    assert said["id"] != worker.id
    assert said["declared_dead"]["state"] == "stopped"


def test_the_answer_says_what_is_asked_of_it(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    job_id = put(ledger, queue)
    [job] = worker.claim(start=True)
    ledger.jobs.cancel([job_id], "me")
    ledger.workers.request(worker.id, "stop", "me")
    said = worker.call("beat", jobs=[key(job)]).json()
    assert (said["stop"], said["drain"], said["cancel"]) == (True, False, [key(job)])
    assert worker.claim() == []
    assert worker.call("settle", jobs=[{**key(job), "outcome": "cancelled"}]).status_code == 200
    assert state(ledger, job_id) is JobState.CANCELLED


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"worker_id": ""},
        {"worker_id": "a\x00b"},
        {"worker_id": "a", "metadata": "x"},
        {"worker_id": "a b"},
        {"worker_id": "a", "metadata": {"x": "y" * 20000}},
        {"worker_id": "a", "metadata": {"x": "\x00"}},
    ],
)
def test_a_malformed_heartbeat_is_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post("/api/workers/heartbeat", json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


# Lists ------------------------------------------------------------------------------------------


def test_workers_are_listed_by_state_also_in_other_words(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    living, stopped = Worker(http, queue), Worker(http, queue)
    stopped.call("shutdown")

    def ids(path: str) -> set[str]:
        answer = http.get(path)
        assert answer.status_code == 200, answer.text
        return {worker["id"] for worker in answer.json()}

    assert living.id in ids("/api/workers?state=active")
    assert stopped.id not in ids("/api/v1/workers?state=active")
    assert stopped.id in ids("/api/workers?state=inactive")
    assert ids("/api/v1/workers?state=stale,inactive") >= {stopped.id}
    assert ids("/api/v1/workers") >= {living.id, stopped.id}
    assert http.get("/api/v1/workers?state=asleep").status_code == 422
    one = http.get(f"/api/v1/workers/{living.id}").json()
    assert (one["door"], one["pid"], one["tasks"]) == ("http", None, ["resize"])
    assert http.get("/api/v1/workers/nobody").status_code == 404


# Registering ------------------------------------------------------------------------------------


def test_a_registration_is_repeated_safely_and_a_name_is_taken_once(http: httpx.Client, queue: str) -> None:
    name = f"one-{queue}"
    first = Worker(http, queue, name=name, instance="i-1")
    assert Worker(http, queue, name=name, instance="i-1").id == first.id
    taken = http.post("/api/v1/workers", json={"name": name})
    assert (taken.status_code, taken.json()["code"], taken.json()["id"]) == (409, "name_taken", first.id)


def test_a_worker_started_anew_takes_its_own_place_and_its_jobs_are_settled_at_once(
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    first = Worker(http, queue, name=f"pod-{queue}")
    claimed = put(ledger, queue)
    first.claim()
    second = Worker(http, queue, name=f"pod-{queue}", replace=True)
    assert second.id != first.id
    assert state(ledger, claimed) is JobState.PENDING
    assert ledger.workers.remote(first.id).state is WorkerState.DEAD  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body",
    [
        {"heartbeat_interval": 40, "heartbeat_timeout": 60},
        {"heartbeat_timeout": "10m"},
        {"heartbeat_timeout": 0.1},
        {"tasks": [{"name": "t", "on_crash": "maybe"}]},
        {"tasks": [{"name": "t", "memory": 1}]},
        {"queues": ["a b"]},
        {"concurrency": 0},
    ],
)
def test_an_unsafe_registration_is_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/api/v1/workers", json=body).status_code == 422


def test_its_tasks_can_be_enqueued_by_others_with_its_rules(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    name = f"task-{queue}"
    rules = {"on_crash": "retry", "max_crash_retries": 1, "timeout": "5m", "retry": {"max_attempts": 2, "delay": 3}}
    Worker(http, queue, tasks=[{"name": name, "queue": f"{queue}-2", **rules}])
    task = next(task for task in ledger.queues.tasks() if task.name == name)
    policy = Policy(RetryRule(2, "exponential", 3.0, 600.0), "retry", 1, 300.0)
    assert (task.queue, task.policy) == (f"{queue}-2", encode_policy(policy))
    # A bare name changes nothing of that.
    Worker(http, queue, tasks=[name])
    assert next(task for task in ledger.queues.tasks() if task.name == name).policy == encode_policy(policy)


# The life of a job ------------------------------------------------------------------------------


def test_a_job_goes_through_its_hands(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    job_id = put(ledger, queue, payload=b'{"args":["a.png"],"kwargs":{"w":3}}')
    [job] = worker.claim()
    assert (job["job_id"], job["state"], job["attempt"]) == (job_id, "claimed", 1)
    assert job["payload"] == {"args": ["a.png"], "kwargs": {"w": 3}}
    assert worker.call("settle", jobs=[done(job)]).json()["code"] == "not_started"
    assert worker.call("start", jobs=[key(job)]).json()["results"][0]["status"] == "running"
    assert worker.call("start", jobs=[key(job)]).json()["results"][0]["status"] == "already"
    said = worker.call("progress", jobs=[{**key(job), "done": 1, "total": 2, "message": "half\0way"}])
    assert said.status_code == 200
    note = ledger.jobs.progress([job_id])[job_id]
    assert (note.done, note.total, note.message) == (1, 2, "half\\x00way")
    settled = done(job, result={"ok": [1, "é"]}, stdout="hello\n", stderr="x" * 50 * LARGEST_OUTPUT)
    assert worker.call("settle", jobs=[settled]).json()["results"][0]["status"] == "succeeded"
    assert worker.call("settle", jobs=[settled]).json()["results"][0]["status"] == "already"
    record = ledger.jobs.get(job_id)
    assert record is not None
    assert (record.state, record.result) == (JobState.SUCCEEDED, '{"ok":[1,"é"]}'.encode())
    [output] = ledger.jobs.outputs(job_id)
    assert output.stdout == b"hello\n"
    assert len(output.stderr) < 2 * LARGEST_OUTPUT
    worker.call("beat")
    assert http.get(f"/api/v1/workers/{worker.id}").json()["processed"] == 1


def test_content_that_is_not_json_comes_as_base64(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    put(ledger, queue, payload=b"\0\1\2", payload_type="application/octet-stream")
    [job] = Worker(http, queue).claim()
    assert (job["payload"], job["payload_type"]) == (None, "application/octet-stream")
    assert base64.b64decode(job["payload_base64"]) == b"\0\1\2"


def test_a_failure_follows_the_rules_that_were_stored_with_the_job(
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    worker = Worker(http, queue)
    job_id = put(ledger, queue, Policy(retry=RetryRule(max_attempts=2, delay_s=0.0)))
    error = {"type": "TypeError", "message": "no\0pe", "traceback": "at x.js:1"}
    statuses = []
    for _ in range(2):
        jobs = wait_for(lambda: worker.claim(start=True, wait=5), "the job")
        body = {"jobs": [{**key(jobs[0]), "outcome": "failed", "error": error}]}
        statuses.append(worker.call("settle", **body).json()["results"][0]["status"])
        assert worker.call("settle", **body).json()["results"][0]["status"] == "already"
    assert statuses == ["retrying", "failed"]
    record = ledger.jobs.get(job_id)
    assert record is not None
    assert record.error is not None
    assert (record.state, record.failures, record.error.code) == (JobState.FAILED, 2, "TASK_FAILED")
    assert record.error.details == {"type": "TypeError", "traceback": "at x.js:1"}


def test_a_result_that_cannot_be_stored_fails_alone(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    good, bad = put(ledger, queue), put(ledger, queue)
    jobs = worker.claim(limit=2, start=True)
    answer = worker.call("settle", jobs=[done(jobs[0], result=1), done(jobs[1], result="x" * LARGEST_RESULT)])
    assert [result["status"] for result in answer.json()["results"]] == ["succeeded", "failed"]
    assert (state(ledger, good), state(ledger, bad)) == (JobState.SUCCEEDED, JobState.FAILED)


def test_what_a_worker_must_leave_undone_counts_for_nobody(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    job_id = put(ledger, queue, Policy(on_crash="retry", max_crash_retries=0))
    [job] = worker.claim(start=True)
    said = worker.call("settle", jobs=[{**key(job), "outcome": "interrupted", "error": {"message": "deploy"}}])
    assert said.json()["results"][0]["status"] == "retrying"
    record = ledger.jobs.get(job_id)
    assert record is not None
    assert (record.state, record.crash_count) == (JobState.PENDING, 0)


MEMORIES = {"beyond all": 10**400, "large": 2**70, "text": "much", "float": 1e300, "bool": True, "list": [1]}


@pytest.mark.parametrize("said", MEMORIES.values(), ids=MEMORIES.keys())
def test_whatever_a_worker_says_of_its_memory_the_page_is_shown(http: httpx.Client, queue: str, said: object) -> None:
    worker = Worker(http, queue, metadata={"memory_bytes": said})
    for path in ("/workers", f"/workers/{worker.id}", "/"):
        assert http.get(path).status_code == 200, path
    worker.call("shutdown")


def test_what_was_never_begun_goes_back_for_free(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    job_id = put(ledger, queue)
    [job] = worker.claim()
    assert worker.call("release", jobs=[key(job)]).json()["results"][0]["status"] == "released"
    assert worker.call("release", jobs=[key(job)]).json()["results"][0]["status"] == "already"
    record = ledger.jobs.get(job_id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.PENDING, 0)


def test_what_was_started_is_not_given_back_on_the_word_of_its_worker(
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    """It may have had effects, and the owner of the task said that it must not run twice."""
    worker = Worker(http, queue)
    begun, unbegun = put(ledger, queue), put(ledger, queue)
    jobs = {job["job_id"]: job for job in worker.claim(limit=2)}
    worker.call("start", jobs=[key(jobs[begun])])
    refused = worker.call("release", jobs=[key(jobs[begun])])
    assert (refused.status_code, refused.json()["code"]) == (409, "started")
    assert "interrupted" in refused.json()["detail"]
    said = worker.call("release", jobs=[key(jobs[begun]), key(jobs[unbegun])])
    assert [result["status"] for result in said.json()["results"]] == ["started", "released"]
    assert (state(ledger, begun), state(ledger, unbegun)) == (JobState.RUNNING, JobState.PENDING)
    said = worker.call("settle", jobs=[{**key(jobs[begun]), "outcome": "interrupted"}])
    assert said.json()["results"][0]["status"] == "failed"


def test_an_orderly_end_gives_back_what_was_only_claimed(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    claimed, running = put(ledger, queue), put(ledger, queue, Policy(on_crash="retry", max_crash_retries=0))
    jobs = {job["job_id"]: job for job in worker.claim(limit=2)}
    worker.call("start", jobs=[key(jobs[running])])
    said = worker.call("shutdown").json()
    assert (said["state"], said["released"], said["left_running"]) == ("stopped", 1, 1)
    record = ledger.jobs.get(claimed)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.PENDING, 0)
    wait_for(lambda: state(ledger, running) is JobState.PENDING, "the reaper")
    record = ledger.jobs.get(running)
    assert record is not None
    assert record.crash_count == 0
    assert worker.call("shutdown").json()["state"] == "stopped"
    assert worker.call("claim").json()["code"] == "worker_gone"


def test_a_draining_worker_claims_nothing_and_finishes(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    put(ledger, queue)
    put(ledger, queue)
    [job] = worker.claim(start=True)
    assert worker.call("drain").status_code == 200
    assert worker.claim(wait=0) == []
    assert worker.call("beat").json()["drain"] is True
    assert worker.call("settle", jobs=[done(job)]).status_code == 200


# Waiting ----------------------------------------------------------------------------------------


@contextmanager
def another_claim_waits(served: Served, queue: str) -> Iterator[None]:
    """Have a claim wait from before the block until its end: a claim that begins later and is answered in the block
    did not wait until its time was up."""
    worker = Worker(served.client, f"{queue}-another")
    waiting = served.passed("http.claim_waiting")
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(worker.call, "claim", wait=50)
        try:
            served.wait_passed("http.claim_waiting", waiting + 1)
            yield
            assert not claim.done()
        finally:
            served.client.post(f"/api/v1/workers/{worker.id}/drain")


def test_whoever_waits_is_woken_by_the_bell(
    open_door: tuple[Served, Ledger], http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    """Ten workers wait and ten jobs come: each gets one before its claim times out."""
    served = open_door[0]
    workers = [Worker(http, queue) for _ in range(10)]
    got: list[list[dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda w=w: got.append(w.claim(wait=50))) for w in workers]
    with another_claim_waits(served, queue):
        waiting = served.passed("http.claim_waiting")
        for thread in threads:
            thread.start()
        served.wait_passed("http.claim_waiting", waiting + len(workers))
        for _ in range(10):
            put(ledger, queue)
        for thread in threads:
            thread.join()
    assert sorted(len(jobs) for jobs in got) == [1] * 10
    assert len({jobs[0]["job_id"] for jobs in got}) == 10


def test_whoever_waits_hears_at_once_that_it_shall_go(
    open_door: tuple[Served, Ledger], http: httpx.Client, queue: str
) -> None:
    served = open_door[0]
    worker = Worker(http, queue)
    said: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: said.append(worker.call("claim", wait=50)))
    with another_claim_waits(served, queue):
        waiting = served.passed("http.claim_waiting")
        thread.start()
        served.wait_passed("http.claim_waiting", waiting + 1)
        http.post(f"/api/v1/workers/{worker.id}/drain")
        thread.join()
    assert (said[0].json()["drain"], said[0].json()["jobs"]) == (True, [])


def test_a_worker_that_waits_hears_a_request_whose_wake_up_was_lost(
    open_door: tuple[Served, Ledger], http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    served = open_door[0]
    worker = Worker(http, queue, heartbeat_interval=0.2)
    said: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: said.append(worker.call("claim", wait=50)))
    with another_claim_waits(served, queue):
        waiting = served.passed("http.claim_waiting")
        thread.start()
        served.wait_passed("http.claim_waiting", waiting + 1)
        # Written without a wake-up. Its next heartbeat brings it, and while it waits the server sends that for it.
        ledger.workers.drain(worker.id)
        thread.join()
    assert (said[0].json()["drain"], said[0].json()["jobs"]) == (True, [])


def test_a_client_that_went_away_takes_no_job_along(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"/api/v1/workers/{worker.id}/claim", json={"wait": 60}, timeout=0.5)
    job_id = put(ledger, queue)
    # Whoever comes next has it at once, and the lease of the first one is five minutes.
    [job] = Worker(http, queue).claim(wait=50)
    assert job["job_id"] == job_id


def test_what_was_lost_with_an_answer_is_handed_out_again(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    first, second = put(ledger, queue), put(ledger, queue)
    [known] = worker.claim(have=[])
    [lost] = worker.claim(have=[known["token"]])
    [again] = worker.claim(have=[known["token"]])
    assert (known["job_id"], lost["job_id"]) == (first, second)
    assert (again["job_id"], again["token"], again["again"]) == (second, lost["token"], True)
    assert again["payload"] == lost["payload"]
    assert worker.call("beat", jobs=[key(known)]).json()["unknown"] == [key(lost)]


def test_a_worker_that_knows_of_no_job_is_told_what_it_holds(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    """Its only claim was lost with the answer: unless it hears of it, the job is stuck for as long as it lives."""
    worker = Worker(http, queue)
    put(ledger, queue)
    [lost] = worker.claim()
    assert worker.call("beat", jobs=[]).json()["unknown"] == [key(lost)]
    assert worker.call("beat").json()["unknown"] == []


def test_a_claim_says_when_a_job_wants_the_next_beat(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    assert worker.call("claim").json()["next_heartbeat_in"] == 30
    put(ledger, queue, Policy(heartbeat_timeout_s=6.0))
    assert worker.call("claim").json()["next_heartbeat_in"] == 2


# The fence --------------------------------------------------------------------------------------


def test_a_write_that_comes_too_late_is_told_what_happened(
    http: httpx.Client, ledger: Ledger, backdoor: Backdoor, queue: str
) -> None:
    late = Worker(http, queue, name=f"late-{queue}")
    job_id = put(ledger, queue, Policy(on_crash="retry"))
    [job] = late.claim(start=True)
    fall_silent(ledger, backdoor, late.id)
    other = Worker(http, queue, name=f"other-{queue}")
    [taken] = other.claim(wait=50, start=True)
    assert taken["job_id"] == job_id
    answer = late.call("settle", jobs=[done(job)])
    said = answer.json()
    assert (answer.status_code, said["code"]) == (409, "superseded")
    assert answer.headers["content-type"] == "application/problem+json"
    assert f"Worker late-{queue} ({late.id}) was declared dead at " in said["detail"]
    assert "no heartbeat for" in said["detail"]
    happened = f"job {job_id} was requeued and runs at worker other-{queue} ({other.id}) as token {taken['token']}"
    assert happened in said["detail"]
    [result] = said["results"]
    assert result["job"] == {
        "state": "running",
        "token": taken["token"],
        "worker": other.id,
        "attempt": 2,
        "error": "WORKER_CRASHED",
        "finished_at": None,
    }
    assert result["worker"]["detector"] == "lease"
    for verb in ("start", "progress"):
        assert late.call(verb, jobs=[key(job)]).status_code == 409
    beat = late.call("beat", jobs=[key(job)])
    assert (beat.status_code, beat.json()["code"]) == (409, "worker_gone")
    assert other.call("settle", jobs=[done(taken, result=2)]).status_code == 200
    record = ledger.jobs.get(job_id)
    assert record is not None
    assert record.result == b"2"


def test_of_a_batch_each_job_is_answered_for_itself(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker, other = Worker(http, queue), Worker(http, queue)
    put(ledger, queue)
    put(ledger, queue)
    [mine] = worker.claim(start=True)
    [theirs] = other.claim(start=True)
    answer = worker.call("settle", jobs=[done(mine), done(theirs)])
    assert answer.status_code == 200
    assert [result["ok"] for result in answer.json()["results"]] == [True, False]
    [lost] = worker.call("beat", jobs=[key(theirs)]).json()["lost"]
    assert lost["token"] == theirs["token"]
    assert other.call("settle", jobs=[done(theirs)]).status_code == 200


def test_a_settlement_repeated_after_its_worker_died_is_still_done(
    http: httpx.Client, ledger: Ledger, backdoor: Backdoor, queue: str
) -> None:
    worker = Worker(http, queue)
    put(ledger, queue)
    [job] = worker.claim(start=True)
    assert worker.call("settle", jobs=[done(job)]).status_code == 200
    fall_silent(ledger, backdoor, worker.id)
    assert worker.call("settle", jobs=[done(job)]).json()["results"][0]["status"] == "already"
    assert worker.call("settle", jobs=[{**key(job), "outcome": "failed"}]).status_code == 409


def test_nobody_speaks_for_a_python_worker(http: httpx.Client, ledger: Ledger) -> None:
    ledger.workers.register(birth("py1", suspect_after_s=600, running_stale_after_s=600))
    for verb in ("beat", "claim", "shutdown"):
        assert http.post(f"/api/v1/workers/py1/{verb}", json={}).status_code == 404


def test_a_foreign_worker_is_looked_after_by_doctor_and_stale(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue, metadata={"hostname": "far", "health": {"weight": 99}, "settings": {"notify": False}})
    put(ledger, queue)
    [job] = worker.claim(start=True)
    operator = Operator(ledger, Settings(), by="test")
    assert [finding for finding in operator.doctor() if worker.id in str(finding)] == []
    assert f"({worker.id}) on far" in str(operator.why(job["job_id"]))
    assert all(item.worker != worker.id for item in operator.stale.list(0.0))
