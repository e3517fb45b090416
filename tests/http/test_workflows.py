"""Workflows over HTTP: start one from a description, follow it, let any language serve its nodes, take it up again."""

from typing import Any

import pytest
from tests.support.http_server import API, ApiClient, guarded_door, make_token

from unstuck.domain.api_tokens import Scope
from unstuck.ledger.contract.workers import AttemptRef

TWO = [
    {"name": "first", "task": "add", "args": [1, 2]},
    {"name": "second", "task": "add", "args": [{"$node": "first"}, 4]},
]


def start(door: ApiClient, nodes: list[dict[str, Any]], **more: Any) -> int:
    return int(door.post("/workflows", {"name": "sums", "nodes": nodes, **more}, 201)["id"])


def states(door: ApiClient, workflow_id: int) -> dict[str, str]:
    return {node["name"]: node["state"] for node in door.get(f"/workflows/{workflow_id}")["nodes"]}


def take(door: ApiClient) -> AttemptRef:
    return door.shop.claim(start=True)[0]


@pytest.fixture(autouse=True)
def swept(door: ApiClient) -> None:
    """What an earlier test left over must not be claimed by this one."""
    door.post("/queues/default/purge")


def test_a_workflow_from_a_description_hands_results_over(door: ApiClient) -> None:
    number = start(door, TWO)
    assert states(door, number) == {"first": "pending", "second": "waiting"}
    first = take(door)
    door.shop.succeed(first, b"3")
    shown = door.get(f"/workflows/{number}")
    assert [(edge["source"], edge["target"]) for edge in shown["edges"]] == [(1, 2)]
    assert [node["state"] for node in shown["nodes"]] == ["succeeded", "pending"]
    second = take(door)
    told = door.get(f"/jobs/{second.job_id}")
    assert told["workflow"] == {
        "id": number,
        "name": "sums",
        "state": "running",
        "node": "second",
        "place": 2,
        "after": ["first"],
    }
    assert told["args"] == [{"$node": 1}, 4]
    door.shop.succeed(second, b"7")
    assert door.get(f"/jobs/{number}/result")["result"] == 7
    assert door.get(f"/workflows/{number}")["state"] == "succeeded"


def test_a_request_that_is_sent_again_starts_no_second_workflow(door: ApiClient) -> None:
    key = {"Idempotency-Key": "night of the 17th"}
    body = {"name": "sums", "nodes": TWO}
    first = door.client.post(f"{API}/workflows", json=body, headers=key)
    assert first.status_code == 201
    assert "idempotency-replayed" not in first.headers
    number = first.json()["id"]
    door.post(f"/workflows/{number}/cancel")
    again = door.client.post(f"{API}/workflows", json=body, headers=key)
    assert again.status_code == 200
    assert again.headers["idempotency-replayed"] == "true"
    assert (again.json()["id"], again.headers["location"]) == (number, f"/api/v1/workflows/{number}")
    other = [TWO[0], {**TWO[1], "args": [{"$node": "first"}, 5]}]
    refused = door.client.post(f"{API}/workflows", json={"name": "sums", "nodes": other}, headers=key)
    assert (refused.status_code, refused.json()["code"]) == (409, "key_used_before")
    assert door.client.post(f"{API}/jobs", json={"task": "add"}, headers=key).status_code == 409
    assert door.get("/workflows?limit=1")["workflows"][0]["id"] == number


def test_a_foreign_worker_gets_a_node_as_a_plain_call(door: ApiClient) -> None:
    nodes = [*TWO, {"name": "sum", "task": "add", "map": "list", "args": [{"$node": "first"}]}]
    nodes.insert(1, {"name": "list", "task": "add", "on_error": "continue"})
    nodes.append({"name": "all", "task": "add", "args": [{"$node": "sum"}], "after": ["second"]})
    number = start(door, nodes)
    worker = door.post("/workers", {"queues": ["default"], "tasks": ["add"]}, 201)["id"]

    def claim() -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = door.post(f"/workers/{worker}/claim", {"limit": 10, "start": True})["jobs"]
        return jobs

    def settle(job: dict[str, Any], **outcome: Any) -> None:
        body = {"job_id": job["job_id"], "token": job["token"], **outcome}
        [said] = door.post(f"/workers/{worker}/settle", {"jobs": [body]})["results"]
        assert said["ok"], said

    begun = {str(job["payload"]["args"]): job for job in claim()}
    settle(begun["[1, 2]"], outcome="succeeded", result=3)
    settle(begun["[]"], outcome="succeeded", result=[10, 20])
    calls = claim()
    again = door.post(f"/workers/{worker}/claim", {"limit": 10, "have": []})["jobs"]
    assert sorted(str(job["payload"]["args"]) for job in calls) == ["[10, 3]", "[20, 3]", "[3, 4]"]
    assert {job["job_id"]: job["payload"] for job in again} == {job["job_id"]: job["payload"] for job in calls}
    for job in calls:
        settle(job, outcome="succeeded", result=sum(job["payload"]["args"]))
    [last] = claim()
    assert last["payload"] == {"args": [[13, 23]], "kwargs": {}}
    settle(last, outcome="succeeded", result=36)
    assert door.get(f"/jobs/{number}/result")["result"] == 36


