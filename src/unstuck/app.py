"""The composition root: tasks are registered here, and the rooms are wired together."""

import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

import msgspec

from unstuck import config
from unstuck.client.counter import Counter
from unstuck.client.following import Follower, Following
from unstuck.client.hooking import names_of
from unstuck.client.job import Job
from unstuck.client.planning import Planning
from unstuck.client.task import Task
from unstuck.config import DEFAULT_QUEUE, GivenSettings, Recovery, Settings
from unstuck.domain.durations import Duration, seconds
from unstuck.domain.errors import ConfigError, UnknownTask
from unstuck.domain.hooks import HOOK_SETTINGS
from unstuck.domain.limits import QueueLimit, read_limit
from unstuck.domain.names import checked_name, did_you_mean
from unstuck.domain.order import KeyFunction, Order, read_order
from unstuck.domain.policy import OnCrash, Overlap, Policy, check_policy
from unstuck.domain.redaction import Redactor
from unstuck.domain.retry import Retry, RetryRule
from unstuck.domain.sizes import Size, size_bytes
from unstuck.runner.context import Context
from unstuck.runner.tasks import TaskDefinition

if TYPE_CHECKING:
    from unstuck.client.events import Events
    from unstuck.client.operator import Operator, StaleAction
    from unstuck.client.workflow import Workflow, WorkflowRun
    from unstuck.store.contract import Ledger

GATHER = "500ms"
"""A burst of events is over when nothing came for so long; ten seconds at the most."""

P = ParamSpec("P")
R = TypeVar("R")


