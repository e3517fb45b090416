"""Notice a runner that starts processes without end, and kill a crowd that grows while it is being killed."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from unstuck.runner import kernel, rooms
from unstuck.runner.rooms import Room

TOO_MANY = "processes"
"""The end of the cause by which such a death is known."""
MAX_ROUNDS = 50
"""Rounds of stopping. Each finds only what was born during the one before, by those who are not stopped yet."""


def too_many(pid: int, room: Room, max_processes: int) -> bool:
    """Say whether a runner and what it started went past the limit (0: there is none).

    Where the kernel bounds them nobody can get past it; then to be refused is the sign."""
    if not max_processes:
        return False
    if room.pids:
        return rooms.refused_forks(room) > 0
    # One cheap look that mostly suffices: so many are not on the whole machine.
    if 0 < kernel.tasks_of_host() <= max_processes:
        return False
    return len(kernel.descendants(pid, max_processes)) >= max_processes


def words(max_processes: int) -> str:
    return f"it started more than {max_processes} {TOO_MANY}"


def kill_trees(roots: list[int]) -> None:
    """Kill these processes and everybody below them.

    All are stopped first: whoever is stopped starts nobody, and nobody is orphaned away while we count. Each is stopped
    before we ask for its children: a crowd that takes all the processor time gives it back bit by bit."""
    if not roots:
        return
    with _in_haste():
        stopped: set[int] = set()
        for _ in range(MAX_ROUNDS):
            found = _stop_trees(roots, stopped)
            if found <= stopped:
                break
            stopped |= found
        # The roots last: whoever waits to hear why they died shall not find us busy with the others.
        for pid in (*(found - set(roots)), *roots):
            _signal(pid, signal.SIGKILL)
        for pid in stopped - found:
            _signal(pid, signal.SIGCONT)  # gone meanwhile: if somebody has its number now, we stopped a stranger


def _stop_trees(roots: list[int], stopped: set[int]) -> set[int]:
    found = set(roots)
    waiting = list(roots)
    while waiting and len(found) < kernel.MAX_DESCENDANTS:
        pid = waiting.pop()
        if pid not in stopped:
            _signal(pid, signal.SIGSTOP)
        below = [child for child in kernel.children(pid) if child not in found]
        found.update(below)
        waiting += below
    return found


@contextmanager
def _in_haste() -> Iterator[None]:
    """Go before others while it lasts, where we may: among a thousand busy processes our turn comes late."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass
