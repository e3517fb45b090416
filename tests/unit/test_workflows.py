"""Building and planning workflows: what cannot be meant is refused, and the largest one takes no time."""

import json
import time
from typing import Any

import msgspec
import pytest
from tests.support.decoding_bombs import assert_bounded

from unstuck import App, ConfigError
from unstuck.client.views import workflow_view
from unstuck.client.workflows import text
from unstuck.client.workflows.outline import outline, root_failures
from unstuck.client.workflows.plan import plan
from unstuck.domain import node_inputs
from unstuck.domain.node_inputs import ITEM, NodeError, Part, pack_inputs
from unstuck.domain.payload import encode_call
from unstuck.domain.states import JobState
from unstuck.domain.workflows import MAX_NODES, NodeState, WorkflowState, call_with_results
from unstuck.http.dashboard.graph import BUNDLE, MAX_BOXES, Box, draw
from unstuck.ledger.contract.workflows import NodeRecord, WorkflowRecord

PATIENCE_S = 5.0
"""A tenth of that is usual. When it was done pair by pair it took half a minute."""


def test_the_largest_workflow_is_built_and_planned_in_a_moment() -> None:
    app = App("sqlite:///nowhere.db")
    task = app.task(name="add")(lambda *args: None)
    flow = app.workflow("chain")
    begun_s = time.thread_time()
    last = flow.add(task)
    for _ in range(MAX_NODES - 1):
        last = flow.add(task, last)
    found = plan(flow, unique_key=None, priority=0)
    assert time.thread_time() - begun_s < PATIENCE_S
    assert [node.name for node in found.nodes[1:4]] == ["add", "add-2", "add-3"]
    assert len({node.name for node in found.nodes}) == MAX_NODES + 1
    with pytest.raises(ConfigError, match="more than 10,000 nodes"):
        flow.add(task)


def test_who_waits_for_each_other_is_named() -> None:
    app = App("sqlite:///nowhere.db")
    task = app.task(name="add")(lambda *args: None)
    flow = app.workflow("bills")
    free = flow.add(task).named("free")
    group = flow.group("group")
    outside = flow.add(task, group).named("outside")
    group.add(task, free).named("fine")
    group.add(task, outside).named("inside")
    with pytest.raises(ConfigError, match="in a circle: 'group', 'inside', 'outside' wait"):
        plan(flow, unique_key=None, priority=0)


