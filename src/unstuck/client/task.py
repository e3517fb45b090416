"""A function registered with an app: still an ordinary function when called, and a job when enqueued."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, cast, overload

import msgspec

from unstuck.client.enqueue import EnqueueOptions, EnqueueOptionsDict, build_job, check_no_refuse, split_call
from unstuck.client.job import Job
from unstuck.client.runtime import ClientRuntime
from unstuck.domain.policy import Policy
from unstuck.errors import ConfigError, NoWorkers, WrongArguments
from unstuck.ledger.contract.jobs import Enqueued, NewJob
from unstuck.runner.tasks import TaskDefinition
from unstuck.tracing import EnqueueSpan, enqueue_span

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MAX_MANY = 100_000
BATCH = 1_000


class Task(Generic[P, R]):
    """What `@app.task` makes of a function: call it as before, or enqueue it."""

    def __init__(
        self,
        runtime: ClientRuntime,
        definition: TaskDefinition,
        known_queues: Callable[[], frozenset[str]],
        options: EnqueueOptions | None = None,
        policy: Callable[[], Policy] | None = None,
    ) -> None:
        # First of all: a callable object may have attributes that are named like ours.
        functools.update_wrapper(self, definition.function)
        self.definition = definition
        self._runtime = runtime
        self._known_queues = known_queues
        self._options = options or EnqueueOptions()
        # Asked for at each enqueue: what follows its ends may be registered later than it.
        self._policy = policy or (lambda: definition.policy)

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        # When it is first called so: most processes that define a task only run it, or enqueue another.
        return _signature(self.definition)

    @property
    def name(self) -> str:
        return self.definition.name

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on queue {self.definition.queue!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, self.definition.function(*args, **kwargs))

    def options(self, **values: Unpack[EnqueueOptionsDict]) -> "Task[P, R]":
        """Give the same task with other options for what is enqueued: priority, delay, run_at, …"""
        return Task(
            self._runtime,
            self.definition,
            self._known_queues,
            EnqueueOptions.checked(self._options, {**values}),
            self._policy,
        )

    # An async task gives a coroutine when it is called, and what it returns when it is a job. The arguments are those
    # of the function without its Context, which may stand anywhere among them: no type says that.

    @overload
    def enqueue(self: "Task[P, Coroutine[Any, Any, T]]", *args: Any, **kwargs: Any) -> Job[T]: ...

    @overload
    def enqueue(self, *args: Any, **kwargs: Any) -> Job[R]: ...

    def enqueue(self, *args: Any, **kwargs: Any) -> Job[Any]:
        """Store a job; it is durable when this returns."""
        with self._sending(1) as sent:
            return self._store([self._job(args, kwargs, sent.trace)], sent)[0]

    @overload
    def enqueue_many(self: "Task[P, Coroutine[Any, Any, T]]", calls: Iterable[Any]) -> list[Job[T]]: ...

    @overload
    def enqueue_many(self, calls: Iterable[Any]) -> list[Job[R]]: ...

    def enqueue_many(self, calls: Iterable[Any]) -> list[Job[Any]]:
        """Store many jobs: tuples of arguments or dicts of named ones. Each thousand is one commit."""
        calls = list(calls)
        with self._sending(len(calls)) as sent:
            jobs = [self._job(*split_call(call, self.name), sent.trace) for call in calls]
            return [handle for at in range(0, len(jobs), BATCH) for handle in self._store(jobs[at : at + BATCH], sent)]

    @overload
    async def enqueue_async(self: "Task[P, Coroutine[Any, Any, T]]", *args: Any, **kwargs: Any) -> Job[T]: ...

    @overload
    async def enqueue_async(self, *args: Any, **kwargs: Any) -> Job[R]: ...

    async def enqueue_async(self, *args: Any, **kwargs: Any) -> Job[Any]:
        """Like `enqueue`, without blocking the event loop."""
        with self._sending(1) as sent:
            job = self._job(args, kwargs, sent.trace)
            return (await asyncio.to_thread(self._store, [job], sent))[0]

    @overload
    async def enqueue_many_async(self: "Task[P, Coroutine[Any, Any, T]]", calls: Iterable[Any]) -> list[Job[T]]: ...

    @overload
    async def enqueue_many_async(self, calls: Iterable[Any]) -> list[Job[R]]: ...

    async def enqueue_many_async(self, calls: Iterable[Any]) -> list[Job[Any]]:
        """Like `enqueue_many`, without blocking the event loop."""
        return await asyncio.to_thread(self.enqueue_many, list(calls))

    def follow_up(self, args: tuple[Any, ...], kwargs: dict[str, Any], job_id: int) -> NewJob:
        """Give the job that is enqueued with the success of another."""
        if self._options.connection is not None:
            raise ConfigError(
                f"{self.name!r} cannot follow another job on a connection= of yours: it is committed with that job's "
                "success. Leave connection= out, or use task.enqueue(…) instead of ctx.enqueue."
            )
        with self._sending(1) as sent:
            job = self._job(args, kwargs, sent.trace)
        check_no_refuse(job, f"{self.name!r}, which follows another job,")
        return msgspec.structs.replace(job, enqueued_by=f"job {job_id}")

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob:
        """Give the job of an enqueue without anything that follows its end."""
        return self._job(args, kwargs, "", hooks=False)

    def template(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob:
        """Give the job that an enqueue would store, and store nothing: for what is enqueued later, by others."""
        return self._job(args, kwargs, "")

    def _sending(self, count: int) -> AbstractContextManager[EnqueueSpan]:
        return enqueue_span(self.name, self._options.queue or self.definition.queue, count)

    def _job(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], trace: str, refs: Any = (), *, hooks: bool = True
    ) -> NewJob:
        definition = self.definition
        if self._signature is not None:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise WrongArguments(f"Task {self.name!r}{self._signature} cannot be called so: {error}.") from None
        return build_job(
            task=definition.name,
            queue=definition.queue,
            policy=self._policy() if hooks else definition.policy,
            options=self._with_line(args, kwargs),
            args=args,
            kwargs=kwargs,
            limit_bytes=self._runtime.settings.max_payload_bytes,
            known_queues=self._known_queues(),
            trace=trace,
            refs=refs,
        )

    def _with_line(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EnqueueOptions:
        """Ask the app's function for the line, where there is one and nobody said it."""
        ask = self.definition.concurrency_key
        if ask is None or self._options.concurrency_key is not None:
            return self._options
        return EnqueueOptions.checked(self._options, {"concurrency_key": ask(*args, **kwargs)})

    def job_for_node(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], refs: list[tuple[list[str | int], int]]
    ) -> NewJob:
        """Give the job that a node of a workflow will be; `refs` say where results of others go."""
        options = self._options
        if options.connection is not None or options.unique_key is not None or options.run_at is not None:
            raise ConfigError(
                f"A node of a workflow takes no connection, unique_key or run_at, and {self.name!r} has one. A "
                "unique_key can be given to the start() of the workflow."
            )
        if refs and options.concurrency_key is None and self.definition.policy.order.computed:
            raise ConfigError(
                f"The concurrency key of task {self.name!r} is computed from its arguments, and this node gets some of "
                'them from others. Say it: task.options(concurrency_key="…").'
            )
        with self._sending(1) as sent:
            return self._job(args, kwargs, sent.trace, refs)

    def _store(self, jobs: list[NewJob], sent: EnqueueSpan) -> list[Job[Any]]:
        parts = self._runtime.services()
        words = {f"queue:{job.queue}" for job in jobs if job.run_at is None and job.delay_s == 0}
        stored: list[Enqueued]
        if self._options.connection is not None:
            stored = parts.ledger.jobs.enqueue_on(self._options.connection, jobs)
            parts.wakeups.send_after_commit(words)
        else:
            stored = parts.batcher.enqueue(jobs)
            parts.wakeups.send(words)
        sent.stored([item.job_id for item in stored])
        return self._handles(stored, jobs)

    def _handles(self, stored: list[Enqueued], jobs: list[NewJob]) -> list[Job[Any]]:
        mode = self._runtime.settings.no_workers
        warnings: list[str | None] = [None] * len(jobs)
        if mode != "ignore":
            committed = self._options.connection is None
            warnings = self._runtime.services().no_worker_check.warnings(jobs, committed=committed)
        handles: list[Job[Any]] = [
            Job(self._runtime, item.job_id, fresh=item.fresh, warning=warning)
            for item, warning in zip(stored, warnings, strict=True)
        ]
        alone = next((handle for handle in handles if handle.warning), None)
        if mode == "error" and alone is not None:
            raise NoWorkers(f"{alone.warning}.", job_ids=[handle.id for handle in handles])
        return handles


def _signature(definition: TaskDefinition) -> inspect.Signature | None:
    """Give what a caller must pass, without the Context; None where Python cannot tell."""
    try:
        whole = inspect.signature(definition.function)
    except (TypeError, ValueError):
        return None
    passed = [item for item in whole.parameters.values() if item.name != definition.context_parameter]
    return whole.replace(parameters=passed)
