"""Find and kill the descendants of a process, and stop fork bombs."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unstuck.runner import cgroups
from unstuck.runner.cgroups import RunnerCgroup

OVER_PROCESS_LIMIT = "processes"
"""The end of the cause by which such a death is known."""
MAX_ROUNDS = 50
"""Rounds of stopping. Each finds only what was born during the one before, by those who are not stopped yet."""


def over_process_limit(pid: int, cgroup: RunnerCgroup, max_processes: int) -> bool:
    """Say whether a runner and what it started went past the limit (0: there is none).

    Where the kernel bounds them nobody can get past it; then to be refused is the sign."""
    if not max_processes:
        return False
    if cgroup.bounds_processes:
        return cgroups.refused_forks(cgroup) > 0
    # One cheap look that mostly suffices: so many are not on the whole machine.
    if 0 < tasks_of_host() <= max_processes:
        return False
    return len(descendants(pid, max_processes)) >= max_processes


def over_limit_text(max_processes: int) -> str:
    return f"it started more than {max_processes} {OVER_PROCESS_LIMIT}"


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
    while waiting and len(found) < MAX_DESCENDANTS:
        pid = waiting.pop()
        if pid not in stopped:
            _signal(pid, signal.SIGSTOP)
        below = [child for child in children(pid) if child not in found]
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


PATIENCE_S = 2.0
_PAUSE_S = 0.0005
_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def has_children() -> bool:
    """Ask whether this process has any child, alive or unreaped: one system call."""
    try:
        os.waitid(os.P_ALL, 0, _LOOK)
    except ChildProcessError:
        return False
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
        living = children()
        kill_trees(living)
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


MAX_DESCENDANTS = 100_000
_NLINK_OF_ONE_THREAD = 3


def children(pid: int = 0) -> list[int]:
    """Give the pids of the living and unreaped children of a process (0: ours), those of all its threads.

    The kernel may leave some out while others end: who must find all goes on until there is none."""
    parent = pid or os.getpid()
    found: list[int] = []
    try:
        if pid and os.stat(f"/proc/{pid}/task").st_nlink == _NLINK_OF_ONE_THREAD:
            return _numbers_in(f"/proc/{pid}/task/{pid}/children")  # the plain case, at a third of the cost
    except OSError:
        pass
    try:
        for thread in os.listdir(f"/proc/{parent}/task"):
            try:
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_bytes().split())
            except FileNotFoundError:
                if not Path(f"/proc/{parent}/task", thread).exists():
                    continue  # the thread ended while we looked; its children went to another one of it
                return _children_by_parent(parent)
    except ProcessLookupError:
        return []
    except OSError:
        return [] if pid and not Path(f"/proc/{parent}").exists() else _children_by_parent(parent)
    return found


def descendants(pid: int, most: int = MAX_DESCENDANTS) -> list[int]:
    """Give everybody below a process, eldest first, and not more than `most`."""
    found: list[int] = []
    seen = {pid}
    waiting = [pid]
    while waiting and len(found) < most:
        below = [child for child in children(waiting.pop()) if child not in seen]
        seen.update(below)
        found += below
        waiting += below
    return found[:most]


def tasks_of_host() -> int:
    """Say how many processes and threads there are on this machine; 0 where it does not tell."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return 0


def _numbers_in(file: str) -> list[int]:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [int(number) for number in b"".join(iter(lambda: os.read(fd, 65536), b"")).split()]
    finally:
        os.close(fd)


def _children_by_parent(parent: int) -> list[int]:
    # Kernels without CONFIG_PROC_CHILDREN: look at everybody.
    found = []
    for entry in _listed("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            if int(stat[stat.rindex(")") + 2 :].split()[1]) == parent:
                found.append(int(entry))
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
