"""Purging a queue cancels what has not begun and spares what has."""

import pytest
from tests.contract.test_journal import suspend
from tests.contract.test_workflows import ROOT, look
from tests.support.builders import claim_jobs, done, failure_retry, new_job, put, running, state_of, turn

from unstuck.domain.states import JobState
from unstuck.domain.workflows import NodeState, WorkflowState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras
from unstuck.ledger.contract.workflows import NewEdge, NewNode, NewWorkflow


def begin(ledger: Ledger, nodes: int, *pairs: tuple[int, int]) -> int:
    """Begin a workflow of tasks whose failures do not fail the whole; the second of each pair waits for the first."""
    places = range(1, nodes + 1)
    tasks = [NewNode(place, 0, f"n{place}", "task", "continue", job=new_job()) for place in places]
    whole = NewNode(0, None, "all", "group", source=nodes)
    edges = tuple(NewEdge(source, target) for source, target in pairs)
    return ledger.workflows.begin(NewWorkflow("all", new_job(task=ROOT), (whole, *tasks), edges)).job_id


def node_states(ledger: Ledger, workflow_id: int) -> list[NodeState]:
    return [node.state for node in look(ledger, workflow_id).nodes if node.kind == "task"]


def test_purging_spares_jobs_that_sleep_or_wait_for_a_signal(ledger: Ledger, w1: str) -> None:
    asleep = running(ledger)
    turn(ledger, endings=[suspend(asleep, 60.0)])
    awaiting = running(ledger)
    turn(ledger, endings=[suspend(awaiting, 60.0, "go")])
    woken = running(ledger)
    turn(ledger, endings=[suspend(woken, None, "go")])
    assert ledger.jobs.signal(woken.job_id, "go", b"1", "me") == "woken"
    fresh = [
        put(ledger),
        put(ledger, delay_s=60.0),
        *(put(ledger, more=JobExtras(concurrency_key="key")) for _ in range(2)),
    ]
    [queue] = ledger.queues.list()
    assert (queue.pending, queue.blocked, queue.scheduled, queue.waiting) == (3, 1, 1, 2)
    assert ledger.queues.purge("default", "ops") == 4
    assert [state_of(ledger, job_id) for job_id in fresh] == [JobState.CANCELLED] * 4
    assert state_of(ledger, asleep.job_id) is JobState.WAITING
    assert state_of(ledger, awaiting.job_id) is JobState.WAITING
    assert state_of(ledger, woken.job_id) is JobState.PENDING
    assert ledger.events.list()[-1].message == "4 pending jobs of queue 'default' were cancelled by ops"


def test_purging_spares_a_job_between_two_tries(ledger: Ledger, w1: str) -> None:
    tried = running(ledger)
    turn(ledger, endings=[failure_retry(tried, delay_s=60.0)])
    assert ledger.queues.purge("default", "ops") == 0
    assert state_of(ledger, tried.job_id) is JobState.PENDING


def test_purging_spares_the_pending_nodes_of_a_workflow_that_has_begun(
    ledger: Ledger, w1: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small steps: a node that one step cancels must not make its workflow look begun to the next.
    package = "sqlite" if dialect == "sqlite" else "postgres"
    monkeypatch.setattr(f"unstuck.ledger.{package}.queues.PURGE_BATCH", 2)
    half_done = begin(ledger, 2, (1, 2))
    turn(ledger, done=[done(job) for job in claim_jobs(ledger, start=10)])
    side_by_side = begin(ledger, 3)
    first = next(node.job_id for node in look(ledger, side_by_side).nodes if node.name == "n1")
    ran = claim_jobs(ledger, limit=2, start=2)
    assert first in {job.job_id for job in ran}
    untouched = begin(ledger, 5)
    plain = put(ledger)
    assert ledger.queues.purge("default", "ops") == 6
    assert state_of(ledger, plain) is JobState.CANCELLED
    assert look(ledger, half_done).state is WorkflowState.RUNNING
    assert node_states(ledger, side_by_side) == [NodeState.RELEASED] * 3
    assert node_states(ledger, untouched) == [NodeState.CANCELLED] * 5


def test_purging_goes_on_behind_more_spared_jobs_than_one_step_holds(
    ledger: Ledger, w1: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "sqlite" if dialect == "sqlite" else "postgres"
    monkeypatch.setattr(f"unstuck.ledger.{package}.queues.PURGE_BATCH", 2)
    monkeypatch.setattr(f"unstuck.ledger.{package}.queues.PURGE_LOOK", 3)
    begin(ledger, 6)
    claim_jobs(ledger, limit=1, start=1)
    fresh = [put(ledger) for _ in range(7)]
    assert ledger.queues.purge("default", "ops") == 7
    assert {state_of(ledger, job_id) for job_id in fresh} == {JobState.CANCELLED}
