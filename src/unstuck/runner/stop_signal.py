"""Decide what SIGTERM means in a runner: nothing, unless its worker asks the job that runs here to stop.

systemd tells every process of a service to end. Only the worker may decide what that means for a job: it may
be draining. So runners overhear the signal, and a handler of user code still gets it. When the worker wants a job to
stop it writes the job's token into the shared page first: then the job is interrupted, and may clean up.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

_blocked_by_us = False
_asked: Callable[[], bool] = lambda: False  # noqa: E731 - replaced when a sync loop begins
_inside = False
_times = 0


class StopRequested(KeyboardInterrupt):
    """The worker asks this job to stop: its deadline passed, it gave no sign, or somebody cancelled it.

    Clean up and let it pass; a process that goes on is killed in a moment. Like KeyboardInterrupt it is no
    `Exception`, so that code which catches those does not swallow it."""


def listen_all() -> None:
    """Begin to overhear SIGTERM in this process, and see that forks of it do not."""
    # A handler, not SIG_IGN: what user code executes would inherit that.
    signal.signal(signal.SIGTERM, _on_terminate)
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_obey_again)


def heed(asked: Callable[[], bool]) -> None:
    """Say how to find out whether the worker wants the job that runs now to stop."""
    global _asked
    _asked = asked


def enter() -> None:
    """User code begins: from here on it may be interrupted."""
    global _inside, _times
    _times = 0
    _inside = True


def leave() -> None:
    """User code is over; nothing of ours may be interrupted. Puts the signal back in order for the next job."""
    global _inside
    _inside = False
    if _getsignal(_SIGTERM) is not _on_terminate:
        signal.signal(signal.SIGTERM, _on_terminate)


def _on_terminate(_number: int, _frame: FrameType | None) -> None:
    global _times
    if not _inside or not _asked():
        return
    _times += 1
    loop = asyncio._get_running_loop()
    if loop is not None and _times == 1:
        # An exception in the middle of an event loop would tear it, and what it should clean up would never run.
        loop.call_soon_threadsafe(_cancel_all, loop)
        return
    raise StopRequested("the worker asked this job to stop")


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


def _hold() -> None:
    # Held back while forking: a child told to end at once must not overhear it in its first instructions.
    global _blocked_by_us
    if signal.getsignal(signal.SIGTERM) is _on_terminate:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _blocked_by_us = signal.SIGTERM not in before


def _release() -> None:
    global _blocked_by_us
    if _blocked_by_us:
        _blocked_by_us = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _obey_again() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()


# Asked once per job: the C function, without the enum that the module's own makes of its answer.
_getsignal = __import__("_signal").getsignal
_SIGTERM = int(signal.SIGTERM)
