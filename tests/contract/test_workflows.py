"""Workflows at the moments at which several things are said of them at once."""

import itertools
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tests.contract.workflow_model import Model
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, claim_jobs, crash, crash_retry, done, new_job, put, state_of, turn

from unstuck.domain.endings import Ending, JobError
from unstuck.domain.node_inputs import NodeError, read_result, unpack_inputs
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.workflows import NodeState, WorkflowState
from unstuck.errors import DuplicateJob
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras
from unstuck.ledger.contract.workers import AttemptRef, Claimed, Heartbeat, Success
from unstuck.ledger.contract.workflows import NewEdge, NewNode, NewWorkflow, WorkflowRecord

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
    return ledger.workflows.begin(NewWorkflow("all", root, (whole, *tasks), edges)).job_id


def look(ledger: Ledger, workflow_id: int) -> WorkflowRecord:
    found = ledger.workflows.get(workflow_id)
    assert found is not None
    return found


def stopped(job: Claimed) -> Ending:
    """End an attempt as a worker does that was asked to stop it."""
    error = JobError("CANCELLED", "Job was cancelled", "it was asked to stop")
    return Ending(job.job_id, job.token, JobState.CANCELLED, AttemptState.CANCELLED, error=error, event="cancelled")


def test_a_repair_looks_at_so_many_nodes_and_the_next_goes_on_behind_them(
    ledger: Ledger, w1: str, dialect: str, meddler: Backdoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "sqlite" if dialect == "sqlite" else "postgres"
    monkeypatch.setattr(f"unstuck.ledger.{package}.maintenance.REPAIR_LOOK", 6)
    numbers = [begin(ledger, (1, 2)) for _ in range(5)]
    table, off = ("unstuck_jobs", 0) if dialect == "sqlite" else ("unstuck.jobs", False)
    now = "unixepoch('subsec')" if dialect == "sqlite" else "now()"
    for number in numbers[1:]:
        meddler.rows(
            f"UPDATE {table} SET state = 'succeeded', ready = {off}, finished_at = {now} "
            f"WHERE workflow_id = {number} AND place = 1 RETURNING id"
        )
    found = [[one.workflow_id for one in ledger.maintenance.repair_workflows(10)] for _ in range(4)]
    assert found == [numbers[1:2], numbers[2:4], numbers[4:], []]


def test_a_signal_does_not_wake_the_job_that_stands_for_a_workflow(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    # What that job waits for in the ledger has a name, but it is no signal.
    assert ledger.jobs.signal(number, "workflow", b"1", "me") == "workflow"
    assert ledger.jobs.signal(number, "go", b"1", "me") == "workflow"
    assert state_of(ledger, number) is JobState.WAITING
    assert ledger.jobs.signals(number) == []
    for _ in range(2):
        turn(ledger, done=[done(job) for job in claim_jobs(ledger, start=10)])
    assert state_of(ledger, number) is JobState.SUCCEEDED


@pytest.mark.parametrize("whole_first", [True, False])
def test_who_cancels_a_workflow_with_its_nodes_has_cancelled_the_workflow(
    ledger: Ledger, w1: str, whole_first: bool
) -> None:
    number = begin(ledger, (1, 3), nodes=3)
    [running] = claim_jobs(ledger, limit=1, start=1)
    pending = next(node.job_id for node in look(ledger, number).nodes if node.name == "n2")
    assert pending is not None
    ids = [number, pending] if whole_first else [pending, number]
    assert ledger.jobs.cancel(ids, "me") == {number: "cancelled", pending: "cancelled"}
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
    [job] = claim_jobs(ledger, start=1)
    turn(ledger, endings=[crash(job)])
    assert look(ledger, number).state is WorkflowState.FAILED
    other = begin(ledger, (1, 2), unique_key="k")
    with pytest.raises(DuplicateJob) as refused:
        ledger.workflows.retry(number, "me")
    assert refused.value.job_id == other
    assert ledger.jobs.retry([number, job.job_id], "me") == {number: "duplicate", job.job_id: "duplicate"}
    found = look(ledger, number)
    assert (found.state, found.nodes[0].state) == (WorkflowState.FAILED, NodeState.FAILED)
    assert state_of(ledger, job.job_id) is JobState.FAILED
    ledger.jobs.cancel([other], "me")
    assert ledger.workflows.retry(number, "me")
    assert state_of(ledger, job.job_id) is JobState.PENDING


def test_a_success_counts_also_beside_a_lost_attempt_at_the_same_job(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    [lost] = claim_jobs(ledger, start=1)
    turn(ledger, endings=[crash_retry(lost)])
    [job] = claim_jobs(ledger, start=1)
    answer = turn(ledger, done=[Success(lost.job_id, lost.token, b"1"), done(job)])
    assert answer.superseded == {(lost.job_id, lost.token)}
    assert [node.state for node in look(ledger, number).nodes] == [NodeState.SUCCEEDED, NodeState.RELEASED]


def test_what_was_claimed_and_not_begun_is_taken_back_when_its_scope_fails(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, nodes=3)
    first, second, third = claim_jobs(ledger, start=2)
    turn(ledger, endings=[crash(first)])
    found = look(ledger, number)
    assert found.state is WorkflowState.FAILED
    # The second runs to its end, the third does not begin any more.
    assert [node.state for node in found.nodes] == [NodeState.FAILED, NodeState.RELEASED, NodeState.CANCELLED]
    assert state_of(ledger, second.job_id) is JobState.RUNNING
    assert state_of(ledger, third.job_id) is JobState.CANCELLED
    answer = turn(ledger, start=[AttemptRef(third.job_id, third.token)], done=[done(second)])
    assert answer.superseded == {(third.job_id, third.token)}
    assert [node.state for node in look(ledger, number).nodes][1] is NodeState.SUCCEEDED
    assert ledger.workers.held("w1") == []


def test_the_place_in_a_line_of_what_was_taken_back_is_free(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, nodes=2, more=JobExtras(concurrency_key="k", concurrency_limit=2))
    first, _ = claim_jobs(ledger, start=1)
    waits = put(ledger, more=JobExtras(concurrency_key="k", concurrency_limit=2))
    turn(ledger, endings=[crash(first)])
    assert look(ledger, number).state is WorkflowState.FAILED
    assert [job.job_id for job in claim_jobs(ledger)] == [waits]


def test_of_what_nodes_say_of_their_line_the_last_word_wins(ledger: Ledger, w1: str) -> None:
    nodes = tuple(
        NewNode(
            place, 0, f"n{place}", "task", job=new_job(more=JobExtras(concurrency_key="mail", concurrency_limit=limit))
        )
        for place, limit in enumerate((2, 1, 2), 1)
    )
    root = NewNode(0, None, "mails", "group", source=1)
    ledger.workflows.begin(NewWorkflow("mails", new_job(task="unstuck.workflow"), (root, *nodes), ()))
    assert len(claim_jobs(ledger)) == 2


def test_what_stops_after_its_workflow_was_taken_up_again_is_tried_again(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    [runs] = claim_jobs(ledger, start=1)
    ledger.jobs.cancel([number], "me")
    assert ledger.workers.beat(Heartbeat("w1", 1, 0)).cancel == ((runs.job_id, runs.token),)
    assert ledger.workflows.retry(number, "me")
    assert ledger.workers.beat(Heartbeat("w1", 1, 0)).cancel == ()
    # Its worker had heard of it already.
    turn(ledger, endings=[stopped(runs)])
    assert look(ledger, number).state is WorkflowState.RUNNING
    [again] = claim_jobs(ledger, start=1)
    assert again.job_id == runs.job_id
    assert [one.state for one in ledger.jobs.attempts(runs.job_id)][:1] == ["cancelled"]
    # Asked anew, it is cancelled for good.
    assert ledger.jobs.cancel([again.job_id], "me") == {again.job_id: "requested"}
    turn(ledger, endings=[stopped(again)])
    assert look(ledger, number).state is WorkflowState.FAILED


def test_what_had_not_heard_that_it_should_stop_goes_on_with_its_workflow(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, (1, 2))
    [runs] = claim_jobs(ledger, start=1)
    ledger.jobs.cancel([number], "me")
    assert ledger.workflows.retry(number, "me")
    turn(ledger, done=[done(runs)])
    turn(ledger, done=[done(job) for job in claim_jobs(ledger, start=1)])
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_all_that_failed_in_a_wide_workflow_is_queued_again(ledger: Ledger, w1: str) -> None:
    number = begin(ledger, nodes=5, on_crash="retry")
    jobs = claim_jobs(ledger, start=5)
    turn(ledger, endings=[crash(job) for job in jobs[:4]])
    assert ledger.workflows.retry(number, "me")
    assert {node.state for node in look(ledger, number).nodes} == {NodeState.RELEASED}
    assert [state_of(ledger, job.job_id) for job in jobs[:4]] == [JobState.PENDING] * 4
    assert [len(ledger.jobs.attempts(job.job_id)) for job in jobs[:4]] == [1] * 4
    turn(ledger, done=[done(job) for job in [jobs[4], *claim_jobs(ledger, start=5)]])
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_workflows_of_one_state_are_listed_page_by_page(ledger: Ledger, w1: str) -> None:
    numbers = [begin(ledger, nodes=1) for _ in range(6)]
    ledger.jobs.cancel([numbers[1], numbers[3], numbers[5]], "me")
    newest, *_ = page = ledger.workflows.list("cancelled", limit=2)
    assert [one.id for one in page] == [numbers[5], numbers[3]]
    assert newest.counts == {"cancelled": 1}
    assert [one.id for one in ledger.workflows.list("cancelled", before_id=numbers[3], limit=2)] == [numbers[1]]
    assert [one.id for one in ledger.workflows.list("running")] == [numbers[4], numbers[2], numbers[0]]
    assert [one.id for one in ledger.workflows.list(before_id=numbers[2])] == [numbers[1], numbers[0]]


# Rows that lack what they should have -----------------------------------------------------------


def end_by_hand(meddler: Backdoor, dialect: str, job_id: int, state: str, **columns: str) -> None:
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
    meddler: Backdoor,
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
    assert [one.workflow_id for one in ledger.maintenance.repair_workflows(10)] == [number]
    [node] = [node for node in look(ledger, number).nodes if node.place == 1]
    assert node.error is not None
    assert (node.state, node.error["code"], node.error["message"]) == (node_state, code, message)
    [second] = claim_jobs(ledger)
    given = unpack_inputs(second.inputs)[1]
    assert isinstance(given, NodeError)
    assert (given.code, given.message, given.node, given.job_id) == (code, message, "n1", first)
    # The same error for whoever looks at the job itself; a success stays one.
    record = ledger.jobs.get(first)
    assert record is not None
    if state != "succeeded":
        assert record.error is not None
        assert record.error.code == ("CANCELLED" if code == "TASK_CANCELLED" else code)
        [outcome] = ledger.jobs.outcomes([first])
        assert outcome.error == record.error


def test_a_result_that_is_lost_after_its_node_succeeded_is_an_error_for_those_who_need_it(
    ledger: Ledger, w1: str, meddler: Backdoor, dialect: str
) -> None:
    table = "unstuck_jobs" if dialect == "sqlite" else "unstuck.jobs"
    number = begin(ledger, (1, 2), nodes=3)
    first, third = claim_jobs(ledger)
    turn(ledger, start=[AttemptRef(first.job_id, first.token), AttemptRef(third.job_id, third.token)])
    turn(ledger, done=[done(first), Success(third.job_id, third.token, b"null")])
    meddler.rows(f"UPDATE {table} SET result = NULL WHERE id = {first.job_id} RETURNING id")
    [second] = claim_jobs(ledger)
    given = unpack_inputs(second.inputs)[1]
    assert isinstance(given, NodeError)
    assert (given.code, given.node, given.job_id) == ("RESULT_NOT_AVAILABLE", "n1", first.job_id)
    # The workflow's own result is that of its last node, and lost in the same way.
    meddler.rows(f"UPDATE {table} SET result = NULL WHERE id = {third.job_id} RETURNING id")
    turn(ledger, start=[AttemptRef(second.job_id, second.token)])
    turn(ledger, done=[done(second)])
    [whole] = ledger.jobs.outcomes([number])
    assert whole.result is not None
    assert read_result(whole.result).code == "RESULT_NOT_AVAILABLE"


def test_a_map_over_a_lost_result_fails_and_is_not_empty(
    ledger: Ledger, w1: str, meddler: Backdoor, dialect: str
) -> None:
    tasks = [
        NewNode(1, 0, "list", "task", on_error="continue", job=new_job()),
        NewNode(2, 0, "each", "map", source=1, job=new_job()),
    ]
    whole = NewNode(0, None, "all", "group", source=2)
    root = new_job(task=ROOT)
    flow = NewWorkflow("all", root, (whole, *tasks), (NewEdge(1, 2, True),))
    number = ledger.workflows.begin(flow).job_id
    [first] = [node.job_id for node in look(ledger, number).nodes if node.place == 1]
    table, on_error = (
        ("unstuck_workflow_nodes", "continue") if dialect == "sqlite" else ("unstuck.workflow_nodes", "continue")
    )
    meddler.rows(
        f"UPDATE {table} SET on_error = '{on_error}' WHERE workflow_id = {number} AND place = 1 RETURNING place"
    )
    assert first is not None
    end_by_hand(meddler, dialect, first, "succeeded")
    ledger.maintenance.repair_workflows(10)
    [outcome] = ledger.jobs.outcomes([number])
    assert outcome.state is JobState.FAILED
    assert outcome.error is not None
    assert outcome.error.code == "RESULT_NOT_AVAILABLE"


_plays = itertools.count()
POLICIES = ("fail", "continue", "pause")


@st.composite
def workflows(draw: Any) -> NewWorkflow:
    """A workflow of up to a dozen nodes: tasks, maps, groups in groups; each may depend on what stands before it in its
    own scope or around it."""
    nodes = [NewNode(0, None, "all", "group")]
    edges: dict[tuple[int, int], bool] = {}
    scopes = [0]
    parents = {0: None}
    for place in range(1, draw(st.integers(2, 12))):
        parent = draw(st.sampled_from(scopes))
        around, scope = [], parent
        while scope is not None:
            around.append(scope)
            scope = parents[scope]
        near = [node.place for node in nodes[1:] if node.parent in around and node.place not in around]
        kind = draw(st.sampled_from(["task", "task", "task", "group", "map"] if near else ["task", "task", "group"]))
        source = None
        if kind == "group":
            scopes.append(place)
            parents[place] = parent
        else:
            for other in draw(st.lists(st.sampled_from(near), max_size=3, unique=True)) if near else ():
                edges[other, place] = draw(st.booleans())
        if kind == "map":
            source = draw(st.sampled_from(near))
            edges[source, place] = True
        job = None if kind == "group" else new_job()
        nodes.append(NewNode(place, parent, f"n{place}", kind, draw(st.sampled_from(POLICIES)), source, job))
    # Every group has something in it, and stands for something in it.
    for scope in scopes:
        if not any(node.parent == scope for node in nodes):
            nodes.append(NewNode(len(nodes), scope, f"n{len(nodes)}", "task", job=new_job()))
    done = []
    for node in nodes:
        if node.kind == "group":
            inside = [other.place for other in nodes if other.parent == node.place]
            node = NewNode(node.place, node.parent, node.name, "group", node.on_error, draw(st.sampled_from(inside)))
        done.append(node)
    root = new_job(task="unstuck.workflow")
    return NewWorkflow("all", root, tuple(done), tuple(NewEdge(*pair, data) for pair, data in edges.items()))


def _has_circle(workflow: NewWorkflow) -> bool:
    """A node may wait for a group that stands before it and is filled later by what waits for the node."""
    before: dict[int, set[int]] = {node.place: set() for node in workflow.nodes}
    for edge in workflow.edges:
        before[edge.target].add(edge.source)
    for node in workflow.nodes:
        if node.parent is not None:
            before[node.parent].add(node.place)
    while ready := [place for place, sources in before.items() if not sources]:
        for place in ready:
            del before[place]
        for sources in before.values():
            sources.difference_update(ready)
    return bool(before)


class Play:
    """One workflow in a ledger and in the model, taken through the same steps."""

    def __init__(self, ledger: Ledger, workflow: NewWorkflow) -> None:
        self.ledger = ledger
        # A queue of its own: what another play left behind is nothing to it.
        self.queue = f"play-{next(_plays)}"
        nodes = tuple(
            node if node.job is None else msgspec.structs.replace(node, job=new_job(queue=self.queue))
            for node in workflow.nodes
        )
        self.id = ledger.workflows.begin(msgspec.structs.replace(workflow, nodes=nodes)).job_id
        self.model = Model.of(workflow)
        self.held: dict[str, Claimed] = {}
        self.compare()

    def compare(self) -> None:
        found = self.ledger.workflows.get(self.id)
        assert found is not None
        assert {node.name: node.state.value for node in found.nodes} == self.model.states()
        assert found.state.value == self.model.state
        job = self.ledger.jobs.get(self.id)
        assert job is not None
        assert (job.finished_at is not None) == (found.finished_at is not None)

    def claim(self, limit: int) -> None:
        names = {
            node.job_id: node.name for node in getattr(self.ledger.workflows.get(self.id), "nodes", ()) if node.job_id
        }
        for job in claim_jobs(self.ledger, limit=limit, start=limit, queues=(self.queue,)):
            name = names[job.job_id]
            assert name in self.model.ready()
            self.model.claim(name)
            self.held[name] = job
        if limit >= 100:
            assert not self.model.ready()

    def end(self, ends: dict[str, str], lists: dict[str, int | None]) -> None:
        done, endings = [], []
        for name, how in ends.items():
            job = self.held.pop(name)
            if how == "well":
                count = lists.get(name)
                result = b"7" if count is None else f"[{','.join(str(n) for n in range(count))}]".encode()
                done.append(Success(job.job_id, job.token, result))
                continue
            state = JobState.PENDING if how == "again" else JobState.FAILED
            error = JobError("WORKER_CRASHED", "Worker died unexpectedly", "killed")
            endings.append(Ending(job.job_id, job.token, state, AttemptState.CRASHED, error=error))
        answer = turn(self.ledger, done=done, endings=endings)
        assert not answer.superseded
        for name, how in ends.items():
            if how == "again":
                self.model.requeue(name)
        over = {name: how == "well" for name, how in ends.items() if how != "again"}
        self.model.end(over, {name: lists.get(name) for name in over})
        self.compare()


@pytest.fixture
def shared(ledger: Ledger) -> Ledger:
    ledger.workers.register(birth("w1", suspect_after_s=3600.0, running_stale_after_s=3600.0))
    return ledger


# Without shrinking: each step goes to a database, and a failing case is small enough to be read. The same cases every
# time: about one in five hundred has two things that follow from one end at the same moment, one of which closes the
# scope of the other, and then the model and the ledgers may differ in who was first.
@given(workflow=workflows(), data=st.data())
@settings(
    derandomize=True,
    phases=[Phase.generate],
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_workflow_does_what_the_model_does(shared: Ledger, workflow: NewWorkflow, data: st.DataObject) -> None:
    if _has_circle(workflow):
        return
    play = Play(shared, workflow)
    taken_up = 0
    # What is no list makes every map over it fail at the same moment; of several the first is a matter of taste too.
    maps = sum(node.kind == "map" for node in workflow.nodes)
    lengths = [0, 1, 3] if maps > 1 else [None, 0, 1, 3]
    for _ in range(60):
        play.claim(data.draw(st.sampled_from([1, 2, 100])))
        if play.held:
            # One at a time: of several in one turn it would be a matter of taste who was first.
            name = data.draw(st.sampled_from(sorted(play.held)))
            how = data.draw(st.sampled_from(["well", "well", "fail", "again"])) if taken_up < 3 else "well"
            play.end({name: how}, {name: data.draw(st.sampled_from(lengths)) if taken_up < 3 else 2})
            continue
        if play.model.state == "succeeded":
            break
        assert play.model.state in ("paused", "failed"), "nothing goes on, and nobody is asked"
        taken_up += 1
        if play.model.state == "paused" and data.draw(st.booleans()):
            assert shared.workflows.resume(play.id, "me")
            play.model.resume()
        else:
            assert shared.workflows.retry(play.id, "me")
            play.model.retry()
        play.compare()
    # Nothing is left for the next one to claim.
    if play.model.state != "succeeded":
        shared.jobs.cancel([play.id], "me")
        left = [Success(job.job_id, job.token, b"0") for job in play.held.values()]
        turn(shared, done=left)
        assert not claim_jobs(shared, queues=(play.queue,))
    assert not shared.maintenance.repair_workflows(10)
