"""Share a page of memory between worker, fork server, runners and the neighbours who may have to clean up.

One record per slot: which process is in it, which attempt it entered (and those before it), when its
interpreter last gave a pulse, and until when its lease allows it to live. Each field is written by one party
only and is eight aligned bytes, so a reader sees an old value or a new one, never half of each.

Whoever lives by the page holds a shared `flock` on it: the kernel lets go of it with the last of them, however they
die, and whatever containers share the folder. So a page that can be locked alone belongs to the dead.
"""

import fcntl
import mmap
import os
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

MAGIC = 0x756E737475636B33
_HEADER = struct.Struct("=QQqq")  # magic, slots, fork server pid, fork server start
_MARK_AT = _HEADER.size
_LEDGER_AT, _LEDGER_BYTES = _MARK_AT + 8, 16
_I64 = struct.Struct("=q")
_F64 = struct.Struct("=d")
_HEADER_BYTES = 64
_PID, _STARTED, _ENTERED, _PULSE, _KILL_AT, _KIND, _ENTRIES, _SETTLED, _STOP, _LATELY = range(0, 80, 8)
ENTERED_KEPT = 248
"""How many of the last entered attempts a slot remembers: more than are unsettled at once, but for a turn that hangs
while one slot races on. Then `remembers_all` is false, and nobody may say of an attempt that it never began."""
_SLOT_BYTES = _LATELY + 8 * ENTERED_KEPT
MAX_SLOTS = 8192

SYNC, ASYNC = 1, 2
"""Kinds of slots. In an async one every job that was handed over counts as entered; 0 means unknown, and the same."""


PREFIX = "unstuck-"


def status_page_folder() -> Path:
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else Path(tempfile.gettempdir())


def status_page_path(worker_id: str) -> Path:
    return status_page_folder() / f"{PREFIX}{worker_id}"


class StatusPage:
    """The shared page. Times are boot-time seconds; 0 means "none"."""

    def __init__(self, path: Path, memory: mmap.mmap, slots: int) -> None:
        self.path = path
        self.slots = slots
        self._memory = memory

    @classmethod
    def create(cls, path: Path, slots: int, ledger_id: str = "") -> Self:
        """Make the page of a worker that is registered in this ledger."""
        assert 0 < slots <= MAX_SLOTS
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            size = _HEADER_BYTES + slots * _SLOT_BYTES
            os.ftruncate(fd, size)
            # Before it can be taken for a page. The mapping keeps a descriptor of its own, and so the lock.
            fcntl.flock(fd, fcntl.LOCK_SH)
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        memory[_LEDGER_AT : _LEDGER_AT + _LEDGER_BYTES] = ledger_id.encode().ljust(_LEDGER_BYTES)[:_LEDGER_BYTES]
        _HEADER.pack_into(memory, 0, MAGIC, slots, 0, 0)
        return cls(path, memory, slots)

    @classmethod
    def open(cls, path: Path, *, live_by_it: bool = False) -> Self:
        """Open an existing page; raises OSError or ValueError when there is none worth reading.

        With `live_by_it` the page stays while this process, or a child that it forks, lives."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if live_by_it:
                fcntl.flock(fd, fcntl.LOCK_SH)
            return cls._map(path, fd)
        finally:
            os.close(fd)

    @classmethod
    def open_abandoned(cls, path: Path, wanted: Callable[[Self], bool] = lambda page: True) -> Self | None:
        """Open a page of this user if all that lived by it are dead, and lock it until it is closed; else None.

        A page that is not `wanted` is not locked either, not even for a moment: whoever wants it would find it locked
        and take its worker for alive."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return None
            page = cls._map(path, fd)
            try:
                if not wanted(page):
                    page.close()
                    return None
                # The mapping keeps a descriptor of its own, and so the lock.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                page.close()
                raise
            return page
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    @classmethod
    def _map(cls, path: Path, fd: int) -> Self:
        size = os.fstat(fd).st_size
        if size < _HEADER_BYTES:
            raise ValueError(f"{path} is not a trace")
        memory = mmap.mmap(fd, size)
        magic, slots, _, _ = _HEADER.unpack_from(memory, 0)
        if magic != MAGIC or size < _HEADER_BYTES + slots * _SLOT_BYTES:
            memory.close()
            raise ValueError(f"{path} is not a trace")
        return cls(path, memory, slots)

    def close(self) -> None:
        self._memory.close()

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)

    def ledger_id(self) -> str:
        """Return in which ledger the worker is registered."""
        return bytes(self._memory[_LEDGER_AT : _LEDGER_AT + _LEDGER_BYTES]).decode("ascii", "replace").strip()

    # Fork server ----------------------------------------------------------------------------------

    def set_fork_server(self, pid: int, started: str) -> None:
        _I64.pack_into(self._memory, 16, pid)
        _I64.pack_into(self._memory, 24, int(started or 0))

    def fork_server(self) -> tuple[int, str]:
        _, _, pid, started = _HEADER.unpack_from(self._memory, 0)
        return pid, str(started)

    def set_mark(self, mark: int) -> None:
        """Note what every process below the fork server carries in its environment (`containment.kill_marked`)."""
        _I64.pack_into(self._memory, _MARK_AT, mark)

    def mark(self) -> int:
        return int(_I64.unpack_from(self._memory, _MARK_AT)[0])

    def set_runner(self, slot: int, pid: int, started: str) -> None:
        # Its pulse is left alone: a child may have given its first before we come to this.
        self._set_i64(slot, _STARTED, int(started or 0))
        self._set_i64(slot, _PID, pid)

    def clear_runner(self, slot: int) -> None:
        # What it had entered stays until the next runner begins: whoever explains the death still needs it.
        self._set_i64(slot, _PID, 0)

    def occupant(self, slot: int) -> tuple[int, str]:
        """Give (pid, start time) of the runner in this slot; pid 0 where there is none."""
        return self._get_i64(slot, _PID), str(self._get_i64(slot, _STARTED))

    # Runner -----------------------------------------------------------------------------------

    def enter(self, slot: int, token: int) -> None:
        """Mark the attempt whose user code is about to run; 0 when none is."""
        base = _HEADER_BYTES + slot * _SLOT_BYTES
        if token:
            # Remembered before it is marked: a death in between must not make it look as if it never began.
            entries = _I64.unpack_from(self._memory, base + _ENTRIES)[0]
            _I64.pack_into(self._memory, base + _LATELY + 8 * (entries % ENTERED_KEPT), token)
            _I64.pack_into(self._memory, base + _ENTRIES, entries + 1)
        _I64.pack_into(self._memory, base + _ENTERED, token)

    def entered(self, slot: int) -> int:
        return self._get_i64(slot, _ENTERED)

    def recently_entered(self, slot: int) -> frozenset[int]:
        """Give the last attempts that were entered in this slot, by whichever runner; the finished ones too."""
        start = _HEADER_BYTES + slot * _SLOT_BYTES + _LATELY
        return frozenset(struct.unpack_from(f"={ENTERED_KEPT}q", self._memory, start)) - {0}

    def entries(self, slot: int) -> int:
        """Give how many attempts were ever entered in this slot."""
        return self._get_i64(slot, _ENTRIES)

    def remembers_all(self, slot: int) -> bool:
        """Return whether every unsettled attempt of this slot is among `recently_entered`."""
        return self._get_i64(slot, _ENTRIES) - self._get_i64(slot, _SETTLED) <= ENTERED_KEPT

    def pulse(self, slot: int, at_s: float) -> None:
        self._set_f64(slot, _PULSE, at_s)

    def last_pulse_s(self, slot: int) -> float:
        return self._get_f64(slot, _PULSE)

    # Worker -----------------------------------------------------------------------------------

    def set_kind(self, slot: int, kind: int) -> None:
        """Say what kind of runner this slot is for: SYNC or ASYNC."""
        self._set_i64(slot, _KIND, kind)

    def kind(self, slot: int) -> int:
        return self._get_i64(slot, _KIND)

    def set_settled(self, slot: int, entries: int) -> None:
        """Say that the ledger knows the outcomes of the first `entries` attempts of this slot."""
        self._set_i64(slot, _SETTLED, entries)

    def set_lease_end(self, slot: int, at_s: float) -> None:
        """Set when the lease of this slot ends. The fork server kills the runner then, even if the worker is frozen."""
        self._set_f64(slot, _KILL_AT, at_s)

    def ask_to_stop(self, slot: int, token: int) -> None:
        """Name the attempt that shall stop; the SIGTERM that follows means it, and nothing else."""
        self._set_i64(slot, _STOP, token)

    def asked_to_stop(self, slot: int) -> int:
        return self._get_i64(slot, _STOP)

    def kill_at_s(self, slot: int) -> float:
        return self._get_f64(slot, _KILL_AT)

    # ------------------------------------------------------------------------------------------

    def _set_i64(self, slot: int, field: int, value: int) -> None:
        _I64.pack_into(self._memory, _HEADER_BYTES + slot * _SLOT_BYTES + field, value)

    def _get_i64(self, slot: int, field: int) -> int:
        return int(_I64.unpack_from(self._memory, _HEADER_BYTES + slot * _SLOT_BYTES + field)[0])

    def _set_f64(self, slot: int, field: int, value: float) -> None:
        _F64.pack_into(self._memory, _HEADER_BYTES + slot * _SLOT_BYTES + field, value)

    def _get_f64(self, slot: int, field: int) -> float:
        return float(_F64.unpack_from(self._memory, _HEADER_BYTES + slot * _SLOT_BYTES + field)[0])
