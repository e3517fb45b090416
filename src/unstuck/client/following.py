"""The part of an app that knows what follows the ends of its jobs: `app.after_failure(task)` and its kin."""

from collections.abc import Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from unstuck.client.hooking import Names, known, names_of, resolve, together
from unstuck.client.task import Task
from unstuck.domain.policy import Policy
from unstuck.runner.tasks import TaskDefinition

P = ParamSpec("P")
R = TypeVar("R")
Follower = Task[Any, Any] | str | Sequence[Task[Any, Any] | str] | None
"""A task of the app or its name, or several of them."""


class Following:
    """Knows what follows the jobs of every task of an app."""

    _definitions: dict[str, TaskDefinition]
    _tasks: dict[str, Task[Any, Any]]

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._hooks: Names = names_of(settings, "App")
        self._policies: dict[str, Policy] = {}

    def after_success(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every job of this app that succeeds: `@app.after_success` above `@app.task`."""
        self._follow("success", task)
        return task

    def after_failure(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every job that failed for good, or was quarantined."""
        self._follow("failure", task)
        return task

    def after_crash(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every attempt that ended by the death of its process."""
        self._follow("crash", task)
        return task

    def after_retry(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every attempt that went wrong and is tried again."""
        self._follow("retry", task)
        return task

    def _follow(self, kind: str, task: Task[Any, Any]) -> None:
        self._hooks = together(self._hooks, names_of({f"after_{kind}": task}, "App"))
        self._policies.clear()

    def _hooks_of(self, definition: TaskDefinition) -> Names:
        # What follows others is followed by nothing of the app's: a broken one would call itself for ever.
        followers = {name for some in self._hooks.values() for name in some}
        return together({**definition.hooks}, {} if definition.name in followers else self._hooks)

    def _policy_of(self, name: str, *, strict: bool = True) -> Policy:
        """Give the policy of a task with what follows its ends; raises for a follower that there is not."""
        found = self._policies.get(name)
        if found is None:
            definition = self._definitions[name]
            hooks = self._hooks_of(definition)
            if not strict and not known(hooks, self._tasks):
                return definition.policy
            resolved = resolve(hooks, self._tasks, f"Task {name!r}")
            found = self._policies[name] = msgspec.structs.replace(definition.policy, hooks=resolved)
        return found
