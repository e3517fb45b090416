"""Workflows at the moments at which several things are said of them at once."""

from typing import Any

import pytest
from tests.contract.hands import claim, crash, crash_retry, done, new_job, state_of, turn

from unstuck.domain.errors import DuplicateJob
from unstuck.domain.states import JobState
from unstuck.domain.workflow import NodeState, WorkflowState
from unstuck.store.contract import Ledger
from unstuck.store.records import Done, NewEdge, NewNode, NewWorkflow, WorkflowRecord

ROOT = "unstuck.workflow"


def begin(ledger: Ledger, *pairs: tuple[int, int], nodes: int = 2, unique_key: str | None = None, **job: Any) -> int:
    """Begin a workflow of so many tasks, of which the second of each pair waits for the first."""
    tasks = [NewNode(place, 0, f"n{place}", "task", job=new_job(**job)) for place in range(1, nodes + 1)]
    root = new_job(task=ROOT, unique_key=unique_key)
    whole = NewNode(0, None, "all", "group", source=nodes)
    edges = tuple(NewEdge(source, target, True) for source, target in pairs)
    return ledger.begin_workflow(NewWorkflow("all", root, (whole, *tasks), edges)).job_id


def look(ledger: Ledger, workflow_id: int) -> WorkflowRecord:
    found = ledger.workflow(workflow_id)
    assert found is not None
    return found


def test_a_signal_does_not_wake_the_job_that_stands_for_a_workflow(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    # What that job waits for in the ledger has a name, but it is no signal.
    assert ledger.signal(number, "workflow", b"1", "me") == "workflow"
    assert ledger.signal(number, "go", b"1", "me") == "workflow"
    assert state_of(ledger, number) is JobState.WAITING
    assert ledger.signals(number) == []
    for _ in range(2):
        turn(ledger, done=[done(job) for job in claim(ledger, start=10)])
    assert state_of(ledger, number) is JobState.SUCCEEDED


@pytest.mark.parametrize("whole_first", [True, False])
def test_who_cancels_a_workflow_with_its_nodes_has_cancelled_the_workflow(
    ledger: Ledger, w1: str, whole_first: bool
) -> None:
    number = begin(ledger, (1, 3), nodes=3)
    [running] = claim(ledger, limit=1, start=1)
    pending = next(node.job_id for node in look(ledger, number).nodes if node.name == "n2")
    assert pending is not None
    ids = [number, pending] if whole_first else [pending, number]
    assert ledger.cancel(ids, "me") == {number: "cancelled", pending: "cancelled"}
    found = look(ledger, number)
    assert found.state is WorkflowState.CANCELLED
    assert {node.name: node.state for node in found.nodes if node.job_id != running.job_id} == {
        "n2": NodeState.CANCELLED,
        "n3": NodeState.CANCELLED,
    }
    # What runs is asked to stop, as whenever a workflow is given up.
    turn(ledger, endings=[crash_retry(running)])
    assert state_of(ledger, running.job_id) is JobState.CANCELLED


def test_a_workflow_whose_key_another_one_has_by_now_is_not_taken_up_again(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2), unique_key="k")
    [job] = claim(ledger, start=1)
    turn(ledger, endings=[crash(job)])
    assert look(ledger, number).state is WorkflowState.FAILED
    other = begin(ledger, (1, 2), unique_key="k")
    with pytest.raises(DuplicateJob) as refused:
        ledger.retry_workflow(number, "me")
    assert refused.value.job_id == other
    assert ledger.retry([number, job.job_id], "me") == {number: "duplicate", job.job_id: "duplicate"}
    found = look(ledger, number)
    assert (found.state, found.nodes[0].state) == (WorkflowState.FAILED, NodeState.FAILED)
    assert state_of(ledger, job.job_id) is JobState.FAILED
    ledger.cancel([other], "me")
    assert ledger.retry_workflow(number, "me")
    assert state_of(ledger, job.job_id) is JobState.PENDING


def test_a_success_counts_also_beside_a_lost_attempt_at_the_same_job(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    [lost] = claim(ledger, start=1)
    turn(ledger, endings=[crash_retry(lost)])
    [job] = claim(ledger, start=1)
    answer = turn(ledger, done=[Done(lost.job_id, lost.token, b"1"), done(job)])
    assert answer.superseded == {(lost.job_id, lost.token)}
    assert [node.state for node in look(ledger, number).nodes] == [NodeState.SUCCEEDED, NodeState.RELEASED]
