"""Apps, tasks and options: what is wrong is refused when it is written down, with the cure."""

import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from unstuck import (
    App,
    ConfigError,
    Context,
    PayloadError,
    Retry,
    UnknownQueue,
    UnknownTask,
    WorkerCrashed,
    WrongArguments,
)


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(f"sqlite:///{tmp_path}/jobs.db")


def test_a_task_is_still_an_ordinary_function(app: App) -> None:
    @app.task
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    assert add(1, 2) == 3
    assert add.name == "add"
    assert add.__doc__ == "Add."


def test_the_unsafe_heartbeat_is_refused_in_the_words_of_the_guidelines(app: App) -> None:
    with pytest.raises(ValueError, match="unsafe") as caught:

        @app.task(heartbeat_interval="60s", heartbeat_timeout="100s")
        def my_task() -> None: ...

    assert str(caught.value) == (
        "Task 'my_task' has unsafe heartbeat config. Interval (60s) must be <= half of timeout (100s) "
        "to prevent false positives."
    )
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"onn_crash": "retry"}, "Did you mean 'on_crash'"),
        ({"on_crash": "retri"}, "on_crash must be 'fail' or 'retry'"),
        ({"heartbeat": False}, "heartbeat=False and no timeout"),
        ({"timeout": "soon"}, "timeout must be a duration"),
        ({"timeout": 0}, "above zero"),
        ({"queue": "two words"}, "not a usable name"),
        ({"name": "a b"}, "not a usable name"),
        ({"retry": "yes"}, "retry must be a Retry"),
        ({"max_crash_retries": -1}, "max_crash_retries"),
        ({"overlap": "maybe"}, "overlap"),
        ({"heartbeat_timeout": "1s"}, "unsafe heartbeat config"),
    ],
)
def test_wrong_task_settings_are_refused(app: App, settings: dict[str, Any], words: str) -> None:
    def some_task() -> None: ...

    with pytest.raises(ConfigError, match=words):
        app.task(**settings)(some_task)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prority": 1}, "Did you mean 'priority'"),
        ({"priority": 5000}, "-1000 to 1000"),
        ({"priority": "high"}, "whole number"),
        ({"delay": "5m", "run_at": 1.0}, "either delay or run_at"),
        ({"delay": "later"}, "delay must be a duration"),
        ({"run_at": datetime(2030, 1, 1)}, "time zone"),
        ({"run_at": float("inf")}, "before the year 9999"),
        ({"run_at": "tomorrow"}, "seconds since 1970"),
        ({"unique_key": ""}, "unique_key"),
        ({"unique_key": "a\0b"}, "unique_key"),
        ({"unique_key": "\ud800"}, "surrogate"),
    ],
)
def test_wrong_options_are_refused(app: App, values: dict[str, Any], words: str) -> None:
    @app.task
    def some_task() -> None: ...

    with pytest.raises(ConfigError, match=words):
        some_task.options(**values)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "not JSON"),
        (datetime.now(UTC), "JSON"),
        ({1, 2}, "JSON"),
        (b"bytes", "JSON"),
        ("\ud800", "surrogate"),
        ("x" * 2_000_000, "over the limit of 1,048,576"),
    ],
    ids=["nan", "inf", "datetime", "set", "bytes", "surrogate", "too-large"],
)
def test_arguments_that_cannot_be_stored_are_refused_and_nothing_is_written(
    app: App, argument: object, words: str
) -> None:
    @app.task
    def some_task(value: object) -> None: ...

    with pytest.raises(PayloadError, match=words):
        some_task.enqueue(argument)
    with pytest.raises(PayloadError, match=words):
        some_task.enqueue_many([(1,), (argument,)])
    assert sum(app.ledger.jobs.count().values()) == 0


def test_arguments_that_do_not_fit_are_refused_where_they_are_given(app: App) -> None:
    @app.task
    def send(ctx: Context, to: str, *, copies: int = 1) -> None: ...

    with pytest.raises(WrongArguments, match="missing a required argument: 'to'"):
        send.enqueue()
    with pytest.raises(TypeError, match="unexpected keyword argument 'copy'"):
        send.enqueue("a", copy=2)
    with pytest.raises(WrongArguments, match="too many positional arguments"):
        send.enqueue_many([("a",), ("b", "c")])
    assert sum(app.ledger.jobs.count().values()) == 0
    assert send.enqueue("a", copies=2).id > 0


def test_a_circular_argument_is_refused(app: App) -> None:
    @app.task
    def some_task(value: object) -> None: ...

    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(PayloadError):
        some_task.enqueue(ring)


def test_an_undeclared_queue_is_refused_with_the_cure(app: App) -> None:
    @app.task(queue="reports")
    def some_task() -> None: ...

    with pytest.raises(UnknownQueue, match="Did you mean 'reports'"):
        some_task.options(queue="report").enqueue()
    assert some_task.options(queue="default").enqueue().id > 0


def test_two_tasks_of_one_name_are_refused(app: App) -> None:
    @app.task(name="same")
    def first() -> None: ...

    with pytest.raises(ConfigError, match="two tasks named 'same'"):

        @app.task(name="same")
        def second() -> None: ...

    with pytest.raises(UnknownTask, match="Did you mean 'same'"):
        app.task_by_name("sane")


def test_the_context_is_found_by_its_annotation(app: App) -> None:
    @app.task
    def with_context(ctx: Context, a: int) -> int:
        return a

    @app.task
    def with_words(a: int, where: "Context") -> int:
        return a

    @app.task
    def without(a: int) -> int:
        return a

    assert with_context.definition.context_parameter == "ctx"
    assert with_words.definition.context_parameter == "where"
    assert without.definition.context_parameter is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://x/y", "not a ledger that Unstuck knows"),
        ("sqlite3:///x", "Did you mean 'sqlite'"),
        ("jobs.db", "not a ledger URL"),
        ("postgresql://u:p@[/x", "cannot be read"),
        ("sqlite://jobs.db", "names no file"),
        ("sqlite:///:memory:", "cannot be shared"),
    ],
)
def test_a_wrong_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        App(url)


def test_retry_is_checked(app: App) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'exponential'"):
        Retry(backoff="exponentiel")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_attempts"):
        Retry(max_attempts=0)

    @app.task(retry=5)
    def some_task() -> None: ...

    assert some_task.definition.policy.retry.max_attempts == 5


def test_the_second_enqueue_of_a_unique_key_gives_the_first_job(app: App) -> None:
    @app.task
    def some_task(n: int) -> None: ...

    first = some_task.options(unique_key="once").enqueue(1)
    second = some_task.options(unique_key="once").enqueue(2)
    assert first.fresh
    assert not second.fresh
    assert first.id == second.id


def test_an_enqueue_in_a_forked_child_uses_connections_of_its_own(app: App) -> None:
    import os

    @app.task
    def some_task(n: int) -> None: ...

    some_task.enqueue(1)
    pid = os.fork()
    if pid == 0:
        try:
            some_task.enqueue(2)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    some_task.enqueue(3)
    assert app.ledger.jobs.count() == {"pending": 3}


def test_a_bad_end_survives_the_way_out_of_a_process_pool() -> None:
    error = WorkerCrashed("Worker died unexpectedly", job_id=7, code="WORKER_CRASHED", cause="killed", host="h")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is WorkerCrashed
    assert str(twin) == str(error)
    assert (twin.job_id, twin.code, twin.cause, twin.details) == (7, "WORKER_CRASHED", "killed", {"host": "h"})
