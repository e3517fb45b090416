"""Decide what holds the processes that jobs start, and kill them all when their runner is gone.

With a cgroup that we may divide (version 2, or the version 1 tree of `pids`), each runner gets a room of its own
and nothing can leave it. Else orphans fall to the fork server, a subreaper, which kills them: that misses only what
leaves by other doors (a daemon that starts services through systemd or docker). Failures here never fail a job.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Literal

import msgspec

from unstuck.runner import cgroups, processes
from unstuck.runner.cgroups import RunnerCgroup

MARK_VARIABLE = "UNSTUCK_BENCH_MARK"
_MAX_ROUNDS = 10

Kind = Literal["cgroup", "pids", "subreaper", "none"]


class Facts(msgspec.Struct, frozen=True):
    """What this system lets us do."""

    kind: Kind
    controllers: tuple[str, ...] = ()
    """What the kernel bounds for each runner: `memory`, `pids`, or `pids (v1)`."""
    oom_group: bool = False
    """A job that is killed for want of memory dies as a whole (`memory.oom.group`)."""
    why: str = ""
    """Why it is not more."""


class Containment:
    """How the processes of one bench are held together. Made by the fork server."""

    def __init__(self, facts: Facts, v2: Path | None = None, v1_pids: Path | None = None) -> None:
        self.facts = facts
        self._v2 = v2
        self._v1_pids = v1_pids

    @property
    def kind(self) -> Kind:
        return self.facts.kind

    def describe(self) -> str:
        """Say in words what is guaranteed, and why not more."""
        return in_words(self.facts)

    def make_cgroup(self, runner_id: int, max_processes: int = 0) -> RunnerCgroup:
        """Prepare the cgroups of one runner; an empty room where it has to do without."""
        return cgroups.make_runner_cgroup(runner_id, self._v2, self._v1_pids, max_processes)

    def clear(self, cgroup: RunnerCgroup) -> None:
        """Kill what is left in the room."""
        for group in cgroup.groups():
            cgroups.clear_runner_cgroup(Path(group))

    def remove(self, cgroup: RunnerCgroup) -> bool:
        """Take the room down; False while somebody is still dying in it."""
        standing = [group for group in cgroup.groups() if not cgroups.remove_cgroup(Path(group))]
        return not standing

    def close(self) -> None:
        for runner_cgroups in (self._v2, self._v1_pids):
            if runner_cgroups is not None:
                cgroups.remove_runner_cgroups(runner_cgroups)


def detect(mark: str, *, cgroup: bool = True, worker_pid: int = 0) -> Containment:
    """Find the strongest containment that this system gives us."""
    if not sys.platform.startswith("linux"):
        return Containment(Facts("none", why=f"{sys.platform} has no subreapers"))
    if not cgroup:
        return Containment(Facts("subreaper", why="cgroups are switched off"))
    name = cgroups.cgroup_name(mark, os.getpid())
    runner_cgroups, why = _open_v2(name, worker_pid)
    controllers = () if runner_cgroups is None else runner_cgroups.controllers
    v1_pids = None if "pids" in controllers else _open_v1_pids(name)
    bounded = controllers if v1_pids is None else (*controllers, "pids (v1)")
    if runner_cgroups is not None:
        return Containment(Facts("cgroup", bounded, "memory" in controllers, why), runner_cgroups.path, v1_pids)
    return Containment(Facts("subreaper" if v1_pids is None else "pids", bounded, why=why), None, v1_pids)


def in_words(facts: Facts) -> str:
    bounded = f"bounded for each runner: {' and '.join(facts.controllers) or 'nothing'}"
    bounded += ", memory.oom.group=1" if facts.oom_group else ""
    bounded += f"; not more, because {facts.why}" if facts.why else ""
    match facts.kind:
        case "cgroup":
            return f"cgroup v2: everything a job starts dies with its runner; {bounded}"
        case "pids":
            return f"cgroup v1 (pids): everything a job starts dies with its runner; {bounded}"
        case "subreaper":
            return f"subreaper: what a job starts is killed with its runner as far as it can be found ({facts.why})"
        case _:
            return f"process groups only: what a job starts in the background may outlive it ({facts.why})"


def _open_v2(name: str, worker_pid: int) -> tuple[cgroups.RunnerCgroups | None, str]:
    """Give the hall, and why it is not all that it could be."""
    own, mount = cgroups.own(), cgroups.top()
    if own is None or mount is None:
        return None, "there is no cgroup v2 here"
    ours = {worker_pid, os.getpid(), *processes.descendants(os.getpid())}
    site = cgroups.choose_site(own, mount, ours)
    cgroups.remove_stale(site.base)
    runner_cgroups = cgroups.make_runner_cgroups(site, name)
    if runner_cgroups is None:
        return None, f"the cgroup {site.base} is not delegated to us"
    if not (runner_cgroups.path / "cgroup.kill").exists() or not os.access(site.base / "cgroup.procs", os.W_OK):
        cgroups.remove_cgroup(runner_cgroups.path)
        return None, "the cgroup cannot be used: it needs cgroup.kill (Linux 5.14) and write access"
    return runner_cgroups, runner_cgroups.why_not


def _open_v1_pids(name: str) -> Path | None:
    base = cgroups.own("pids")
    if base is None or not os.access(base / "cgroup.procs", os.W_OK):
        return None
    cgroups.remove_stale(base)
    return base / name if cgroups.make_cgroup(base / name) else None


def enter_runner_cgroup(cgroup: RunnerCgroup) -> None:
    """Move the calling process into its cgroups; what it starts from now on is born there."""
    for group in cgroup.groups():
        cgroups.enter(group)


def kill_marked(mark: int) -> int:
    """Kill everything below a fork server that is gone itself, and give how many processes that were.

    Orphans of a dead fork server have no parent of ours any more; they are found by their cgroup and by the mark
    that they inherited in their environment."""
    text = mark_text(mark)
    own = cgroups.own()
    # A fork server lives in its worker's own cgroup, so both find the same places.
    found_halls = cgroups.marked_cgroups((own, None if own is None else own.parent, cgroups.own("pids")), text)
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
