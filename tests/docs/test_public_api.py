"""What `unstuck` offers: every name is there, editors see it, and a user's app passes a strict type checker."""

from pathlib import Path

import pytest

import unstuck
from unstuck import errors

USERS_APP = """
from typing import assert_type

from unstuck import App, Context, Job, JobState, Recovery, Retry, Task, TaskFailed, WorkerCrashed, step

app = App("sqlite:///jobs.db", recovery=Recovery(heartbeat_interval="5s"), queues=["bulk"], poll_interval="1s")


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task(queue="scrapes", retry=Retry(max_attempts=5), on_crash="retry", timeout="5h")
async def scrape(ctx: Context, url: str) -> dict[str, int]:
    return {url: ctx.attempt}


def use() -> None:
    assert_type(add(1, 2), int)
    job = add.enqueue(1, 2)
    assert_type(job.result(timeout=10), int)
    assert_type(job.state, JobState)
    assert_type(scrape.enqueue("x").result(), dict[str, int])
    assert_type(add.options(priority=3, delay="5m", unique_key="x").enqueue(1, 2), Job[int])
    assert_type(add.enqueue_many([(1, 2)]), list[Job[int]])
    bare: list[Job] = [job, *scrape.enqueue_many([("x",)]), app.job(1)]
    try:
        bare[0].result()
    except (TaskFailed, WorkerCrashed) as error:
        print(error.job_id, error.code, error.cause)


async def use_async() -> None:
    job = await add.enqueue_async(1, 2)
    assert_type(await job.result_async(), int)
    assert_type(await (await scrape.enqueue_async("x")).result_async(), dict[str, int])


def plain(a: int) -> str:
    return str(a)


async def slow(a: int) -> bytes:
    return bytes(a)


@step
def charge(order: int) -> str:
    return str(order)


@step(name="tell")
async def tell(receipt: str) -> int:
    return len(receipt)


@app.task
async def in_steps(ctx: Context) -> None:
    assert_type(ctx.step("a", plain, 1), str)
    assert_type(await ctx.step_async("b", slow, a=1), bytes)
    assert_type(await ctx.step_async("c", plain, 1), str)
    assert_type(charge(1), str)
    assert_type(await tell("x"), int)
    ctx.step("d", plain, "x")  # type: ignore[arg-type]
    ctx.checkpoint({"at": 1})
    await ctx.sleep_async("2h")
    print(ctx.last_checkpoint, await ctx.wait_signal_async("go", timeout="1d"))
    ctx.enqueue(add, 1, 2)


from unstuck import Nothing  # type: ignore[attr-defined]


def wrong(task: Task[[int], int]) -> None:
    task("x")  # type: ignore[arg-type]
    task.options(prioritty=3)  # type: ignore[call-arg]
    App(pol_interval="1s")  # type: ignore[call-arg]
"""


def test_every_public_name_is_there() -> None:
    found = {name: getattr(unstuck, name) for name in unstuck.__all__}
    assert all(found.values())
    assert set(unstuck.__all__) < set(dir(unstuck))
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds <= set(found)


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Worker'"):
        _ = unstuck.Worker


def test_a_users_app_passes_a_strict_type_checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mypy = pytest.importorskip("mypy.api")
    (tmp_path / "app.py").write_text(USERS_APP)
    monkeypatch.setenv("MYPYPATH", str(Path(unstuck.__file__).parent.parent))
    out, err, code = mypy.run(["--strict", "--config-file=", str(tmp_path / "app.py")])
    assert (code, err) == (0, ""), out
