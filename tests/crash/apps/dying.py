"""Tasks that die, that take more than there is, and that leave something behind when they end."""

import ctypes
import os
import signal
import time
from pathlib import Path

from tests.crash.apps.notes import note, noted

from unstuck import App

app = App(queues=["other"])

MB = 1 << 20


@app.task
def die(how: str = "kill") -> None:
    end_by(how)


@app.task
def eat(megabytes: int) -> str:
    """Take so much memory and touch it, a little at a time."""
    taken = [b"x" * (1 << 20) for _ in range(megabytes)]
    return f"ate {len(taken)}"


@app.task
def fork_bomb(most: int, seconds: int) -> str:
    """Fork without end, and everybody below too; yet no more than `most` in all, and no longer than that."""
    tokens, put = os.pipe()
    os.write(put, b"." * most)
    os.set_blocking(tokens, False)
    bomber, until_s = os.getpid(), time.monotonic() + seconds
    while time.monotonic() < until_s:
        try:
            if os.read(tokens, 1) and os.fork() == 0:
                signal.alarm(seconds)  # whatever becomes of the test, this process ends
        except OSError:
            time.sleep(0.001)
    if os.getpid() != bomber:
        os._exit(0)
    return "survived"


@app.task
def leave_a_grandchild(path: str, how: str = "") -> str:
    """Fork twice and leave the session, as daemons do; then end well, or die."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.alarm(120)  # whatever becomes of the test, this process ends
            note(path, str(os.getpid()))
            signal.pause()
        os._exit(0)
    while not (Path(path).exists() and Path(path).read_text()):
        time.sleep(0.001)
    if how:
        note(path, str(time.time()))
        end_by(how)
    return "left"


@app.task
def flood(megabytes: int, path: str, how: str = "") -> str:
    """Print so much, wait until the file is removed, then end well, or die."""
    os.write(1, b"first words\n")
    for _ in range(megabytes):
        os.write(1, b"x" * (MB - 1) + b"\n")
    note(path, f"printed {os.getpid()}")
    while Path(path).exists():
        time.sleep(0.001)
    if how:
        end_by(how)
    os.write(1, b"last words\n")
    return "printed"


@app.task(on_crash="retry", max_crash_retries=3)
def die_again(how: str = "kill") -> None:
    end_by(how)


def end_by(how: str) -> None:
    print(f"died of {how}", flush=True)
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "let go":
            os.closerange(3, 1024)
            time.sleep(600)
        case _:
            raise ValueError(how)


@app.task
def die_if_sick() -> int:
    """Die where the host has what $SICK names; else tell who ran it."""
    if os.environ.get("SICK") and Path(os.environ["SICK"]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@app.task(on_crash="retry")
def victim(nap_s: float = 0.0) -> None:
    """Die where the host is sick, and be tried again."""
    if os.environ.get("SICK") and Path(os.environ["SICK"]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(nap_s)


@app.task(on_crash="retry", max_crash_retries=2)
async def poison_async(beside: list[str]) -> None:
    """Kill the process that it shares with others, each time; at first when all of these have begun."""
    await noted(*beside)
    os.kill(os.getpid(), signal.SIGKILL)
