"""Write the Python stacks of this process into a file of its own: at a fatal signal, and whenever the worker asks.

The handlers are C code and need no GIL: they work inside a C call that never returns. Stacks go to a memory file
beside stdout and stderr, so that they are never mixed with what the job printed.
"""

import faulthandler
import os
import signal
from asyncio import Task
from pathlib import Path
from typing import Any

from unstuck import host

STACK_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGQUIT)) - (2 if hasattr(signal, "SIGRTMAX") else 0)
"""One that user code and its libraries have no use for, so that they leave its handler alone."""
MAX_FRAMES = 100
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


def of_task(task: "Task[Any]") -> str:
    """Give where an async job waits, the innermost frame first, in the form that fatal signals use."""
    frames: list[str] = []
    waits_in: Any = task.get_coro()
    # From the task inwards, through everything that it awaits.
    while waits_in is not None and len(frames) < MAX_FRAMES:
        frame = getattr(waits_in, "cr_frame", None) or getattr(waits_in, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_ROOM):
            frames.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "gi_yieldfrom", None)
    return "\n".join(["Task of this job (most recent call first):", *reversed(frames)])
