"""Jobs of several steps in the hands of workers over HTTP: the journal, sleeps and signals."""

import secrets
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.backdoor import Backdoor, backdoor_of
from tests.support.fleet import wait_for
from tests.support.http_server import (
    DATABASES,
    SecuredServer,
    Worker,
    done,
    empty_database,
    fall_silent,
    guarded_door,
    key,
    make_token,
    put,
    serve,
    serving,
    state,
)
from tests.support.postgres import start_postgres

from unstuck.config import Settings
from unstuck.domain.api_tokens import Scope
from unstuck.domain.endings import Release
from unstuck.domain.policy import Policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import Turn
from unstuck.ledger.open import ready_ledger


def steps(worker: Worker, *items: dict[str, Any]) -> list[str]:
    answer = worker.call("steps", jobs=list(items))
    assert answer.status_code in (200, 409), answer.text
    return [result["status"] for result in answer.json()["results"]]


def test_what_a_dead_worker_wrote_down_comes_to_the_next(
    http: httpx.Client, ledger: Ledger, backdoor: Backdoor, queue: str
) -> None:
    first = Worker(http, queue)
    job_id = put(ledger, queue, Policy(on_crash="retry"))
    (job,) = first.claim(start=True)
    assert (job["journal"], job["signals"]) == ([], [])
    one = {**key(job), "seq": 1, "name": "charge", "value": {"paid": 3}}
    assert steps(first, one, {**key(job), "seq": 0, "value": "half way"}) == ["written", "written"]
    assert steps(first, one) == ["already"]
    assert steps(first, {**one, "name": "refund"}) == ["step_mismatch"]
    fall_silent(ledger, backdoor, first.id)
    wait_for(lambda: state(ledger, job_id) is JobState.PENDING, "its job to be given back")
    second = Worker(http, queue)
    (again,) = wait_for(lambda: second.claim(start=True), "the job to be due again")
    assert [(line["kind"], line["name"], line["value"]) for line in again["journal"]] == [
        ("checkpoint", "checkpoint", "half way"),
        ("step", "charge", {"paid": 3}),
    ]
    # The zombie is refused, and told.
    late = first.call("steps", jobs=[{**key(job), "seq": 2, "name": "late", "value": 1}])
    assert late.status_code == 409
    assert [one.name for one in ledger.jobs.journal(job_id)] == ["checkpoint", "charge"]


def test_sleeping_and_waiting_for_a_signal(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue)
    job_id = put(ledger, queue)
    (job,) = worker.claim(start=True)
    asleep = {**key(job), "outcome": "suspended", "pause": {"seq": 1, "sleep": "100ms"}}
    results = worker.call("settle", jobs=[asleep]).json()["results"]
    assert (results[0]["status"], results[0]["detail"]) == ("waiting", "Sleeps for 100ms")
    assert worker.call("settle", jobs=[asleep]).json()["results"][0]["status"] == "already"
    (job,) = worker.claim(start=True, wait=30)
    assert [line["kind"] for line in job["journal"]] == ["sleep"]
    assert job["journal"][0]["age_s"] >= 0.1

    waits = {**key(job), "outcome": "suspended", "pause": {"seq": 2, "signal": "approved", "timeout": "1h"}}
    assert worker.call("settle", jobs=[waits]).json()["results"][0]["status"] == "waiting"
    shown = http.get(f"/api/v1/jobs/{job_id}").json()
    assert (shown["state"], shown["awaits"]) == ("waiting", "approved")
    assert "unstuck signal" in shown["waiting"]
    assert [one["id"] for one in http.get("/api/v1/jobs", params={"state": "waiting"}).json()["jobs"]] == [job_id]
    assert http.get(f"/api/v1/jobs/{job_id}/result").json()["state"] == "waiting"
    sent = http.post(f"/api/v1/jobs/{job_id}/signals", json={"name": "approved", "value": {"by": "ada"}})
    assert sent.json() == {"id": job_id, "name": "approved", "answer": "woken"}
    (job,) = worker.claim(start=True, wait=30)
    assert job["signals"] == [{"number": 1, "name": "approved", "value": {"by": "ada"}}]
    take = {**key(job), "seq": 2, "signal": 1}
    assert steps(worker, take) == ["written"]
    assert steps(worker, take) == ["already"]
    assert steps(worker, {**take, "seq": 3}) == ["taken"]
    assert steps(worker, {**take, "signal": 9}) == ["no_such_signal"]

    ended = {**key(job), "outcome": "succeeded", "result": 1}
    assert worker.call("settle", jobs=[ended]).json()["results"][0]["status"] == "succeeded"
    assert worker.call("settle", jobs=[ended]).json()["results"][0]["status"] == "already"
    over = http.post(f"/api/v1/jobs/{job_id}/signals", json={"name": "approved"})
    assert (over.status_code, over.json()["code"]) == (409, "signal_refused")


