"""Registering a task: every setting is honoured or refused, and so is every kind of callable."""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unstuck import App, ConfigError, Context
from unstuck.domain.payload import JSON, encode_call
from unstuck.runner.call import Call, Caller
from unstuck.runner.messages import NOT_STORABLE, JobMessage


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(f"sqlite:///{tmp_path}/jobs.db")


def plain(ctx: Context, a: int) -> int:
    return a + ctx.job_id


async def asynchronous(ctx: Context, a: int) -> int:
    return a + ctx.job_id


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


class Adder:
    """A class with every kind of method."""

    base = 100

    def __init__(self, more: int = 0) -> None:
        self.more = more

    def method(self, ctx: Context, a: int) -> int:
        return a + self.more + ctx.job_id

    async def async_method(self, ctx: Context, a: int) -> int:
        return a + self.more + ctx.job_id

    @classmethod
    def of_class(cls, ctx: Context, a: int) -> int:
        return a + cls.base + ctx.job_id

    @staticmethod
    def static(ctx: Context, a: int) -> int:
        return a + ctx.job_id

    def __call__(self, ctx: Context, a: int) -> int:
        return a + self.more + ctx.job_id


class AsyncAdder:
    async def __call__(self, ctx: Context, a: int) -> int:
        return a + ctx.job_id


class Yielder:
    def __call__(self) -> Iterator[int]:
        yield 1


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


# Settings -------------------------------------------------------------------------------------


def test_settings_given_beside_the_function_are_those_of_the_decorator(app: App) -> None:
    settings: dict[str, Any] = {"timeout": "5m", "retry": 7, "on_crash": "retry", "queue": "mail", "keep": "1h"}
    called = app.task(plain, name="called", **settings)
    decorated = app.task(name="decorated", **settings)(plain)
    assert called.name == "called"
    assert called.definition.policy.timeout_s == 300
    assert called.definition.policy.retry.max_attempts == 7
    assert called.definition.policy == decorated.definition.policy
    assert called.definition.queue == decorated.definition.queue == "mail"
    with pytest.raises(ConfigError, match="two tasks named 'called'"):
        app.task(asynchronous, name="called")


