"""Find the tasks that follow the ends of another, and write them down so that whoever ends a job can enqueue them."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from unstuck.domain.errors import ConfigError, PayloadError, UnknownQueue, WrongArguments
from unstuck.domain.hooks import EVENT, HOOK_KINDS, HOOK_SETTINGS, Hooks
from unstuck.domain.names import did_you_mean
from unstuck.store.records import NewJob

if TYPE_CHECKING:
    from unstuck.client.task import Task

Names = dict[str, tuple[str, ...]]
"""By kind: the names of tasks."""
MAX_HOOKS = 10


def names_of(settings: Mapping[str, Any], owner: str) -> Names:
    """Read `after_success`, … of a task or an app: a task, its name, or several of them."""
    found: Names = {}
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


def together(*parts: Names) -> Names:
    """Put the hooks of a task and of its app together, each once."""
    return {
        kind: names
        for kind in HOOK_KINDS
        if (names := tuple(dict.fromkeys(name for part in parts for name in part.get(kind, ()))))
    }


def resolve(names: Names, tasks: "Mapping[str, Task[Any, Any]]", owner: str) -> Hooks | None:
    """Turn names into what is stored with a job, or raise ConfigError for one that cannot follow."""
    if not names:
        return None
    return {kind: [_followed(name, tasks, f"{owner}: after_{kind}") for name in some] for kind, some in names.items()}


def known(names: Names, tasks: Iterable[str]) -> bool:
    """Say whether every task that is named is there yet."""
    return {name for some in names.values() for name in some} <= set(tasks)


def _followed(name: str, tasks: "Mapping[str, Task[Any, Any]]", what: str) -> dict[str, Any]:
    task = tasks.get(name)
    if task is None:
        raise ConfigError(f"{what} names {name!r}, and this app has no such task.{did_you_mean(name, tasks)}")
    try:
        return follower(task.plain((), {EVENT: {}}))
    except (WrongArguments, PayloadError, UnknownQueue) as error:
        raise ConfigError(f"{what} names {name!r}, which must take one argument by name, `event`: {error}") from None


def follower(job: NewJob) -> dict[str, Any]:
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
