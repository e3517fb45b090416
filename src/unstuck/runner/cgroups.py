"""Find our places in the kernel's cgroup trees, and read and write their small files.

Nothing here raises: a file that cannot be read is empty, and a write says whether it was taken.
"""

import os
from pathlib import Path

PROC = Path("/proc/self")
_READ_BYTES = 1 << 16


def own(controller: str = "", proc: Path = PROC) -> Path | None:
    """Give our own cgroup: of version 2, or of the version 1 tree of a controller. None where there is none."""
    return _find(controller, proc)[0]


def top(controller: str = "", proc: Path = PROC) -> Path | None:
    """Give the highest cgroup that we can see of a tree: its mount point."""
    return _find(controller, proc)[1]


def _find(controller: str, proc: Path) -> tuple[Path | None, Path | None]:
    inside = _inside(controller, read(proc / "cgroup").splitlines())
    if inside is None:
        return None, None
    for line in read(proc / "mountinfo").splitlines():
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


def make(group: Path) -> bool:
    """Make a cgroup, and those above it; False where we may not, or where it exists."""
    try:
        group.mkdir(parents=True)
    except OSError:
        return False
    return True


def remove(group: Path) -> bool:
    """Take a cgroup down; False while somebody lives in it."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def read(file: Path) -> str:
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


def write(file: Path, text: str) -> bool:
    try:
        file.write_text(text)
    except OSError:
        return False
    return True


def words(file: Path) -> frozenset[str]:
    """Read a list of names, such as controllers."""
    return frozenset(read(file).split())


def counter(file: Path, name: str) -> int | None:
    """Read one line of a file of counters; None where it is not told."""
    for line in read(file).splitlines():
        found, _, value = line.partition(" ")
        if found == name:
            return number(value)
    return None


def number(text: str) -> int | None:
    """Read a plain number; None for `max` and for nothing."""
    text = text.strip()
    return int(text) if text.isdigit() else None


def members(group: Path) -> list[int]:
    """Give the processes that live in this cgroup itself."""
    return [int(pid) for pid in read(group / "cgroup.procs").split() if pid.isdigit()]


def enter(group: str | Path, pid: int = 0) -> bool:
    """Move a process (0: the calling one) into a cgroup; what it starts from then on is born there."""
    try:
        fd = os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(pid).encode())
        finally:
            os.close(fd)
    except OSError:
        return False
    return True
