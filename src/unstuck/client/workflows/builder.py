"""Build a workflow from tasks and groups, start it, and follow it by its handle."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar, overload

from unstuck.client.job import Job
from unstuck.client.runtime import ClientRuntime
from unstuck.client.task import Task
from unstuck.client.workflows.nodes import Node, TaskNode, checked_node_name
from unstuck.client.workflows.plan import plan
from unstuck.domain.text import did_you_mean
from unstuck.domain.workflows import MAX_NODES, TASK
from unstuck.errors import ConfigError, DuplicateJob, JobNotFound, NoWorkers, UnknownName
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Enqueued
from unstuck.ledger.contract.workflows import NewWorkflow, WorkflowRecord


def refuse_key_of_job(ledger: Ledger, stored: Enqueued, key: str | None) -> None:
    """Raise DuplicateJob if the key of a workflow belongs to an ordinary job: nothing was started, and that job would
    be taken for a workflow."""
    found = None if stored.fresh else ledger.jobs.get(stored.job_id)
    if found is not None and found.task != TASK:
        raise DuplicateJob(stored.job_id, key)


class WorkflowRun(Job[Any]):
    """The job that stands for a workflow: `result()`, `cancel()` and `events()` mean the whole of it."""

    def __repr__(self) -> str:
        return f"<WorkflowRun {self.id}>"

    def look(self) -> WorkflowRecord:
        """Give the workflow with all of its nodes as they are now."""
        found = self._runtime.services().ledger.workflows.get(self.id)
        if found is None:
            raise JobNotFound(f"Workflow {self.id} does not exist: it was never stored, or was pruned after it ended.")
        return found

    def job(self, name: str) -> Job[Any]:
        """Give the job of the node of this name."""
        nodes = {node.name: node for node in self.look().nodes}
        if name not in nodes:
            raise UnknownName(f"Workflow {self.id} has no node {name!r}.{did_you_mean(name, nodes)}")
        job_id = nodes[name].job_id
        if job_id is None:
            raise UnknownName(f"Node {name!r} of workflow {self.id} has no job yet: it is {nodes[name].state.value}.")
        return Job(self._runtime, job_id)

    def retry(self) -> bool:
        """Take it up again from what failed, was cancelled or is paused; False where there is nothing to take up."""
        return self._runtime.services().client_operator.workflows.retry(self.id)

    def resume(self) -> bool:
        """Go on past what is paused: those who depend on it get its error. False where it is not paused."""
        return self._runtime.services().client_operator.workflows.resume(self.id)


R = TypeVar("R")
T = TypeVar("T")
N = TypeVar("N", bound=Node[Any])


class Container(Node[Any]):
    """A group of nodes. It ends when all of them have, or when one failed that may not fail; its result is that of the
    node named with `result`, else of the last one that was added."""

    kind = "group"

    def __init__(self, scope: "Container | None", name: str) -> None:
        super().__init__(scope, name)
        self.members: list[Node[Any]] = []
        self.chosen: Node[Any] | None = None

    @overload
    def add(self, task: "Task[Any, Coroutine[Any, Any, T]]", /, *args: Any, **kwargs: Any) -> Node[T]: ...

    @overload
    def add(self, task: Task[Any, R], /, *args: Any, **kwargs: Any) -> Node[R]: ...

    def add(self, task: Task[Any, Any], /, *args: Any, **kwargs: Any) -> Node[Any]:
        """Add a call of a task. Arguments may be nodes, also inside lists and dicts: their results come in instead."""
        return self._joined(TaskNode(self, self._name_for(task), task, args, kwargs))

    @overload
    def map(
        self, task: "Task[Any, Coroutine[Any, Any, T]]", over: Node[Any], /, *args: Any, **kwargs: Any
    ) -> Node[list[T]]: ...

    @overload
    def map(self, task: Task[Any, R], over: Node[Any], /, *args: Any, **kwargs: Any) -> Node[list[R]]: ...

    def map(self, task: Task[Any, Any], over: Node[Any], /, *args: Any, **kwargs: Any) -> Node[Any]:
        """Call a task for each item of the list that `over` gives, as its first argument; the result is the list of
        results, in order. How long the list is need not be known before."""
        if not isinstance(over, Node):
            raise ConfigError(
                f"map() goes over the result of a node, not over {type(over).__name__}. For a list that is known now, "
                "add() a node for each item."
            )
        return self._joined(TaskNode(self, self._name_for(task), task, args, kwargs, over))

    def group(self, name: str) -> "Group":
        """Add a group: a part with an end and an `on_error` of its own."""
        return self._joined(Group(self, self.workflow.own_name(name)))

    def result(self, node: Node[Any]) -> None:
        """Let the result of this node be that of the whole group or workflow."""
        if node not in self.members:
            raise ConfigError(f"{node!r} is not in {self.name!r}: its result cannot stand for it.")
        self.chosen = node

    def _name_for(self, task: Any) -> str:
        if not isinstance(task, Task):
            raise ConfigError(
                f"A workflow is made of tasks, and {task!r:.80} is none. Register the function with @app.task."
            )
        return self.workflow.free_name(task.name)

    def join(self, node: N) -> N:
        """Add a node that was made elsewhere, under a name of its own."""
        return self._joined(node)

    def _joined(self, node: N) -> N:
        self.workflow.count_one()
        for other in references(node):
            self.workflow.check_reach(node, other)
        self.members.append(node)
        return node


class Group(Container):
    """A part of a workflow, made with `group(name)`. Pass it to a node outside to hand over its result."""


class Workflow(Container):
    """A workflow that is being built: `app.workflow(name)`. Nothing is stored before `start()`."""

    def __init__(self, runtime: ClientRuntime, name: str) -> None:
        super().__init__(None, checked_node_name(name))
        self._runtime = runtime
        self._names: set[str] = set()
        self._numbers: dict[str, int] = {}
        """The last number that a name was given: thousands of nodes may have the same task."""
        self._count = 0
        self._started_as: int | None = None
        self._start_lock = threading.Lock()
        """Of two starts at once the second waits, and is refused."""

    @property
    def workflow(self) -> "Workflow":
        return self

    def start(
        self, *, unique_key: str | None = None, priority: int = 0, connection: Any = None, again: bool = False
    ) -> WorkflowRun:
        """Store the workflow, with the jobs of those nodes that wait for no other. It is durable when this returns.

        With `connection` it becomes a part of your own transaction, and is durable when you commit. A second start of
        the same object is refused unless you pass `again=True`."""
        with self._start_lock:
            return self._start(unique_key=unique_key, priority=priority, connection=connection, again=again)

    def _start(self, *, unique_key: str | None, priority: int, connection: Any, again: bool) -> WorkflowRun:
        if self._started_as is not None and not again:
            raise ConfigError(
                f"Workflow {self.name!r} was started already as {self._started_as}. To start another one, build it "
                "anew with app.workflow(…), or pass start(again=True)."
            )
        new = plan(self, unique_key=unique_key, priority=priority)
        parts = self._runtime.services()
        if connection is None:
            stored = parts.ledger.workflows.begin(new)
        else:
            stored = parts.ledger.workflows.begin_on(connection, new)
            parts.wakeups.send_after_commit({f"queue:{node.job.queue}" for node in new.nodes if node.job is not None})
        refuse_key_of_job(parts.ledger, stored, unique_key)
        self._started_as = stored.job_id
        warning = self._warning(new, committed=connection is None)
        if warning is not None and self._runtime.settings.no_workers == "error":
            raise NoWorkers(f"{warning}.", job_ids=[stored.job_id])
        return WorkflowRun(self._runtime, stored.job_id, fresh=stored.fresh, warning=warning)

    def _warning(self, new: NewWorkflow, *, committed: bool) -> str | None:
        """Say that nobody would take some of its nodes now, as an enqueue does; they wait in their queues."""
        jobs = [node.job for node in new.nodes if node.job is not None]
        if self._runtime.settings.no_workers == "ignore":
            return None
        found = self._runtime.services().no_worker_check.warnings(jobs, committed=committed)
        return next((warning for warning in found if warning is not None), None)

    async def start_async(
        self, *, unique_key: str | None = None, priority: int = 0, connection: Any = None, again: bool = False
    ) -> WorkflowRun:
        """Like `start`, without blocking the event loop."""
        return await asyncio.to_thread(
            self.start, unique_key=unique_key, priority=priority, connection=connection, again=again
        )

    def own_name(self, name: str, node: Node[Any] | None = None) -> str:
        """Take a name that somebody chose; no two nodes have the same."""
        if name in self._names and (node is None or node.name != name):
            raise ConfigError(f"Workflow {self.name!r} has two nodes named {name!r}. Give one of them another name.")
        if node is not None:
            self._names.discard(node.name)
        self._names.add(checked_node_name(name))
        return name

    def free_name(self, name: str) -> str:
        """Give a name that nobody has yet, made of this one."""
        found, number = name, self._numbers.get(name, 1)
        while found in self._names:
            number += 1
            found = f"{name}-{number}"
        self._names.add(found)
        self._numbers[name] = number
        return found

    def count_one(self) -> None:
        self._count += 1
        if self._count > MAX_NODES:
            raise ConfigError(
                f"Workflow {self.name!r} has more than {MAX_NODES:,} nodes. Map over a list, or start several of them."
            )

    def check_reach(self, node: Node[Any], other: Node[Any]) -> None:
        """Refuse what a node may not depend on."""
        if other is self or other.workflow is not self:
            raise ConfigError(f"{node!r} cannot depend on {other!r}: it is not a node of workflow {self.name!r}.")
        context = list(_around(node))
        if other.scope not in context:
            assert other.scope is not None
            raise ConfigError(
                f"{node!r} cannot depend on {other!r}, which is inside the group {other.scope.name!r}: that may end "
                f"without it. Depend on the group, and let {other.scope.name!r}.result(…) name what it hands over."
            )
        if other in context or other is node:
            raise ConfigError(f"{node!r} cannot depend on {other!r}, which ends only after it.")


def references(node: Any) -> Iterator[Node[Any]]:
    """Give the nodes whose results a node takes."""
    if isinstance(node, TaskNode):
        if node.over is not None:
            yield node.over
        yield from _nodes_in((node.args, node.kwargs))


def _nodes_in(value: Any) -> Iterator[Node[Any]]:
    match value:
        case Node():
            yield value
        case list() | tuple():
            for one in value:
                yield from _nodes_in(one)
        case dict():
            for one in value.values():
                yield from _nodes_in(one)


def _around(node: Node[Any]) -> Iterator[Node[Any]]:
    """Give every scope that a node is in."""
    scope = node.scope
    while scope is not None:
        yield scope
        scope = scope.scope
