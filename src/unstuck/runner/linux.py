"""Ask the kernel for what Python has no words for: death signals, adoption of orphans, holes in files.

Everything here is best effort: False or None means that this system cannot, and callers live with it.
"""

import ctypes
import fcntl
import functools
import os
import tempfile
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02
_IOLBF = 1
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
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
    if libc is None:
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


def prefer_as_oom_victim() -> None:
    """Ask the kernel to take us before our worker when memory runs out; what we start inherits that."""
    try:
        own = int(Path("/proc/self/oom_score_adj").read_text())
        # Above our worker's, not just high: in a container everybody may have been given 900 already.
        Path("/proc/self/oom_score_adj").write_text(str(min(1000, max(OOM_SCORE, own + OOM_SCORE_STEP))))
    except (OSError, ValueError):
        pass


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
