"""Kill what a job started and left behind, so that everything dies with its attempt."""

import os
import time

from unstuck.runner import crowd, kernel

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


def kill_children() -> bool:
    """Kill and reap every child, and those that fall to us as orphans; False when some outlive our patience.

    As a subreaper we become the parent of whatever their deaths leave behind, so going round until no child
    is left finds every descendant, however it hid: in a session of its own, forked twice, deaf to SIGTERM."""
    give_up_at = time.monotonic() + PATIENCE_S
    while has_children():
        if time.monotonic() > give_up_at:
            return False
        # Empty although there are some: the list is not exact while others end, and cannot be read without
        # descriptors. Then we go round again, and give up in time.
        living = kernel.children()
        crowd.kill_trees(living)
        for pid in living:
            _reap(pid)
        if not living:
            time.sleep(_PAUSE_S)
    return True


def _reap(pid: int) -> None:
    # A killed child is gone in a moment; one stuck in the kernel must not hold us.
    for _ in range(20):
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)
