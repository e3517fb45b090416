"""Prove that Python code can run here, say where it stands when the worker asks, and end this process when its lease
has ended or its worker is gone."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from unstuck import host
from unstuck.runner import stacks
from unstuck.runner.answering import Answering
from unstuck.runner.loop_watch import Blocked
from unstuck.runner.signs import Signs
from unstuck.runner.trace import Trace

MAX_INTERVAL_S = 1.0

Look = Callable[[float], Blocked | None]
"""Says whether the event loop of this process is blocked."""


def start_pulse(
    trace: Trace,
    slot: int,
    interval_s: float,
    stream_fd: int,
    stack_fd: int,
    signs: Signs,
    look: Look | None,
    flush: Callable[[], None],
) -> None:
    """Begin the pulse in a thread of its own; with each, `flush` sends what was held back."""
    # The first one here, before any job: who dies without it began none, and who gave it may have, even if a job never
    # lets go of the interpreter again.
    trace.pulse(slot, host.boottime_s())
    # Here too: a job that is quicker than the thread may put a file of its own in the place of ours.
    answering = Answering(signs, stack_fd)
    arguments = (trace, slot, min(interval_s, MAX_INTERVAL_S), stream_fd, stack_fd, signs, answering, look, flush)
    threading.Thread(target=_beat, args=arguments, name="unstuck-pulse", daemon=True).start()


def _beat(
    trace: Trace,
    slot: int,
    interval_s: float,
    stream_fd: int,
    stack_fd: int,
    signs: Signs,
    answering: Answering,
    look: Look | None,
    flush: Callable[[], None],
) -> None:
    poller = select.poll()
    poller.register(stream_fd, 0)  # hang-up alone: the worker closed its end, or died
    poller.register(answering, select.POLLIN)
    watched = {stream_fd, answering.fileno()}
    while True:
        now_s = host.boottime_s()
        kill_at_s = trace.kill_at_s(slot)
        if kill_at_s and now_s >= kill_at_s:
            _die()
        trace.pulse(slot, now_s)
        signs.flush()
        flush()
        if look is not None and (blocked := look(now_s)) is not None:
            signs.blocked(blocked.token, blocked.since_s)
        stacks.put_in_order(stack_fd)
        if not watched:
            time.sleep(interval_s)
            continue
        for fd, event in poller.poll(interval_s * 1000):
            if fd == stream_fd and not event & select.POLLNVAL:
                _die()
            if fd == stream_fd or not answering.answer():
                # User code closed our descriptor; the nursery still watches over us, and there are signals.
                watched.discard(fd)
                poller.unregister(fd)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)
