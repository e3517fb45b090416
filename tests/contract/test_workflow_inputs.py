"""What a node is given of others: bounded together, and said clearly."""

import pytest
from tests.contract.test_workflows import ROOT, look
from tests.support.builders import claim_jobs, done, new_job, turn
from tests.support.decoding_bombs import assert_bounded, json_bombs

from unstuck.domain import node_inputs
from unstuck.domain.node_inputs import NodeError
from unstuck.domain.workflows import call_with_results
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import Claimed
from unstuck.ledger.contract.workflows import NewEdge, NewNode, NewWorkflow

REFS = b'{"args":[null,null],"refs":[[["args",0],1],[["args",1],2]]}'


def last_of_three(ledger: Ledger, size: int) -> Claimed:
    """Run a workflow of three nodes up to the last one, which gets results of this size from the others."""
    tasks = [NewNode(place, 0, f"n{place}", "task", job=new_job()) for place in (1, 2)]
    tasks.append(NewNode(3, 0, "n3", "task", job=new_job(payload=REFS)))
    edges = (NewEdge(1, 3, True), NewEdge(2, 3, True))
    whole = NewNode(0, None, "all", "group", source=3)
    ledger.workflows.begin(NewWorkflow("all", new_job(task=ROOT), (whole, *tasks), edges))
    result = b'"' + b"x" * (size - 2) + b'"'
    turn(ledger, done=[done(job, result) for job in claim_jobs(ledger, start=2)])
    [last] = claim_jobs(ledger, start=1)
    return last


@pytest.mark.parametrize("size", [500, 501])
def test_the_results_that_a_node_is_given_are_bounded_together(
    ledger: Ledger, w1: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_inputs, "MAX_BYTES", 1000)
    last = last_of_three(ledger, size)
    found = node_inputs.unpack_inputs(last.inputs)
    if size == 500:
        assert found == {1: "x" * 498, 2: "x" * 498}
        return
    assert list(found) == [node_inputs.ALL]
    assert isinstance(found[node_inputs.ALL], NodeError)
    assert found[node_inputs.ALL].code == "INPUTS_TOO_LARGE"
    assert "over 1,000 bytes together" in found[node_inputs.ALL].cause
    # A worker in another language finds the error where the results would be.
    assert call_with_results(last.payload, last.inputs)["args"][0]["$error"]["code"] == "INPUTS_TOO_LARGE"


def map_over(ledger: Ledger, result: bytes) -> list[NodeError | None]:
    """Run a workflow that maps over this result; return the errors of its nodes."""
    list_node = NewNode(1, 0, "list", "task", job=new_job())
    each = NewNode(2, 0, "each", "map", source=1, job=new_job(payload=b'{"args":[null],"refs":[[["args",0],-1]]}'))
    whole = NewNode(0, None, "all", "group", source=2)
    edges = (NewEdge(1, 2, True),)
    workflow = ledger.workflows.begin(NewWorkflow("all", new_job(task=ROOT), (whole, list_node, each), edges))
    [job] = claim_jobs(ledger, start=1)
    turn(ledger, done=[done(job, result)])
    return [node.error for node in look(ledger, workflow.job_id).nodes]


@pytest.mark.parametrize("bomb", ["empty arrays", "digits", "one-letter texts"])
def test_a_list_of_millions_to_map_over_is_counted_and_not_built(ledger: Ledger, w1: str, bomb: str) -> None:
    result = json_bombs()[bomb]()
    error: list[NodeError | None] = []
    # On PostgreSQL the server counts.
    assert_bounded(lambda: error.extend(map_over(ledger, result)))
    assert f"a map has at most 10000 items, and the list has {result.count(b',') + 1}" in str(error[1])


@pytest.mark.parametrize(
    ("result", "trouble"),
    [
        (b"[" + b",".join([b"[1,2]"] * 10_000) + b"]", None),
        (b"[" + b",".join([b"[1,2]"] * 10_001) + b"]", "the list has 10001"),
        (b'{"a":[' + b"0," * 20_000 + b"0]}", "is no list"),
        (b'"' + b"," * 20_000 + b'"', "is no list"),
    ],
)
def test_only_the_items_of_the_list_itself_count(ledger: Ledger, w1: str, result: bytes, trouble: str | None) -> None:
    errors = map_over(ledger, result)
    assert (errors[1] is None) == (trouble is None)
    assert trouble is None or trouble in str(errors[1])
    assert len(errors) == (2 if trouble else 10_002)