def test_an_unknown_setting_is_refused_beside_the_function_too(app: App) -> None:
    for register in (lambda **given: app.task(plain, **given), lambda **given: app.task(**given)(plain)):
        with pytest.raises(ConfigError, match=r"There is no task setting 'timout'\. Did you mean 'timeout'\?"):
            register(timout="5m")
    assert not app.definition().tasks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": ""}, "Task '' is not a usable name"),
        ({"name": 0}, "Task 0 is not a usable name"),
        ({"heartbeat": "no"}, "heartbeat must be true or false, not 'no'"),
        ({"heartbeat": 1}, "heartbeat must be true or false, not 1"),
        ({"max_crash_retries": "3"}, "max_crash_retries must be a whole number from 0 to 1000, not '3'"),
        ({"max_crash_retries": True}, "max_crash_retries must be a whole number from 0 to 1000, not True"),
        ({"max_crash_retries": 1.5}, "max_crash_retries must be a whole number from 0 to 1000, not 1.5"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused(app: App, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        app.task(plain, **settings)


def test_one_call_registers_one_function(app: App) -> None:
    with pytest.raises(ConfigError, match="takes one function, and 2 were given"):
        app.task(plain, asynchronous)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"takes a function, not 'mail'\. Give its name as name='mail'"):
        app.task("mail")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"heartbeat_timeout": "5s"}, "'heartbeat_timeout'. Did you mean recovery=Recovery(heartbeat_timeout=…)?"),
        ({"heartbeat_timout": "5s"}, "'heartbeat_timout'. Did you mean recovery=Recovery(heartbeat_timeout=…)?"),
        ({"after_sucess": "x"}, "'after_sucess'. Did you mean 'after_success'?"),
        ({"queue": ["a"]}, "'queue'. Did you mean 'queues'?"),
        ({"concurency": 3}, "'concurency'. Did you mean 'concurrency'?"),
    ],
)
def test_a_misspelt_setting_of_an_app_is_guessed(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        App("sqlite:///x.db", **given)
    assert words in str(caught.value)
    listed = str(caught.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert len(listed) == len(set(listed)), "each setting is listed once"


def test_a_misspelt_setting_of_a_schedule_or_a_queue_is_guessed(app: App) -> None:
    task = app.task(plain)
    for register in (
        lambda **given: app.schedule(task, args=[1], **given),
        lambda **given: app.schedule("* * * * *", args=[1], **given)(task),
    ):
        with pytest.raises(ConfigError, match=r"no schedule setting 'evry'\. Did you mean 'every'\?"):
            register(evry="5s")
        with pytest.raises(ConfigError, match=r"no schedule setting 'prority'\. Did you mean 'priority'\?"):
            register(every="5s", prority=5)
        with pytest.raises(ConfigError, match=r"'timeout' is a setting of the task\. Give it to @app\.task"):
            register(every="5s", timeout="3s")
    assert not app.definition().schedules
    with pytest.raises(ConfigError, match=r"no queue setting 'concurency'\. Did you mean 'concurrency'\?"):
        app.queue("mail", concurency=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"'timeout' is a setting of the task\. Give it to @app\.task"):
        task.options(timeout="5m")  # type: ignore[call-arg]


def test_a_workflow_takes_no_settings_of_tasks(app: App) -> None:
    with pytest.raises(ConfigError, match=r"no setting 'timeout'\. Give it to the tasks: @app\.task\(timeout=…\)"):
        app.workflow("orders", timeout="5m")  # type: ignore[arg-type]


# Functions that cannot be tasks ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (generator, "'generator' is a generator.*Return a list"),
        (async_generator, "'async_generator' is an async generator.*Return a list"),
        (functools.partial(generator), "is a generator"),
        (staticmethod(generator), "is a generator"),
        (Yielder(), "is a generator"),
        (Adder, "'Adder' is a class.*Register a function"),
        (functools.partial(Adder, 3), "'Adder' is a class"),
        (int, "'int' is a class"),
        (Adder.method, "'Adder.method' takes 'self'.*no object to pass"),
        (wrapped(Adder.method), "'Adder.method' takes 'self'"),
        (vars(Adder)["of_class"], "classmethod.*Register it on the class"),
        (property(plain), "takes a function"),
        (None, "takes a function, not None"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_a_callable_that_cannot_be_a_task_is_refused(app: App, function: Any, words: str) -> None:
    for register in (lambda: app.task(function, name="named"), lambda: app.task(name="named")(function)):
        with pytest.raises(ConfigError, match=words):
            register()
    assert not app.definition().tasks


def test_a_method_decorated_in_its_class_is_refused_and_one_without_self_is_not(app: App) -> None:
    with pytest.raises(ConfigError, match="takes 'self'"):

        class Wrong:
            @app.task
            def send(self, to: str) -> None: ...

    class Right:
        @staticmethod
        @app.task
        def send(to: str) -> str:
            return to

        @app.task
        @staticmethod
        def receive(to: str) -> str:
            return to

    assert Right.send("a") == Right.receive("a") == "a"
    assert set(app.definition().tasks) == {"send", "receive"}


def test_a_task_is_registered_once(app: App, tmp_path: Path) -> None:
    task = app.task(plain)
    for other in (app, App(f"sqlite:///{tmp_path}/other.db")):
        with pytest.raises(ConfigError, match=r"'plain' is a task already.*Register its function"):
            other.task(task, name="again")


@pytest.mark.parametrize("function", [functools.partial(plain, a=1), lambda: 1, Adder()])
def test_a_callable_without_a_name_needs_one(app: App, function: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no name that a job could be found by.*Give it name=…"):
        app.task(function)


# Functions that can ---------------------------------------------------------------------------

_ADDER = Adder(10)


@pytest.mark.parametrize(
    ("function", "is_async", "expected"),
    [
        (plain, False, 12),
        (asynchronous, True, 12),
        (functools.partial(plain), False, 12),
        (functools.partial(asynchronous), True, 12),
        (functools.partial(functools.partial(Adder.method, _ADDER)), False, 22),
        (_ADDER.method, False, 22),
        (_ADDER.async_method, True, 22),
        (Adder.of_class, False, 112),
        (Adder.static, False, 12),
        (staticmethod(plain), False, 12),
        (staticmethod(asynchronous), True, 12),
        (_ADDER, False, 22),
        (AsyncAdder(), True, 12),
        (functools.partial(AsyncAdder()), True, 12),
        (lambda ctx, a: a + 5, False, None),
        (wrapped(plain), False, 12),
        (functools.lru_cache(plain), False, 12),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if callable(value) else "",
)
def test_every_other_callable_runs_with_its_context_in_the_right_runner(
    app: App, function: Any, is_async: bool, expected: int | None
) -> None:
    task = app.task(function, name="named")
    assert task.definition.is_async is is_async
    if expected is None:
        assert task.definition.context_parameter is None
        return
    call = _prepared(app, "async" if is_async else "sync", (10,))
    value = call.function(*call.args, **call.kwargs)
    if is_async:
        assert inspect.iscoroutine(value)
        with pytest.raises(StopIteration) as ended:
            value.send(None)
        value = ended.value.value
    assert value == expected


def test_a_context_that_may_be_none_is_filled_in(app: App) -> None:
    def optional(a: int, ctx: Context | None = None) -> int:
        return 0 if ctx is None else ctx.job_id

    def in_words(a: int, ctx: "unknown.Thing | None" = None, where: "Context | None" = None) -> int:  # type: ignore[name-defined] # noqa: F821
        return 0 if where is None else where.job_id

    assert app.task(optional).definition.context_parameter == "ctx"
    assert app.task(in_words).definition.context_parameter == "where"
    assert optional(1) == 0

    def two(one: Context, other: Context) -> None: ...

    with pytest.raises(ConfigError, match="two parameters for the Context, 'one' and 'other'"):
        app.task(two)


def test_a_coroutine_that_nobody_awaited_is_named(app: App) -> None:
    app.task(wrapped(asynchronous), name="named")
    call = _prepared(app, "sync", (10,))
    value = call.function(*call.args, **call.kwargs)
    caller = Caller(app.definition().tasks, "sync", "w", 1000)
    report = caller.succeeded(_frame((10,)), value)
    assert report.kind == NOT_STORABLE
    assert "returned a coroutine that was not awaited" in report.words[0]
    assert "async def" in report.words[0]
    assert inspect.getcoroutinestate(value) == inspect.CORO_CLOSED
    report = caller.succeeded(_frame((10,)), (one for one in (1, 2)))
    assert "returned a generator" in report.words[0]
    assert "list" in report.words[0]


def _frame(args: tuple[Any, ...]) -> JobMessage:
    return JobMessage(1, 2, "named", "default", encode_call(args, {}, "named", 1000), JSON, 1, 0)


def _prepared(app: App, kind: Any, args: tuple[Any, ...]) -> Call:
    tasks = app.definition().tasks
    assert tasks["named"].is_async == (kind == "async")
    return Caller(tasks, kind, "w", 1000).prepare(_frame(args))
