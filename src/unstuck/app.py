"""The app: tasks, queues, schedules and hooks are registered with it, and it leads to the ledger."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar, Unpack, overload

import msgspec

from unstuck import config
from unstuck.client.enqueue import EnqueueOptionsDict
from unstuck.client.hooks import Follower, HookRegistry
from unstuck.client.job import Job
from unstuck.client.runtime import ClientRuntime
from unstuck.client.schedules import DEFAULT_CATCH_UP, ScheduleRegistry, check_schedule_settings
from unstuck.client.task import Task
from unstuck.client.task_settings import GivenTaskSettings, check_task_settings, define_task
from unstuck.config import DEFAULT_QUEUE, GivenSettings, Recovery, Settings
from unstuck.domain.limits import QueueLimit, read_limit
from unstuck.domain.policy import HOOK_SETTINGS
from unstuck.domain.schedules import CatchUp
from unstuck.domain.text import check_names, checked_name, did_you_mean
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError, UnknownTask
from unstuck.runner.tasks import AppDefinition, TaskDefinition

if TYPE_CHECKING:
    from unstuck.client.events import EventStream
    from unstuck.client.operator import Operator
    from unstuck.client.operator.stale import StaleAction
    from unstuck.client.workflows import Workflow, WorkflowRun
    from unstuck.ledger.contract import Ledger

GATHER = "500ms"
"""A burst of events is over if nothing comes for this time; it lasts ten seconds at most."""

P = ParamSpec("P")
R = TypeVar("R")

_APP_SETTINGS = ("queues", *HOOK_SETTINGS)


class App:
    """Tasks, settings and the way to the ledger. Nothing is connected before it is used."""

    def __init__(
        self,
        url: str | None = None,
        *,
        recovery: Recovery | None = None,
        queues: Iterable[str] = (),
        after_success: Follower = None,
        after_failure: Follower = None,
        after_crash: Follower = None,
        after_retry: Follower = None,
        **settings: Unpack[GivenSettings],
    ) -> None:
        config.check_setting_names(settings, _APP_SETTINGS)
        self.settings: Settings = config.load({"url": url, "recovery": recovery, **settings})
        self._runtime = ClientRuntime(self.settings, config.overruled(url))
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._limits: dict[str, QueueLimit] = {}
        self._schedules = ScheduleRegistry(self._tasks)
        self._hooks = HookRegistry(
            self._tasks,
            {
                "after_success": after_success,
                "after_failure": after_failure,
                "after_crash": after_crash,
                "after_retry": after_retry,
            },
        )
        self._queues = frozenset(checked_name(queue, "Queue") for queue in queues) | {DEFAULT_QUEUE}

    def __repr__(self) -> str:
        return f"<App with {len(self._tasks)} tasks>"

    # Tasks ------------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, R], /, **settings: Unpack[GivenTaskSettings]) -> Task[P, R]: ...

    @overload
    def task(self, **settings: Unpack[GivenTaskSettings]) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, *function: Any, **settings: Any) -> Any:
        """Register a function: `@app.task`, `@app.task(queue=…, retry=…, on_crash=…, …)` or `app.task(function, …)`."""
        check_task_settings(settings)
        if len(function) > 1:
            raise ConfigError(f"app.task takes one function, and {len(function)} were given. Register each by itself.")
        if function:
            return self._add(define_task(function[0], settings, self.settings))
        return lambda decorated: self._add(define_task(decorated, settings, self.settings))

    def _add(self, definition: TaskDefinition) -> Task[Any, Any]:
        name = definition.name
        if name in self._tasks:
            raise ConfigError(f"There are two tasks named {name!r} in this app. Give one of them name=….")
        recovery = self.settings.recovery
        policy = msgspec.structs.replace(
            definition.policy,
            auto_requeue_stale_claimed=recovery.auto_requeue_stale_claimed,
            auto_fail_stale_running=recovery.auto_fail_stale_running,
        )
        task: Task[Any, Any] = Task(
            self._runtime,
            replace(definition, policy=policy),
            lambda: self._queues,
            policy=partial(self._hooks.policy_of, name),
        )
        self._tasks[name] = task
        self._queues |= {definition.queue}
        self._hooks.forget_policies()
        return task

    def task_by_name(self, name: str) -> Task[Any, Any]:
        """Return a task of this app, or raise UnknownTask."""
        if name not in self._tasks:
            raise UnknownTask(f"This app has no task {name!r}.{did_you_mean(name, self._tasks)}")
        return self._tasks[name]

    # Queues, schedules, hooks -----------------------------------------------------------------

    def queue(self, name: str, *, concurrency: int | None = None, rate: str | None = None, **unknown: Never) -> str:
        """Declare a queue, with the number of its jobs that may run at once and the rate at which they may start
        (`"100/m"`), across all workers. Each worker stores it when it starts; a limit set by an operator stays."""
        check_names(unknown, ("concurrency", "rate"), "queue setting")
        checked = checked_name(name, "Queue")
        self._queues |= {checked}
        limit = read_limit(concurrency, rate)
        if limit:
            self._limits[checked] = limit
        return checked

    @property
    def queues(self) -> frozenset[str]:
        """Every queue that this app's workers serve by default."""
        return self._queues

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
        check_schedule_settings(options)

        def add(task: Any) -> Any:
            self._schedules.add(
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
            return task

        if isinstance(target, str) and cron is not None:
            raise ConfigError("Give the cron expression once: as the first argument or as cron=….")
        return add if target is None or isinstance(target, str) else add(target)

    def after_success(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every job of this app that succeeds: `@app.after_success` above `@app.task`."""
        self._hooks.add("success", task)
        return task

    def after_failure(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every job that failed for good, or was quarantined."""
        self._hooks.add("failure", task)
        return task

    def after_crash(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every attempt whose process died."""
        self._hooks.add("crash", task)
        return task

    def after_retry(self, task: Task[P, R]) -> Task[P, R]:
        """Have a task follow every attempt that went wrong and is tried again."""
        self._hooks.add("retry", task)
        return task

    # Processes that run the app ---------------------------------------------------------------

    def definition(self) -> AppDefinition:
        """Return what the fork server and the command line need of this app, or raise ConfigError if it is not whole:
        if a hook names a task that is not registered, for example."""
        return AppDefinition(
            tasks={name: self._with_hooks(task.definition) for name, task in self._tasks.items()},
            queues=self._queues,
            limits=dict(self._limits),
            schedules=self._schedules.definitions(),
            settings=config.dump(self.settings),
            note=self._runtime.take_note(),
            pack_follow_up=self._pack_follow_up,
        )

    def _with_hooks(self, definition: TaskDefinition) -> TaskDefinition:
        policy = self._hooks.policy_of(definition.name)
        return definition if policy is definition.policy else replace(definition, policy=policy)

    def _pack_follow_up(self, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], job_id: int) -> bytes:
        if not isinstance(task, Task):
            task = self.task_by_name(task if isinstance(task, str) else getattr(task, "__name__", repr(task)))
        return msgspec.msgpack.encode(task.follow_up(args, kwargs, job_id))

    def use_ledger(self, url: str) -> None:
        """Use the ledger of this URL instead of the one that the code names, as `--url` of a worker does.

        Call it before the app is used: jobs that were enqueued before stay where they are."""
        self.settings = replace(self.settings, url=url)
        self._runtime.move(self.settings)

    # The ledger -------------------------------------------------------------------------------

    @property
    def ledger(self) -> "Ledger":
        return self._runtime.services().ledger

    @property
    def operator(self) -> "Operator":
        return self._runtime.services().operator

    def job(self, job_id: int) -> Job[Any]:
        """Return a handle on a job whose id is known."""
        return Job(self._runtime, job_id)

    def workflow(self, name: str, **unknown: Never) -> "Workflow":
        """Return a new workflow to build; nothing is stored before its `start()`."""
        for setting in unknown:
            raise ConfigError(f"A workflow has no setting {setting!r}. Give it to the tasks: @app.task({setting}=…).")
        from unstuck.client.workflows import Workflow

        return Workflow(self._runtime, name)

    def workflow_run(self, workflow_id: int) -> "WorkflowRun":
        """Return a handle on a workflow that was started."""
        from unstuck.client.workflows import WorkflowRun

        return WorkflowRun(self._runtime, workflow_id)

    def events(
        self,
        kinds: Collection[str] = (),
        *,
        worker: str | None = None,
        after: str | None = None,
        gather: Duration | None = GATHER,
    ) -> "EventStream":
        """Iterate over events with `for` or `async for`: deaths, requeues, failures, queues without workers.

        `kinds` and `worker` filter; `after` continues behind the cursor of an earlier event. A burst of one kind
        arrives as one event with its count, after `gather` without another (None: each event by itself, at once)."""
        from unstuck.client.events import listen

        return listen(self._runtime, kinds, worker, after, gather)

    def stale(self, older_than: Duration = 0) -> "list[StaleAction]":
        """List held jobs whose worker has been silent for at least this time."""
        return self.operator.stale.list(seconds(older_than, "older_than"))

    def fail_stale(self, older_than: Duration) -> "list[StaleAction]":
        """Fail running jobs whose worker has been silent for this time; return what was done."""
        return self.operator.stale.fail(seconds(older_than, "older_than"))

    def requeue_stale(self, older_than: Duration) -> "list[StaleAction]":
        """Requeue claimed jobs whose worker has been silent for this time; return what was done."""
        return self.operator.stale.requeue(seconds(older_than, "older_than"))

    def migrate(self) -> list[str]:
        """Create or update the tables; return what was applied."""
        return self._runtime.services().ledger.migrate()

    def close(self) -> None:
        """Send pending wake-ups and close the connections; the next use opens them again."""
        self._runtime.close()
