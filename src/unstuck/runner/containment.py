"""Decide what holds the processes that jobs start, and kill them all when their runner is gone.

With a cgroup of version 2 that we may divide, each runner gets one of its own and nothing can leave it. Else orphans
fall to the fork server, a subreaper, which kills them: that misses only what leaves by other doors (a daemon that
starts services through systemd or docker). Failures here never fail a job.
"""

import os
import signal
from pathlib import Path

from unstuck.runner import cgroups
from unstuck.runner.cgroups import RunnerCgroup, RunnerCgroups

MARK_VARIABLE = "UNSTUCK_BENCH_MARK"
_MAX_ROUNDS = 10


class Containment:
    """How the processes of one bench are held together. Made by the fork server."""

    def __init__(self, runner_cgroups: RunnerCgroups | None, why_none: str = "") -> None:
        self._runner_cgroups = runner_cgroups
        self._why_none = why_none

    def describe(self) -> str:
        """Return in words what is guaranteed, and why not more."""
        found = self._runner_cgroups
        if found is None:
            return (
                "subreaper: what a job starts is killed with its runner as far as it can be found, and the kernel "
                f"limits neither its processes nor its memory, because {self._why_none}"
            )
        bounded = f"bounded for each runner: {' and '.join(found.controllers) or 'nothing'}"
        bounded += ", memory.oom.group=1" if "memory" in found.controllers else ""
        bounded += f"; not more, because {found.why_not}" if found.why_not else ""
        return f"cgroup v2: everything a job starts dies with its runner; {bounded}"

    def make_cgroup(self, runner_id: int, max_processes: int = 0) -> RunnerCgroup:
        """Make the cgroup of one runner; one without a path if it has to do without."""
        base = None if self._runner_cgroups is None else self._runner_cgroups.path
        return cgroups.make_runner_cgroup(runner_id, base, max_processes)

    def clear(self, cgroup: RunnerCgroup) -> None:
        """Kill every process that is left in the cgroup."""
        if cgroup.path:
            cgroups.clear_runner_cgroup(Path(cgroup.path))

    def remove(self, cgroup: RunnerCgroup) -> bool:
        """Remove the cgroup; False while a process is still dying in it."""
        return not cgroup.path or cgroups.remove_cgroup(Path(cgroup.path))

    def close(self) -> None:
        if self._runner_cgroups is not None:
            cgroups.remove_runner_cgroups(self._runner_cgroups.path)


def detect(mark: str, *, cgroup: bool = True) -> Containment:
    """Find the strongest containment that this system gives us."""
    if not cgroup:
        return Containment(None, "cgroups are switched off")
    return _with_cgroups(cgroups.cgroup_name(mark, os.getpid()))


def _with_cgroups(name: str) -> Containment:
    own, mount = cgroups.own(), cgroups.top()
    if own is None or mount is None:
        return Containment(None, "there is no cgroup v2 here (version 1 is not used)")
    base, why_not = cgroups.choose_base(own, mount)
    cgroups.remove_stale(base)
    runner_cgroups = cgroups.make_runner_cgroups(base, name, why_not)
    if runner_cgroups is None:
        return Containment(None, f"the cgroup {base} is not delegated to us")
    if not (runner_cgroups.path / "cgroup.kill").exists() or not os.access(base / "cgroup.procs", os.W_OK):
        cgroups.remove_cgroup(runner_cgroups.path)
        return Containment(None, "the cgroup cannot be used: it needs cgroup.kill (Linux 5.14) and write access")
    return Containment(runner_cgroups)


def enter_runner_cgroup(cgroup: RunnerCgroup) -> None:
    """Move the calling process into its cgroup; what it starts from now on is born there."""
    if cgroup.path:
        cgroups.enter(cgroup.path)


def kill_marked(mark: int) -> int:
    """Kill everything below a fork server that is gone itself, and give how many processes that were.

    Orphans of a dead fork server have no parent of ours any more; they are found by their cgroup and by the mark
    that they inherited in their environment."""
    text = mark_text(mark)
    own = cgroups.own()
    # A fork server lives in its worker's own cgroup, so both find the same places.
    found_halls = cgroups.marked_cgroups((own, None if own is None else own.parent), text)
    for runner_cgroups in found_halls:
        for cgroup in cgroups.runner_cgroups_in(runner_cgroups):
            cgroups.clear_runner_cgroup(cgroup)
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        found = _marked(text)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
            killed.add(pid)
        if not found:
            break
    for runner_cgroups in found_halls:
        cgroups.remove_runner_cgroups(runner_cgroups)
    return len(killed)


def mark_text(mark: int) -> str:
    return f"{mark:016x}"


def _marked(text: str) -> list[int]:
    needle = f"{MARK_VARIABLE}={text}".encode()
    found = []
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    for entry in entries:
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            # Zombies have no environment any more, so the dead are not found again.
            if needle in environment.split(b"\0"):
                found.append(int(entry))
    return found


def oom_group() -> bool | None:
    """Say whether the kernel, out of memory, kills everybody in our cgroup at once; None where it cannot be told."""
    base = cgroups.own()
    try:
        return None if base is None else (base / "memory.oom.group").read_text().strip() == "1"
    except OSError:
        # The root cgroup has no such file, and cgroup v1 knows no such thing.
        return None
