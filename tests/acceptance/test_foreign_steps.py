"""Jobs of several steps in the hands of workers over HTTP: the journal, sleeps, signals, and what follows."""

from typing import Any

import httpx
import pytest
from tests.acceptance.foreign_kit import TIGHT, Worker, key, put, state
from tests.fleet import wait_for

from unstuck.domain.policy import Policy
from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import JobFilter


def steps(worker: Worker, *items: dict[str, Any]) -> list[str]:
    answer = worker.call("steps", jobs=list(items))
    assert answer.status_code in (200, 409), answer.text
    return [result["status"] for result in answer.json()["results"]]


def test_what_a_dead_worker_wrote_down_comes_to_the_next(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    first = Worker(http, queue, **TIGHT)
    job_id = put(ledger, queue, Policy(on_crash="retry"))
    (job,) = first.claim(start=True)
    assert (job["journal"], job["signals"]) == ([], [])
    one = {**key(job), "seq": 1, "name": "charge", "value": {"paid": 3}}
    assert steps(first, one, {**key(job), "seq": 0, "value": "half way"}) == ["written", "written"]
    assert steps(first, one) == ["already"]
    assert steps(first, {**one, "name": "refund"}) == ["step_mismatch"]
    wait_for(lambda: state(ledger, job_id) is JobState.PENDING, "the silent worker to be given up")
    second = Worker(http, queue)
    (again,) = wait_for(lambda: second.claim(start=True), "the job to be due again")
    assert [(line["kind"], line["name"], line["value"]) for line in again["journal"]] == [
        ("checkpoint", "checkpoint", "half way"),
        ("step", "charge", {"paid": 3}),
    ]
    # The zombie is refused, and told.
    late = first.call("steps", jobs=[{**key(job), "seq": 2, "name": "late", "value": 1}])
    assert late.status_code == 409
    assert [one.name for one in ledger.journal(job_id)] == ["checkpoint", "charge"]


def test_sleeping_waiting_and_what_follows(http: httpx.Client, ledger: Ledger, queue: str) -> None:
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

    follows = {"task": "resize", "args": ["b.png"], "queue": queue, "priority": 3}
    wrong = worker.call("settle", jobs=[{**key(job), "outcome": "succeeded", "follow_up": [{"task": "nobody"}]}])
    assert wrong.status_code == 404
    ended = {**key(job), "outcome": "succeeded", "result": 1, "follow_up": [follows]}
    assert worker.call("settle", jobs=[ended]).json()["results"][0]["status"] == "succeeded"
    assert worker.call("settle", jobs=[ended]).json()["results"][0]["status"] == "already"
    (later,) = [one for one in ledger.jobs(JobFilter(queue=queue)) if one.id != job_id]
    assert (later.priority, later.enqueued_by) == (3, f"job {job_id}")

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
