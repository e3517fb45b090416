"""Workers over HTTP that wait, are woken, lose answers, come too late, or speak for somebody else."""

import threading
import time
from typing import Any

import httpx
import pytest
from tests.acceptance.foreign_kit import TIGHT, Worker, done, key, put
from tests.contract.hands import birth
from tests.fleet import wait_for

from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.domain.policy import Policy
from unstuck.domain.states import WorkerState
from unstuck.store.contract import Ledger

# Waiting ----------------------------------------------------------------------------------------


def test_whoever_waits_is_woken_by_the_bell(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    """Ten wait, ten jobs come: everybody has one, long before anybody's time is up."""
    workers = [Worker(http, queue) for _ in range(10)]
    got: list[list[dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda w=w: got.append(w.claim(wait=50))) for w in workers]
    for thread in threads:
        thread.start()
    # Nothing says from outside that they rest by now; who does not yet is woken all the same.
    time.sleep(0.3)
    begun_s = time.monotonic()
    for _ in range(10):
        put(ledger, queue)
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun_s < 40
    assert sorted(len(jobs) for jobs in got) == [1] * 10
    assert len({jobs[0]["job_id"] for jobs in got}) == 10


def test_whoever_waits_hears_at_once_that_it_shall_go(http: httpx.Client, queue: str) -> None:
    worker = Worker(http, queue)
    said: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: said.append(worker.call("claim", wait=50)))
    thread.start()
    # As above: most likely it rests by now, and hears of it in any case.
    time.sleep(0.3)
    begun_s = time.monotonic()
    http.post(f"/api/v1/workers/{worker.id}/drain")
    thread.join()
    assert time.monotonic() - begun_s < 40
    assert (said[0].json()["drain"], said[0].json()["jobs"]) == (True, [])


def test_a_worker_that_waits_hears_a_request_whose_wake_up_was_lost(
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    worker = Worker(http, queue, heartbeat_interval=0.2)
    said: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: said.append(worker.call("claim", wait=50)))
    begun_s = time.monotonic()
    registered = ledger.foreign_worker(worker.id)
    assert registered is not None
    thread.start()
    wait_for(lambda: ledger.foreign_worker(worker.id).last_seen_at > registered.last_seen_at, "its claim")  # type: ignore[union-attr]
    # Written without a wake-up. Its next heartbeat brings it, and while it waits the server sends that for it.
    ledger.drain(worker.id)
    thread.join()
    assert time.monotonic() - begun_s < 40
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


def test_a_write_that_comes_too_late_is_told_what_happened(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    late = Worker(http, queue, name=f"late-{queue}", **TIGHT)
    job_id = put(ledger, queue, Policy(on_crash="retry"))
    [job] = late.claim(start=True)
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
    record = ledger.job(job_id)
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
    http: httpx.Client, ledger: Ledger, queue: str
) -> None:
    worker = Worker(http, queue, **TIGHT)
    put(ledger, queue)
    [job] = worker.claim(start=True)
    assert worker.call("settle", jobs=[done(job)]).status_code == 200
    wait_for(lambda: ledger.foreign_worker(worker.id).state is WorkerState.DEAD, "its death")  # type: ignore[union-attr]
    assert worker.call("settle", jobs=[done(job)]).json()["results"][0]["status"] == "already"
    assert worker.call("settle", jobs=[{**key(job), "outcome": "failed"}]).status_code == 409


def test_nobody_speaks_for_a_python_worker(http: httpx.Client, ledger: Ledger) -> None:
    ledger.register(birth("py1", suspect_after_s=600, running_stale_after_s=600))
    for verb in ("beat", "claim", "shutdown"):
        assert http.post(f"/api/v1/workers/py1/{verb}", json={}).status_code == 404


def test_a_foreign_worker_is_looked_after_by_doctor_and_stale(http: httpx.Client, ledger: Ledger, queue: str) -> None:
    worker = Worker(http, queue, metadata={"hostname": "far", "health": {"weight": 99}, "settings": {"notify": False}})
    put(ledger, queue)
    [job] = worker.claim(start=True)
    operator = Operator(ledger, Settings(), by="test")
    assert [finding for finding in operator.doctor() if worker.id in str(finding)] == []
    assert f"({worker.id}) on far" in str(operator.why(job["job_id"]))
    assert all(item.worker != worker.id for item in operator.stale(0.0))
