"""Ask this machine about itself and its processes: clocks, boot, namespaces, who is alive."""

import ctypes
import functools
import os
import socket
import time
from pathlib import Path

from unstuck.domain.liveness import Process

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_s() -> float:
    """Give seconds since boot, counting time asleep: the clock of leases on one host."""
    return time.clock_gettime(_CLOCK)


@functools.cache
def boot_id() -> str:
    """Name this boot of this machine; empty where the system cannot tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Name the pid namespace: a pid means nothing outside it. Empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def hostname() -> str:
    return socket.gethostname()


def process_started(pid: int) -> str:
    """Give the start time of a process as the kernel counts it, or empty where it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command name may hold spaces and brackets: count from behind the last bracket.
    fields = stat[stat.rindex(")") + 2 :].split()
    return fields[19]


def process_state(pid: int, started: str) -> Process:
    """Say whether a process of this host and namespace lives. Only certainty is certain."""
    if not started or not Path("/proc/self/stat").exists():
        return _look_by_signal(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        # With hidepid another user's process looks missing: ask the kernel in a way that tells the two apart.
        return _look_by_signal(pid)
    except ProcessLookupError:
        return Process.GONE
    except OSError:
        return Process.UNKNOWN
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[19] != started:
        return Process.GONE
    return Process.GONE if fields[0] in ("Z", "X") else Process.ALIVE


def _look_by_signal(pid: int) -> Process:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Process.GONE
    except OSError:
        return Process.UNKNOWN
    return Process.ALIVE


def pidfd(pid: int, started: str) -> int | None:
    """Hold on to a process, or None where the system cannot or the process is not the one meant."""
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
    # Compared after opening: from here on the pid cannot be reused without the descriptor noticing.
    if started and process_started(pid) != started:
        os.close(fd)
        return None
    return fd


def is_stopped(pid: int) -> bool:
    """Say whether a process is stopped by a signal or held by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def catches(pid: int, *signal_numbers: int) -> bool:
    """Say whether a process has a handler for each of these signals; where that cannot be read, believe that it has."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            caught = int(line.split()[1], 16)
            return all(caught >> (number - 1) & 1 for number in signal_numbers)
    return True


def family_memory_bytes(pid: int, limit: int = 64) -> int:
    """Give the resident memory of a process and of what it started, at most `limit` processes of them."""
    total, waiting, seen = 0, [pid], 0
    while waiting and seen < limit:
        current = waiting.pop()
        seen += 1
        total += memory_bytes(current)
        try:
            waiting += map(int, _read(f"/proc/{current}/task/{current}/children").split())
        except OSError:
            continue
    return total


def memory_bytes(pid: int) -> int:
    """Give the resident memory of a process; 0 where it cannot be read."""
    try:
        return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def release_free_memory() -> None:
    """Give memory that was freed back to the system: the C library keeps it if something small lies behind it."""
    # If the C library has no such function, it does so by itself, or never.
    if (release := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        release(0)


def _read(path: str) -> bytes:
    # Asked for every runner many times a second: a third of what pathlib takes.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
