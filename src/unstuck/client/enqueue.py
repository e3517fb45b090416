"""Turn a task, its options and arguments into a job that the ledger can store."""

import os
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from unstuck.domain.limits import (
    MAX_KEY_CHARS,
    KeyRule,
    check_key,
    check_limit,
    concurrency_key_of,
    positive_s,
    refuse_unknown,
)
from unstuck.domain.payload import encode_call
from unstuck.domain.policy import TASK_SETTINGS, Policy, encode_policy, without_hooks
from unstuck.domain.text import check_names, checked_name, did_you_mean
from unstuck.domain.units import Duration, seconds
from unstuck.errors import ConfigError, PayloadError, UnknownQueue, UnknownTask
from unstuck.ledger.checks import EARLIEST_S, LATEST_S
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras, NewJob, TaskRecord

MAX_PRIORITY = 1000
MAX_UNIQUE_KEY_CHARS = MAX_KEY_CHARS
PENDING, UNFINISHED = "pending", "unfinished"
_ON_DUPLICATE: dict[str, Literal["replace", "refuse"] | None] = {
    "return": None,
    "replace": "replace",
    "refuse": "refuse",
}
ON_DUPLICATE = tuple(_ON_DUPLICATE)
_PLAIN = JobExtras()


class EnqueueOptionsDict(TypedDict, total=False):
    """What `options(…)` takes, for type checkers and editors; `Options` checks it."""

    queue: str | None
    priority: int
    delay: Duration | None
    run_at: datetime | float | None
    unique_key: str | None
    unique: str | Duration
    on_duplicate: str
    concurrency_key: str | None
    concurrency_limit: int | None
    expires: Duration | None
    keep: Duration | None
    connection: Any


