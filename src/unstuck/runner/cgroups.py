"""The cgroup of a runner: find, create, bound, kill and remove it.

Nothing here raises: a file that cannot be read is empty, and a write says whether it was taken.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from unstuck import host
from unstuck.domain.liveness import Process

PROC = Path("/proc/self")
_READ_BYTES = 1 << 16


def own(controller: str = "", proc: Path = PROC) -> Path | None:
    """Give our own cgroup: of version 2, or of the version 1 tree of a controller. None where there is none."""
    return _find(controller, proc)[0]


def top(controller: str = "", proc: Path = PROC) -> Path | None:
    """Give the highest cgroup that we can see of a tree: its mount point."""
    return _find(controller, proc)[1]


def _find(controller: str, proc: Path) -> tuple[Path | None, Path | None]:
    inside = _inside(controller, read_file(proc / "cgroup").splitlines())
    if inside is None:
        return None, None
    for line in read_file(proc / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields = right.split()
        if len(fields) < 3 or not _is_tree(controller, fields[0], fields[2]):
            continue
        root, mount = left.split()[3:5]
        path = Path(mount) / (inside.removeprefix(root) if root != "/" else inside).lstrip("/")
        return (path if path.is_dir() else None), Path(mount)
    return None, None


def _is_tree(controller: str, kind: str, options: str) -> bool:
    return kind == "cgroup" and controller in options.split(",") if controller else kind == "cgroup2"


def _inside(controller: str, lines: list[str]) -> str | None:
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") if controller else number == "0":
            return path
    return None


def make_cgroup(group: Path) -> bool:
    """Make a cgroup, and those above it; False where we may not, or where it exists."""
    try:
        group.mkdir(parents=True)
    except OSError:
        return False
    return True


def remove_cgroup(group: Path) -> bool:
    """Take a cgroup down; False while somebody lives in it."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def read_file(file: Path) -> str:
    # Without the layers of `Path.read_text`: this is done for every runner, five times a second.
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = b"".join(iter(lambda: os.read(fd, _READ_BYTES), b""))
        finally:
            os.close(fd)
    except OSError:
        return ""
    return data.decode(errors="replace")


def write_file(file: Path, text: str) -> bool:
    try:
        file.write_text(text)
    except OSError:
        return False
    return True


def read_words(file: Path) -> frozenset[str]:
    """Read a list of names, such as controllers."""
    return frozenset(read_file(file).split())


def read_counter(file: Path, name: str) -> int | None:
    """Read one line of a file of counters; None where it is not told."""
    for line in read_file(file).splitlines():
        found, _, value = line.partition(" ")
        if found == name:
            return read_number(value)
    return None


def read_number(text: str) -> int | None:
    """Read a plain number; None for `max` and for nothing."""
    text = text.strip()
    return int(text) if text.isdigit() else None


def members(group: Path) -> list[int]:
    """Give the processes that live in this cgroup itself."""
    return [int(pid) for pid in read_file(group / "cgroup.procs").split() if pid.isdigit()]


def enter(group: str | Path) -> bool:
    """Move the calling process into a cgroup; what it starts from then on is born there."""
    try:
        fd = os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


UNLIMITED = "max"


class RunnerCgroup(msgspec.Struct, frozen=True):
    """The cgroup of one runner; without a path there is none."""

    path: str = ""
    bounds_processes: bool = False
    bounds_memory: bool = False

    @property
    def memory_path(self) -> str:
        """Where its memory is counted and can be bounded; empty if the kernel does neither."""
        return self.path if self.bounds_memory else ""


def make_runner_cgroup(runner_id: int, base: Path | None, max_processes: int) -> RunnerCgroup:
    """Make the cgroup of one runner below `base`. What fails is left out."""
    if base is None:
        return RunnerCgroup()
    group = base / f"runner-{runner_id}"
    if not make_cgroup(group):
        return RunnerCgroup()
    bounds_memory = (group / "memory.max").exists()
    if bounds_memory:
        # Half of a job is worth nothing, and a child that dies alone would look like a failing command.
        write_file(group / "memory.oom.group", "1")
    bound = str(max_processes) if max_processes else UNLIMITED
    bounds_processes = (group / "pids.max").exists() and write_file(group / "pids.max", bound)
    return RunnerCgroup(str(group), bounds_processes, bounds_memory)


def refused_forks(cgroup: RunnerCgroup) -> int:
    """Say how often somebody in the room was refused a process because the room was full."""
    group = Path(cgroup.path)
    refused = read_counter(group / "pids.events", "max") or 0
    if not refused:
        return 0
    bound, peak = (read_number(read_file(group / name)) for name in ("pids.max", "pids.peak"))
    # Older kernels count the refusals of the cgroups above us here too: those are not this job's doing.
    return 0 if bound is not None and peak is not None and peak < bound else refused


def clear_runner_cgroup(group: Path) -> None:
    """Kill every process in one cgroup, those that are being born too."""
    write_file(group / "cgroup.kill", "1")


PREFIX = "unstuck-"
WANTED = ("memory", "pids")
_DELEGATE_MARKS = ("user.delegate", "trusted.delegate")


class RunnerCgroups(msgspec.Struct, frozen=True):
    path: Path
    controllers: tuple[str, ...] = ()
    """What can be bounded for each room below."""
    why_not: str = ""


def is_delegated(group: Path) -> bool:
    """Say whether systemd marked this cgroup as given away."""
    for mark in _DELEGATE_MARKS:
        try:
            if os.getxattr(group, mark) == b"1":
                return True
        except OSError:
            continue
    return False


def choose_base(own: Path, mount: Path, delegated: Callable[[Path], bool] = is_delegated) -> tuple[Path, str]:
    """Return the cgroup in which to make those of runners, and why it cannot give them controllers. Changes nothing."""
    parent = own.parent
    if own != mount and delegated(parent):
        return (own, f"processes live in {parent} itself") if members(parent) else (parent, "")
    if not (own / "cgroup.type").exists():
        return own, "the worker lives in the root of all cgroups, which is not ours to divide"
    if own != mount and not delegated(own):
        return own, "the cgroup is not delegated: set Delegate=yes and DelegateSubgroup= in the unit"
    return own, f"the worker itself lives in {own}: set DelegateSubgroup= in the unit"


def make_runner_cgroups(base: Path, name: str, why_not: str = "") -> RunnerCgroups | None:
    """Make the parent of runners' cgroups, with every controller that we need and can have; None if it is refused.

    `why_not` says why `base` cannot give them any: then no controller of it is switched on."""
    if not why_not:
        for controller in sorted(read_words(base / "cgroup.controllers") & set(WANTED)):
            write_file(base / "cgroup.subtree_control", f"+{controller}")
    path = base / name
    if not make_cgroup(path):
        return None
    there = read_words(path / "cgroup.controllers")
    # One by one: one that is refused must not cost us the other.
    taken = [c for c in WANTED if c in there and write_file(path / "cgroup.subtree_control", f"+{c}")]
    missing = [c for c in WANTED if c not in taken]
    why_not = why_not or f"{base} has no controller {' or '.join(missing)}"
    return RunnerCgroups(path, tuple(taken), why_not if missing else "")


def cgroup_name(mark: str, pid: int) -> str:
    return f"{PREFIX}{mark}-{pid}-{host.process_started(pid)}"


def marked_cgroups(bases: Collection[Path | None], mark: str) -> list[Path]:
    """Find the halls of one bench."""
    return [runner_cgroups for base in bases if base is not None for runner_cgroups in base.glob(f"{PREFIX}{mark}-*")]


def remove_stale(base: Path) -> None:
    """Remove the cgroups of fork servers that were killed. An empty one is not a sign: its fork server may be idle."""
    for runner_cgroups in base.glob(f"{PREFIX}*"):
        _, _, owner = runner_cgroups.name.removeprefix(PREFIX).partition("-")
        pid, _, started = owner.partition("-")
        if pid.isdigit() and host.process_state(int(pid), started) is Process.GONE:
            remove_runner_cgroups(runner_cgroups)


def runner_cgroups_in(runner_cgroups: Path) -> list[Path]:
    try:
        return [cgroup for cgroup in runner_cgroups.iterdir() if cgroup.is_dir()]
    except OSError:
        return []


def remove_runner_cgroups(runner_cgroups: Path) -> None:
    for cgroup in runner_cgroups_in(runner_cgroups):
        remove_cgroup(cgroup)
    remove_cgroup(runner_cgroups)


class MemoryLimits:
    """Sets the limit of rooms, and remembers it: a job without a limit after one without costs a look, no more."""

    def __init__(self) -> None:
        self._set: dict[str, int] = {}
        self._without: set[str] = set()
        """Rooms in which the kernel bounds no memory."""

    def set_memory_limit(self, cgroup: str, limit_bytes: int | None) -> bool:
        """Set or clear (None) the limit of a cgroup (`RunnerBorn.cgroup`); False where the kernel does not enforce it.

        False too where the runner is larger already: the kernel would kill it at once for what earlier jobs left."""
        if self._set.get(cgroup) == limit_bytes:
            return True
        if cgroup in self._without:
            return False
        group = Path(cgroup)
        if limit_bytes is None:
            return self._clear(group)
        if not cgroup or not (group / "memory.max").exists():
            self._without.add(cgroup)
            return False
        if (read_counter(group / "memory.stat", "anon") or 0) > limit_bytes:
            self._clear(group)
            return False
        write_file(group / "memory.swap.max", "0")
        taken = write_file(group / "memory.max", str(limit_bytes))
        if taken:
            self._set[cgroup] = limit_bytes
        return taken

    def _clear(self, group: Path) -> bool:
        self._set.pop(str(group), None)
        write_file(group / "memory.swap.max", UNLIMITED)
        return write_file(group / "memory.max", UNLIMITED)

    def forget(self, cgroup: str) -> None:
        """The runner is gone, and its room with it."""
        self._set.pop(cgroup, None)
        self._without.discard(cgroup)
