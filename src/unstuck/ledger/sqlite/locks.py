"""Find out which process has a write under way in a SQLite file, from the kernel's list of locks."""

import os
from pathlib import Path

from unstuck.domain.text import one_line

_WRITE_LOCK_BYTE = 120
"""Of the `-shm` file: whoever writes to the write-ahead log locks it (SQLite's WAL_WRITE_LOCK)."""
MAX_COMMAND_CHARS = 120


def writer_of(path: Path) -> int | None:
    """Return the process that has a write under way in this file, if it can be seen from here."""
    return _writer(path.with_name(path.name + "-shm"))


def command_of(pid: int) -> str:
    """Return the beginning of the command line of a process, or nothing if it cannot be read."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return one_line(command, MAX_COMMAND_CHARS)


def describe_writer(path: Path) -> str:
    """Name the process for people, as far as it can be found."""
    pid = writer_of(path)
    if pid is None:
        return "a process with a write under way"
    command = command_of(pid)
    return f"process {pid}" + (f": {command}" if command else "")


def _writer(shm: Path) -> int | None:
    try:
        found = os.stat(shm)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: POSIX  ADVISORY  WRITE 3568 fd:00:2531452 120 120
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in lines:
        words = line.split()
        if len(words) == 8 and words[3] == "WRITE" and words[5] == file and _covers(words[6], words[7]):
            return int(words[4]) if int(words[4]) > 0 else None
    return None


def _covers(first: str, last: str) -> bool:
    return int(first) <= _WRITE_LOCK_BYTE and (last == "EOF" or int(last) >= _WRITE_LOCK_BYTE)
