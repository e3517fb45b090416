"""Give each runner a room: the cgroups that hold it, bound what it may start, and die as one."""

import os
import signal
from pathlib import Path

import msgspec

from unstuck.runner import cgroups

UNLIMITED = "max"


class Room(msgspec.Struct, frozen=True):
    """The cgroups of one runner; an empty name where there is none of that kind."""

    v2: str = ""
    pids: str = ""
    """Where its processes are counted and bounded: the same as `v2`, or in the version 1 tree."""
    memory: str = ""
    """Where its memory is counted and can be bounded: the same as `v2`."""

    def groups(self) -> tuple[str, ...]:
        """Give each cgroup once: what the runner has to enter, and what has to be taken down."""
        return tuple(dict.fromkeys(group for group in (self.v2, self.pids, self.memory) if group))


def furnish(serial: int, v2: Path | None, v1_pids: Path | None, max_processes: int) -> Room:
    """Make the room of one runner in the halls that there are. What fails is left out."""
    home = _made(v2, serial)
    pids = memory = ""
    bound = str(max_processes) if max_processes else UNLIMITED
    if home and (Path(home) / "memory.max").exists():
        memory = home
        # Half of a job is worth nothing, and a child that dies alone would look like a failing command.
        cgroups.write(Path(home) / "memory.oom.group", "1")
    if home and (Path(home) / "pids.max").exists() and cgroups.write(Path(home) / "pids.max", bound):
        pids = home
    elif v1_pids is not None:
        pids = _made(v1_pids, serial)
        if pids:
            cgroups.write(Path(pids) / "pids.max", bound)
    return Room(home, pids, memory)


def _made(hall: Path | None, serial: int) -> str:
    if hall is None:
        return ""
    room = hall / f"runner-{serial}"
    return str(room) if cgroups.make(room) else ""


def refused_forks(room: Room) -> int:
    """Say how often somebody in the room was refused a process because the room was full."""
    group = Path(room.pids)
    refused = cgroups.counter(group / "pids.events", "max") or 0
    if not refused:
        return 0
    bound, peak = (cgroups.number(cgroups.read(group / name)) for name in ("pids.max", "pids.peak"))
    # Older kernels count the refusals of the cgroups above us here too: those are not this job's doing.
    return 0 if bound is not None and peak is not None and peak < bound else refused


def clear(group: Path) -> None:
    """Kill everybody in one cgroup, those that are being born too."""
    if (group / "cgroup.kill").exists():
        cgroups.write(group / "cgroup.kill", "1")
        return
    # Version 1 has no such word. Once nobody can be born any more, one round finds them all.
    cgroups.write(group / "pids.max", "0")
    for pid in cgroups.members(group):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
