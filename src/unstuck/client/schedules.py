"""Check what an app or an operator says about a schedule, and turn it into its definition."""

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import msgspec

from unstuck.client.enqueue import OPTION_NAMES, check_no_refuse, refuse_task_settings
from unstuck.client.task import Task
from unstuck.domain.schedules import CatchUp, ScheduleDefinition, checked_timing
from unstuck.domain.text import check_names, checked_name
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError, PayloadError, WrongArguments
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.contract.schedules import pack_job

NOT_HERE = ("delay", "run_at", "connection")
DEFAULT_CATCH_UP: CatchUp = "latest"
_SCHEDULE_SETTINGS = ("cron", "every", "tz", "catch_up", "name", "args", "kwargs")


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
    """Return the definition of a schedule of a task, or raise ConfigError with what to write instead.

    `hooks=False` is for a first check: the tasks that follow may be registered later."""
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
    """Return the definition of a schedule of this job, for callers that have no app."""
    owner = f"Schedule {checked_name(name, 'Schedule')!r}"
    if catch_up not in get_args(CatchUp):
        raise ConfigError(f"{owner}: catch_up must be 'skip', 'latest' or 'all', not {catch_up!r}.")
    timing = checked_timing(cron, None if every is None else seconds(every, f"{owner}: every"), tz, owner)
    check_no_refuse(job, owner)
    # Who enqueues it is said at each tick; what differs between processes must not be part of the definition.
    job = msgspec.structs.replace(job, enqueued_by=None)
    return ScheduleDefinition(name, job.task, job.queue, timing, pack_job(job), catch_up)


class ScheduleRegistry:
    """Keep the schedules of an app."""

    def __init__(self, tasks: Container[str]) -> None:
        self._tasks = tasks
        self._plans: dict[str, Callable[..., ScheduleDefinition]] = {}

    def add(
        self,
        task: Task[Any, Any],
        *,
        name: str | None,
        cron: str | None,
        every: Duration | None,
        tz: str,
        catch_up: CatchUp,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Add a schedule of a task, or raise ConfigError with what to write instead."""
        if not isinstance(task, Task):
            raise ConfigError(f"app.schedule wants a task, not {task!r:.80}. Write it above @app.task.")
        plan = partial(
            define_schedule,
            task,
            name=name,
            cron=cron,
            every=every,
            tz=tz,
            catch_up=catch_up,
            args=args,
            kwargs=kwargs,
            options=options,
        )
        defined = plan(hooks=False)
        if defined.task not in self._tasks:
            raise ConfigError(
                f"Schedule {defined.name!r} is of a task of another app. Register the function with this app."
            )
        if defined.name in self._plans:
            raise ConfigError(f"There are two schedules named {defined.name!r} in this app. Give one name=….")
        self._plans[defined.name] = plan

    def definitions(self) -> tuple[ScheduleDefinition, ...]:
        """Return every schedule, with the hooks that are registered by now."""
        return tuple(plan() for plan in self._plans.values())


def check_schedule_settings(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that no schedule has, with the one that was probably meant."""
    known = (*_SCHEDULE_SETTINGS, *OPTION_NAMES)
    check_names(refuse_task_settings(options, OPTION_NAMES), known, "schedule setting")
