"""What a process that runs tasks needs to know of an app, and what it reports to the worker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from unstuck.domain.limits import KeyFunction, QueueLimit
from unstuck.domain.policy import Policy
from unstuck.domain.schedules import ScheduleDefinition


@dataclass(frozen=True)
class TaskDefinition:
    name: str
    queue: str
    function: Callable[..., Any]
    is_async: bool
    context_parameter: str | None
    """The parameter that wants the Context, if any."""
    policy: Policy
    concurrency_key: KeyFunction | None = None
    """Computes the concurrency key of a call, if a text with arguments in it is not enough."""
    hooks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of end: the names of the tasks that follow it."""


@dataclass(frozen=True)
class AppDefinition:
    """What the fork server, its runners and the command line need of an app, as it is after the import."""

    tasks: Mapping[str, TaskDefinition]
    """Every task by its name, with the hooks of the app in its policy."""
    queues: frozenset[str]
    """Every queue that the app declared, even if no task uses it."""
    limits: Mapping[str, QueueLimit]
    """By queue: the limits that the app declared."""
    schedules: tuple[ScheduleDefinition, ...]
    settings: bytes
    """The settings as JSON (see `unstuck.config.dump`): the worker never imports the app itself."""
    note: str
    """A sentence about the address of another ledger that was not used; else "". Only the first definition has it."""
    pack_follow_up: Callable[[Any, tuple[Any, ...], dict[str, Any], int], bytes]
    """Pack a job (`NewJob`) of a task or a task's name that is enqueued with the success of the job of this id."""


class DefinesApp(Protocol):
    """An app, as the loader sees it."""

    def definition(self) -> AppDefinition: ...

    def use_ledger(self, url: str) -> None:
        """Use the ledger of this URL instead of the one that the code names."""
        ...


class TaskEntry(msgspec.Struct, frozen=True):
    """A task as the fork server tells the worker of it."""

    name: str
    queue: str
    is_async: bool
    policy: Policy


class Manifest(msgspec.Struct, frozen=True):
    """What the fork server found when it imported the app."""

    tasks: tuple[TaskEntry, ...]
    settings: bytes
    fork: bool
    """False: runners are spawned afresh, because forking would not be safe."""
    why_spawn: str = ""
    queues: tuple[str, ...] = ()
    """Every queue that the app declared."""
    limits: dict[str, QueueLimit] = {}
    containment: str = ""
    """How what a job started is made to die with it, in words."""
    schedules: tuple[ScheduleDefinition, ...] = ()
    note: str = ""
    """What the app's owner should know about the choice of the ledger."""