@pytest.mark.parametrize(
    "pause", [None, {"seq": 1}, {"seq": 1, "sleep": 1, "signal": "x"}, {"seq": 1, "sleep": "long"}], ids=str
)
def test_a_pause_that_says_not_what_it_waits_for_is_refused(
    http: httpx.Client, ledger: Ledger, queue: str, pause: Any
) -> None:
    worker = Worker(http, queue)
    put(ledger, queue)
    (job,) = worker.claim(start=True)
    answer = worker.call("settle", jobs=[{**key(job), "outcome": "suspended", "pause": pause}])
    assert answer.status_code == 409
    assert answer.json()["code"] == "not_valid"


@pytest.fixture(params=DATABASES, scope="module")
def guarded(request: pytest.FixtureRequest) -> Iterator[SecuredServer]:
    with empty_database(request) as url, guarded_door(url, UNSTUCK_CHECK_INTERVAL="0.1") as guarded:
        yield guarded


class Hand:
    """Somebody with a token of their own, for workers alone."""

    def __init__(self, guarded: SecuredServer) -> None:
        self.guarded = guarded
        self.token = make_token(guarded.ledger_url, Scope.WORKER)[1]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.guarded.ask("POST", f"/api{path}", self.token, json=body)

    def heartbeat(self, name: str) -> httpx.Response:
        return self.post("/workers/heartbeat", {"worker_id": name})


def test_a_token_writes_only_what_its_own_workers_hold(guarded: SecuredServer) -> None:
    mine, other = Hand(guarded), Hand(guarded)
    born = mine.post("/v1/workers", {"name": "owned", "queues": ["owned"], "tasks": ["resize"]}).json()
    enqueued = guarded.ask("POST", "/api/v1/jobs", guarded.all, json={"task": "resize", "queue": "owned"})
    assert enqueued.status_code == 201
    [job] = mine.post(f"/v1/workers/{born['id']}/claim", {"start": True}).json()["jobs"]
    for verb, body in (
        ("beat", {}),
        ("claim", {}),
        ("start", {"jobs": [key(job)]}),
        ("progress", {"jobs": [key(job)]}),
        ("settle", {"jobs": [done(job)]}),
        ("release", {"jobs": [key(job)]}),
        ("drain", {}),
        ("shutdown", {}),
    ):
        answer = other.post(f"/v1/workers/{born['id']}/{verb}", body)
        assert (verb, answer.status_code, answer.json()["code"]) == (verb, 403, "not_your_worker")
    assert other.heartbeat("owned").status_code == 403
    assert other.post("/v1/workers", {"name": "owned", "replace": True}).status_code == 403
    # Not through a worker of its own either: the token of the attempt is not enough.
    own = other.post("/v1/workers", {"queues": ["owned"], "tasks": ["resize"]}).json()
    assert other.post(f"/v1/workers/{own['id']}/settle", {"jobs": [done(job)]}).status_code == 409
    assert mine.post(f"/v1/workers/{born['id']}/settle", {"jobs": [done(job)]}).status_code == 200


def test_a_token_for_workers_does_not_change_the_rules_of_tasks_that_others_have_at_work(
    guarded: SecuredServer,
) -> None:
    mine, other = Hand(guarded), Hand(guarded)
    careful = {"name": "pay", "queue": "money", "on_crash": "fail"}
    loose = {"name": "pay", "queue": "money", "on_crash": "retry", "max_crash_retries": 1000}
    assert mine.post("/v1/workers", {"name": "till", "tasks": [careful]}).status_code == 201

    def rules() -> str:
        body = {"task": "pay", "unique_key": "one"}
        job = guarded.ask("POST", "/api/v1/jobs", guarded.all, json=body).json()["id"]
        said: str = guarded.ask("GET", f"/api/v1/jobs/{job}", guarded.all).json()["policy"]["on_crash"]
        guarded.ask("POST", f"/api/v1/jobs/{job}/cancel", guarded.all)
        return said

    refused = other.post("/v1/workers", {"name": "thief", "tasks": [loose]})
    assert (refused.status_code, refused.json()["code"]) == (409, "task_of_others")
    assert "till" in refused.json()["detail"]
    assert rules() == "fail"
    # As it is, anybody may serve it; its own people and operators may change it.
    assert other.post("/v1/workers", {"name": "till-2", "tasks": ["pay"]}).status_code == 201
    assert other.post("/v1/workers", {"name": "till-3", "tasks": [careful]}).status_code == 201
    both = make_token(guarded.ledger_url, Scope.WORKER, Scope.OPERATE)[1]
    body = {"name": "head", "tasks": [loose]}
    assert guarded.ask("POST", "/api/v1/workers", both, json=body).status_code == 201
    assert rules() == "retry"


