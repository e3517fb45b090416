"""Workflows at the moments at which several things are said of them at once."""

from typing import Any

import pytest
from tests.contract.hands import claim, crash, crash_retry, done, new_job, put, state_of, turn
from tests.contract.meddling import Meddler

from unstuck.domain.endings import Ending, JobError
from unstuck.domain.errors import DuplicateJob
from unstuck.domain.inputs import NodeError, read_result, unpack
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.workflow import NodeState, WorkflowState
from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed, Done, Held, NewEdge, NewNode, NewWorkflow, Pulse, Ties, WorkflowRecord

ROOT = "unstuck.workflow"


def begin(
    ledger: Ledger,
    *pairs: tuple[int, int],
    nodes: int = 2,
    unique_key: str | None = None,
    on_error: Any = "fail",
    **job: Any,
) -> int:
    """Begin a workflow of so many tasks, of which the second of each pair waits for the first."""
    tasks = [
        NewNode(place, 0, f"n{place}", "task", on_error=on_error, job=new_job(**job)) for place in range(1, nodes + 1)
    ]
    root = new_job(task=ROOT, unique_key=unique_key)
    whole = NewNode(0, None, "all", "group", source=nodes)
    edges = tuple(NewEdge(source, target, True) for source, target in pairs)
    return ledger.begin_workflow(NewWorkflow("all", root, (whole, *tasks), edges)).job_id


def look(ledger: Ledger, workflow_id: int) -> WorkflowRecord:
    found = ledger.workflow(workflow_id)
    assert found is not None
    return found


def stopped(job: Claimed) -> Ending:
    """End an attempt as a worker does that was asked to stop it."""
    error = JobError("CANCELLED", "Job was cancelled", "it was asked to stop")
    return Ending(job.job_id, job.token, JobState.CANCELLED, AttemptState.CANCELLED, error=error, event="cancelled")


