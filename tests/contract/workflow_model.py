"""A pure model of a workflow, slow and plain: it looks at everything again after each step, until nothing changes."""

from dataclasses import dataclass, field

from unstuck.ledger.contract.workflows import NewWorkflow

WAITING, RELEASED, PAUSED, SUCCEEDED, FAILED, CANCELLED = (
    "waiting",
    "released",
    "paused",
    "succeeded",
    "failed",
    "cancelled",
)


@dataclass
class Part:
    name: str
    kind: str
    parent: str | None
    on_error: str
    after: set[str]
    source: str | None = None
    state: str = WAITING
    running: bool = False
    has_job: bool = False

    @property
    def well(self) -> bool:
        return self.state == SUCCEEDED or (self.on_error == "continue" and self.state in (FAILED, CANCELLED))


@dataclass
class Model:
    parts: dict[str, Part]
    lists: dict[str, int | None] = field(default_factory=dict)
    """How long the list is that a node gave; None where it gave no list."""
    root: str = ""

    @classmethod
    def of(cls, workflow: NewWorkflow) -> "Model":
        names = {node.place: node.name for node in workflow.nodes}
        parts = {}
        for node in workflow.nodes:
            after = {names[edge.source] for edge in workflow.edges if edge.target == node.place}
            parent = None if node.parent is None else names[node.parent]
            source = None if node.source is None else names[node.source]
            state = RELEASED if node.kind == "group" else WAITING
            parts[node.name] = Part(node.name, node.kind, parent, node.on_error, after, source, state)
        model = cls(parts, root=names[0])
        model.settle()
        return model

    def states(self) -> dict[str, str]:
        return {part.name: part.state for part in self.parts.values() if part.parent is not None}

    def ready(self) -> set[str]:
        """Tasks whose jobs may be claimed."""
        return {p.name for p in self.parts.values() if p.kind == "task" and p.state == RELEASED and not p.running}

    @property
    def state(self) -> str:
        root = self.parts[self.root].state
        if root != RELEASED:
            return root
        return PAUSED if any(part.state == PAUSED for part in self.parts.values()) else "running"

    def claim(self, name: str) -> None:
        self.parts[name].running = True

    def requeue(self, name: str) -> None:
        self.parts[name].running = False

    def end(self, ends: dict[str, bool], lists: dict[str, int | None]) -> None:
        self.lists |= lists
        for name, well in ends.items():
            part = self.parts[name]
            part.running = False
            part.state = SUCCEEDED if well else FAILED
        self.settle()

    def resume(self) -> None:
        for part in self.parts.values():
            if part.state == PAUSED:
                part.state, part.on_error = FAILED, "continue"
        self.settle()

    def retry(self) -> None:
        self.parts[self.root].state = RELEASED
        self._reopen(self.root)
        self.settle()

    # ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        while self._fail_something() or self._move_something():
            pass

    def _fail_something(self) -> bool:
        for part in self.parts.values():
            if part.parent is None or part.state not in (FAILED, CANCELLED) or part.well:
                continue
            scope = self.parts[part.parent]
            if scope.state != RELEASED:
                continue
            if part.on_error == "pause":
                part.state = PAUSED
            else:
                scope.state = FAILED
                self._close(scope.name)
            return True
        return False

    def _move_something(self) -> bool:
        for part in list(self.parts.values()):
            if part.kind != "task" and part.state == RELEASED:
                inside = self._inside(part.name)
                if inside and all(member.well for member in inside):
                    part.state = SUCCEEDED
                    return True
            if part.state != WAITING or self.parts[part.parent or ""].state != RELEASED:
                continue
            if not all(self.parts[name].well for name in part.after):
                continue
            if part.kind == "map":
                self._open_map(part)
            else:
                part.state, part.has_job = RELEASED, True
            return True
        return False

    def _open_map(self, part: Part) -> None:
        if self._inside(part.name):
            part.state = RELEASED
            return
        count = self._length(part.source or "")
        if not count:
            part.state = FAILED if count is None else SUCCEEDED
            return
        part.state = RELEASED
        for n in range(count):
            name = f"{part.name}[{n}]"
            self.parts[name] = Part(name, "task", part.name, part.on_error, set(), None, RELEASED, has_job=True)

    def _length(self, name: str) -> int | None:
        part = self.parts[name]
        if part.state != SUCCEEDED:
            return None
        if part.kind == "group":
            return self._length(part.source or "")
        return len(self._inside(name)) if part.kind == "map" else self.lists.get(name)

    def _inside(self, scope: str) -> list[Part]:
        return [part for part in self.parts.values() if part.parent == scope]

    def _close(self, scope: str) -> None:
        for part in self._inside(scope):
            if part.kind != "task":
                self._close(part.name)
            if part.state in (WAITING, PAUSED) or (part.state == RELEASED and not part.running):
                part.state = CANCELLED

    def _reopen(self, scope: str) -> None:
        for part in self._inside(scope):
            if part.kind != "task" and part.state == RELEASED:
                self._reopen(part.name)
            if not (part.state in (CANCELLED, PAUSED) or (part.state == FAILED and part.on_error != "continue")):
                continue
            if part.kind == "task":
                part.state = RELEASED if part.has_job else WAITING
            else:
                opened = part.kind == "group" or bool(self._inside(part.name))
                part.state = RELEASED if opened else WAITING
                self._reopen(part.name)