def test_a_task_that_only_ones_own_workers_have_is_ones_own_to_change(guarded: SecuredServer) -> None:
    hand = Hand(guarded)
    for number, timeout in enumerate(("10m", "20m")):
        task = {"name": "own", "queue": "own", "timeout": timeout}
        assert hand.post("/v1/workers", {"name": f"own-{number}", "tasks": [task]}).status_code == 201


def test_a_name_is_free_for_another_token_when_its_worker_is_dead(guarded: SecuredServer) -> None:
    """Else whoever gets a new token could never beat under its old name again."""
    before, after = Hand(guarded), Hand(guarded)
    first = before.post("/v1/workers", {"name": "rotated"}).json()
    assert before.heartbeat("rotated").json()["id"] == first["id"]
    assert after.heartbeat("rotated").status_code == 403
    with closing(ready_ledger(Settings(url=guarded.ledger_url))) as ledger:
        fall_silent(ledger, backdoor_of(guarded.ledger_url), first["id"])
    said = after.heartbeat("rotated").json()
    assert said["id"] != first["id"]
    # What the other was is nobody else's business: it is another worker of that name.
    assert (said["declared_dead"], said["next_heartbeat_in"]) == (None, 30)
    assert before.heartbeat("rotated").status_code == 403


def test_a_token_for_workers_does_not_fill_the_ledger_with_tasks(guarded: SecuredServer) -> None:
    hand = Hand(guarded)

    def register(number: int) -> httpx.Response:
        tasks = [f"task{number}.{n}" for n in range(1_000)]
        return hand.post("/v1/workers", {"name": f"flood{number}", "queues": ["flood"], "tasks": tasks})

    answers = [register(number) for number in range(11)]
    full = next(answer for answer in answers if answer.status_code != 201)
    assert (full.status_code, full.json()["code"]) == (409, "too_many_tasks")
    assert answers.index(full) >= 9
    # What is known is still served, and enqueued.
    assert hand.post("/v1/workers", {"name": "late", "queues": ["flood"], "tasks": ["task0.7"]}).status_code == 201
    assert guarded.ask("POST", "/api/v1/jobs", guarded.all, json={"task": "task0.7"}).status_code == 201


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("ready_pg_url"))


def test_jobs_of_foreign_workers_are_counted(url: str) -> None:
    def shows(client: httpx.Client, line: str) -> bool:
        return f"{line}\n" in client.get("/metrics").text

    env = {"UNSTUCK_HEARTBEAT_INTERVAL": "0.1s", "UNSTUCK_CHECK_INTERVAL": "0.1s"}
    with serving(url, env=env) as client:
        ledger = ready_ledger(Settings(url=url))
        try:
            for _ in range(3):
                put(ledger, "pictures")
            put(ledger, "pictures", Policy(retry=RetryRule(max_attempts=2)))
        finally:
            ledger.close()
        worker = Worker(client, "pictures")
        first, second, third, again = worker.claim(limit=4, start=True)
        settled = [{**key(job), "outcome": "succeeded"} for job in (first, second)]
        failed = {"outcome": "failed", "error": {"type": "IOError", "message": "no such file"}}
        answer = worker.call("settle", jobs=[*settled, {**key(third), **failed}, {**key(again), **failed}])
        assert answer.status_code == 200, answer.text
        lost = {"job_id": first["job_id"], "token": first["token"] + 1000}
        step = {"seq": 1, "name": "charge", "value": 1}
        for verb, more in (("settle", {"outcome": "succeeded"}), ("start", {}), ("progress", {}), ("steps", step)):
            assert worker.call(verb, jobs=[{**lost, **more}]).status_code == 409
        # One that was handed out here, and that the ledger took back since.
        with closing(ready_ledger(Settings(url=url))) as ledger:
            put(ledger, "pictures")
            [taken] = worker.claim(limit=1)
            ledger.workers.turn(Turn(worker.id, release=(Release(taken["job_id"], taken["token"]),)))
        assert worker.call("settle", jobs=[{**key(taken), "outcome": "succeeded"}]).status_code == 409
        for line in (
            'unstuck_jobs_ended_total{queue="pictures",state="succeeded"} 2',
            'unstuck_jobs_ended_total{queue="pictures",state="failed"} 1',
            'unstuck_job_retries_total{code="TASK_FAILED",queue="pictures"} 1',
            'unstuck_job_wait_seconds_count{queue="pictures",task="resize"} 5',
            'unstuck_job_run_seconds_count{queue="pictures",task="resize"} 4',
            "unstuck_superseded_writes_total 5",
        ):
            wait_for(lambda line=line: shows(client, line), line)  # type: ignore[misc]