def test_a_repair_looks_at_so_many_nodes_and_the_next_goes_on_behind_them(
    ledger: Ledger, w1: str, dialect: str, meddler: Meddler, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "sqlite" if dialect == "sqlite" else "postgres"
    monkeypatch.setattr(f"unstuck.store.{package}.workflows.REPAIR_LOOK", 6)
    numbers = [begin(ledger, (1, 2)) for _ in range(5)]
    table, off = ("unstuck_jobs", 0) if dialect == "sqlite" else ("unstuck.jobs", False)
    now = "unixepoch('subsec')" if dialect == "sqlite" else "now()"
    for number in numbers[1:]:
        meddler.rows(
            f"UPDATE {table} SET state = 'succeeded', ready = {off}, finished_at = {now} "
            f"WHERE workflow_id = {number} AND place = 1 RETURNING id"
        )
    found = [[one.workflow_id for one in ledger.repair_workflows(10)] for _ in range(4)]
    assert found == [numbers[1:2], numbers[2:4], numbers[4:], []]


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


def test_what_was_claimed_and_not_begun_is_taken_back_when_its_scope_fails(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, nodes=3)
    first, second, third = claim(ledger, start=2)
    turn(ledger, endings=[crash(first)])
    found = look(ledger, number)
    assert found.state is WorkflowState.FAILED
    # The second runs to its end, the third does not begin any more.
    assert [node.state for node in found.nodes] == [NodeState.FAILED, NodeState.RELEASED, NodeState.CANCELLED]
    assert state_of(ledger, second.job_id) is JobState.RUNNING
    assert state_of(ledger, third.job_id) is JobState.CANCELLED
    answer = turn(ledger, start=[Held(third.job_id, third.token)], done=[done(second)])
    assert answer.superseded == {(third.job_id, third.token)}
    assert [node.state for node in look(ledger, number).nodes][1] is NodeState.SUCCEEDED
    assert ledger.held("w1") == []


def test_the_place_in_a_line_of_what_was_taken_back_is_free(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, nodes=2, more=Ties(line="k", line_limit=2))
    first, _ = claim(ledger, start=1)
    waits = put(ledger, more=Ties(line="k", line_limit=2))
    turn(ledger, endings=[crash(first)])
    assert look(ledger, number).state is WorkflowState.FAILED
    assert [job.job_id for job in claim(ledger)] == [waits]


def test_of_what_nodes_say_of_their_line_the_last_word_wins(ledger: Ledger, w1: str) -> None:
    nodes = tuple(
        NewNode(place, 0, f"n{place}", "task", job=new_job(more=Ties(line="mail", line_limit=limit)))
        for place, limit in enumerate((2, 1, 2), 1)
    )
    root = NewNode(0, None, "mails", "group", source=1)
    ledger.begin_workflow(NewWorkflow("mails", new_job(task="unstuck.workflow"), (root, *nodes), ()))
    assert len(claim(ledger)) == 2


def test_what_stops_after_its_workflow_was_taken_up_again_is_tried_again(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    [runs] = claim(ledger, start=1)
    ledger.cancel([number], "me")
    assert ledger.beat(Pulse("w1", 1, 0)).cancel == ((runs.job_id, runs.token),)
    assert ledger.retry_workflow(number, "me")
    assert ledger.beat(Pulse("w1", 1, 0)).cancel == ()
    # Its worker had heard of it already.
    turn(ledger, endings=[stopped(runs)])
    assert look(ledger, number).state is WorkflowState.RUNNING
    [again] = claim(ledger, start=1)
    assert again.job_id == runs.job_id
    assert [one.state for one in ledger.attempts(runs.job_id)][:1] == ["cancelled"]
    # Asked anew, it is cancelled for good.
    assert ledger.cancel([again.job_id], "me") == {again.job_id: "requested"}
    turn(ledger, endings=[stopped(again)])
    assert look(ledger, number).state is WorkflowState.FAILED


def test_what_had_not_heard_that_it_should_stop_goes_on_with_its_workflow(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    [runs] = claim(ledger, start=1)
    ledger.cancel([number], "me")
    assert ledger.retry_workflow(number, "me")
    turn(ledger, done=[done(runs)])
    turn(ledger, done=[done(job) for job in claim(ledger, start=1)])
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_all_that_failed_in_a_wide_workflow_is_queued_again(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, nodes=5, on_crash="retry")
    jobs = claim(ledger, start=5)
    turn(ledger, endings=[crash(job) for job in jobs[:4]])
    assert ledger.retry_workflow(number, "me")
    assert {node.state for node in look(ledger, number).nodes} == {NodeState.RELEASED}
    assert [state_of(ledger, job.job_id) for job in jobs[:4]] == [JobState.PENDING] * 4
    assert [len(ledger.attempts(job.job_id)) for job in jobs[:4]] == [1] * 4
    turn(ledger, done=[done(job) for job in [jobs[4], *claim(ledger, start=5)]])
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_workflows_of_one_state_are_listed_page_by_page(ledger: Ledger, w1: str) -> None:
    numbers = [begin(ledger, nodes=1) for _ in range(6)]
    ledger.cancel([numbers[1], numbers[3], numbers[5]], "me")
    newest, *_ = page = ledger.workflows("cancelled", limit=2)
    assert [one.id for one in page] == [numbers[5], numbers[3]]
    assert newest.counts == {"cancelled": 1}
    assert [one.id for one in ledger.workflows("cancelled", before_id=numbers[3], limit=2)] == [numbers[1]]
    assert [one.id for one in ledger.workflows("running")] == [numbers[4], numbers[2], numbers[0]]
    assert [one.id for one in ledger.workflows(before_id=numbers[2])] == [numbers[1], numbers[0]]


# Rows that lack what they should have -----------------------------------------------------------


def end_by_hand(meddler: Meddler, dialect: str, job_id: int, state: str, **columns: str) -> None:
    """Move a job that waits to a final state, as a person or a partial restore would."""
    table, off, now = (
        ("unstuck_jobs", "0", "unixepoch('subsec')") if dialect == "sqlite" else ("unstuck.jobs", "false", "now()")
    )
    # PostgreSQL refuses a failure without any code; an empty one is as good as none.
    code = "NULL" if dialect == "sqlite" or state == "succeeded" else "''"
    facts = {"error_code": code, **columns}
    told = "".join(f", {name} = {value}" for name, value in facts.items())
    meddler.rows(
        f"UPDATE {table} SET state = '{state}', ready = {off}, finished_at = {now}{told} "
        f"WHERE id = {job_id} RETURNING id"
    )


@pytest.mark.parametrize(
    ("state", "columns", "node_state", "code", "message"),
    [
        ("failed", {}, "failed", "WORKER_CRASHED", "Worker died unexpectedly"),
        ("cancelled", {}, "cancelled", "TASK_CANCELLED", "Job was cancelled"),
        ("quarantined", {}, "failed", "CRASHED_TOO_OFTEN", "Job is quarantined"),
        ("succeeded", {}, "failed", "RESULT_NOT_AVAILABLE", "Its result is not there any more"),
        ("failed", {"error_code": "'TASK_FAILED'"}, "failed", "TASK_FAILED", ""),
        ("cancelled", {"error_code": "'CANCELLED'"}, "cancelled", "TASK_CANCELLED", ""),
    ],
)
def test_a_node_whose_job_lacks_its_outcome_gets_the_error_that_its_state_means(
    ledger: Ledger,
    w1: str,
    meddler: Meddler,
    dialect: str,
    state: str,
    columns: dict[str, str],
    node_state: str,
    code: str,
    message: str,
) -> None:
    number = begin(ledger, (1, 2), on_error="continue")
    [first] = [node.job_id for node in look(ledger, number).nodes if node.place == 1]
    assert first is not None
    end_by_hand(meddler, dialect, first, state, **columns)
    assert [one.workflow_id for one in ledger.repair_workflows(10)] == [number]
    [node] = [node for node in look(ledger, number).nodes if node.place == 1]
    assert node.error is not None
    assert (node.state, node.error["code"], node.error["message"]) == (node_state, code, message)
    [second] = claim(ledger)
    given = unpack(second.inputs)[1]
    assert isinstance(given, NodeError)
    assert (given.code, given.message, given.node, given.job_id) == (code, message, "n1", first)
    # The same error for whoever looks at the job itself; a success stays one.
    record = ledger.job(first)
    assert record is not None
    if state != "succeeded":
        assert record.error is not None
        assert record.error.code == ("CANCELLED" if code == "TASK_CANCELLED" else code)
        [outcome] = ledger.outcomes([first])
        assert outcome.error == record.error


def test_a_result_that_is_lost_after_its_node_succeeded_is_an_error_for_those_who_need_it(
    ledger: Ledger, w1: str, meddler: Meddler, dialect: str
) -> None:
    table = "unstuck_jobs" if dialect == "sqlite" else "unstuck.jobs"
    number = begin(ledger, (1, 2), nodes=3)
    first, third = claim(ledger)
    turn(ledger, start=[Held(first.job_id, first.token), Held(third.job_id, third.token)])
    turn(ledger, done=[done(first), Done(third.job_id, third.token, b"null")])
    meddler.rows(f"UPDATE {table} SET result = NULL WHERE id = {first.job_id} RETURNING id")
    [second] = claim(ledger)
    given = unpack(second.inputs)[1]
    assert isinstance(given, NodeError)
    assert (given.code, given.node, given.job_id) == ("RESULT_NOT_AVAILABLE", "n1", first.job_id)
    # The workflow's own result is that of its last node, and lost in the same way.
    meddler.rows(f"UPDATE {table} SET result = NULL WHERE id = {third.job_id} RETURNING id")
    turn(ledger, start=[Held(second.job_id, second.token)])
    turn(ledger, done=[done(second)])
    [whole] = ledger.outcomes([number])
    assert whole.result is not None
    assert read_result(whole.result).code == "RESULT_NOT_AVAILABLE"


def test_a_map_over_a_lost_result_fails_and_is_not_empty(
    ledger: Ledger, w1: str, meddler: Meddler, dialect: str
) -> None:
    tasks = [
        NewNode(1, 0, "list", "task", on_error="continue", job=new_job()),
        NewNode(2, 0, "each", "map", source=1, job=new_job()),
    ]
    whole = NewNode(0, None, "all", "group", source=2)
    root = new_job(task=ROOT)
    flow = NewWorkflow("all", root, (whole, *tasks), (NewEdge(1, 2, True),))
    number = ledger.begin_workflow(flow).job_id
    [first] = [node.job_id for node in look(ledger, number).nodes if node.place == 1]
    table, on_error = ("unstuck_nodes", "continue") if dialect == "sqlite" else ("unstuck.nodes", "continue")
    meddler.rows(
        f"UPDATE {table} SET on_error = '{on_error}' WHERE workflow_id = {number} AND place = 1 RETURNING place"
    )
    assert first is not None
    end_by_hand(meddler, dialect, first, "succeeded")
    ledger.repair_workflows(10)
    [outcome] = ledger.outcomes([number])
    assert outcome.state is JobState.FAILED
    assert outcome.error is not None
    assert outcome.error.code == "RESULT_NOT_AVAILABLE"
