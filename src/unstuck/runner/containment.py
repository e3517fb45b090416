"""Decide what holds the processes that jobs start, and kill them all when their runner is gone.

With a cgroup v2 that we may divide, each runner gets a room of its own and nothing can leave it. Else
orphans fall to the nursery, a subreaper, which kills them: that misses only what leaves by other doors
(a daemon that starts services through systemd or docker). Failures here never fail a job.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Literal

from unstuck import host
from unstuck.domain.liveness import Process

_PREFIX = "unstuck-"
MARK_VARIABLE = "UNSTUCK_BENCH_MARK"
_MAX_ROUNDS = 10

Kind = Literal["cgroup", "subreaper", "none"]


class Containment:
    """How the processes of one bench are held together. Made by the nursery."""

    def __init__(self, kind: Kind, hall: Path | None, why: str) -> None:
        self.kind = kind
        self._hall = hall
        self._why = why

    def describe(self) -> str:
        """Say in words what is guaranteed, and why not more."""
        match self.kind:
            case "cgroup":
                return "cgroup v2: everything a job starts dies with its runner"
            case "subreaper":
                return f"subreaper: what a job starts is killed with its runner as far as it can be found ({self._why})"
            case _:
                return f"process groups only: what a job starts in the background may outlive it ({self._why})"

    def make_room(self, serial: int) -> str | None:
        """Prepare a cgroup for one runner, or None where it has to do without."""
        if self._hall is None:
            return None
        room = self._hall / f"runner-{serial}"
        try:
            room.mkdir(parents=True)
        except OSError:
            return None
        return str(room)

    def clear(self, room: str | None) -> None:
        """Kill what is left in the room."""
        if room is not None:
            _kill(Path(room))

    def remove(self, room: str | None) -> bool:
        """Take the room down; False while somebody is still dying in it."""
        return room is None or _rmdir(Path(room))

    def close(self) -> None:
        if self._hall is not None:
            _remove_hall(self._hall)


def detect(mark: str, *, cgroup: bool = True) -> Containment:
    """Find the strongest containment that this system gives us."""
    if not sys.platform.startswith("linux"):
        return Containment("none", None, f"{sys.platform} has no subreapers")
    if not cgroup:
        return Containment("subreaper", None, "cgroups are switched off")
    base = _own_cgroup()
    if base is None:
        return Containment("subreaper", None, "there is no cgroup v2 here")
    hall = base / f"{_PREFIX}{mark}-{os.getpid()}-{host.process_started(os.getpid())}"
    try:
        _remove_stale(base)
        hall.mkdir()
    except OSError as error:
        return Containment("subreaper", None, f"the cgroup {base} is not delegated to us: {error.strerror}")
    if not (hall / "cgroup.kill").exists() or not os.access(base / "cgroup.procs", os.W_OK):
        _rmdir(hall)
        return Containment(
            "subreaper", None, "the cgroup cannot be used: it needs cgroup.kill (Linux 5.14) and write access"
        )
    return Containment("cgroup", hall, "")


def enter_room(room: str) -> None:
    """Move the calling process into its cgroup; what it starts from now on is born there."""
    try:
        fd = os.open(f"{room}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)
    except OSError:
        pass


def kill_marked(mark: int) -> int:
    """Kill everything below a nursery that is gone itself, and give how many processes that were.

    Orphans of a dead nursery have no parent of ours any more; they are found by their cgroup and by the mark
    that they inherited in their environment."""
    text = mark_text(mark)
    base = _own_cgroup()
    # A nursery lives in its worker's own cgroup, so both find the same place.
    halls = [] if base is None else list(base.glob(f"{_PREFIX}{text}-*"))
    for hall in halls:
        _kill(hall)
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
    for hall in halls:
        _remove_hall(hall)
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


def _own_cgroup() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            if right.split()[0] == "cgroup2":
                root, mount = left.split()[3:5]
                inside = own.removeprefix(root) if root != "/" else own
                base = Path(mount) / inside.lstrip("/")
                return base if base.is_dir() else None
    except (OSError, StopIteration, IndexError, ValueError):
        pass
    return None


def _remove_stale(base: Path) -> None:
    """Take down what killed nurseries left. An empty hall alone is no sign: its nursery may just be idle."""
    for hall in base.glob(f"{_PREFIX}*"):
        _, _, owner = hall.name.removeprefix(_PREFIX).partition("-")
        pid, _, started = owner.partition("-")
        if pid.isdigit() and host.look(int(pid), started) is Process.GONE:
            _remove_hall(hall)


def _remove_hall(hall: Path) -> None:
    try:
        rooms = [room for room in hall.iterdir() if room.is_dir()]
    except OSError:
        return
    for room in rooms:
        _rmdir(room)
    _rmdir(hall)


def _kill(group: Path) -> None:
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:
        pass


def _rmdir(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def oom_group() -> bool | None:
    """Say whether the kernel, out of memory, kills everybody in our cgroup at once; None where it cannot be told."""
    base = _own_cgroup()
    try:
        return None if base is None else (base / "memory.oom.group").read_text().strip() == "1"
    except OSError:
        # The root cgroup has no such file, and cgroup v1 knows no such thing.
        return None
