"""Jobs of several steps, with effects that can be counted and deaths at chosen moments."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from unstuck import App, Context, SignalTimeout, step

app = App(queues=["other"])


def effect(folder: str, name: str, value: Any, die: str = "") -> Any:
    """Happen, where it can be seen; and die before anybody can write it down, if told so, once."""
    with open(f"{folder}/effects", "a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    if die == name:
        die_once(folder, f"in-{name}")
    return value


def die_once(folder: str, when: str) -> None:
    try:
        Path(folder, f"died-{when}").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_file(path: str) -> None:
    while not Path(path).exists():
        os.sched_yield()


@app.task(on_crash="retry", max_crash_retries=20)
def five_steps(ctx: Context, folder: str, die_after: int = 0, die_in: str = "") -> list[int]:
    found = []
    for number in range(1, 6):
        found.append(ctx.step(f"s{number}", effect, folder, f"s{number}", number * 10, die_in))
        if number == die_after:
            die_once(folder, f"after-{number}")
    return found


@app.task(on_crash="retry", max_crash_retries=20)
async def five_steps_async(ctx: Context, folder: str, die_after: int = 0) -> list[int]:
    async def slowly(name: str, value: int) -> int:
        await asyncio.sleep(0)
        return int(effect(folder, name, value))

    both = await asyncio.gather(*(ctx.step_async(f"s{number}", slowly, f"s{number}", number * 10) for number in (1, 2)))
    found = list(both)
    for number in (3, 4, 5):
        found.append(await ctx.step_async(f"s{number}", slowly, f"s{number}", number * 10))
        if number == die_after:
            die_once(folder, f"after-{number}")
    return found


@app.task(on_crash="retry")
def held_up(ctx: Context, folder: str) -> list[int]:
    """Stand between two steps until told to go on; where a worker can be killed."""
    first = ctx.step("first", effect, folder, "first", 1)
    Path(folder, "between").touch()
    wait_for_file(f"{folder}/go")
    return [first, ctx.step("second", effect, folder, "second", 2)]


@step
def charge(folder: str, amount: int) -> int:
    return int(effect(folder, f"charge {amount}", amount))


@app.task(retry=3)
def naps(ctx: Context, folder: str, duration: float) -> list[Any]:
    begun = ctx.step("begin", effect, folder, "begin", "begun")
    try:
        with contextlib.suppress(Exception):
            ctx.sleep(duration)
    finally:
        effect(folder, "finally", None)
    return [begun, charge(folder, 1), charge(folder, 2), ctx.attempt]


@app.task
def asks(ctx: Context, folder: str, count: int = 1, timeout: float | None = None) -> list[Any]:
    effect(folder, "asked", None)
    try:
        return [ctx.wait_signal("answer", timeout=timeout) for _ in range(count)]
    except SignalTimeout as error:
        return [type(error).__name__]


@app.task
async def asks_async(ctx: Context) -> list[Any]:
    await ctx.sleep_async(0.05)
    return [await ctx.wait_signal_async("answer"), await ctx.wait_signal_async("answer", timeout=60)]


@app.task(retry=2)
def counts(ctx: Context, folder: str, until: int, fail_at: int) -> int:
    start = ctx.last_checkpoint or 0
    for number in range(start, until):
        effect(folder, str(number), None)
        ctx.checkpoint(number + 1)
        if number == fail_at and ctx.attempt == 1:
            raise ValueError("half way")
    return int(start)


@app.task
def leads(ctx: Context, succeed: bool) -> str:
    ctx.enqueue(follows, "by task")
    ctx.enqueue("follows", "by name")
    ctx.enqueue(follows.options(delay="1h", priority=5), "later")
    if not succeed:
        raise ValueError("no")
    return "led"


@app.task
def follows(word: str) -> str:
    return word


@app.task(on_crash="retry", max_crash_retries=20)
def changing(ctx: Context, folder: str, before: list[str], after: list[str]) -> list[str]:
    """Come to other steps after the first try: the code changed."""
    died = Path(folder, "died-changed").exists()
    found = [ctx.step(name, effect, folder, name, name) for name in (after if died else before)]
    die_once(folder, "changed")
    return found
