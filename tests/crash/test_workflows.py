"""Workflows go on whatever dies: workers in the midst of many nodes, the one that runs a node, a row in the ledger."""

import random
import threading

import pytest
from tests.crash.apps import workflows as tasks
from tests.support.fleet import Fleet, copy_tasks, wait_for

from unstuck import App, NodeError, WorkerCrashed, WorkflowRun
from unstuck.client.workflows import Workflow
from unstuck.domain.workflows import NodeState, WorkflowState

pytestmark = pytest.mark.both_databases

TARGET = "tests.crash.apps.workflows:app"


def app_on(fleet: Fleet) -> App:
    """The same tasks, on the ledger of this test."""
    app = App(fleet.url)
    copy_tasks(tasks.app, app)
    return app


def of_two_hundred(app: App) -> Workflow:
    """Fan-out of a hundred, fan-in, a map of eighty, a group with another inside, and what brings it all together."""
    task = app.task_by_name
    flow = app.workflow("two hundred")
    start = flow.add(task("square"), 1)
    fans = [flow.add(task("square"), n, 0.01).after(start) for n in range(100)]
    gathered = flow.add(task("total"), fans)
    numbers = flow.add(task("count_to"), 80)
    mapped = flow.map(task("square"), numbers, nap_s=0.01)
    group = flow.group("nested")
    inner = group.group("deeper")
    deep = [inner.add(task("double"), n) for n in range(10)]
    inner.add(task("total"), deep)
    group.add(task("first"), inner)
    broken = flow.add(task("break_down"), 5).on_error("continue")
    flow.add(task("total"), mapped, group, broken).named("end").after(gathered)
    return flow


def kill_one_each_second(fleet: Fleet, chance: random.Random, done: threading.Event) -> None:
    while not done.wait(1.0):
        victim = chance.choice([worker for worker in fleet.workers if worker.process.poll() is None])
        victim.kill_family()
        fleet.start("--concurrency", "4", target=TARGET, wait=False)


def test_two_hundred_nodes_end_as_they_should_while_a_worker_is_killed_each_second(fleet: Fleet, seed: int) -> None:
    app = app_on(fleet)
    done = threading.Event()
    for _ in range(3):
        fleet.start("--concurrency", "4", target=TARGET)
    killer = threading.Thread(target=kill_one_each_second, args=(fleet, random.Random(seed), done))
    killer.start()
    try:
        run = of_two_hundred(app).start()
        found = run.result(timeout=120)
    finally:
        done.set()
        killer.join()
        app.close()
    assert found == [sum(n * n for n in range(80)) + sum(2 * n for n in range(10)), 1]
    states = {node.name: node.state for node in run.look().nodes}
    assert len(states) == 200
    assert {name for name, state in states.items() if state is not NodeState.SUCCEEDED} == {"break_down"}


def begun(fleet: Fleet, app: App, policy: str) -> WorkflowRun:
    """A workflow whose first node runs in a worker."""
    flow = app.workflow("victim")
    victim = flow.add(app.task_by_name("nap"), 60).on_error(policy)  # type: ignore[arg-type]
    flow.add(app.task_by_name("total"), [], victim).named("after")
    run = flow.start()
    wait_for(lambda: run.job("nap").state == "running", "the node to run")
    return run


@pytest.mark.parametrize("policy", ["fail", "continue", "pause"])
def test_the_death_of_a_worker_in_a_node_moves_the_workflow_on_by_its_rule(fleet: Fleet, policy: str) -> None:
    app = app_on(fleet)
    victim = fleet.start("--concurrency", "1", target=TARGET)
    run = begun(fleet, app, policy)
    fleet.start("--concurrency", "1", target=TARGET)
    victim.kill_family()
    if policy == "fail":
        with pytest.raises(WorkerCrashed) as caught:
            run.result(timeout=60)
        assert caught.value.details["node"] == "nap"
        assert {node.name: node.state for node in run.look().nodes}["after"] is NodeState.CANCELLED
    elif policy == "continue":
        assert run.result(timeout=60) == [0, 1]
    else:
        wait_for(lambda: run.look().state is WorkflowState.PAUSED, "the workflow to wait for an operator")
        assert run.resume()
        assert run.result(timeout=60) == [0, 1]
    [error] = [node.error for node in run.look().nodes if node.name == "nap"]
    assert error is not None
    assert error["code"] == "WORKER_CRASHED"
    app.close()


