"""Build a workflow from a description in plain values, for doors that do not have the app: tasks are named."""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, cast

import msgspec

from unstuck.client.enqueue import EnqueueOptions, build_job, find_task
from unstuck.client.runtime import ClientRuntime
from unstuck.client.workflows.builder import Container, Group, Workflow
from unstuck.client.workflows.nodes import Node, TaskNode
from unstuck.client.workflows.plan import plan
from unstuck.domain.policy import decode_policy
from unstuck.domain.text import did_you_mean
from unstuck.domain.workflows import OnError
from unstuck.errors import ConfigError
from unstuck.ledger.contract.jobs import NewJob, TaskRecord
from unstuck.ledger.contract.workflows import NewWorkflow

REFERENCE = "$node"
"""`{"$node": "fetch"}` among the arguments stands for the result of the node of that name."""


class NodeDescription(msgspec.Struct, frozen=True):
    """A call of a task, a map (`over`), or a group (`nodes`)."""

    name: str | None = None
    task: str | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    over: str | None = None
    after: Sequence[str] = ()
    on_error: OnError = "fail"
    nodes: Sequence["NodeDescription"] | None = None
    result: str | None = None


def build(
    runtime: ClientRuntime,
    tasks: Mapping[str, TaskRecord],
    name: str,
    nodes: Sequence[NodeDescription],
    *,
    result: str | None = None,
    unique_key: str | None = None,
    priority: int = 0,
    by: str | None = None,
) -> NewWorkflow:
    """Give the workflow as it is stored, everything checked as if it had been built in Python."""
    workflow = Workflow(runtime, name)
    reader = _Reader(tasks, runtime.settings.max_payload_bytes, by)
    reader.fill(workflow, nodes, result)
    found = plan(workflow, unique_key=unique_key, priority=priority)
    return msgspec.structs.replace(found, root=msgspec.structs.replace(found.root, enqueued_by=by))


class _Reader:
    def __init__(self, tasks: Mapping[str, TaskRecord], limit_bytes: int, by: str | None) -> None:
        self._tasks = tasks
        self._limit_bytes = limit_bytes
        self._by = by
        self._known: dict[str, Node[Any]] = {}

    def fill(self, scope: Container, nodes: Sequence[NodeDescription], result: str | None) -> None:
        for node in nodes:
            built = self._group(scope, node) if node.nodes is not None else self._task(scope, node)
            built.on_error(node.on_error)
            built.after(*(self._named(earlier) for earlier in node.after))
            self._known[built.name] = built
        if result is not None:
            scope.result(self._named(result))

    def _group(self, scope: Container, node: NodeDescription) -> Group:
        if node.name is None or node.task is not None or node.over is not None or node.args or node.kwargs:
            raise ConfigError(f"A group has a name and nodes, and no task or arguments: {node.name!r}.")
        group = scope.group(node.name)
        self.fill(group, node.nodes or (), node.result)
        return group

    def _task(self, scope: Container, node: NodeDescription) -> Node[Any]:
        if node.task is None or node.result is not None:
            raise ConfigError(f"Node {node.name!r} needs a task, or, as a group, nodes; only a group names a result.")
        task = KnownTask(find_task(self._tasks, node.task), self._limit_bytes, self._by)
        over = None if node.over is None else self._named(node.over)
        args, kwargs = self._resolved(list(node.args)), self._resolved(dict(node.kwargs))
        name = scope.workflow.free_name(node.task) if node.name is None else scope.workflow.own_name(node.name)
        # It has the one method of a task that a node needs.
        return scope.join(TaskNode(scope, name, cast(Any, task), tuple(args), kwargs, over))

    def _resolved(self, value: Any) -> Any:
        """Return a value with nodes in the place of their names. What has none in it is not copied: it may be large."""
        match value:
            case {"$node": str(name)} if len(value) == 1:
                return self._named(name)
            case dict():
                fields = {key: self._resolved(one) for key, one in value.items()}
                return value if all(fields[key] is one for key, one in value.items()) else fields
            case list():
                items = [self._resolved(one) for one in value]
                return value if all(map(is_, items, value)) else items
        return value

    def _named(self, name: str) -> Node[Any]:
        if name not in self._known:
            raise ConfigError(
                f"There is no node {name!r} before this one.{did_you_mean(name, self._known)} Name a node earlier in "
                "the list than those that depend on it."
            )
        return self._known[name]


class KnownTask:
    """A task by what workers told the ledger of it."""

    def __init__(self, record: TaskRecord, limit_bytes: int, by: str | None) -> None:
        self.name = record.name
        self._record = record
        self._limit_bytes = limit_bytes
        self._by = by

    def job_for_node(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], refs: list[tuple[list[str | int], int]]
    ) -> NewJob:
        job = build_job(
            task=self._record.name,
            queue=self._record.queue,
            policy=decode_policy(self._record.policy),
            options=EnqueueOptions.checked(None, {}),
            args=args,
            kwargs=kwargs,
            limit_bytes=self._limit_bytes,
            known_queues=None,
            refs=refs,
        )
        return msgspec.structs.replace(job, enqueued_by=self._by)