def test_a_ledger_that_is_away_is_a_problem_for_a_moment() -> None:
    token = secrets.token_urlsafe(32)
    with start_postgres() as server:
        url = server.new_ledger()
        # A token that is not in the ledger: else nobody would come as far as the handlers.
        bearer = {"Authorization": f"Bearer {token}"}
        with serve(url, env={"UNSTUCK_HTTP_TOKEN": token}, headers=bearer) as served:
            http = served.client
            named = {"name": "one", "queues": ["q"], "tasks": ["resize"]}
            worker = http.post("/api/v1/workers", json=named).json()["id"]
            beat = {"worker_id": "one", "metadata": {"version": "1"}}
            assert http.post("/api/workers/heartbeat", json=beat).status_code == 200
            server.stop(signal.SIGQUIT)
            beat["metadata"] = {"version": "2"}
            fence = {"job_id": 1, "token": 1}
            for path, body in (
                ("/api/workers/heartbeat", beat),
                ("/api/workers/heartbeat", {"worker_id": "two"}),
                ("/api/v1/workers", {"name": "two"}),
                (f"/api/v1/workers/{worker}/beat", {"jobs": []}),
                (f"/api/v1/workers/{worker}/claim", {"wait": 5}),
                (f"/api/v1/workers/{worker}/turn", {"claim": 1}),
                (f"/api/v1/workers/{worker}/turn", {"claim": 1, "settle": [{**fence, "outcome": "succeeded"}]}),
                (f"/api/v1/workers/{worker}/start", {"jobs": [fence]}),
                (f"/api/v1/workers/{worker}/progress", {"jobs": [fence]}),
                (f"/api/v1/workers/{worker}/settle", {"jobs": [{**fence, "outcome": "succeeded"}]}),
                (f"/api/v1/workers/{worker}/release", {"jobs": [fence]}),
                (f"/api/v1/workers/{worker}/drain", {}),
                (f"/api/v1/workers/{worker}/shutdown", {}),
                ("/api/v1/jobs", {"task": "resize"}),
                ("/api/v1/jobs/1/cancel", {}),
                ("/api/v1/jobs/retry", {"ids": [1]}),
                ("/api/v1/queues/pause", {}),
            ):
                answer = http.post(path, json=body)
                assert (path, answer.status_code, answer.headers["Retry-After"]) == (path, 503, "1")
                assert answer.json()["code"] == "ledger_unavailable"
            for path in ("/api/v1/workers", "/api/v1/jobs/1/result?wait=5", "/api/v1/events", "/metrics", "/jobs", "/"):
                assert http.get(path).status_code == 503, path
            with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as person:
                # Whoever logged in with a token of the ledger comes as far as the guard, and sees a page of words.
                answer = person.get("/jobs", headers={"Accept": "text/html", "Cookie": "unstuck_session=none"})
                assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
                assert answer.headers["Content-Type"].startswith("text/html")
                assert "The ledger cannot be used" in answer.text
            server.start()
            wait_for(lambda: http.post("/api/workers/heartbeat", json=beat).status_code == 200, "the ledger's return")
            # What it said of itself meanwhile was not written then, and is now.
            found = http.get(f"/api/v1/workers/{worker}").json()
            assert (found["state"], found["metadata"]) == ("active", {"version": "2"})
            assert "Traceback" not in served.said()
