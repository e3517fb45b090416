"""Ask the kernel for what Python has no words for: death signals, adoption of orphans, holes in files.

Everything here is best effort: False or None means that this system cannot, and callers live with it.
"""

import ctypes
import fcntl
import functools
import os
import sys
import tempfile
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02
_IOLBF = 1
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_DESCENDANTS = 100_000
_NLINK_OF_ONE_THREAD = 3
OOM_SCORE = 500
OOM_SCORE_STEP = 100


@functools.cache
def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def _prctl(option: int, argument: int | bytes) -> bool:
    libc = _libc()
    if libc is None or not sys.platform.startswith("linux"):
        return False
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    return int(libc.prctl(option, value, 0, 0, 0)) == 0


def die_with_parent(signal_number: int, parent_pid: int) -> bool:
    """Have the kernel send us a signal when our parent dies; False when it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    # Asked afterwards: a parent that died before the request would never be noticed.
    return os.getppid() == parent_pid


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent dies."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show (15 bytes)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def signal_main_thread(pid: int, number: int) -> bool:
    """Send a signal to the main thread of a process and to no other; False where the system has no such call."""
    tgkill = getattr(_libc(), "tgkill", None)
    return tgkill is not None and int(tgkill(pid, pid, number)) == 0


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


def offer_as_victim() -> None:
    """Ask the kernel to take us before our worker when memory runs out; what we start inherits that."""
    try:
        own = int(Path("/proc/self/oom_score_adj").read_text())
        # Above our worker's, not just high: in a container everybody may have been given 900 already.
        Path("/proc/self/oom_score_adj").write_text(str(min(1000, max(OOM_SCORE, own + OOM_SCORE_STEP))))
    except (OSError, ValueError):
        pass


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


def punch_hole(fd: int, start: int, end: int) -> None:
    """Give back the memory of whole pages between two offsets of a file; its size stays."""
    start = -(-start // PAGE_BYTES) * PAGE_BYTES
    end = end // PAGE_BYTES * PAGE_BYTES
    libc = _libc()
    if libc is None or end <= start or not hasattr(libc, "fallocate"):
        return
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(end - start))


def line_buffer_c_stdout() -> None:
    """Make C code that prints flush at line ends, so that its words are not lost in a crash."""
    libc = _libc()
    try:
        assert libc is not None
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    except (AssertionError, AttributeError, ValueError):
        pass


def memory_file(name: str) -> int:
    """Open an anonymous file that several processes append to."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd
