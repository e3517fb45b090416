"""Describe a function registered with an app, as the bench needs it."""

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
    """Gives the line of a call, where a text with arguments in it is not enough."""
    hooks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of end: the names of the tasks that follow it."""


class Registry(Protocol):
    """What the bench needs of an app."""

    @property
    def definitions(self) -> Mapping[str, TaskDefinition]: ...

    @property
    def queues(self) -> frozenset[str]:
        """Every queue that the app declared, whether a task uses it or not."""
        ...

    def pack_follow_up(self, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], job_id: int) -> bytes:
        """Pack a job (`NewJob`) that is enqueued with the success of another."""
        ...

    @property
    def limits(self) -> Mapping[str, QueueLimit]:
        """What the app said of its queues."""
        ...

    @property
    def schedule_definitions(self) -> Mapping[str, ScheduleDefinition]:
        """What the app wants enqueued again and again."""
        ...

    def use_ledger(self, url: str) -> None:
        """Take the ledger of this URL instead of the one that the code names."""
        ...

    def ledger_note(self) -> str:
        """Return, only once, a sentence about an address of another ledger that was not used; else ""."""
        ...

    def manifest_settings(self) -> bytes:
        """The app's settings as JSON (see `unstuck.config.dump`): the worker never imports the app itself."""
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
