"""Kill what a job started and left behind, so that everything dies with its attempt."""

import os
import signal
import time

from unstuck.runner import kernel

PATIENCE_S = 2.0
_PAUSE_S = 0.0005
_LOOK = getattr(os, "WEXITED", 0) | getattr(os, "WNOHANG", 0) | getattr(os, "WNOWAIT", 0)


def has_children() -> bool:
    """Ask whether this process has any child, alive or unreaped: one system call."""
    try:
        os.waitid(os.P_ALL, 0, _LOOK)
    except ChildProcessError:
        return False
    except AttributeError:
        return bool(kernel.children())
    return True


def kill_children(spare: frozenset[int] = frozenset()) -> bool:
    """Kill and reap every child, and those that fall to us as orphans; False when some outlive our patience.

    As a subreaper we become the parent of whatever their deaths leave behind, so going round until no child
    is left finds every descendant, however it hid."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        living = [pid for pid in kernel.children() if pid not in spare]
        if not living:
            return True
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        for pid in living:
            _reap(pid)
        if time.monotonic() > give_up_at:
            return False


def _reap(pid: int) -> None:
    # A killed child is gone in a moment; one stuck in the kernel must not hold us.
    for _ in range(20):
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)
