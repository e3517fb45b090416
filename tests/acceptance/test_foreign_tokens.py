"""Workers over HTTP that come with tokens: nobody speaks for another's worker, and a name outlives its token."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.acceptance.foreign_kit import DATABASES, TIGHT, done, empty_database, key
from tests.fleet import wait_for
from tests.guarded import Guarded, guarded_door, make_token

from unstuck.domain.api_tokens import Scope


@pytest.fixture(params=DATABASES, scope="module")
def guarded(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    with empty_database(request) as url, guarded_door(url, UNSTUCK_CHECK_INTERVAL="0.1") as guarded:
        yield guarded


class Hand:
    """Somebody with a token of their own, for workers alone."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded
        self.token = make_token(guarded.ledger_url, Scope.WORKER)[1]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.guarded.ask("POST", f"/api{path}", self.token, json=body)

    def heartbeat(self, name: str) -> httpx.Response:
        return self.post("/workers/heartbeat", {"worker_id": name})


def test_a_token_writes_only_what_its_own_workers_hold(guarded: Guarded) -> None:
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


def test_a_token_for_workers_does_not_change_the_rules_of_tasks_that_others_have_at_work(guarded: Guarded) -> None:
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


def test_a_task_that_only_ones_own_workers_have_is_ones_own_to_change(guarded: Guarded) -> None:
    hand = Hand(guarded)
    for number, timeout in enumerate(("10m", "20m")):
        task = {"name": "own", "queue": "own", "timeout": timeout}
        assert hand.post("/v1/workers", {"name": f"own-{number}", "tasks": [task]}).status_code == 201


def test_a_name_is_free_for_another_token_when_its_worker_is_dead(guarded: Guarded) -> None:
    """Else whoever gets a new token could never beat under its old name again."""
    before, after = Hand(guarded), Hand(guarded)
    first = before.post("/v1/workers", {"name": "rotated", **TIGHT}).json()
    assert before.heartbeat("rotated").json()["id"] == first["id"]
    assert after.heartbeat("rotated").status_code == 403
    wait_for(lambda: after.heartbeat("rotated").status_code == 200, "the name to be free")
    said = after.heartbeat("rotated").json()
    assert said["id"] != first["id"]
    # What the other was is nobody else's business: it is another worker of that name.
    assert (said["declared_dead"], said["next_heartbeat_in"]) == (None, 30)
    assert before.heartbeat("rotated").status_code == 403


def test_a_token_for_workers_does_not_fill_the_ledger_with_tasks(guarded: Guarded) -> None:
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