@pytest.mark.parametrize("policy", ["fail", "continue"])
def test_a_job_that_was_failed_by_hand_is_found_and_its_workflow_finished_in_the_same_pass(
    fleet: Fleet, policy: str
) -> None:
    """The job is over and its node is not: nobody who uses the ledger as it is meant can bring that about."""
    app = app_on(fleet)
    flow = app.workflow("mismatch")
    node = flow.add(app.task_by_name("nap"), 60).on_error(policy)  # type: ignore[arg-type]
    flow.add(app.task_by_name("total"), [], node)
    run = flow.start()
    table, now = (
        ("unstuck_jobs", "unixepoch('subsec')") if fleet.url.startswith("sqlite") else ("unstuck.jobs", "now()")
    )
    off = "0" if fleet.url.startswith("sqlite") else "false"
    fleet.backdoor().rows(
        f"UPDATE {table} SET state = 'failed', ready = {off}, finished_at = {now}, error_code = 'WORKER_CRASHED', "
        f"error_message = 'Worker died unexpectedly' WHERE id = {run.job('nap').id} RETURNING id"
    )
    [repaired] = fleet.ledger.maintenance.repair_workflows(10)
    assert repaired.workflow_id == run.id
    assert not fleet.ledger.maintenance.repair_workflows(10)
    assert any(event.kind == "workflow_repaired" for event in fleet.ledger.events.list(job_id=run.id))
    if policy == "fail":
        with pytest.raises(WorkerCrashed):
            run.result(timeout=5)
    else:
        fleet.start("--concurrency", "1", target=TARGET)
        assert run.result(timeout=60) == [0, 1]
    app.close()


def test_what_was_removed_by_hand_is_an_error_of_its_own(fleet: Fleet) -> None:
    app = app_on(fleet)
    flow = app.workflow("gone")
    node = flow.add(app.task_by_name("nap"), 60).on_error("continue")
    passed = flow.add(app.task_by_name("pass_on"), node)
    flow.add(app.task_by_name("total"), [], passed)
    run = flow.start()
    table = "unstuck_jobs" if fleet.url.startswith("sqlite") else "unstuck.jobs"
    fleet.backdoor().rows(f"DELETE FROM {table} WHERE id = {run.job('nap').id} RETURNING id")
    assert len(fleet.ledger.maintenance.repair_workflows(10)) == 1
    fleet.start("--concurrency", "1", target=TARGET)
    assert run.result(timeout=60) == [0, 1]
    [error] = [node.error for node in run.look().nodes if node.name == "nap"]
    assert error is not None
    assert error["code"] == "RESULT_NOT_AVAILABLE"
    # A task may return the error that it was given: it is the same to those who depend on it, and to its caller.
    returned = run.job("pass_on").result(timeout=5)
    assert isinstance(returned, NodeError)
    assert (returned.code, returned.node) == ("RESULT_NOT_AVAILABLE", "nap")
    app.close()


def test_a_node_error_may_stand_wherever_a_job_gives_a_value(fleet: Fleet) -> None:
    app = app_on(fleet)
    fleet.start("--concurrency", "1", target=TARGET)
    error = NodeError(code="TASK_FAILED", message="boom", node="first", job_id=7)
    job = app.task_by_name("remember").enqueue(error)
    job.signal("go", {"value": error})
    assert job.result(timeout=60) == [error] * 3
    named = app.task_by_name("pass_on").enqueue(value=[error, {"deep": error}, 1])
    assert named.result(timeout=60) == [error, {"deep": error}, 1]
    app.close()