@dataclass(frozen=True)
class EnqueueOptions:
    """What one enqueue may say beside the arguments."""

    queue: str | None = None
    priority: int = 0
    """Higher goes first; -1000 to 1000."""
    delay: Duration | None = None
    run_at: datetime | float | None = None
    unique_key: str | None = None
    unique: str | Duration = UNFINISHED
    """What the key is good for: "pending", "unfinished", or a time from the enqueue, such as "10m"."""
    on_duplicate: str = "return"
    """What happens to the second: "return" the first, "replace" it while it is pending, "refuse" with DuplicateJob."""
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    """None: the task's, or as the line has it."""
    expires: Duration | None = None
    keep: Duration | None = None
    connection: Any = None

    @classmethod
    def checked(cls, base: "EnqueueOptions | None", values: dict[str, Any]) -> Self:
        """Give the options with `values` over `base`, or raise ConfigError with what was meant."""
        known = OPTION_NAMES
        check_names(refuse_task_settings(values, known), known, "option")
        merged = {name: getattr(base, name) for name in known} if base is not None else {}
        options = cls(**{**merged, **values})
        options._check()
        return options

    def _check(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > MAX_PRIORITY:
            raise ConfigError(f"priority must be a whole number from -1000 to 1000, not {self.priority!r}.")
        if self.delay is not None and self.run_at is not None:
            raise ConfigError("Give either delay or run_at, not both.")
        if self.delay is not None:
            seconds(self.delay, "delay")
        if self.queue is not None:
            checked_name(self.queue, "Queue")
        if self.run_at is not None:
            _check_run_at(self.run_at)
        if self.unique_key is not None:
            check_key(self.unique_key, "unique_key")
        self._check_order()

    def _check_order(self) -> None:
        if self.unique not in (PENDING, UNFINISHED):
            try:
                positive_s(self.unique, "unique")
            except ConfigError as error:
                raise ConfigError(f'unique must be "pending", "unfinished" or a time. {error}') from None
        if self.on_duplicate not in ON_DUPLICATE:
            raise ConfigError(f"on_duplicate must be one of {', '.join(ON_DUPLICATE)}, not {self.on_duplicate!r}.")
        if self.unique_key is None and (self.unique != UNFINISHED or self.on_duplicate != "return"):
            raise ConfigError("unique and on_duplicate say what a unique_key means: give it too.")
        if self.concurrency_key is not None:
            check_key(self.concurrency_key, "concurrency_key")
        if self.concurrency_limit is not None:
            check_limit(self.concurrency_limit)
        for name in ("expires", "keep"):
            if getattr(self, name) is not None:
                positive_s(getattr(self, name), name)


OPTION_NAMES = tuple(item.name for item in fields(EnqueueOptions))


def refuse_task_settings(given: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Pass the names on, and raise ConfigError for one that belongs to the task instead."""
    for name in given:
        if name not in known and name in TASK_SETTINGS:
            raise ConfigError(f"{name!r} is a setting of the task. Give it to @app.task({name}=…).")
        yield name


def _check_run_at(moment: object) -> None:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ConfigError("run_at must know its time zone: use datetime.now(timezone.utc) + …")
        moment = moment.timestamp()
    if isinstance(moment, bool) or not isinstance(moment, int | float) or not EARLIEST_S <= moment <= LATEST_S:
        raise ConfigError(f"run_at must be a datetime or seconds since 1970, before the year 9999, not {moment!r}.")


def build_job(
    *,
    task: str,
    queue: str,
    policy: Policy,
    options: EnqueueOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit_bytes: int,
    known_queues: frozenset[str] | None,
    trace: str = "",
    refs: Sequence[tuple[list[str | int], int]] = (),
) -> NewJob:
    """Give the job as it is stored, everything checked: nothing half-written later."""
    chosen = options.queue or queue
    if known_queues is not None and chosen not in known_queues:
        raise UnknownQueue(
            f"No task of this app uses the queue {chosen!r}, so no worker of it would serve it."
            f"{did_you_mean(chosen, known_queues)} Declare it with App(…, queues=[{chosen!r}])."
        )
    policy, hooks = without_hooks(policy)
    if refs and options.concurrency_key is None:
        refuse_unknown(policy.order, {path[1] for path, _ in refs}, task)
    return NewJob(
        task=task,
        queue=chosen,
        payload=encode_call(args, kwargs, task, limit_bytes, trace, refs),
        policy=encode_policy(policy),
        on_crash=policy.on_crash,
        heartbeat=policy.heartbeat,
        heartbeat_timeout_s=policy.heartbeat_timeout_s,
        timeout_s=policy.timeout_s,
        priority=options.priority,
        delay_s=0.0 if options.delay is None else seconds(options.delay, "delay"),
        run_at=_epoch(options.run_at),
        unique_key=options.unique_key,
        enqueued_by=_program(),
        more=_job_extras(policy.order, options, args, kwargs, task, hooks),
    )


def _job_extras(
    order: KeyRule,
    options: EnqueueOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    task: str,
    hooks: dict[str, Any] | None,
) -> JobExtras | None:
    """Give what few jobs have; None for the plain one."""
    line = options.concurrency_key or concurrency_key_of(order, args, kwargs, task)
    if line is None and options.concurrency_limit is not None:
        raise ConfigError("concurrency_limit says how many of one concurrency_key may be at work: give it too.")
    own = order.limit if options.concurrency_key is None or order.key is not None or order.computed else None
    keyed = options.unique_key is not None
    links = JobExtras(
        concurrency_key=line,
        concurrency_limit=None if line is None else options.concurrency_limit or own,
        hooks=hooks,
        expires_in_s=order.expires_s if options.expires is None else seconds(options.expires, "expires"),
        retain_s=order.retain_s if options.keep is None else seconds(options.keep, "keep"),
        unique="pending" if keyed and options.unique == PENDING else None,
        unique_for_s=seconds(options.unique) if keyed and options.unique not in (PENDING, UNFINISHED) else None,
        on_duplicate=_ON_DUPLICATE[options.on_duplicate] if keyed else None,
    )
    return None if links == _PLAIN else links


def check_no_refuse(job: NewJob, what: str) -> None:
    """Raise ConfigError for a job that is stored when nobody is there who could be told that it is refused."""
    if job.more is not None and job.more.on_duplicate == "refuse":
        raise ConfigError(
            f"{what} cannot say on_duplicate='refuse': nobody would hear of it. Use 'return' (nothing is stored while "
            "another has the unique_key) or 'replace'."
        )


def split_call(call: Any, task: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read one entry of `enqueue_many`: a tuple or list of arguments, or a dict of named ones."""
    if isinstance(call, dict):
        return (), call
    if isinstance(call, tuple | list):
        return tuple(call), {}
    raise PayloadError(
        f"enqueue_many of {task!r} takes tuples of arguments or dicts of named ones, not {type(call).__name__}. "
        f"Write [(value,), …] for a single argument."
    )


def _epoch(moment: datetime | float | None) -> float | None:
    if isinstance(moment, datetime):
        return moment.timestamp()
    return None if moment is None else float(moment)


_programs: dict[int, str] = {}


def _program() -> str:
    """Say who enqueues, for the story of the job: program, host and pid."""
    pid = os.getpid()
    if pid not in _programs:
        # `python -c` and `python -` leave no name of a program.
        name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-", "-c") else "python"
        text = f"{name[:60]}@{socket.gethostname()[:60]}:{pid}"
        # Names of files and hosts may hold anything.
        _programs[pid] = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "")
    return _programs[pid]


LISTED = 10


def load_tasks(ledger: Ledger) -> dict[str, TaskRecord]:
    """Give every task that a living or past worker knows, by name."""
    return {task.name: task for task in ledger.queues.tasks()}


def find_task(tasks: Mapping[str, TaskRecord], name: str) -> TaskRecord:
    """Give the task of this name, or raise UnknownTask that lists those there are."""
    found = tasks.get(name)
    if found is not None:
        return found
    owner = "No worker has told the ledger of a task by that name; known are"
    listed = f" {owner}: {_first(tasks)}." if tasks else " No worker has told the ledger of any task yet."
    raise UnknownTask(
        f"There is no task {name!r}.{did_you_mean(name, tasks)}{listed} Start a worker that has the task."
    )


def check_queue(queue: str, known: Iterable[str]) -> None:
    """Raise UnknownQueue for a queue that nothing names: a job in it would wait in vain."""
    names = set(known)
    if queue not in names:
        raise UnknownQueue(
            f"There is no queue {queue!r}.{did_you_mean(queue, names)} Known: {_first(names)}. "
            "A queue comes to be with a task or a worker that names it."
        )


def _first(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:LISTED])
