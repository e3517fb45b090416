"""Turn what an app or an operator says of a schedule into its definition, everything checked."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from unstuck.client.enqueueing import refuse_refusing
from unstuck.domain.catching_up import CatchUp
from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError, PayloadError, WrongArguments
from unstuck.domain.names import checked_name
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.domain.ticking import checked_timing
from unstuck.store.records import NewJob, pack_job

if TYPE_CHECKING:
    # The other way round at run time: a task reaches the operator, who makes schedules.
    from unstuck.client.task import Task

NOT_HERE = ("delay", "run_at", "connection")
DEFAULT_CATCH_UP: CatchUp = "latest"


def define(
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
    refuse_refusing(job, owner)
    # Who enqueues it is said at each tick; what differs between processes must not be part of the definition.
    job = msgspec.structs.replace(job, enqueued_by=None)
    return ScheduleDefinition(name, job.task, job.queue, timing, pack_job(job), catch_up)
