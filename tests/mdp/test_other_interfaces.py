"""One ledger, several doors: Majordomo clients call Python tasks, Majordomo workers serve Python, people see both."""

import json
import signal
from pathlib import Path
from typing import Any

import cbor2
import pytest
from tests.mdp.broker import BrokerHarness, as_cbor
from tests.support import processes
from tests.support.fleet import ROOT, TIMEOUT_S, wait_for
from tests.support.signals import send_signal

from unstuck import App
from unstuck.domain.states import JobState


def said(scene: BrokerHarness, *words: str) -> str:
    done = processes.run("unstuck.cli.main", *words, cwd=ROOT, env=scene.fleet.surroundings())
    return done.stdout + done.stderr


def told(scene: BrokerHarness, *words: str) -> Any:
    return json.loads(said(scene, *words, "--json"))


def test_a_majordomo_client_calls_a_python_task(scene: BrokerHarness) -> None:
    scene.fleet.start("--concurrency", "1")
    client = scene.client()
    assert json.loads(client.call("add", b'{"a": 1, "b": 2}')[0]) == 3
    assert cbor2.loads(client.call("add", {"a": 20, "b": 3, "JobID": "mine"})[0]) == 23
    (pair,) = client.call("add", as_cbor(priority=3), as_cbor(a=4, b=5))
    assert cbor2.loads(pair) == 9
    first, second = client.call("add", as_cbor(), as_cbor(a=1, b=1), as_cbor(a=2, b=2))
    assert (cbor2.loads(first), cbor2.loads(second)) == (2, 4)
    refusal = cbor2.loads(client.call("add", b"no arguments")[0])
    assert refusal["error"] == "TASK_FAILED"
    assert "no CBOR map and no JSON object" in refusal["message"]
    assert client.news.empty()
    by_id = {job.id: scene.fleet.app.job(job.id) for job in scene.jobs(JobState.SUCCEEDED)}
    assert sorted(job.result(TIMEOUT_S) for job in by_id.values()) == [2, 3, 4, 9, 23]
    shown = told(scene, "job", str(min(by_id)))
    assert (shown["kwargs"], shown["args"], shown["result"]) == ({"a": 1, "b": 2}, [], 3)


def test_a_majordomo_client_of_the_old_kind_calls_a_python_task(scene: BrokerHarness) -> None:
    scene.fleet.start("--concurrency", "1")
    client = scene.plain_client("add", '{"a": 1, "b": 2}')
    said_, complaints = client.communicate(timeout=TIMEOUT_S)
    assert (said_.decode().strip(), client.returncode) == ("3", 0), complaints


def test_an_enqueue_in_python_is_served_by_a_majordomo_worker(scene: BrokerHarness) -> None:
    app = App(scene.fleet.url)

    @app.task(name="echo", queue="echo")
    def echo(**words: str) -> Any:
        raise AssertionError("the worker of the other door does it")

    try:
        scene.worker("echo", "--plain")
        job = echo.enqueue(word="hello")
        assert job.result(TIMEOUT_S) == {"seen": {"kwargs": {"word": "hello"}}}
        assert told(scene, "job", str(job.id))["result"] == {"seen": {"kwargs": {"word": "hello"}}}
    finally:
        app.close()


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_people_are_told_the_truth_of_such_workers_and_jobs(scene: BrokerHarness, tmp_path: Path, kind: str) -> None:
    gate = tmp_path / "gate"
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode())
    client.next()
    job = scene.job()
    waits = said(scene, "why", str(job.id))
    assert "It waits for its first try" in waits
    assert "Nobody" in waits or "no worker" in waits.lower() or "No living worker" in waits, waits
    scene.worker("echo", *(["--plain"] if kind == "plain" else ["--name", "my-worker"]))
    begun = scene.wait_begun("job")
    (worker,) = told(scene, "workers")
    assert (worker["door"], worker["state"], worker["pid"], worker["tasks"]) == ("mdp", "active", None, ["echo"])
    assert worker["name"] == "my-worker" or kind == "plain"
    assert worker["id"] in said(scene, "why", str(job.id)) or worker["name"] in said(scene, "why", str(job.id))
    send_signal(begun.pid, signal.SIGKILL)
    client.next()
    dead = next(one for one in told(scene, "workers", "--all") if one["id"] == worker["id"])
    assert (dead["state"], dead["verdict"]["detector"]) == ("dead", "connection")
    shown = told(scene, "job", str(job.id))
    assert (shown["state"], shown["crash_count"], shown["args"]) == ("pending", 1, [f"job 0 {gate}"])
    assert "connection" in said(scene, "why", str(job.id))
    gate.touch()
    scene.worker("echo")
    assert call.result() == [b"done job"]
    wait_for(lambda: told(scene, "job", str(job.id))["result"] == "done job", "the text of its reply")


