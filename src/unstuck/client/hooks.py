"""Register the tasks that follow the success, failure, crash or retry of another task."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

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


Follower = Task[Any, Any] | str | Sequence[Task[Any, Any] | str] | None
"""A task of the app or its name, or several of them."""


class HookRegistry:
    """Keep the hooks of an app, and the policies of its tasks with their own hooks and the app's."""

    def __init__(self, tasks: Mapping[str, Task[Any, Any]], settings: Mapping[str, Any]) -> None:
        self._tasks = tasks
        self._names: HookNames = names_of(settings, "App")
        self._policies: dict[str, Policy] = {}

    def add(self, kind: str, task: Task[Any, Any]) -> None:
        """Have a task follow every job of the app that ends in this way."""
        self._names = merge(self._names, names_of({f"after_{kind}": task}, "App"))
        self.forget_policies()

    def forget_policies(self) -> None:
        """Compute every policy again when it is next asked for: a task or a hook was registered."""
        self._policies.clear()

    def policy_of(self, name: str) -> Policy:
        """Return the policy of a task with all its hooks, or raise ConfigError if one of these is not a task."""
        found = self._policies.get(name)
        if found is None:
            definition = self._tasks[name].definition
            found = definition.policy
            if hooks := resolve(self._names_of(definition), self._tasks, f"Task {name!r}"):
                found = msgspec.structs.replace(found, hooks=hooks)
            self._policies[name] = found
        return found

    def _names_of(self, definition: TaskDefinition) -> HookNames:
        # The app's hooks do not follow each other: a broken one would call itself for ever.
        followers = {name for some in self._names.values() for name in some}
        return merge({**definition.hooks}, {} if definition.name in followers else self._names)
