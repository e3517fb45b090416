"""Check what an app or an operator says about a schedule, and turn it into its definition."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack, get_args, overload

import msgspec

from unstuck.client.enqueue import OPTION_NAMES, EnqueueOptionsDict, check_no_refuse, refuse_task_settings
from unstuck.client.task import Task
from unstuck.domain.schedules import CatchUp, ScheduleDefinition, checked_timing
from unstuck.domain.text import check_names, checked_name
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError, PayloadError, WrongArguments
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.contract.schedules import pack_job
from unstuck.runner.tasks import TaskDefinition

NOT_HERE = ("delay", "run_at", "connection")
DEFAULT_CATCH_UP: CatchUp = "latest"


def define_schedule(
    task: "Task[Any, Any]",
    *,
    name: str | None,
    cron: str | None,
    every: Duration | None,
    tz: str,
    catch_up: CatchUp,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    hooks: bool = True,
) -> ScheduleDefinition:
    """Give the definition of a schedule of a task, or raise ConfigError with what to write instead.

    Without `hooks` for a first look: the tasks that follow may be registered later."""
    name = checked_name(task.name if name is None else name, "Schedule")
    owner = f"Schedule {name!r}"
    for option in NOT_HERE:
        if option in options:
            raise ConfigError(f"{owner}: {option} has no place here: a job is enqueued when its tick is due.")
    try:
        optioned = task.options(**dict(options))
        job = (optioned.template if hooks else optioned.plain)(tuple(args), dict(kwargs))
    except (WrongArguments, PayloadError) as error:
        raise ConfigError(f"{owner}: {error} Give what the task needs as args=… and kwargs=….") from None
    return definition_of(name, job, cron, every, tz, catch_up)


def definition_of(
    name: str, job: NewJob, cron: str | None, every: Duration | None, tz: str, catch_up: CatchUp
) -> ScheduleDefinition:
    """Put a job and its times together, for doors that have no app."""
    owner = f"Schedule {checked_name(name, 'Schedule')!r}"
    if catch_up not in get_args(CatchUp):
        raise ConfigError(f"{owner}: catch_up must be 'skip', 'latest' or 'all', not {catch_up!r}.")
    timing = checked_timing(cron, None if every is None else seconds(every, f"{owner}: every"), tz, owner)
    check_no_refuse(job, owner)
    # Who enqueues it is said at each tick; what differs between processes must not be part of the definition.
    job = msgspec.structs.replace(job, enqueued_by=None)
    return ScheduleDefinition(name, job.task, job.queue, timing, pack_job(job), catch_up)


P = ParamSpec("P")
R = TypeVar("R")
_SCHEDULE_SETTINGS = ("cron", "every", "tz", "catch_up", "name", "args", "kwargs")


class ScheduleRegistry:
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
        **options: Unpack[EnqueueOptionsDict],
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
        **options: Unpack[EnqueueOptionsDict],
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
                define_schedule,
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
                raise ConfigError(
                    f"Schedule {defined.name!r} is of a task of another app. Register the function with this app."
                )
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
