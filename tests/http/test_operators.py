"""Operators over HTTP: lists, verbs for many, queues, stale jobs, workers; all that the command line can."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from tests.support import http_server
from tests.support.builders import birth
from tests.support.cli import Cli
from tests.support.http_server import API, ApiClient, SecuredServer, guarded_door, make_token

from unstuck import host
from unstuck.cli.main import app as cli
from unstuck.config import Settings
from unstuck.domain.api_tokens import Scope
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.limits import KeyRule
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import AttemptRef, Turn
from unstuck.ledger.open import ready_ledger


def quarantine(door: ApiClient) -> AttemptRef:
    held = door.held()
    error = JobError("CRASHED_TOO_OFTEN", "Worker died unexpectedly", "killed by SIGSEGV", {})
    ending = Ending(
        held.job_id,
        held.token,
        JobState.QUARANTINED,
        AttemptState.CRASHED,
        error=error,
        counter="crash",
        event="quarantined",
        message="quarantined",
    )
    with door.shop.ledger() as ledger:
        assert not ledger.workers.turn(Turn(door.get(f"/jobs/{held.job_id}")["worker"], endings=(ending,))).superseded
    return held


class TestJobs:
    def test_pages_follow_each_other_without_gap_or_repeat(self, door: ApiClient) -> None:
        queue = door.queue()
        ids = [door.enqueue(queue=queue) for _ in range(5)]
        seen: list[int] = []
        path = f"/jobs?queue={queue}&limit=2"
        before = ""
        for _ in range(3):
            page = door.get(path + before)
            seen += [job["id"] for job in page["jobs"]]
            before = f"&before={page['next']}"
        assert seen == ids[::-1]
        assert page["next"] is None

    def test_a_page_that_is_just_full_is_the_last(self, door: ApiClient) -> None:
        queue = door.queue()
        for _ in range(2):
            door.enqueue(queue=queue)
        assert door.get(f"/jobs?queue={queue}&limit=2")["next"] is None

    def test_every_condition_of_the_command_line(self, door: ApiClient) -> None:
        held = door.held()
        waiting, cancelled = door.enqueue(task="crawl"), door.enqueue()
        door.post(f"/jobs/{cancelled}/cancel")
        owner = door.get(f"/jobs/{held.job_id}")["worker"]

        def found(**conditions: Any) -> set[int]:
            return {job["id"] for job in door.get("/jobs", params=conditions)["jobs"]}

        mine = {held.job_id, waiting, cancelled}
        assert found(state="running,cancelled") & mine == {held.job_id, cancelled}
        assert found(state=["running", "pending"]) & mine == {held.job_id, waiting}
        assert found(task="crawl") & mine == {waiting}
        assert found(error="cancelled") & mine == {cancelled}
        assert found(worker=owner) == {held.job_id}
        assert found(newer_than="1h") & mine == mine
        assert found(older_than="1h") & mine == set()
        assert "running" in door.problem("GET", "/jobs?state=runing", 422)["detail"]
        door.problem("GET", "/jobs?worker=nobody", 404)
        door.problem("GET", "/jobs?limit=1001", 422)

    def test_the_lines_are_those_of_the_command_line(self, door: ApiClient) -> None:
        door.enqueue()
        assert door.get("/jobs?limit=3")["jobs"] == door.shop.run("jobs", "--limit", "3", "--json").json


class TestMany:
    def test_cancel_what_matches_a_part_at_a_time(self, door: ApiClient) -> None:
        queue = door.queue()
        ids = [door.enqueue(queue=queue) for _ in range(3)]
        body = {"where": {"queue": queue}, "limit": 2}
        tried = door.post("/jobs/cancel", {**body, "dry_run": True})
        assert (tried["matched"], tried["more"], tried["counts"]) == (2, True, {"matched": 2})
        assert door.get(f"/jobs/{ids[2]}")["state"] == "pending"
        done = door.post("/jobs/cancel", body)
        assert (done["matched"], done["more"], done["counts"]) == (2, True, {"cancelled": 2})
        assert [item["id"] for item in done["answers"]] == ids[:0:-1]
        assert door.post("/jobs/cancel", body)["more"] is False
        assert door.post("/jobs/cancel", body)["matched"] == 0

    def test_retry_by_number_says_what_became_of_each(self, door: ApiClient) -> None:
        waiting, cancelled = door.enqueue(), door.enqueue()
        door.post(f"/jobs/{cancelled}/cancel")
        done = door.post("/jobs/retry", {"ids": [cancelled, waiting, 2**80, cancelled]})
        assert {item["id"]: item["answer"] for item in done["answers"]} == {
            cancelled: "queued",
            waiting: "live",
            2**80: "missing",
        }
        assert done["counts"] == {"live": 1, "missing": 1, "queued": 1}

    def test_without_a_state_retry_takes_the_failed_only(self, door: ApiClient) -> None:
        held = door.held()
        queue = door.get(f"/jobs/{held.job_id}")["queue"]
        door.shop.fail(held, worker_id=f"of-{queue}")
        door.post(f"/jobs/{door.enqueue(queue=queue)}/cancel")
        done = door.post("/jobs/retry", {"where": {"queue": queue}})
        assert done["answers"] == [{"id": held.job_id, "answer": "queued"}]

    @pytest.mark.parametrize(
        "body", [{}, {"where": {}}, {"ids": [1], "where": {"task": "add"}}, {"ids": []}, {"where": {"sate": "x"}}]
    )
    def test_everything_is_never_meant_by_nothing(self, door: ApiClient, body: dict[str, Any]) -> None:
        for verb in ("cancel", "retry"):
            door.problem("POST", f"/jobs/{verb}", 422, json=body)

    def test_prune(self, door: ApiClient) -> None:
        job_id = door.enqueue()
        door.post(f"/jobs/{job_id}/cancel")
        assert door.post("/prune", {"older_than": "1h"}) == {"pruned": 0}
        assert door.post("/prune", {"older_than": 0, "state": ["succeeded"]})["pruned"] >= 0
        door.get(f"/jobs/{job_id}")
        assert door.post("/prune", {"older_than": 0})["pruned"] >= 1
        door.problem("GET", f"/jobs/{job_id}", 404)
        door.problem("POST", "/prune", 422, json={"state": ["running"]})


class TestQueues:
    def test_pause_resume_purge(self, door: ApiClient) -> None:
        queue = door.queue()
        door.enqueue(queue=queue)
        door.enqueue(queue=queue, delay="1h")
        assert door.post(f"/queues/{queue}/pause") == {"paused": [queue]}
        assert door.post(f"/queues/{queue}/pause") == {"paused": []}
        [shown] = [item for item in door.get("/queues") if item["name"] == queue]
        assert (shown["paused"], shown["pending"], shown["scheduled"], shown["workers"]) == (True, 1, 1, 1)
        assert door.post(f"/queues/{queue}/resume") == {"resumed": [queue]}
        assert door.post(f"/queues/{queue}/purge") == {"queue": queue, "cancelled": 2}

    def test_all_at_once(self, door: ApiClient) -> None:
        queue = door.queue()
        assert queue in door.post("/queues/pause")["paused"]
        assert queue in door.post("/queues/resume")["resumed"]
        assert door.post("/queues/resume") == {"resumed": []}

    def test_a_name_with_a_slash(self, door: ApiClient) -> None:
        door.shop.worker("slashed", "slashed", queues=("a/b",))
        for name in ("a/b", "a%2Fb"):
            assert door.post(f"/queues/{name}/pause") == {"paused": ["a/b"]}
            assert door.post(f"/queues/{name}/resume") == {"resumed": ["a/b"]}

    def test_a_queue_that_does_not_exist(self, door: ApiClient) -> None:
        for verb in ("pause", "resume", "purge"):
            assert "Did you mean" in door.problem("POST", f"/queues/defaul/{verb}", 404)["detail"]


class TestStale:
    def test_running_ones_fail_and_claimed_ones_go_back(self, door: ApiClient) -> None:
        running, claimed = door.held(), door.held(start=False)
        for held in (running, claimed):
            door.shop.report_death(door.get(f"/jobs/{held.job_id}")["worker"])
        shown = {item["job_id"]: item for item in door.get("/stale")}
        assert shown[running.job_id]["worker_state"] == "dead"
        back = {item["job_id"]: item["action"] for item in door.post("/stale/requeue", {"older_than": "0s"})}
        assert back[claimed.job_id] == "requeued"
        assert running.job_id not in back
        failed = {item["job_id"]: item["action"] for item in door.post("/stale/fail")}
        assert failed[running.job_id] == "failed"
        assert door.get(f"/jobs/{running.job_id}/result")["error"]["code"] == "WORKER_CRASHED"
        assert door.get(f"/jobs/{claimed.job_id}")["state"] == "pending"
        door.problem("GET", "/stale?older_than=long", 422)
        door.problem("POST", "/stale/fail", 422, json={"older_than": "nan"})


class TestWorkers:
    def test_drain_and_stop(self, door: ApiClient) -> None:
        queue = door.queue()
        for verb in ("drain", "stop"):
            said = door.post(f"/workers/worker-of-{queue}/{verb}")
            assert said == {"id": f"of-{queue}", "name": f"worker-of-{queue}", "request": verb}
        door.problem("POST", "/workers/nobody/drain", 404)
        door.shop.report_death(f"of-{queue}")
        for verb in ("drain", "stop", "disable"):
            problem = door.problem("POST", f"/workers/of-{queue}/{verb}", 409)
            assert (problem["code"], problem["state"]) == ("worker_gone", "dead")

    def test_off_and_on(self, door: ApiClient) -> None:
        queue = door.queue()
        said = door.post(f"/workers/of-{queue}/disable", {"reason": "its disk is full"})
        assert said == {"workers": [f"of-{queue}"], "host": None, "disabled": True, "unserved": [queue]}
        job_id = door.enqueue(queue=queue)
        assert "its disk is full" in door.get(f"/jobs/{job_id}")["waiting"]
        on = door.post(f"/workers/of-{queue}/enable")
        assert on == {"workers": [f"of-{queue}"], "host": None, "changed": True, "disabled": None}
        assert door.post(f"/workers/of-{queue}/enable")["changed"] is False

    def test_a_whole_host(self, door: ApiClient) -> None:
        queue, here = door.queue(), host.hostname()
        said = door.post(f"/hosts/{here}/disable")
        assert (said["host"], said["disabled"]) == (here, True)
        assert f"of-{queue}" in said["workers"]
        still = door.post(f"/workers/of-{queue}/enable")
        assert still["disabled"]["of_host"] is True
        assert still["disabled"]["by"] == "web"
        assert door.post(f"/hosts/{here}/enable")["changed"] is True
        door.problem("POST", "/hosts/nowhere/disable", 404)


class TestQuarantine:
    def test_list_and_retry(self, door: ApiClient) -> None:
        held, other = quarantine(door), door.enqueue()
        [shown] = [job for job in door.get("/quarantine?task=add") if job["id"] == held.job_id]
        assert shown["cause"] == "killed by SIGSEGV"
        assert [victim["token"] for victim in shown["victims"]] == [held.token]
        tried = door.post("/jobs/retry", {"where": {"state": ["quarantined"], "task": "add"}, "dry_run": True})
        assert held.job_id in [item["id"] for item in tried["answers"]]
        done = door.post("/jobs/retry", {"ids": [held.job_id, other]})
        assert [item["answer"] for item in done["answers"]] == ["queued", "live"]
        assert held.job_id not in [job["id"] for job in door.get("/quarantine")]
        assert door.post("/jobs/retry", {"where": {"state": ["quarantined"]}})["matched"] == 0


class TestLook:
    def test_a_job_that_does_not_run_has_no_stack_and_a_worker_that_is_deaf_gives_none(self, door: ApiClient) -> None:
        assert door.problem("POST", f"/jobs/{door.enqueue()}/stack", 409)["code"] == "not_running"
        held = door.held()
        assert door.problem("POST", f"/jobs/{held.job_id}/stack?wait=0.2", 409)["code"] == "no_answer"
        door.problem("POST", "/jobs/999999999/stack", 404)

    def test_tasks(self, door: ApiClient) -> None:
        known = {task["name"]: task for task in door.get("/tasks")}
        assert known["crawl"]["queue"] == "scrapes"
        assert known["crawl"]["policy"]["on_crash"] == "retry"

    def test_schedules(self, door: ApiClient) -> None:
        name = f"every/{door.queue()}"
        body = {"task": "add", "cron": "0 3 * * *", "tz": "Europe/Berlin", "args": [1, 2], "catch_up": "skip"}
        made = door.client.put(f"{API}/schedules/{name}", json=body)
        assert made.status_code == 200, made.text
        assert (made.json()["when"], made.json()["source"]) == ("0 3 * * * (Europe/Berlin)", "operator")
        assert name in [one["name"] for one in door.get("/schedules")]
        assert door.post(f"/schedules/{name}/pause") == {"name": name, "paused": True, "changed": True}
        assert door.post(f"/schedules/{name}/pause")["changed"] is False
        assert door.post(f"/schedules/{name}/resume")["changed"] is True
        job = door.get(f"/jobs/{door.post(f'/schedules/{name}/run')['job_id']}")
        assert (job["args"], name in job["enqueued_by"]) == ([1, 2], True)
        for wrong, status in (
            ({**body, "every": "1s"}, 422),
            ({**body, "cron": "x"}, 422),
            ({**body, "task": "a"}, 404),
        ):
            answer = door.client.put(f"{API}/schedules/{name}", json=wrong)
            assert answer.status_code == status, answer.text
        gone = door.client.delete(f"{API}/schedules/{name}")
        assert gone.json() == {"name": name, "removed": True, "workers": 0}
        assert door.client.delete(f"{API}/schedules/{name}").status_code == 404

    def test_doctor(self, door: ApiClient) -> None:
        queue = door.queue()
        door.post(f"/queues/{queue}/pause")
        assert "queue-paused" in [finding["code"] for finding in door.get("/doctor")]
        door.post(f"/queues/{queue}/resume")


# Where each command of the command line is in the API.
THERE = {
    "enqueue": "POST /jobs",
    "jobs": "GET /jobs",
    "job": "GET /jobs/{job_id}",
    "why": "GET /jobs/{job_id}/why",
    "logs": "GET /jobs/{job_id}/logs",
    "stack": "POST /jobs/{job_id}/stack",
    "signal": "POST /jobs/{job_id}/signals",
    "doctor": "GET /doctor",
    "queues": "GET /queues",
    "retry": "POST /jobs/retry",
    "cancel": "POST /jobs/cancel",
    "stale": "GET /stale",
    "workflow": "GET /workflows/{job_id}",
    "workflows": "GET /workflows",
    "workflows list": "GET /workflows",
    "workflows show": "GET /workflows/{job_id}",
    "workflows retry": "POST /workflows/{job_id}/retry",
    "workflows resume": "POST /workflows/{job_id}/resume",
    "workflows cancel": "POST /workflows/{job_id}/cancel",
    "queues limit": "POST /queues/{name}/limit",
    "lines": "GET /lines",
    "lines limit": "POST /lines/limit",
    "pause": "POST /queues/{name}/pause",
    "resume": "POST /queues/{name}/resume",
    "purge": "POST /queues/{name}/purge",
    "prune": "POST /prune",
    "workers": "GET /workers",
    "workers drain": "POST /workers/{worker}/drain",
    "workers stop": "POST /workers/{worker}/stop",
    "workers disable": "POST /workers/{worker}/disable",
    "workers enable": "POST /workers/{worker}/enable",
    "quarantine": "GET /quarantine",
    "quarantine list": "GET /quarantine",
    "schedules": "GET /schedules",
    "schedules list": "GET /schedules",
    "schedules add": "PUT /schedules/{name}",
    "schedules pause": "POST /schedules/{name}/pause",
    "schedules resume": "POST /schedules/{name}/resume",
    "schedules run": "POST /schedules/{name}/run",
    "schedules remove": "DELETE /schedules/{name}",
    "audit": "GET /audit",
}
ELSEWHERE = {
    # They are processes, or are about this very machine.
    *("worker", "up", "reaper", "serve", "broker", "popups", "demo", "alive", "keygen"),
    # The API document has it.
    "version",
    # The door itself does not open on tables that do not fit.
    "migrate",
    # Who may come in, and who is told, is not for those who came in.
    *("tokens", "tokens create", "tokens list", "tokens revoke"),
    *("alerts", "alerts list", "alerts run", "alerts test"),
}


def test_the_api_can_what_the_command_line_can(door: ApiClient) -> None:
    schema = door.client.get(f"{API}/openapi.json").json()
    routes = {
        f"{method.upper()} {path.removeprefix(API)}"
        for path, operations in schema["paths"].items()
        for method in operations
    }
    commands = set(_commands(typer.main.get_command(cli), ""))
    assert commands - ELSEWHERE == THERE.keys(), "say where a new command is in the API"
    assert {command: route for command, route in THERE.items() if route not in routes} == {}


def _commands(group: Any, path: str) -> list[str]:
    found = []
    for name in group.list_commands(None):
        found.append(f"{path}{name}")
        below = group.get_command(None, name)
        if hasattr(below, "commands"):
            found += _commands(below, f"{path}{name} ")
    return found


SCOPES_API = "/api/v1"
OF_ONE = ("", "/result", "/why", "/doctor", "/logs", "/events")


@pytest.fixture(scope="module", params=http_server.DATABASES)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    with http_server.empty_database(request) as url:
        yield from serve(Cli(url, tmp_path_factory.mktemp("guarded")))


def serve(shop: Cli) -> Iterator[SecuredServer]:
    shop.worker()
    with guarded_door(shop.url) as door:
        yield door


def enqueue(door: SecuredServer, token: str, key: str = "") -> int:
    headers = {"Idempotency-Key": key} if key else {}
    answer = door.ask("POST", f"{SCOPES_API}/jobs", token, json={"task": "add", "args": [1, 2]}, headers=headers)
    assert answer.status_code == (201 if answer.json()["fresh"] else 200), answer.text
    return int(answer.json()["id"])


def test_a_token_that_enqueues_may_follow_and_end_its_own_jobs(guarded: SecuredServer) -> None:
    mine = make_token(guarded.ledger_url, Scope.ENQUEUE)[1]
    job_id = enqueue(guarded, mine)
    shown = guarded.ask("GET", f"{SCOPES_API}/jobs/{job_id}", mine)
    assert shown.status_code == 200
    assert shown.json()["enqueued_by"].startswith("test (token ")
    assert mine not in shown.text
    for verb in ("cancel", "retry", "cancel"):
        assert guarded.ask("POST", f"{SCOPES_API}/jobs/{job_id}/{verb}", mine).status_code == 200
    for path in OF_ONE:
        assert guarded.ask("GET", f"{SCOPES_API}/jobs/{job_id}{path}", mine).status_code == 200, path


def test_it_may_not_touch_those_of_others_nor_learn_which_there_are(guarded: SecuredServer) -> None:
    mine, theirs = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    job_id = enqueue(guarded, theirs)
    for number in (job_id, 999_999_999):
        for path in OF_ONE:
            assert guarded.ask("GET", f"{SCOPES_API}/jobs/{number}{path}", mine).status_code == 403, path
        for verb in ("cancel", "retry"):
            assert guarded.ask("POST", f"{SCOPES_API}/jobs/{number}/{verb}", mine).status_code == 403, verb
    assert guarded.ask("GET", f"{SCOPES_API}/jobs", mine).status_code == 403
    assert guarded.ask("GET", f"{SCOPES_API}/jobs/{job_id}", theirs).json()["state"] == "pending"


def test_who_reads_may_not_change_and_who_operates_may_not_enqueue(guarded: SecuredServer) -> None:
    job_id = enqueue(guarded, guarded.all)
    reader, operator = guarded.token(Scope.READ), guarded.token(Scope.OPERATE)
    assert guarded.ask("GET", f"{SCOPES_API}/jobs/{job_id}/result", reader).status_code == 202
    assert guarded.ask("POST", f"{SCOPES_API}/jobs/{job_id}/cancel", reader).status_code == 403
    assert guarded.ask("POST", f"{SCOPES_API}/queues/pause", reader).status_code == 403
    assert guarded.ask("POST", f"{SCOPES_API}/jobs", operator, json={"task": "add"}).status_code == 403
    assert guarded.ask("POST", f"{SCOPES_API}/jobs/{job_id}/cancel", operator).status_code == 200


def test_two_tokens_with_the_same_key_do_not_meet(guarded: SecuredServer) -> None:
    one, two = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    first, other = enqueue(guarded, one, "the-key"), enqueue(guarded, two, "the-key")
    assert first != other
    again = guarded.ask(
        "POST", f"{SCOPES_API}/jobs", one, json={"task": "add", "args": [1, 2]}, headers={"Idempotency-Key": "the-key"}
    )
    assert (again.status_code, again.json()["id"]) == (200, first)


def keyed(door: SecuredServer, token: str, key: str, path: str = "jobs", **more: object) -> tuple[int, int]:
    """Enqueue under a unique key; give the status and the job."""
    what = {"task": "add", "args": [1, 2]} if path == "jobs" else {"name": "sums", "nodes": [{"name": "a", **ADD}]}
    answer = door.ask("POST", f"{SCOPES_API}/{path}", token, json={**what, "unique_key": key, **more})
    assert answer.status_code < 300, answer.text
    return answer.status_code, int(answer.json()["id"])


ADD = {"task": "add", "args": [1, 2]}
WAYS_OF_A_DUPLICATE = ("replace", "refuse", "return")


def test_a_unique_key_of_one_token_says_and_does_nothing_to_jobs_of_others(guarded: SecuredServer) -> None:
    mine, theirs = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    for number, way in enumerate(WAYS_OF_A_DUPLICATE):
        key = f"nightly-{number}"
        for other in (theirs, guarded.all):
            keyed(guarded, other, key)
        status, job_id = keyed(guarded, mine, key, on_duplicate=way)
        assert status == 201
        for other in (theirs, guarded.all):
            status, found = keyed(guarded, other, key)
            assert (status, found != job_id) == (200, True)
            shown = guarded.ask("GET", f"{SCOPES_API}/jobs/{found}", guarded.all).json()
            assert shown["state"] == "pending"


def test_a_unique_key_still_finds_the_jobs_of_its_own_token(guarded: SecuredServer) -> None:
    mine = make_token(guarded.ledger_url, Scope.ENQUEUE)[1]
    _, first = keyed(guarded, mine, "own")
    assert keyed(guarded, mine, "own") == (200, first)
    refused = guarded.ask(
        "POST", f"{SCOPES_API}/jobs", mine, json={**ADD, "unique_key": "own", "on_duplicate": "refuse"}
    )
    assert (refused.status_code, refused.json()["job_id"]) == (409, first)
    status, second = keyed(guarded, mine, "own", on_duplicate="replace")
    assert (status, second != first) == (201, True)
    assert guarded.ask("GET", f"{SCOPES_API}/jobs/{first}", mine).json()["state"] == "cancelled"


def test_the_unique_key_of_a_workflow_is_its_tokens_own(guarded: SecuredServer) -> None:
    mine, theirs = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    _, first = keyed(guarded, theirs, "flow", "workflows")
    status, second = keyed(guarded, mine, "flow", "workflows")
    assert (status, second != first) == (201, True)
    assert keyed(guarded, mine, "flow", "workflows") == (200, second)


def test_tokens_that_operate_share_the_keys_of_everybody(guarded: SecuredServer) -> None:
    one, two = (make_token(guarded.ledger_url, Scope.ENQUEUE, Scope.OPERATE)[1] for _ in range(2))
    _, first = keyed(guarded, one, "shared")
    assert keyed(guarded, two, "shared") == (200, first)


def lined(door: SecuredServer, token: str, key: str, task: str = "add", **more: object) -> int:
    """Enqueue under a concurrency key; give the status."""
    body = {"task": task, "args": [1, 2], "concurrency_key": key, **more}
    return door.ask("POST", f"{SCOPES_API}/jobs", token, json=body).status_code


def limit_of(door: SecuredServer, key: str) -> int:
    [found] = door.ask("GET", f"{SCOPES_API}/lines?key={key}", door.all).json()
    return int(found["limit"])


def test_a_token_that_only_enqueues_does_not_change_the_limit_of_a_key(guarded: SecuredServer) -> None:
    mine = make_token(guarded.ledger_url, Scope.ENQUEUE)[1]
    policy = encode_policy(Policy(order=KeyRule(computed=True, limit=3)))
    ledger = ready_ledger(Settings(url=guarded.ledger_url))
    ledger.workers.register(birth("limits", tasks=(TaskRecord("three_by_three", "default", policy),)))
    ledger.close()
    assert lined(guarded, guarded.all, "shared-limit", concurrency_limit=2) == 201
    refused = guarded.ask(
        "POST", f"{SCOPES_API}/jobs", mine, json={**ADD, "concurrency_key": "shared-limit", "concurrency_limit": 9}
    )
    assert (refused.status_code, refused.json()["code"], refused.json()["at"]) == (403, "forbidden", 0)
    assert limit_of(guarded, "shared-limit") == 2
    # Nor with a task that brings a limit of its own.
    assert lined(guarded, mine, "shared-limit") == 201
    assert lined(guarded, mine, "shared-limit", "three_by_three") == 201
    assert limit_of(guarded, "shared-limit") == 2
    # Of a key that is new, the limit is that of the task; a token that operates may change it.
    assert lined(guarded, mine, "new-limit", "three_by_three") == 201
    assert limit_of(guarded, "new-limit") == 3
    assert lined(guarded, guarded.all, "new-limit", concurrency_limit=4) == 201
    assert limit_of(guarded, "new-limit") == 4
