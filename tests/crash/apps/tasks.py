"""The app that crash tests run in real workers. Settings come from UNSTUCK_* in the environment."""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.crash.apps import dying
from tests.crash.apps.notes import note, noted

from unstuck import Context, Retry, StopRequested, current_context

app = dying.app

MB = 1 << 20


def _live_with(limits: str) -> None:
    """Do to our process what apps do, and what makes a payload dangerous."""
    match limits:
        case "no limit of recursion":
            # Nothing but the stack itself ends what goes deep, and the stack is none of the largest.
            sys.setrecursionlimit(10**8)
            resource.setrlimit(resource.RLIMIT_STACK, (MB // 2, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        case "little memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 200 * MB, resource.getrlimit(resource.RLIMIT_AS)[1]))


_live_with(os.environ.get("LIVE_WITH", ""))


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
        note(path, f"begun {os.getpid()}")
    time.sleep(seconds)
    if path:
        note(path, f"ended {os.getpid()}")
    return "rested"


@app.task
def talk(seconds: float, path: str) -> str:
    """Say something on every way there is, then sleep."""
    print("the last line of stdout", flush=True)
    print("the last line of stderr", file=sys.stderr, flush=True)
    current_context().progress(137, 150, "nearly done")
    note(path, f"begun {os.getpid()}")
    time.sleep(seconds)
    return "rested"


@app.task
def wait_for_file(gate: str, path: str) -> str:
    """Wait until the file is there: the test says when."""
    note(path, f"begun {os.getpid()}")
    while not os.path.exists(gate):
        time.sleep(0.01)
    return "rested"


@app.task(on_crash="retry", max_crash_retries=3)
def wait_for_file_again(gate: str, path: str) -> str:
    return wait_for_file(gate, path)


def _churn(done: threading.Event) -> None:
    """Go in and out of functions as fast as it goes."""
    number = 0
    while not done.is_set():
        for _ in range(1000):
            Path("/a/b/c").joinpath(str(number)).with_suffix(".x").parts  # noqa: B018 - what it gives is of no use
            number += 1


@contextlib.contextmanager
def _busy_threads(count: int) -> Iterator[None]:
    done = threading.Event()
    threads = [threading.Thread(target=_churn, args=(done,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


@app.task
def wait_among_busy_threads(count: int, path: str) -> str:
    """Run until there is a file `path`.end."""
    with _busy_threads(count):
        note(path, f"begun {os.getpid()}")
        while not Path(f"{path}.end").exists():
            time.sleep(0.01)
    return "ended well"


@app.task
async def await_among_busy_threads(count: int, path: str) -> str:
    """Run until there is a file `path`.end."""
    with _busy_threads(count):
        note(path, f"begun {os.getpid()}")
        while not Path(f"{path}.end").exists():  # noqa: ASYNC240, ASYNC110 - it takes no time
            await asyncio.sleep(0.01)
    return "ended well"


@app.task(on_crash="retry", max_crash_retries=3)
def nap_again(seconds: float, path: str = "") -> str:
    return nap(seconds, path)


@app.task(on_crash="retry", max_crash_retries=3)
def nap_once_then_quick(seconds: float, path: str) -> str:
    """Sleep the first time only: the second attempt returns at once."""
    first = not Path(path).exists()
    note(path, f"begun {os.getpid()}")
    if first:
        time.sleep(seconds)
    note(path, f"ended {os.getpid()}")
    return "late" if first else "quick"


@app.task(on_crash="retry", max_crash_retries=3)
def tick_once_then_quick(seconds: float, path: str) -> str:
    """Note the time again and again, the first time only: the notes tell when this process was really stopped."""
    first = not Path(path).exists()
    note(path, f"begun {os.getpid()} {time.monotonic()}")
    end_s = time.monotonic() + seconds
    while first and time.monotonic() < end_s:
        time.sleep(0.01)
        note(path, f"tick {os.getpid()} {time.monotonic()}")
    return "late" if first else "quick"


@app.task
async def nap_async(seconds: float, path: str = "") -> str:
    if path:
        note(path, f"begun {os.getpid()}")
    await asyncio.sleep(seconds)
    return "rested"


@app.task(on_crash="retry")
async def nap_async_again(seconds: float, path: str = "") -> str:
    return await nap_async(seconds, path)


@app.task(on_crash="retry")
async def nap_async_once_then_quick(seconds: float, path: str) -> str:
    first = not os.path.exists(path)  # noqa: ASYNC240 - it takes no time
    note(path, f"begun {os.getpid()}")
    if first:
        await asyncio.sleep(seconds)
    return "late" if first else "quick"


@app.task
def hold_the_gil(seconds: float) -> str:
    """Sleep in C without letting any other Python thread of this process run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    return "held"


@app.task
def hold_the_gil_until_opened(fifo: str) -> str:
    """Wait in C, without letting any other Python thread of this process run, until the test opens the pipe too."""
    libc = ctypes.PyDLL(None)
    while libc.open(fifo.encode(), os.O_RDONLY) < 0:
        pass  # A signal ended the call.
    return "held"


@app.task(retry=Retry(max_attempts=3, backoff="constant", delay=0.05))
def fail(message: str = "no") -> None:
    raise RuntimeError(message)


@app.task
def give(kind: str) -> object:
    """Return what cannot always be stored."""
    return {"nan": float("nan"), "nul": "a\0b", "surrogate": "\ud800", "set": {1}, "big": "x" * 3_000_000}[kind]


@app.task
def shout(text: str, times: int = 1) -> None:
    for _ in range(times):
        print(text)
        print(text, file=sys.stderr)


@app.task(timeout="1s")
def overrun(seconds: float) -> None:
    time.sleep(seconds)


@app.task
def about(ctx: Context) -> dict[str, object]:
    return {"job_id": ctx.job_id, "task": ctx.task, "attempt": ctx.attempt}


# What hangs, and what must be ended ----------------------------------------------------------


@app.task(timeout="1s", retry=Retry(max_attempts=2, backoff="constant", delay=0.05))
def hang(how: str, path: str = "") -> None:
    """Run past the deadline in one of the ways that code hangs."""
    if path:
        note(path, f"begun {os.getpid()}")
    _hang(how, path)


@app.task(timeout="1s")
async def hang_async(how: str, path: str = "") -> None:
    if path:
        note(path, f"begun {os.getpid()}")
    try:
        if how == "sleep":
            await asyncio.sleep(600)
        while how == "stubborn":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
        _hang(how, path)
    finally:
        if path:
            note(path, "cleaned up")


@app.task(on_crash="retry", max_crash_retries=0)
async def block_the_loop(seconds: float, path: str, where: str = "itself", beside: str = "") -> None:
    """Sleep without letting go of the event loop, in itself or in a task that it started, when another has begun."""
    note(path, f"begun {os.getpid()}")

    async def block() -> None:
        if beside:
            await noted(beside)
        time.sleep(seconds)  # noqa: ASYNC251 - that is the point

    if where == "itself":
        await block()
    else:
        await asyncio.gather(block(), asyncio.sleep(seconds))


@app.task
async def wait_for_many(seconds: float, path: str) -> None:
    note(path, f"begun {os.getpid()}")
    await asyncio.gather(_wait_inside(), asyncio.sleep(seconds))


async def _wait_inside() -> None:
    await asyncio.Event().wait()


def _hang(how: str, path: str) -> None:
    match how:
        case "not at all":
            return
        case "segfault":
            dying.end_by(how)
        case "sleep":
            try:
                time.sleep(600)
            finally:
                if path:
                    note(path, "cleaned up")
        case "loop":
            while True:
                pass
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "gil":
            stuck_in_c()
        case "c sleep":
            ctypes.CDLL(None).usleep(600_000_000)  # a signal ends it, and the job would go on
        case "c sleep with the gil":
            ctypes.PyDLL(None).usleep(600_000_000)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            _hang("deadlock", path)
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _hang("loop", path)
        case "reset":
            for number in range(1, signal.NSIG):
                if number not in (signal.SIGKILL, signal.SIGSTOP):
                    with contextlib.suppress(OSError, ValueError):
                        signal.signal(number, signal.SIG_DFL)
            _hang("loop", path)
        case "event loop":
            asyncio.run(hang_async.definition.function("sleep", path))
        case _:
            raise ValueError(how)


@app.task(timeout="1s", retry=2)
def end_late(path: str) -> str:
    """Come to an end only when the deadline is over and we are asked to stop."""
    note(path, f"begun {os.getpid()}")
    try:
        time.sleep(600)
    except StopRequested:
        return "done, though late"
    return "never asked"


@app.task(stall_timeout="2s", timeout="60s")
def work_with_signs(ctx: Context, signs: int, path: str = "", how: str = "heartbeat") -> str:
    """Give signs often enough, then fall silent if there is a path to note that in."""
    for number in range(signs):
        time.sleep(0.1)
        if how == "heartbeat":
            ctx.heartbeat()
        else:
            current_context().progress(number + 1, signs, f"step {number + 1}")
    if path:
        note(path, f"begun {os.getpid()}")
        time.sleep(600)
    return "done"


@app.task(stall_timeout="2s", timeout="60s")
def give_signs_until(ctx: Context, path: str) -> str:
    """Give signs until the file is there."""
    while not os.path.exists(path):
        time.sleep(0.05)
        ctx.heartbeat()
    return "done"


@app.task(stall_timeout="2s")
async def async_with_signs(ctx: Context, signs: int) -> str:
    for number in range(signs):
        await asyncio.sleep(0.1)
        ctx.progress(number, signs)
    await asyncio.sleep(600)
    return "done"


def stuck_in_c() -> None:
    """Wait for ever in C with the GIL held; unlike a sleep, no signal ends it."""
    mutex = ctypes.create_string_buffer(128)
    libc = ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@app.task(interpreter_timeout="2s")
def hold_the_gil_too_long() -> None:
    stuck_in_c()


@app.task(memory_limit="150MB", on_crash="retry", max_crash_retries=0)
def eat_over_limit(megabytes: int, path: str = "") -> int:
    """Grow by steps, so that even a slow machine looks in between; then stay so large for a while."""
    eaten = []
    for _ in range(megabytes):
        eaten.append(bytearray(os.urandom(1) * 1_000_000))
        time.sleep(0.001)
    if path:
        note(path, f"begun {os.getpid()}")
        time.sleep(600)
    return len(eaten)


@app.task
def leave_memory(megabytes: int) -> None:
    """Leave the process larger than it was, as caches do."""
    globals()["left_behind"] = bytearray(os.urandom(1) * megabytes * 1_000_000)