def test_what_failed_is_told_and_taken_up_again(door: ApiClient) -> None:
    number = start(door, TWO)
    door.shop.fail(take(door), "the card was declined")
    shown = door.get(f"/workflows/{number}")
    assert shown["state"] == "failed"
    assert [(node["name"], node["error"]["code"]) for node in shown["failed"]] == [("first", "TASK_FAILED")]
    assert "the card was declined" in shown["headline"]
    assert states(door, number) == {"first": "failed", "second": "cancelled"}
    assert number in [one["id"] for one in door.get("/workflows?state=failed")["workflows"]]
    assert "node 'first'" in door.get(f"/jobs/{number}/why")["headline"]
    assert door.post(f"/workflows/{number}/retry") == {"id": number, "answer": "retried"}
    assert states(door, number) == {"first": "pending", "second": "waiting"}
    refused = door.problem("POST", f"/workflows/{number}/retry", 409)
    assert (refused["code"], refused["state"]) == ("not_retried", "running")
    assert door.get("/audit")[0]["verb"] == "retry workflow"
    # A purge spares what has begun.
    door.post(f"/workflows/{number}/cancel")


def test_a_paused_workflow_goes_on_past_what_failed_and_can_be_given_up(door: ApiClient) -> None:
    number = start(door, [{**TWO[0], "on_error": "pause"}, TWO[1]])
    door.shop.fail(take(door))
    assert states(door, number) == {"first": "paused", "second": "waiting"}
    assert "workflow-paused" in [finding["code"] for finding in door.get(f"/jobs/{number}/doctor")]
    door.problem("POST", f"/workflows/{number + 1000}/resume", 404)
    assert door.post(f"/workflows/{number}/resume")["answer"] == "resumed"
    second = take(door)
    assert door.get(f"/workflows/{number}")["nodes"][1]["state"] == "running"
    assert door.post(f"/workflows/{number}/cancel")["answer"] == "cancelled"
    assert door.get(f"/jobs/{second.job_id}")["cancel_requested"] is True
    assert door.problem("POST", f"/workflows/{number}/cancel", 409)["code"] == "not_cancelled"


def test_a_group_stands_for_its_nodes(door: ApiClient) -> None:
    group = {"name": "both", "nodes": TWO, "result": "first", "on_error": "continue"}
    number = start(door, [group, {"name": "end", "task": "add", "args": [{"$node": "both"}]}])
    nodes = {node["name"]: node for node in door.get(f"/workflows/{number}")["nodes"]}
    assert nodes["first"]["parent"] == nodes["both"]["place"]
    assert nodes["both"]["counts"] == {"pending": 1, "waiting": 1}
    assert nodes["end"]["after"] == [nodes["both"]["place"]]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([{"task": "ad"}], "There is no task 'ad'"),
        ([{"task": "add", "args": [{"$node": "later"}]}, {"name": "later", "task": "add"}], "before this one"),
        ([{"task": "add", "name": "a"}, {"task": "add", "name": "a"}], "two nodes named 'a'"),
        ([{"name": "empty", "nodes": []}], "is empty"),
        ([{"name": "nothing"}], "needs a task"),
        ([{"name": "in", "nodes": TWO}, {"task": "add", "args": [{"$node": "first"}]}], "inside the group 'in'"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(door: ApiClient, nodes: list[dict[str, Any]], said: str) -> None:
    before = door.get("/workflows")
    response = door.client.post(f"{API}/workflows", json={"name": "odd", "nodes": nodes})
    assert response.status_code in (404, 422), response.text
    assert said in response.json()["detail"]
    assert door.get("/workflows") == before


def test_a_unique_key_gives_the_one_that_is_there(door: ApiClient) -> None:
    number = start(door, TWO, unique_key="tonight")
    again = door.post("/workflows", {"name": "sums", "nodes": TWO, "unique_key": "tonight"}, 200)
    assert again == {"id": number, "name": "sums", "fresh": False, "warning": None}
    job = door.enqueue(unique_key="a job", delay="1h")
    body = {"name": "sums", "nodes": TWO, "unique_key": "a job"}
    refused = door.problem("POST", "/workflows", 409, json=body)
    assert (refused["code"], refused["job_id"]) == ("duplicate_job", job)


def test_pages_of_workflows_follow_each_other(door: ApiClient) -> None:
    ids = [start(door, TWO) for _ in range(3)]
    page = door.get("/workflows?limit=2")
    assert [one["id"] for one in page["workflows"]] == ids[:0:-1]
    assert page["workflows"][0]["counts"] == {"released": 1, "waiting": 1}
    after = door.get(f"/workflows?limit=1&before={page['next']}")
    assert [one["id"] for one in after["workflows"]] == ids[:1]


def test_a_token_may_follow_what_it_started_and_no_more(door: ApiClient) -> None:
    with guarded_door(door.shop.url) as guarded:
        mine, theirs = (make_token(door.shop.url, Scope.ENQUEUE)[1] for _ in range(2))
        stored = guarded.ask("POST", f"{API}/workflows", mine, json={"name": "sums", "nodes": TWO})
        path = f"{API}/workflows/{stored.json()['id']}"
        assert guarded.ask("GET", path, mine).status_code == 200
        assert guarded.ask("GET", path, theirs).status_code == 403
        assert guarded.ask("POST", f"{path}/cancel", theirs).status_code == 403
        assert guarded.ask("POST", f"{path}/cancel", mine).status_code == 200
        assert guarded.ask("GET", f"{API}/workflows", mine).status_code == 403
