"""Building and planning workflows: what cannot be meant is refused, and the largest one takes no time."""

import time

import pytest

from unstuck import App, ConfigError
from unstuck.client.workflow.plan import plan
from unstuck.domain.workflow import MAX_NODES

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
