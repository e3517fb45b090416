"""Tasks of workflows for tests: small numbers, a nap, and failures on demand."""

import os
import time

from unstuck import App, Context, NodeError, Retry

app = App(os.environ.get("UNSTUCK_URL", "sqlite:///unstuck.db"))


@app.task(on_crash="retry", max_crash_retries=20)
def count_to(n: int) -> list[int]:
    return list(range(n))


@app.task(on_crash="retry", max_crash_retries=20, retry=Retry(max_attempts=2, backoff="constant", delay=0.01))
def square(x: int, nap_s: float = 0.0) -> int:
    time.sleep(nap_s)
    return x * x


@app.task(on_crash="retry", max_crash_retries=20)
async def double(x: int) -> int:
    return 2 * x


@app.task(on_crash="retry", max_crash_retries=20)
def total(values: list[int | NodeError], *more: int | NodeError) -> list[int]:
    """The sum of what there is, and how many errors came instead."""
    every = [*values, *more]
    errors = [value for value in every if isinstance(value, NodeError)]
    return [sum(value for value in every if not isinstance(value, NodeError)), len(errors)]


@app.task(on_crash="retry", max_crash_retries=20)
def first(pair: list[int]) -> int:
    return pair[0]


@app.task
def pass_on(value: int | NodeError) -> int | NodeError:
    return value


def same(value: object) -> object:
    return value


@app.task(retry=Retry(max_attempts=2, backoff="constant", delay=0.01))
def remember(value: int | NodeError, ctx: Context) -> list[object]:
    """What a step, a checkpoint and a signal gave back, in the second attempt."""
    kept = ctx.step("keep", same, value)
    sent = ctx.wait_signal("go")
    if ctx.last_checkpoint is None:
        ctx.checkpoint({"last": [value]})
        raise ValueError("the next attempt reads what was written")
    found = [kept, sent["value"], ctx.last_checkpoint["last"][0]]
    assert all(isinstance(one, NodeError) for one in found), found
    return found


@app.task
def break_down(x: int) -> int:
    raise ValueError(f"{x} is too much")


@app.task
def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"
