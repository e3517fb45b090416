"""One node of a workflow that is being built: a call of a task, a map, or a group."""

from typing import TYPE_CHECKING, Any, Generic, Self, get_args

from unstuck.domain.workflows import MAX_NAME_CHARS, OnError
from unstuck.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from unstuck.client.task import Task
    from unstuck.client.workflows.builder import Container, Workflow

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)


class Node(Generic[R_co]):
    """Pass it to another node where the result should go; say more of it with `named`, `after` and `on_error`."""

    kind = "task"

    def __init__(self, scope: "Container | None", name: str) -> None:
        self.scope = scope
        self.name = name
        self.place = 0
        self.policy: OnError = "fail"
        self.earlier: dict[Node[Any], None] = {}
        """Those that it comes after, without their results."""

    def __repr__(self) -> str:
        return f"<Node {self.name!r}>"

    @property
    def workflow(self) -> "Workflow":
        assert self.scope is not None
        return self.scope.workflow

    def named(self, name: str) -> Self:
        """Call it so, in the terminal, on the page and in errors."""
        self.name = self.workflow.own_name(name, self)
        return self

    def after(self, *nodes: "Node[Any]") -> Self:
        """Begin only when these have ended, without taking their results."""
        for node in nodes:
            if not isinstance(node, Node):
                raise ConfigError(f"after() takes nodes of the workflow, not {node!r:.80}.")
            if node not in self.earlier:
                self.workflow.check_reach(self, node)
                self.earlier[node] = None
        return self

    def on_error(self, policy: OnError) -> Self:
        """Say what its failure means: "fail" (the default: so does what it is in), "continue" (those who depend on it
        get a NodeError instead of its result) or "pause" (an operator decides)."""
        if policy not in get_args(OnError):
            raise ConfigError(f"on_error must be 'fail', 'continue' or 'pause', not {policy!r:.80}.")
        self.policy = policy
        return self


class TaskNode(Node[R_co]):
    """A call of a task, or of a map one for each item."""

    def __init__(
        self,
        scope: "Container",
        name: str,
        task: "Task[Any, Any]",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        over: Node[Any] | None = None,
    ) -> None:
        super().__init__(scope, name)
        self.kind = "task" if over is None else "map"
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.over = over


def checked_node_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"The name of a node must be printable text of 1 to {MAX_NAME_CHARS} characters, not {name!r:.80}."
        )
    return name
