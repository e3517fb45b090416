"""The app that crash tests run in real workers. Settings come from UNSTUCK_* in the environment."""

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path

from unstuck import App, Context, Retry

app = App(queues=["other"])


def _note(path: str, word: str) -> None:
    """Append one line, atomically: what really happened, whatever the ledger says."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{word}\n")


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task(on_crash="retry")
def add_again(a: int, b: int) -> int:
    return a + b


@app.task
async def add_async(a: int, b: int) -> int:
    return a + b


@app.task(on_crash="retry")
async def add_async_again(a: int, b: int) -> int:
    return a + b


@app.task
def nap(seconds: float, path: str = "") -> str:
    """Sleep; leave `begun`/`ended` lines in a file."""
    if path:
        _note(path, f"begun {os.getpid()}")
    time.sleep(seconds)
    if path:
        _note(path, f"ended {os.getpid()}")
    return "rested"


@app.task(on_crash="retry", max_crash_retries=3)
def nap_again(seconds: float, path: str = "") -> str:
    return nap(seconds, path)


@app.task(on_crash="retry", max_crash_retries=3)
def nap_once_then_quick(seconds: float, path: str) -> str:
    """Sleep the first time only: the second attempt returns at once."""
    first = not Path(path).exists()
    _note(path, f"begun {os.getpid()}")
    if first:
        time.sleep(seconds)
    _note(path, f"ended {os.getpid()}")
    return "late" if first else "quick"


@app.task
async def nap_async(seconds: float, path: str = "") -> str:
    if path:
        _note(path, f"begun {os.getpid()}")
    await asyncio.sleep(seconds)
    return "rested"


@app.task(on_crash="retry")
async def nap_async_again(seconds: float, path: str = "") -> str:
    return await nap_async(seconds, path)


@app.task
def hold_the_gil(seconds: float) -> str:
    """Sleep in C without letting any other Python thread of this process run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    return "held"


@app.task
def die(how: str = "kill") -> None:
    _die(how)


@app.task(on_crash="retry", max_crash_retries=3)
def die_again(how: str = "kill") -> None:
    _die(how)


def _die(how: str) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case _:
            raise ValueError(how)


@app.task
def die_if_sick() -> int:
    """Die where the host has what $SICK names; else tell who ran it."""
    if os.environ.get("SICK") and Path(os.environ["SICK"]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@app.task(retry=Retry(max_attempts=3, backoff="constant", delay=0.05))
def fail(message: str = "no") -> None:
    raise RuntimeError(message)


@app.task
def give(kind: str) -> object:
    """Return what cannot always be stored."""
    return {"nan": float("nan"), "nul": "a\0b", "surrogate": "\ud800", "set": {1}, "big": "x" * 3_000_000}[kind]


@app.task
def shout(text: str, times: int = 1) -> None:
    import sys

    for _ in range(times):
        print(text)
        print(text, file=sys.stderr)


@app.task(timeout="1s")
def overrun(seconds: float) -> None:
    time.sleep(seconds)


@app.task
def about(ctx: Context) -> dict[str, object]:
    return {"job_id": ctx.job_id, "task": ctx.task, "attempt": ctx.attempt}
