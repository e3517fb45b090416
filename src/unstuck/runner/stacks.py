"""Write the Python stacks of this process into a file of its own: at a fatal signal, and whenever the worker asks.

Whoever has the GIL may read the stacks of all threads: none of them is in motion. The handlers of signals are C code
and need no GIL, so that they work inside a C call that never returns; but what they read may move, and a dump of other
threads while those run Python code kills the process. Stacks go to a memory file beside stdout and stderr, so that they
are never mixed with what the job printed.
"""

import faulthandler
import os
import signal
import sys
import threading
from asyncio import Task
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from unstuck import host

# Clients on other systems import this module too, without that name.
STACK_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.NSIG)) - 2
"""Writes down the stack of the thread that gets it. One that user code and its libraries have no use for, so that they
leave its handler alone."""
ALL_STACKS_SIGNAL = STACK_SIGNAL - 1
"""Writes down those of all threads: only for a process in which C code holds the GIL, so that no Python code runs."""
MAX_THREADS = 100
MAX_FRAMES = 100
MAX_TASKS = 10
_ROOM = str(Path(__file__).parent)


def watch(fd: int) -> None:
    """Begin to write stacks to `fd`."""
    # All threads, though others may move: who dies of this was dying anyway, and where a thread of native code dies
    # nothing else says what the job was doing.
    faulthandler.enable(file=fd, all_threads=True)
    _register(fd)


def put_in_order(fd: int) -> None:
    """Do it again where it is needed: a job may have reset every signal, or want its stacks elsewhere, and the next one
    must still leave its own."""
    faulthandler.enable(file=fd, all_threads=True)
    if host.catches(os.getpid(), STACK_SIGNAL, ALL_STACKS_SIGNAL):
        return  # Never taken away without need: for that moment the signal would kill.
    faulthandler.unregister(STACK_SIGNAL)
    faulthandler.unregister(ALL_STACKS_SIGNAL)
    _register(fd)


def _register(fd: int) -> None:
    faulthandler.register(ALL_STACKS_SIGNAL, file=fd, all_threads=True, chain=False)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)


def of_threads() -> str:
    """Give where all other threads of this process stand, the job's first, in the form that fatal signals use."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    told: list[str] = []
    for ident in sorted(frames, key=lambda one: one != main)[:MAX_THREADS]:
        kind = "Current thread" if ident == main else "Thread"
        told += [f"{kind} 0x{ident:016x} (most recent call first):", *_called_by(frames[ident]), ""]
    if len(frames) > MAX_THREADS:
        told.append(f"and {len(frames) - MAX_THREADS} more threads")
    return "\n".join(told)


def _called_by(frame: FrameType | None) -> list[str]:
    told: list[str] = []
    while frame is not None and len(told) < MAX_FRAMES:
        told.append(_line(frame))
        frame = frame.f_back
    return told if frame is None else [*told, "  ..."]


def of_job(job_id: int, main: "Task[Any]", tasks: "Sequence[Task[Any]]") -> str:
    """Give where an async job waits, then where the tasks wait that it started: it may wait for one of them."""
    others = [task for task in tasks if task is not main]
    told = [f"Task of job {job_id} (most recent call first):", *_frames(main)]
    for task in others[:MAX_TASKS]:
        told += [f"Task {task.get_name()} that it started (most recent call first):", *_frames(task)]
    if len(others) > MAX_TASKS:
        told.append(f"and {len(others) - MAX_TASKS} more tasks that it started")
    return "\n".join(told)


def _frames(task: "Task[Any]") -> list[str]:
    """Give the frames of a task, the innermost first, in the form that fatal signals use."""
    frames: list[str] = []
    waits_in: Any = task.get_coro()
    # From the task inwards, through everything that it awaits.
    while waits_in is not None and len(frames) < MAX_FRAMES:
        frame = getattr(waits_in, "cr_frame", None) or getattr(waits_in, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_ROOM):
            frames.append(_line(frame))
        waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "gi_yieldfrom", None)
    return frames[::-1]


def _line(frame: FrameType) -> str:
    line = "???" if frame.f_lineno is None else frame.f_lineno
    return f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}'