class App(Planning, Following):
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
        self.settings: Settings = config.load({"url": url, "recovery": recovery, **settings})
        self._counter = Counter(self.settings)
        self._definitions: dict[str, TaskDefinition] = {}
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._limits: dict[str, QueueLimit] = {}
        Planning.__init__(self)
        Following.__init__(
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
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
        retry: Retry | int | None = None,
        on_crash: OnCrash = "fail",
        max_crash_retries: int = 3,
        timeout: Duration | None = None,
        heartbeat: bool = True,
        heartbeat_interval: Duration | None = None,
        heartbeat_timeout: Duration | None = None,
        overlap: Overlap = "bounded",
        stall_timeout: Duration | None = None,
        interpreter_timeout: Duration | None = None,
        memory_limit: Size | None = None,
        concurrency_key: str | KeyFunction | None = None,
        concurrency_limit: int = 1,
        expires: Duration | None = None,
        keep: Duration | None = None,
        after_success: Follower = None,
        after_failure: Follower = None,
        after_crash: Follower = None,
        after_retry: Follower = None,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, *function: Any, **settings: Any) -> Any:
        """Register a function, with `@app.task` or `@app.task(queue=…, retry=…, on_crash=…, …)`."""
        if function:
            return self._register(function[0], {})
        for name in settings:
            if name not in _TASK_SETTINGS:
                raise ConfigError(
                    f"There is no task setting {name!r}.{did_you_mean(name, _TASK_SETTINGS)} "
                    f"Known: {', '.join(_TASK_SETTINGS)}."
                )
        return lambda decorated: self._register(decorated, settings)

    def _register(self, function: Callable[..., Any], settings: dict[str, Any]) -> Task[Any, Any]:
        if not callable(function):
            raise ConfigError(f"@app.task wants a function, not {function!r}.")
        name = checked_name(settings.get("name") or getattr(function, "__name__", "task"), "Task")
        context_parameter = _context_parameter(function)
        policy = msgspec.structs.replace(
            _policy(settings, read_order(name, settings, _parameters(function))),
            **self._hidden(function, context_parameter),
        )
        recovery = self.settings.recovery
        check_policy(
            name,
            policy,
            app_interval_s=recovery.heartbeat_interval_s,
            app_timeout_s=recovery.running_stale_after_s,
            pulse_interval_s=recovery.runner_heartbeat_interval_s,
            is_async=inspect.iscoroutinefunction(function),
        )
        return self.adopt(
            TaskDefinition(
                name=name,
                queue=checked_name(settings.get("queue", DEFAULT_QUEUE), "Queue"),
                function=function,
                is_async=inspect.iscoroutinefunction(function),
                context_parameter=context_parameter,
                policy=policy,
                concurrency_key=settings["concurrency_key"] if policy.order.computed else None,
                hooks=names_of(settings, f"Task {name!r}"),
            )
        )

    def queue(self, name: str, *, concurrency: int | None = None, rate: str | None = None) -> str:
        """Declare a queue, with how many of its jobs may be in hand at once and how many may be begun in a time
        (`"100/m"`), across all workers. Each worker that starts writes it down; what an operator chose stands."""
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

    def _hidden(self, function: Callable[..., Any], context_parameter: str | None) -> dict[str, Any]:
        """Say by which places secrets are passed: the name of a positional argument stands in the signature alone."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return {}
        passed = [parameter for parameter in parameters if parameter.name != context_parameter]
        places, rest = Redactor(self.settings.web.redact).places(passed)
        return {"hidden_args": places, "hidden_args_from": rest}

    def adopt(self, definition: TaskDefinition) -> Task[Any, Any]:
        """Take a task of another app, for example one that lives in a library."""
        name = definition.name
        if name in self._definitions:
            raise ConfigError(f"There are two tasks named {name!r} in this app. Give one of them name=….")
        self._definitions[name] = definition
        self._queues |= {definition.queue}
        task: Task[Any, Any] = Task(
            self._counter, definition, lambda: self._queues, policy=lambda: self._policy_of(name)
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

    def manifest_settings(self) -> bytes:
        for name in self._definitions:
            self._policy_of(name)  # Refuse here, before a worker starts, what no job could be enqueued with.
        return config.dump(self.settings)

    # The ledger -------------------------------------------------------------------------------

    @property
    def ledger(self) -> "Ledger":
        return self._counter.parts().ledger

    @property
    def operator(self) -> "Operator":
        return self._counter.parts().operator

    def job(self, job_id: int) -> Job[Any]:
        """Give a handle on a job whose id is known."""
        return Job(self._counter, job_id)

    def signal(self, job_id: int, name: str, value: Any = None) -> str:
        """Signal a job: 'woken' (it waited for it) or 'kept' (until it does); SignalRefused when it is over."""
        return Job[Any](self._counter, job_id).signal(name, value)

    def workflow(self, name: str) -> "Workflow":
        """Begin to build a workflow; nothing is stored before its `start()`."""
        from unstuck.client.workflow import Workflow

        return Workflow(self._counter, name)

    def workflow_run(self, workflow_id: int) -> "WorkflowRun":
        """Give a handle on a workflow that was started."""
        from unstuck.client.workflow import WorkflowRun

        return WorkflowRun(self._counter, workflow_id)

    def events(
        self,
        kinds: Collection[str] = (),
        *,
        worker: str | None = None,
        after: str | None = None,
        gather: Duration | None = GATHER,
    ) -> "Events":
        """Listen to what happens, with `for` or `async for`: deaths, requeues, failures, queues that nobody serves.

        `kinds` and `worker` choose; `after` goes on behind the cursor of an earlier event. A burst of one kind is told
        as one event with its count, once nothing more came for `gather` (None: each by itself, at once)."""
        from unstuck.client.events import listen

        return listen(self._counter, kinds, worker, after, gather)

    def stale(self, older_than: Duration = 0) -> "list[StaleAction]":
        """List held jobs whose worker has been silent for at least so long."""
        return self.operator.stale(seconds(older_than, "older_than"))

    def fail_stale(self, older_than: Duration) -> "list[StaleAction]":
        """Fail running jobs whose worker has been silent for so long; give what was done."""
        return self.operator.fail_stale(seconds(older_than, "older_than"))

    def requeue_stale(self, older_than: Duration) -> "list[StaleAction]":
        """Requeue claimed jobs whose worker has been silent for so long; give what was done."""
        return self.operator.requeue_stale(seconds(older_than, "older_than"))

    def migrate(self) -> list[str]:
        """Create or update the tables; give what was applied."""
        return self._counter.parts().ledger.migrate()

    def close(self) -> None:
        """Ring what is still to be rung and close the connections; the next use opens them again."""
        self._counter.close()


_TASK_SETTINGS = (
    "name",
    "queue",
    "retry",
    "on_crash",
    "max_crash_retries",
    "timeout",
    "heartbeat",
    "heartbeat_interval",
    "heartbeat_timeout",
    "overlap",
    "stall_timeout",
    "interpreter_timeout",
    "memory_limit",
    "concurrency_key",
    "concurrency_limit",
    "expires",
    "keep",
    *HOOK_SETTINGS,
)


def _policy(settings: dict[str, Any], order: Order) -> Policy:
    memory = settings.get("memory_limit")
    return Policy(
        retry=_rule(settings.get("retry")),
        on_crash=settings.get("on_crash", "fail"),
        max_crash_retries=settings.get("max_crash_retries", 3),
        timeout_s=_optional_s(settings, "timeout"),
        heartbeat=settings.get("heartbeat", True),
        heartbeat_interval_s=_optional_s(settings, "heartbeat_interval"),
        heartbeat_timeout_s=_optional_s(settings, "heartbeat_timeout"),
        overlap=settings.get("overlap", "bounded"),
        stall_timeout_s=_optional_s(settings, "stall_timeout"),
        interpreter_timeout_s=_optional_s(settings, "interpreter_timeout"),
        memory_limit_bytes=None if memory is None else size_bytes(memory, "memory_limit"),
        order=order,
    )


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Give what a caller passes, without the Context, with defaults (or `...`)."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    context = _context_parameter(function)
    by_name = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return {
        item.name: ... if item.default is inspect.Parameter.empty else item.default
        for item in found
        if item.name != context and item.kind in by_name
    }


def _rule(retry: Any) -> RetryRule:
    if retry is None:
        return RetryRule()
    if isinstance(retry, Retry):
        return retry.rule()
    if isinstance(retry, int) and not isinstance(retry, bool):
        return Retry(max_attempts=retry).rule()
    raise ConfigError(f"retry must be a Retry(…) or a number of attempts, not {retry!r}.")


def _optional_s(settings: dict[str, Any], name: str) -> float | None:
    value = settings.get(name)
    return None if value is None else seconds(value, name)


def _context_parameter(function: Callable[..., Any]) -> str | None:
    """Find the parameter annotated with Context, if there is one."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - annotations may name what is not importable; then the text decides
        hints = dict(getattr(function, "__annotations__", {}))
    for name, hint in hints.items():
        if name != "return" and (hint is Context or hint in ("Context", "unstuck.Context")):
            return name
    return None
