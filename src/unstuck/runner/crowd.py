"""Notice a runner that starts processes without end, and kill a crowd that grows while it is being killed."""

import os
import signal

from unstuck.runner import kernel, rooms
from unstuck.runner.rooms import Room

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
    return f"it started more than {max_processes} processes"


def kill_trees(roots: list[int]) -> None:
    """Kill these processes and everybody below them.

    All are stopped first: whoever is stopped starts nobody, and nobody is orphaned away while we count."""
    stopped: set[int] = set()
    for _ in range(MAX_ROUNDS):
        found = {*roots, *(pid for root in roots for pid in kernel.descendants(root))}
        if found <= stopped:
            break
        for pid in found - stopped:
            _signal(pid, signal.SIGSTOP)
        stopped |= found
    for pid in found:
        _signal(pid, signal.SIGKILL)
    for pid in stopped - found:
        _signal(pid, signal.SIGCONT)  # gone meanwhile: if somebody has its number now, we stopped a stranger


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass
