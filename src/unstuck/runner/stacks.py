"""Write the Python stacks of this process into a file of its own: at a fatal signal, and whenever the worker asks.

The handlers are C code and need no GIL: they work inside a C call that never returns. Stacks go to a memory file
beside stdout and stderr, so that they are never mixed with what the job printed.
"""

import faulthandler
import os
import signal
from asyncio import Task
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unstuck import host

STACK_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGQUIT)) - (2 if hasattr(signal, "SIGRTMAX") else 0)
"""One that user code and its libraries have no use for, so that they leave its handler alone."""
MAX_FRAMES = 100
MAX_TASKS = 10
_ROOM = str(Path(__file__).parent)


def watch(fd: int) -> None:
    """Begin to write stacks to `fd`."""
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def put_in_order(fd: int) -> None:
    """Do it again where it is needed: a job may have reset every signal, or want its stacks elsewhere, and the next one
    must still leave its own."""
    faulthandler.enable(file=fd, all_threads=True)
    if host.catches(os.getpid(), STACK_SIGNAL):
        return  # Never taken away without need: for that moment the signal would kill.
    faulthandler.unregister(STACK_SIGNAL)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


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
            frames.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "gi_yieldfrom", None)
    return frames[::-1]
