"""Read the settings of a task: `@app.task(queue=…, retry=…, on_crash=…, …)`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import msgspec

from unstuck.client.enqueue import OPTION_NAMES
from unstuck.client.hooks import Follower, names_of
from unstuck.client.task_function import read_function, shown
from unstuck.config import DEFAULT_QUEUE, Settings
from unstuck.domain.limits import KeyFunction, KeyRule, read_key_rule
from unstuck.domain.policy import TASK_SETTINGS, OnCrash, Overlap, Policy, check_policy
from unstuck.domain.redaction import Redactor
from unstuck.domain.retry import Retry, RetryRule
from unstuck.domain.text import check_names, checked_name
from unstuck.domain.units import Duration, Size, seconds, size_bytes
from unstuck.errors import ConfigError
from unstuck.runner.tasks import TaskDefinition


class GivenTaskSettings(TypedDict, total=False):
    """The settings that `app.task(…)` takes, for type checkers and editors; `policy_of` and its kin check them."""

    name: str | None
    queue: str
    retry: Retry | int | None
    on_crash: OnCrash
    max_crash_retries: int
    timeout: Duration | None
    heartbeat: bool
    heartbeat_interval: Duration | None
    heartbeat_timeout: Duration | None
    overlap: Overlap
    stall_timeout: Duration | None
    interpreter_timeout: Duration | None
    memory_limit: Size | None
    concurrency_key: str | KeyFunction | None
    concurrency_limit: int
    expires: Duration | None
    keep: Duration | None
    after_success: Follower
    after_failure: Follower
    after_crash: Follower
    after_retry: Follower


def check_task_settings(given: Iterable[str]) -> None:
    """Raise ConfigError for a setting that no task has, with the one that was probably meant."""
    for name in given:
        if name in OPTION_NAMES and name not in TASK_SETTINGS:
            raise ConfigError(f"{name!r} is an option of an enqueue, not of a task. Give it to task.options({name}=…).")
    check_names(given, TASK_SETTINGS, "task setting")


def define_task(given: Callable[..., Any], values: Mapping[str, Any], settings: Settings) -> TaskDefinition:
    """Return the task that a function and its checked settings make in an app with these settings."""
    found = read_function(given)
    name = values.get("name")
    if name is None and found.name is None:
        raise ConfigError(f"{shown(given)} has no name that a job could be found by. Give it name=….")
    name = checked_name(found.name if name is None else name, "Task")
    places, rest = Redactor(settings.http.redact).places(found.parameters)
    policy = msgspec.structs.replace(
        policy_of(values, read_key_rule(name, values, found.defaults)),
        hidden_args=places,
        hidden_args_from=rest,
    )
    recovery = settings.recovery
    check_policy(
        name,
        policy,
        app_interval_s=recovery.heartbeat_interval_s,
        app_timeout_s=recovery.running_stale_after_s,
        pulse_interval_s=recovery.runner_heartbeat_interval_s,
        is_async=found.is_async,
    )
    return TaskDefinition(
        name=name,
        queue=checked_name(values.get("queue", DEFAULT_QUEUE), "Queue"),
        function=found.function,
        is_async=found.is_async,
        context_parameter=found.context_parameter,
        policy=policy,
        concurrency_key=values["concurrency_key"] if policy.order.computed else None,
        hooks=names_of(values, f"Task {name!r}"),
    )


def policy_of(settings: Mapping[str, Any], order: KeyRule) -> Policy:
    """Return the rules that the settings of a task give its jobs."""
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


def _rule(retry: Any) -> RetryRule:
    if retry is None:
        return RetryRule()
    if isinstance(retry, Retry):
        return retry.rule()
    if isinstance(retry, int) and not isinstance(retry, bool):
        return Retry(max_attempts=retry).rule()
    raise ConfigError(f"retry must be a Retry(…) or a number of attempts, not {retry!r}.")


def _optional_s(settings: Mapping[str, Any], name: str) -> float | None:
    value = settings.get(name)
    return None if value is None else seconds(value, name)