def test_requests_keep_to_the_limits_of_the_task_that_they_call(scene: BrokerHarness, tmp_path: Path) -> None:
    """One at a time for each account; those of which nobody knows the account stand in one line."""
    scene.fleet.start("--concurrency", "4", target="tests.mdp.limited_tasks:app")
    wait_for(lambda: scene.living("draw"), "a worker that is limited")
    client, path = scene.client(), str(tmp_path / "drawn")
    calls = [client.submit("draw", as_cbor(path=path, account=f"a{number % 2}")) for number in range(8)]
    calls += [client.submit("draw", as_cbor(path=path, account="other"), concurrency_key="account:a1")]
    calls += [client.submit("draw", b"no map"), client.submit("draw_computed", as_cbor(path=path, account="b"))]
    calls += [client.submit("draw_computed", as_cbor(path=path, account="b"), concurrency_key="mine")]
    for call in calls:
        call.result()
    drawn = [line.split() for line in Path(path).read_text().splitlines()]
    for line in ({"a0"}, {"a1", "other"}):
        steps = [step for step, account in drawn if account in line]
        assert steps == ["begin", "end"] * (len(steps) // 2), drawn
    ties = [scene.fleet.ledger.jobs.links(job.id) for job in scene.jobs()]
    lines = sorted((one.concurrency_key or "", one.concurrency_limit, one.retain_s) for one in ties if one is not None)
    kept = ("account:a0", 1, 7200.0), ("account:a1", 1, 7200.0), ("draw", 1, 7200.0)
    assert lines == [kept[0]] * 4 + [kept[1]] * 5 + [kept[2]] + [("draw_computed", 2, None), ("mine", 2, None)]


def test_a_request_of_which_no_key_can_be_made_stands_in_the_line_of_its_task(scene: BrokerHarness) -> None:
    """Nothing has no first letters: that is no reason for a broker to end."""
    scene.fleet.start("--concurrency", "1", target="tests.mdp.limited_tasks:app")
    wait_for(lambda: scene.living("draw_short"), "a worker that is limited")
    client = scene.client()
    for account in ("abc", None):
        assert cbor2.loads(client.call("draw_short", as_cbor(path="", account=account))[0]) == str(account)
    ties = [scene.fleet.ledger.jobs.links(job.id) for job in scene.jobs()]
    assert sorted(one.concurrency_key or "" for one in ties if one is not None) == ["ab", "draw_short"]


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_a_majordomo_worker_serves_nodes_of_a_workflow(scene: BrokerHarness, kind: str) -> None:
    app = App(scene.fleet.url)

    @app.task(name="echo", queue="echo")
    def echo(**words: Any) -> Any:
        raise AssertionError("the worker of the other door does it")

    try:
        scene.worker("echo", *(["--plain"] if kind == "plain" else []))
        flow = app.workflow("pair")
        first = flow.add(echo, word="hello")
        flow.add(echo, before=first)
        before = {"seen": {"kwargs": {"word": "hello"}}}
        assert flow.start().result(TIMEOUT_S) == {"seen": {"args": [], "kwargs": {"before": before}}}
    finally:
        app.close()
