"""What a node is given of others: bounded together, and said clearly."""

import pytest
from tests.contract.test_workflows import ROOT
from tests.support.builders import claim_jobs, done, new_job, turn

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
    ledger.begin_workflow(NewWorkflow("all", new_job(task=ROOT), (whole, *tasks), edges))
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
