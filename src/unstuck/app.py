"""The composition root: tasks are registered here, and the rooms are wired together."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar, Unpack, overload

import msgspec

from unstuck import config
from unstuck.client.hooks import Follower, HookRegistry, names_of
from unstuck.client.job import Job
from unstuck.client.runtime import ClientRuntime
from unstuck.client.schedules import ScheduleRegistry
from unstuck.client.task import Task
from unstuck.client.task_function import read_function, shown
from unstuck.client.task_settings import GivenTaskSettings, check_task_settings, policy_of
from unstuck.config import DEFAULT_QUEUE, GivenSettings, Recovery, Settings
from unstuck.domain.limits import QueueLimit, read_key_rule, read_limit
from unstuck.domain.policy import HOOK_SETTINGS, check_policy
from unstuck.domain.redaction import Redactor
from unstuck.domain.text import check_names, checked_name, did_you_mean
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError, UnknownTask
from unstuck.runner.tasks import TaskDefinition

if TYPE_CHECKING:
    from unstuck.client.events import EventStream
    from unstuck.client.operator import Operator
    from unstuck.client.operator.stale import StaleAction
    from unstuck.client.workflows import Workflow, WorkflowRun
    from unstuck.ledger.contract import Ledger

GATHER = "500ms"
"""A burst of events is over when nothing came for so long; ten seconds at the most."""

P = ParamSpec("P")
R = TypeVar("R")

_APP_SETTINGS = ("queues", *HOOK_SETTINGS)


class App(ScheduleRegistry, HookRegistry):
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
        self._definitions: dict[str, TaskDefinition] = {}
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._limits: dict[str, QueueLimit] = {}
        ScheduleRegistry.__init__(self)
        HookRegistry.__init__(
            self,
            {
                "after_success": after_success,
                "after_failure": after_failure,
                "after_crash": after_crash,
                "after_retry": after_retry,
            },
        )
        self._queues = frozenset(checked_name(queue, "Queue") for queue in queues) | {DEFAULT_QUEUE}

    def __repr__(self) -> str:
        return f"<App with {len(self._definitions)} tasks>"

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
            return self._register(function[0], settings)
        return lambda decorated: self._register(decorated, settings)

    def _register(self, given: Callable[..., Any], settings: dict[str, Any]) -> Task[Any, Any]:
        found = read_function(given)
        name = settings.get("name")
        if name is None and found.name is None:
            raise ConfigError(f"{shown(given)} has no name that a job could be found by. Give it name=….")
        name = checked_name(found.name if name is None else name, "Task")
        places, rest = Redactor(self.settings.web.redact).places(found.parameters)
        policy = msgspec.structs.replace(
            policy_of(settings, read_key_rule(name, settings, found.defaults)),
            hidden_args=places,
            hidden_args_from=rest,
        )
        recovery = self.settings.recovery
        check_policy(
            name,
            policy,
            app_interval_s=recovery.heartbeat_interval_s,
            app_timeout_s=recovery.running_stale_after_s,
            pulse_interval_s=recovery.runner_heartbeat_interval_s,
            is_async=found.is_async,
        )
        return self._add(
            TaskDefinition(
                name=name,
                queue=checked_name(settings.get("queue", DEFAULT_QUEUE), "Queue"),
                function=found.function,
                is_async=found.is_async,
                context_parameter=found.context_parameter,
                policy=policy,
                concurrency_key=settings["concurrency_key"] if policy.order.computed else None,
                hooks=names_of(settings, f"Task {name!r}"),
            )
        )

    def queue(self, name: str, *, concurrency: int | None = None, rate: str | None = None, **unknown: Never) -> str:
        """Declare a queue, with how many of its jobs may be in hand at once and how many may be begun in a time
        (`"100/m"`), across all workers. Each worker that starts writes it down; what an operator chose stands."""
        check_names(unknown, ("concurrency", "rate"), "queue setting")
        checked = checked_name(name, "Queue")
        self._queues |= {checked}
        limit = read_limit(concurrency, rate)
        if limit:
            self._limits[checked] = limit
        return checked

    @property
    def limits(self) -> Mapping[str, QueueLimit]:
        """What was declared of queues."""
        return self._limits

    def _add(self, definition: TaskDefinition) -> Task[Any, Any]:
        name = definition.name
        if name in self._definitions:
            raise ConfigError(f"There are two tasks named {name!r} in this app. Give one of them name=….")
        recovery = self.settings.recovery
        policy = msgspec.structs.replace(
            definition.policy,
            auto_requeue_stale_claimed=recovery.auto_requeue_stale_claimed,
            auto_fail_stale_running=recovery.auto_fail_stale_running,
        )
        definition = replace(definition, policy=policy)
        self._definitions[name] = definition
        self._queues |= {definition.queue}
        task: Task[Any, Any] = Task(
            self._runtime, definition, lambda: self._queues, policy=lambda: self._policy_of(name)
        )
        self._policies.clear()
        self._tasks[name] = task
        return task

    @property
    def definitions(self) -> Mapping[str, TaskDefinition]:
        """Every task, with all that follows its ends as far as those tasks are registered yet."""
        if not any(self._hooks_of(one) for one in self._definitions.values()):
            return self._definitions
        return {
            name: replace(one, policy=self._policy_of(name, strict=False)) for name, one in self._definitions.items()
        }

    @property
    def queues(self) -> frozenset[str]:
        """Every queue that this app's workers serve unless told otherwise."""
        return self._queues

    def task_by_name(self, name: str) -> Task[Any, Any]:
        if name not in self._tasks:
            raise UnknownTask(f"This app has no task {name!r}.{did_you_mean(name, self._tasks)}")
        return self._tasks[name]

    def pack_follow_up(self, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], job_id: int) -> bytes:
        """Pack a job that is enqueued with the success of another; for `ctx.enqueue`."""
        if not isinstance(task, Task):
            task = self.task_by_name(task if isinstance(task, str) else getattr(task, "__name__", repr(task)))
        return msgspec.msgpack.encode(task.follow_up(args, kwargs, job_id))

    def use_ledger(self, url: str) -> None:
        """Take the ledger of this URL instead of the one that the code names, as `--url` of a worker does.

        Call it before the app is used: jobs that were enqueued before stay where they are."""
        self.settings = replace(self.settings, url=url)
        self._runtime.move(self.settings)

    def ledger_note(self) -> str:
        """Return, only once, a sentence if the environment or a file names another ledger than the code; else ""."""
        return self._runtime.take_note()

    def manifest_settings(self) -> bytes:
        for name in self._definitions:
            self._policy_of(name)  # Refuse here, before a worker starts, what no job could be enqueued with.
        return config.dump(self.settings)

    # The ledger -------------------------------------------------------------------------------

    @property
    def ledger(self) -> "Ledger":
        return self._runtime.services().ledger

    @property
    def operator(self) -> "Operator":
        return self._runtime.services().operator

    def job(self, job_id: int) -> Job[Any]:
        """Give a handle on a job whose id is known."""
        return Job(self._runtime, job_id)

    def workflow(self, name: str, **unknown: Never) -> "Workflow":
        """Begin to build a workflow; nothing is stored before its `start()`."""
        for setting in unknown:
            raise ConfigError(f"A workflow has no setting {setting!r}. Give it to the tasks: @app.task({setting}=…).")
        from unstuck.client.workflows import Workflow

        return Workflow(self._runtime, name)

    def workflow_run(self, workflow_id: int) -> "WorkflowRun":
        """Give a handle on a workflow that was started."""
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
        """Listen to what happens, with `for` or `async for`: deaths, requeues, failures, queues that nobody serves.

        `kinds` and `worker` choose; `after` goes on behind the cursor of an earlier event. A burst of one kind is told
        as one event with its count, once nothing more came for `gather` (None: each by itself, at once)."""
        from unstuck.client.events import listen

        return listen(self._runtime, kinds, worker, after, gather)

    def stale(self, older_than: Duration = 0) -> "list[StaleAction]":
        """List held jobs whose worker has been silent for at least so long."""
        return self.operator.stale.list(seconds(older_than, "older_than"))

    def fail_stale(self, older_than: Duration) -> "list[StaleAction]":
        """Fail running jobs whose worker has been silent for so long; give what was done."""
        return self.operator.stale.fail(seconds(older_than, "older_than"))

    def requeue_stale(self, older_than: Duration) -> "list[StaleAction]":
        """Requeue claimed jobs whose worker has been silent for so long; give what was done."""
        return self.operator.stale.requeue(seconds(older_than, "older_than"))

    def migrate(self) -> list[str]:
        """Create or update the tables; give what was applied."""
        return self._runtime.services().ledger.migrate()

    def close(self) -> None:
        """Ring what is still to be rung and close the connections; the next use opens them again."""
        self._runtime.close()
