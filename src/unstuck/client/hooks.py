"""Register the tasks that follow the success, failure, crash or retry of another task."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from unstuck.client.task import Task
from unstuck.domain.policy import EVENT, HOOK_KINDS, HOOK_SETTINGS, Hooks, Policy
from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError, PayloadError, UnknownQueue, WrongArguments
from unstuck.ledger.contract.jobs import NewJob
from unstuck.runner.tasks import TaskDefinition

HookNames = dict[str, tuple[str, ...]]
"""By kind: the names of tasks."""
MAX_HOOKS = 10


def names_of(settings: Mapping[str, Any], owner: str) -> HookNames:
    """Read `after_success`, … of a task or an app: a task, its name, or several of them."""
    found: HookNames = {}
    for setting, kind in zip(HOOK_SETTINGS, HOOK_KINDS, strict=True):
        given = settings.get(setting)
        if given is None:
            continue
        several = given if isinstance(given, list | tuple) else [given]
        names = tuple(dict.fromkeys(_name(one, f"{owner}: {setting}") for one in several))
        if len(names) > MAX_HOOKS:
            raise ConfigError(f"{owner}: {setting} has {len(names)} tasks; {MAX_HOOKS} are the most.")
        found[kind] = names
    return found


def _name(given: object, what: str) -> str:
    name = given if isinstance(given, str) else getattr(given, "name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{what} must be a task of this app or its name, not {given!r:.80}. Write it above @app.task."
        )
    return name


def merge(*parts: HookNames) -> HookNames:
    """Put the hooks of a task and of its app together, each once."""
    return {
        kind: names
        for kind in HOOK_KINDS
        if (names := tuple(dict.fromkeys(name for part in parts for name in part.get(kind, ()))))
    }


def resolve(names: HookNames, tasks: "Mapping[str, Task[Any, Any]]", owner: str) -> Hooks | None:
    """Turn names into what is stored with a job, or raise ConfigError for one that cannot follow."""
    if not names:
        return None
    return {kind: [_followed(name, tasks, f"{owner}: after_{kind}") for name in some] for kind, some in names.items()}


def known(names: HookNames, tasks: Iterable[str]) -> bool:
    """Say whether every task that is named is there yet."""
    return {name for some in names.values() for name in some} <= set(tasks)


def _followed(name: str, tasks: "Mapping[str, Task[Any, Any]]", what: str) -> dict[str, Any]:
    task = tasks.get(name)
    if task is None:
        raise ConfigError(f"{what} names {name!r}, and this app has no such task.{did_you_mean(name, tasks)}")
    try:
        return hook_spec(task.plain((), {EVENT: {}}))
    except (WrongArguments, PayloadError, UnknownQueue) as error:
        raise ConfigError(f"{what} names {name!r}, which must take one argument by name, `event`: {error}") from None


def hook_spec(job: NewJob) -> dict[str, Any]:
    """Write a job down without its arguments: they are made when the time comes. Defaults are left out."""
    spec: dict[str, Any] = {"task": job.task, "queue": job.queue}
    if job.policy:
        spec["policy"] = job.policy.decode()
    if job.on_crash != "fail":
        spec["on_crash"] = job.on_crash
    if not job.heartbeat:
        spec["heartbeat"] = False
    for field in ("heartbeat_timeout_s", "timeout_s"):
        if getattr(job, field) is not None:
            spec[field] = getattr(job, field)
    if job.more is not None:
        # A hook has no hooks of its own: nothing goes round in circles.
        more = msgspec.to_builtins(msgspec.structs.replace(job.more, hooks=None))
        if more:
            spec["more"] = cast(dict[str, Any], more)
    return spec


P = ParamSpec("P")
R = TypeVar("R")
Follower = Task[Any, Any] | str | Sequence[Task[Any, Any] | str] | None
"""A task of the app or its name, or several of them."""


class HookRegistry:
    """Knows what follows the jobs of every task of an app."""

    _definitions: dict[str, TaskDefinition]
    _tasks: dict[str, Task[Any, Any]]

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._hooks: HookNames = names_of(settings, "App")
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
        self._hooks = merge(self._hooks, names_of({f"after_{kind}": task}, "App"))
        self._policies.clear()

    def _hooks_of(self, definition: TaskDefinition) -> HookNames:
        # What follows others is followed by nothing of the app's: a broken one would call itself for ever.
        followers = {name for some in self._hooks.values() for name in some}
        return merge({**definition.hooks}, {} if definition.name in followers else self._hooks)

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
