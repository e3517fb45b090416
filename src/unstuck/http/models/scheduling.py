"""Schedules as they are asked for and shown."""

from typing import Any, Literal

from pydantic import Field, StrictInt

from unstuck.http.models.base import Asked, Given, Instant, Span


class ScheduleView(Given):
    name: str
    task: str
    queue: str
    priority: int
    args: Any
    kwargs: Any
    cron: str | None
    every_s: float | None
    tz: str
    when: str = Field(examples=["*/5 * * * * (Europe/Berlin)"])
    catch_up: Literal["skip", "latest", "all"]
    source: Literal["app", "operator"] = Field(description="`app`: it stands in code. `operator`: it was made here.")
    paused: bool
    paused_by: str | None
    next_at: Instant | None = Field(description="Null where it is paused or just begun.")
    last_at: Instant | None = Field(description="Its last tick.")
    fired_at: Instant | None = Field(description="When that was really enqueued.")
    last_job_id: int | None
    changed_at: Instant
    workers: int = Field(description="Living workers that would fire it.")


class ScheduleBody(Asked):
    """Exactly one of `cron` and `every`."""

    task: str = Field(description="As workers know it.")
    cron: str | None = Field(default=None, examples=["*/5 * * * *"])
    every: Span | None = Field(default=None, examples=["30s"])
    tz: str = "UTC"
    catch_up: Literal["skip", "latest", "all"] = "latest"
    args: list[Any] = Field(default=[])
    kwargs: dict[str, Any] = Field(default={})
    queue: str | None = None
    priority: StrictInt = Field(default=0, ge=-1000, le=1000)
    unique_key: str | None = None


class SchedulePaused(Given):
    name: str
    paused: bool
    changed: bool


class ScheduleRun(Given):
    name: str
    job_id: int


class ScheduleRemoved(Given):
    name: str
    removed: Literal[True]
    workers: int = Field(description="Living workers with it in their code: it comes back with the next that starts.")
