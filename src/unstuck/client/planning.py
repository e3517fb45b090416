"""The part of an app that plans ahead: `app.schedule(…)`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from unstuck.client.enqueueing import OPTION_NAMES, GivenOptions, refuse_task_settings
from unstuck.client.scheduling import DEFAULT_CATCH_UP, define
from unstuck.client.task import Task
from unstuck.domain.catching_up import CatchUp
from unstuck.domain.durations import Duration
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import check_names
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.runner.tasks import TaskDefinition

P = ParamSpec("P")
R = TypeVar("R")
_SCHEDULE_SETTINGS = ("cron", "every", "tz", "catch_up", "name", "args", "kwargs")


class Planning:
    """Knows the schedules of an app."""

    _definitions: dict[str, TaskDefinition]

    def __init__(self) -> None:
        self._schedules: dict[str, Callable[..., ScheduleDefinition]] = {}

    @overload
    def schedule(
        self,
        cron: str | None = None,
        /,
        *,
        every: Duration | None = None,
        tz: str = "UTC",
        catch_up: CatchUp = DEFAULT_CATCH_UP,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[GivenOptions],
    ) -> Callable[[Task[P, R]], Task[P, R]]: ...

    @overload
    def schedule(
        self,
        task: Task[P, R],
        /,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str = "UTC",
        catch_up: CatchUp = DEFAULT_CATCH_UP,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[GivenOptions],
    ) -> Task[P, R]: ...

    def schedule(
        self,
        target: Any = None,
        /,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str = "UTC",
        catch_up: CatchUp = DEFAULT_CATCH_UP,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Enqueue a task again and again: `@app.schedule("*/5 * * * *", tz="Europe/Berlin")` above `@app.task`, or
        `app.schedule(task, every="30s", args=[…])`. The workers keep the clock; nothing else needs to run."""
        check_names(
            refuse_task_settings(options, OPTION_NAMES), (*_SCHEDULE_SETTINGS, *OPTION_NAMES), "schedule setting"
        )

        def add(task: Any) -> Any:
            if not isinstance(task, Task):
                raise ConfigError(f"app.schedule wants a task, not {task!r:.80}. Write it above @app.task.")
            plan = partial(
                define,
                task,
                name=name,
                cron=target if isinstance(target, str) else cron,
                every=every,
                tz=tz,
                catch_up=catch_up,
                args=args,
                kwargs=kwargs or {},
                options=options,
            )
            defined = plan(hooks=False)
            if defined.task not in self._definitions:
                raise ConfigError(f"Schedule {defined.name!r} is of a task of another app. Take it in with adopt(…).")
            if defined.name in self._schedules:
                raise ConfigError(f"There are two schedules named {defined.name!r} in this app. Give one name=….")
            self._schedules[defined.name] = plan
            return task

        if isinstance(target, str) and cron is not None:
            raise ConfigError("Give the cron expression once: as the first argument or as cron=….")
        return add if target is None or isinstance(target, str) else add(target)

    @property
    def schedule_definitions(self) -> Mapping[str, ScheduleDefinition]:
        """What this app wants enqueued again and again."""
        return {name: plan() for name, plan in self._schedules.items()}