def test_more_edges_than_a_ledger_can_take_are_refused_before_they_are_made() -> None:
    app = App("sqlite:///nowhere.db")
    task = app.task(name="add")(lambda *args: None)
    flow = app.workflow("cross")
    begun_s = time.thread_time()
    first = [flow.add(task) for _ in range(MAX_NODES // 2)]
    group = flow.group("group").after(*first, *first)
    for _ in range(MAX_NODES // 2 - 1):
        group.add(task)
    with pytest.raises(ConfigError, match="in more than 100,000 ways"):
        plan(flow, unique_key=None, priority=0)
    assert time.thread_time() - begun_s < PATIENCE_S


def test_a_node_that_comes_after_another_in_many_ways_does_so_once() -> None:
    app = App("sqlite:///nowhere.db")
    task = app.task(name="add")(lambda *args, **named: None)
    flow = app.workflow("again")
    first = flow.add(task)
    begun_s = time.thread_time()
    group = flow.group("group").after(*[first] * 5_000)
    for _ in range(5_000):
        group.add(task)
    given: dict[str, Any] = {"a": [first, 1, (2, first)], "b": (1, [2])}
    last = flow.add(task, given, key=first).after(first, first)
    found = plan(flow, unique_key=None, priority=0)
    assert time.thread_time() - begun_s < PATIENCE_S
    assert len(found.edges) == 5_001
    assert given["a"][0] is first
    job = found.nodes[last.place].job
    assert job is not None
    call = json.loads(job.payload)
    assert (call["args"], call["kwargs"]) == ([{"a": [None, 1, [2, None]], "b": [1, [2]]}], {"key": None})
    assert sorted(map(str, call["refs"])) == [
        "[['args', 0, 'a', 0], 1]",
        "[['args', 0, 'a', 2, 1], 1]",
        "[['kwargs', 'key'], 1]",
    ]


ERROR = {"code": "TASK_FAILED", "message": "boom", "cause": "boom", "node": "a", "job_id": 7}


def node(place: int, name: str, *after: int, **facts: Any) -> NodeRecord:
    given = {
        "place": place,
        "parent": 0,
        "name": name,
        "kind": "task",
        "state": NodeState.WAITING,
        "on_error": "fail",
        "job_id": None,
        "job_state": None,
        "task": "add",
        "started_at": None,
        "finished_at": None,
        "error": None,
        "item": None,
        "blockers": 0,
        "after": after,
    }
    return NodeRecord(**{**given, **facts})


def flow(*nodes: NodeRecord, state: WorkflowState = WorkflowState.RUNNING) -> WorkflowRecord:
    return WorkflowRecord(1, "bills", state, 100.0, None if state is WorkflowState.RUNNING else 105.0, nodes)


def names(record: WorkflowRecord) -> list[str]:
    return [item.node.name for item in outline(record).items]


def test_each_node_stands_after_those_that_it_waits_for() -> None:
    record = flow(node(1, "last", 2, 3), node(2, "middle", 3), node(3, "first"))
    assert names(record) == ["first", "middle", "last"]
    assert [item.layer for item in outline(record).items] == [0, 1, 2]


def test_a_group_waits_for_what_something_in_it_waits_for() -> None:
    inside = node(3, "inside", 4, parent=2)
    group = node(2, "group", kind="group", state=NodeState.RELEASED)
    record = flow(group, inside, node(4, "first", state=NodeState.SUCCEEDED))
    assert names(record) == ["first", "group"]
    assert outline(record).items[1].after == (4,)
    assert outline(record).items[1].state == "waiting"


def test_rows_that_go_in_a_circle_are_shown_all_the_same() -> None:
    record = flow(node(1, "a", 2), node(2, "b", 1), node(3, "c", 2), node(4, "d"))
    assert sorted(names(record)) == ["a", "b", "c", "d"]
    assert draw(outline(record), 0.0) is not None


def test_ten_thousand_nodes_in_a_row_are_put_in_order() -> None:
    record = flow(*(node(place, str(place), *([place - 1] if place > 1 else [])) for place in range(1, 10_001)))
    assert names(record)[-1] == "10000"
    assert draw(outline(record), 0.0) is None


@pytest.mark.parametrize(
    ("inside", "state"),
    [
        ([NodeState.WAITING], "waiting"),
        ([NodeState.SUCCEEDED, NodeState.WAITING], "running"),
        ([NodeState.SUCCEEDED, NodeState.PAUSED], "paused"),
    ],
)
def test_a_scope_that_goes_on_stands_as_what_is_in_it(inside: list[NodeState], state: str) -> None:
    members = [node(2 + at, f"m[{at}]", parent=1, state=one) for at, one in enumerate(inside)]
    whole = outline(flow(node(1, "m", kind="map", state=NodeState.RELEASED), *members))
    assert whole.items[0].state == state


def test_who_may_fail_is_not_to_blame_nor_is_what_is_inside_it() -> None:
    failed = {"state": NodeState.FAILED, "error": ERROR, "finished_at": 101.0}
    record = flow(
        node(1, "lenient", **failed, on_error="continue"),
        node(2, "group", kind="group", on_error="continue", **failed),
        node(3, "inside", parent=2, **failed),
        node(4, "strict", **failed, job_id=9),
        state=WorkflowState.FAILED,
    )
    assert [one.name for one in root_failures(record)] == ["strict"]
    assert "node 'a' (job 9)" in text.headline(record)
    assert workflow_view(record)["failed"] == [{"place": 4, "name": "strict", "job_id": 9, "error": ERROR}]


def test_a_map_that_could_not_begin_is_to_blame_itself() -> None:
    error = {**ERROR, "code": "RESULT_NOT_AVAILABLE", "node": "m", "job_id": None}
    record = flow(node(1, "m", kind="map", state=NodeState.FAILED, error=error), state=WorkflowState.FAILED)
    assert [one.name for one in root_failures(record)] == ["m"]


@pytest.mark.parametrize("state", list(WorkflowState))
def test_every_state_has_its_words_also_where_nothing_is_known_any_more(state: WorkflowState) -> None:
    record = flow(state=state)
    assert text.headline(record).startswith("It ")
    assert text.waits_for(record)
    assert all(hint.command.startswith("unstuck ") for hint in text.hints(record))


def test_many_are_counted_in_words() -> None:
    assert text.summary({"succeeded": 97, "running": 2, "failed": 1}) == "97 of 100 succeeded, 2 running, 1 failed"
    assert text.named([node(at, str(at)) for at in range(5)]) == "nodes '0', '1', '2' and 2 more"


def test_boxes_of_a_drawing_never_lie_on_each_other() -> None:
    group = [
        node(10, "g", kind="group", state=NodeState.RELEASED),
        *(node(11 + n, f"i{n}", parent=10) for n in range(3)),
    ]
    record = flow(node(1, "a"), node(2, "b", 1), node(3, "c", 1), *group, node(20, "z", 2, 3, 10, 1))
    drawing = draw(outline(record), 0.0)
    assert drawing is not None
    assert_apart(drawing.boxes)
    # That z comes after a goes without saying: it comes after b, which does.
    assert {edge.key for edge in drawing.edges} == {"n1-n2", "n1-n3", "n2-n20", "n3-n20", "n10-n20"}


def assert_apart(boxes: list[Box]) -> None:
    for at, one in enumerate(boxes):
        for other in boxes[:at]:
            beside = one.x + one.width <= other.x or other.x + other.width <= one.x
            below = one.y + one.height <= other.y or other.y + other.height <= one.y
            assert beside or below, (one.title, other.title)
        assert all(box.x + box.width <= one.width and box.y + box.height <= one.height for box in one.inside)
        assert_apart(one.inside)


def test_many_that_are_alike_are_drawn_as_one_and_too_many_not_at_all() -> None:
    wide = [node(place, str(place), state=NodeState.SUCCEEDED) for place in range(1, BUNDLE + 2)]
    drawing = draw(outline(flow(*wide, node(50, "end", *range(1, BUNDLE + 2)))), 0.0)
    assert drawing is not None
    assert [(box.kind, box.line) for box in drawing.boxes] == [("bundle", "9 of 9"), ("task", "waiting")]
    assert len(drawing.edges) == 1
    many = [node(place, str(place), task=str(place)) for place in range(1, MAX_BOXES + 2)]
    assert draw(outline(flow(*many)), 0.0) is None


def test_a_node_is_a_plain_call_for_other_languages() -> None:
    refs = [(["args", 0], ITEM), (["kwargs", "rest", 1], 2), (["kwargs", "lost"], 9)]
    payload = encode_call((None,), {"rest": [1, None], "lost": None}, "add", 1_000, refs=refs)
    error = NodeError(code="TASK_FAILED", message="boom")
    inputs = pack_inputs([Part(ITEM, False, 0, b'"item"'), Part(2, True, 0, b"5"), Part(2, True, 1, error=error)])
    call = msgspec.json.decode(msgspec.json.encode(call_with_results(payload, inputs)))
    assert call["args"] == ["item"]
    assert call["kwargs"]["rest"] == [1, [5, {"$error": msgspec.to_builtins(error)}]]
    assert call["kwargs"]["lost"]["$error"]["code"] == "RESULT_NOT_AVAILABLE"


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize(("references", "result_bytes"), [(500, 1_000_000), (40_000, 5_000), (9, 8_000_000)])
def test_a_result_that_a_node_refers_to_again_and_again_is_not_handed_over_as_often(
    references: int, result_bytes: int, is_list: bool
) -> None:
    refs = [(["args", place], 1) for place in range(references)]
    payload = encode_call((None,) * references, {}, "add", 10_000_000, refs=refs)
    result = b'"%s"' % (b"x" * (result_bytes - 2))
    inputs = pack_inputs([Part(1, is_list, 0 if is_list else None, result)])
    assert_bounded(lambda: msgspec.json.encode(call_with_results(payload, inputs)), ())
    error = call_with_results(payload, inputs)["args"][0]["$error"]
    assert error["code"] == "INPUTS_TOO_LARGE"
    assert "its references stand for more than" in error["cause"]


def test_a_few_references_to_one_result_are_handed_over() -> None:
    for references, result_bytes in ((8, 1_000_000), (600, 100), (1, node_inputs.MAX_BYTES)):
        payload = encode_call(
            (None,) * references, {}, "add", 1_000_000, refs=[(["args", place], 1) for place in range(references)]
        )
        inputs = pack_inputs([Part(1, False, None, b'"%s"' % (b"x" * (result_bytes - 2)))])
        call = call_with_results(payload, inputs)
        assert [len(memoryview(one)) for one in call["args"]] == [result_bytes] * references


def test_a_released_node_stands_as_its_job_does() -> None:
    record = flow(node(1, "a", state=NodeState.RELEASED, job_id=2, job_state=JobState.RUNNING, started_at=100.0))
    assert outline(record).counts == {"running": 1}
    assert "'a' (job 2, running)" in text.waits_for(record)
