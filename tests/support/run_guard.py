"""Clean up behind a run of the tests, even one that was killed: end its processes, and remove what they left in memory.

    run_guard.start()

starts a process that waits for the end of this one. Everything that this process starts from then on has the mark of
the run in its environment, and so has whatever those start: the guard knows them by that. PostgreSQL overwrites its
environment; it is known by its folder, see `folder_prefix`.

The guard is a script that needs the standard library alone, so that it starts in a moment.
"""

import contextlib
import ctypes
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MARK = "TEST_RUN"
"""The variable that holds the mark. That of a run inside another one begins with the mark of the outer one."""
SERVER_HOMES = ("/dev/shm", "/tmp")
PAGES = re.compile(rb"(/dev/shm/(?:\.?unstuck|faketime_|sem\.faketime_)\S*)")
"""What Unstuck and libfaketime keep in memory. A process that is killed leaves it behind."""
CGROUPS = re.compile(rb"^\d+:([^:]*):(/.*unstuck.*)$", re.MULTILINE)
STOP_S = 10.0
"""How long PostgreSQL may take to shut down; then it is killed."""
PAUSE_S = 0.05


_notes = -1


def start() -> None:
    """Begin a run in this process, with a mark and a guard of its own."""
    global _notes
    if not hasattr(os, "pidfd_open"):
        return
    _notes = os.memfd_create("notes")
    outer = os.environ.get(MARK)
    mark = f"{outer}.{secrets.token_hex(4)}" if outer else secrets.token_hex(4)
    pidfd = os.pidfd_open(os.getpid())
    try:
        # Without the mark in its own environment, and deaf to the terminal: it ends nothing before its time.
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(pidfd), str(_notes), mark],
            pass_fds=[pidfd, _notes],
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0  # It outlives us: nothing waits for it.
    finally:
        os.close(pidfd)
    os.environ[MARK] = mark


def note_memory_of(pid: int) -> set[Path]:
    """Have the guard remove the pages in memory of a process that may be killed; return them."""
    pages = _pages(pid)
    note(*pages)
    return pages


def note(*paths: Path) -> None:
    """Have the guard remove files, or cgroups, when the run is over."""
    if _notes >= 0:
        os.write(_notes, b"".join(os.fsencode(path) + b"\0" for path in paths))


def folder_prefix(kind: str) -> str:
    """Return how the names of folders begin that the guard removes, in `SERVER_HOMES`."""
    return f"{kind}{os.environ.get(MARK, '')}-"


def main(pidfd: int, notes: int, mark: str) -> None:
    assert mark
    select.select([pidfd], [], [])
    noted = os.pread(notes, os.fstat(notes).st_size, 0).split(b"\0")
    clean_up(mark, {Path(os.fsdecode(path)) for path in noted if path})


def clean_up(mark: str, noted: set[Path]) -> None:
    folders = [path for home in SERVER_HOMES for path in Path(home).glob(f"*{mark}*")]
    # PostgreSQL was told by the kernel to shut down. It removes its shared memory if it is let.
    left = noted
    for pid, pidfd in _held(lambda pid: _is_in(pid, folders)):
        left |= _pages(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    left |= _end_marked(mark)
    until_s = time.monotonic() + STOP_S
    while time.monotonic() < until_s and any(_held(lambda pid: _is_in(pid, folders))):
        time.sleep(PAUSE_S)
    for _, pidfd in _held(lambda pid: _is_in(pid, folders)):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    for folder in folders:
        remove_shared_memory(folder / "data" / "postmaster.pid")
        shutil.rmtree(folder, ignore_errors=True)
    # A cgroup is empty when the last process in it was waited for.
    until_s = time.monotonic() + STOP_S
    while time.monotonic() < until_s and any(path.exists() for path in left):
        for path in sorted(left, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        time.sleep(PAUSE_S)


def _end_marked(mark: str) -> set[Path]:
    """Kill every process of the run; return the files in memory and the cgroups that they leave."""
    left: set[Path] = set()
    while True:
        stopped = []
        # All stand still before the first is killed: the end of one lets others do things.
        for pid, pidfd in _held(lambda pid: _has_mark(pid, mark), keep=True):
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            stopped.append((pid, pidfd))
        for pid, _ in stopped:
            left |= _left_by(pid)
        for _, pidfd in stopped:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for _, pidfd in stopped:
            select.select([pidfd], [], [])
            os.close(pidfd)
        if not stopped:
            return left


def _left_by(pid: int) -> set[Path]:
    left = _pages(pid)
    for controllers, inside in CGROUPS.findall(_read(pid, "cgroup")):
        for tree in (os.fsdecode(controllers).removeprefix("name="), "unified"):
            group = Path("/sys/fs/cgroup", tree, os.fsdecode(inside).lstrip("/"))
            while "unstuck" in group.name:
                left.add(group)
                group = group.parent
    return left


def _pages(pid: int) -> set[Path]:
    return {Path(os.fsdecode(found)) for found in PAGES.findall(_read(pid, "maps"))}


def _held(wanted: Callable[[int], bool], *, keep: bool = False) -> Iterator[tuple[int, int]]:
    """Yield processes with their pidfds, each checked after it was held. The caller closes those that it keeps."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or not wanted(int(name)):
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        if wanted(int(name)) and not select.select([pidfd], [], [], 0)[0]:
            try:
                yield int(name), pidfd
            finally:
                if not keep:
                    os.close(pidfd)
        else:
            os.close(pidfd)


def _has_mark(pid: int, mark: str) -> bool:
    return f"\0{MARK}={mark}".encode() in b"\0" + _read(pid, "environ")


def _is_in(pid: int, folders: list[Path]) -> bool:
    try:
        place = Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return False
    return any(place.is_relative_to(folder) for folder in folders)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def remove_shared_memory(pid_file: Path) -> None:
    """Remove the segment that a killed PostgreSQL left: the file has its number, the kernel's list its maker."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        lines = pid_file.read_text().splitlines()
        maker, segment = lines[0].strip(), lines[6].split()[1]
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            fields = line.split()
            if (fields[1], fields[4]) == (segment, maker):
                ctypes.CDLL(None).shmctl(int(segment), 0, None)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
