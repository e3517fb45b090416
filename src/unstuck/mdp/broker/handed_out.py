"""Note in shared memory which request each old worker has, so that the next broker on this host knows it if this one is
killed.

Jobs are claimed for a quick worker in advance and wait at the broker. Only the broker knows which of them it handed
out, and an old worker cannot say it. The memory outlives the process. A lock on it, which the kernel lets go of at the
end of the process, says whether its broker is dead.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct
import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from unstuck.mdp.protocol import is_automatic

PREFIX = "unstuckbroker-"
MAX_WORKERS = 8192
"""Further ones are not noted: what was claimed for them waits for `mdp.busy_timeout` if the broker is killed."""
REUSE_AFTER_S = 60.0
"""How long the record of a worker that left stays: until its end is in the ledger."""

FORGET_AFTER_S = 86_400.0
"""When the record of a dead broker is removed that no broker of its ledger came for."""

_I64 = struct.Struct("=q")
_WORKER_BYTES = 24
_IDENTITY_BYTES = 16
_STATE, _JOB, _TOKEN, _WORKER, _IDENTITY = 0, 8, 16, 24, 48
_SLOT_BYTES = _IDENTITY + _IDENTITY_BYTES
_HEAD_BYTES = 32
"""A digest of the address at which the broker listens."""
_SIZE_BYTES = _HEAD_BYTES + MAX_WORKERS * _SLOT_BYTES
_FREE, _IDLE, _WORKING, _CHANGING, _WORKING_QUICKLY = range(5)


def digest_of(url: str) -> str:
    """Return what the files of all brokers of a ledger have in their names."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def mark_of(identity: bytes) -> bytes:
    """Return what is noted of a routing id that a worker chose itself, and nothing of one that a socket made up."""
    if is_automatic(identity):
        return b""
    return hashlib.sha256(identity).digest()[:_IDENTITY_BYTES]


def _head_of(address: str) -> bytes:
    return hashlib.sha256(address.encode()).digest()


class HandedOut:
    """The record of a living broker. Without a file it is kept for nobody."""

    def __init__(self, path: Path | None = None, memory: mmap.mmap | None = None, fd: int = -1) -> None:
        self._path = path
        self._memory = memory
        self._fd = fd
        self._slots: dict[str, int] = {}
        self._next = 0
        self._left: deque[tuple[float, int]] = deque()

    @classmethod
    def create(cls, folder: Path, digest: str, address: str = "") -> "HandedOut":
        """Make the file of this broker; without room for it, go without."""
        name = f"{digest}-{secrets.token_hex(8)}"
        hidden, path = folder / f".{PREFIX}{name}", folder / f"{PREFIX}{name}"
        try:
            fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return cls()
        try:
            os.ftruncate(fd, _SIZE_BYTES)
            # Locked before it can be found: nobody takes it for that of a dead broker.
            fcntl.flock(fd, fcntl.LOCK_EX)
            memory = mmap.mmap(fd, _SIZE_BYTES)
            memory[:_HEAD_BYTES] = _head_of(address)
            hidden.rename(path)
        except OSError:
            os.close(fd)
            hidden.unlink(missing_ok=True)
            return cls()
        return cls(path, memory, fd)

    def close(self) -> None:
        """End in order: nothing of this broker is left to the next one."""
        if self._path is not None and self._memory is not None:
            self._path.unlink(missing_ok=True)
            self._memory.close()
            os.close(self._fd)
            self._path = self._memory = None

    def add(self, worker_id: str, now_s: float, identity: bytes = b"") -> None:
        """Begin the record of an old worker, which has nothing yet."""
        at = self._free_slot(now_s)
        said = worker_id.encode()
        if self._memory is None or at is None or len(said) > _WORKER_BYTES:
            return
        self._slots[worker_id] = at
        self._memory[at + _WORKER : at + _IDENTITY] = said.ljust(_WORKER_BYTES, b"\0")
        self._memory[at + _IDENTITY : at + _SLOT_BYTES] = mark_of(identity).ljust(_IDENTITY_BYTES, b"\0")
        self._mark(at, _IDLE)

    def give(self, worker_id: str, job_id: int, token: int, *, quick: bool) -> None:
        """Note it before it is sent. `quick`: this worker answers within milliseconds, and the job may run again."""
        at = self._slots.get(worker_id)
        if at is not None and self._memory is not None:
            self._mark(at, _CHANGING)
            _I64.pack_into(self._memory, at + _JOB, job_id)
            _I64.pack_into(self._memory, at + _TOKEN, token)
            self._mark(at, _WORKING_QUICKLY if quick else _WORKING)

    def take(self, worker_id: str) -> None:
        """Note that its reply has come."""
        if (at := self._slots.get(worker_id)) is not None:
            self._mark(at, _IDLE)

    def remove(self, worker_id: str, now_s: float) -> None:
        if (at := self._slots.pop(worker_id, None)) is not None:
            self._left.append((now_s, at))

    def _mark(self, at: int, state: int) -> None:
        if self._memory is not None:
            _I64.pack_into(self._memory, at + _STATE, state)

    def _free_slot(self, now_s: float) -> int | None:
        if self._left and now_s - self._left[0][0] > REUSE_AFTER_S:
            at = self._left.popleft()[1]
            self._mark(at, _FREE)
            return at
        if self._next >= MAX_WORKERS:
            return None
        self._next += 1
        return _HEAD_BYTES + (self._next - 1) * _SLOT_BYTES


@dataclass(eq=False)
class Estate:
    """What a dead broker left. It is removed when all of it is settled; before that, the next broker finds it again."""

    path: Path
    fd: int
    unsettled: set[str] = field(default_factory=set)
    is_kept: bool = False
    """Only a broker at the address of the dead one can find out more about it."""

    def settled(self, worker_id: str) -> None:
        self.unsettled.discard(worker_id)
        if self.unsettled:
            return
        if self.is_kept:
            self.leave()
        else:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Leave the rest to the next broker."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Abandoned:
    """An old worker whose broker died."""

    worker_id: str
    working_on: tuple[int, int] | None
    """The job and the token that it was given last, if its reply had not come. All else never reached it, or its reply
    was lost."""
    estate: Estate
    is_quick: bool = False
    """It answered within milliseconds before, and may do that job again."""
    is_near: bool = False
    """Its broker listened at the address of the present one, so that it comes back to this one."""
    mark: bytes = b""
    """Of its routing id; see `mark_of`."""
    is_given_up: bool = False
    """No reply of it will come."""

    @property
    def may_be_given_up(self) -> bool:
        """Return whether there can be evidence that its reply will not come, before the busy timeout."""
        return self.working_on is not None and (self.is_quick or self.is_near)


def find_abandoned(folder: Path, digest: str, address: str = "", known: Container[Path] = ()) -> list[Abandoned]:
    """Return the old workers of all brokers of this ledger that died on this host, except those in `known` files.
    `address` is our own."""
    found: list[Abandoned] = []
    for path in folder.glob(f"{PREFIX}{digest}-*"):
        with contextlib.suppress(OSError):
            found += [] if path in known else _abandoned_in(path, address)
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_old(path)
    return found


class Heir:
    """A living broker: it finds what others leave that die."""

    def __init__(self, folder: Path, digest: str, address: str) -> None:
        self._folder = folder
        self._digest = digest
        self._address = address
        self._estates: dict[Path, Estate] = {}

    def find(self) -> list[Abandoned]:
        """Return the old workers of brokers that died since the last look."""
        found = find_abandoned(self._folder, self._digest, self._address, self._estates)
        self._estates |= {one.estate.path: one.estate for one in found}
        return found

    def leave(self) -> None:
        """Leave to the next broker what is not settled."""
        for estate in self._estates.values():
            estate.leave()


def _remove_if_old(path: Path) -> None:
    """Remove what a dead broker of any ledger left long ago: its jobs were settled by the busy timeout since."""
    if time.time() - path.lstat().st_mtime > FORGET_AFTER_S:
        os.close(_locked(path))
        path.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """Open the file of a dead broker, and lock it; OSError if its broker lives or it is no such file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        # Others could write into the folder: only what we wrote ourselves counts.
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size != _SIZE_BYTES:
            raise OSError(f"{path} is no record of a broker")
        # Its broker lives if this fails.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _abandoned_in(path: Path, address: str) -> list[Abandoned]:
    fd = _locked(path)
    said = os.pread(fd, _SIZE_BYTES, 0)
    is_near = said[:_HEAD_BYTES] == _head_of(address)
    estate = Estate(path, fd)
    found = []
    for at in range(_HEAD_BYTES, len(said), _SLOT_BYTES):
        (state,) = _I64.unpack_from(said, at + _STATE)
        if state not in (_IDLE, _WORKING, _WORKING_QUICKLY):
            # Killed in the middle of a change: nobody knows what it had.
            continue
        worker_id = said[at + _WORKER : at + _IDENTITY].rstrip(b"\0").decode("ascii", "replace")
        mark = said[at + _IDENTITY : at + _SLOT_BYTES]
        (job_id,), (token,) = _I64.unpack_from(said, at + _JOB), _I64.unpack_from(said, at + _TOKEN)
        working_on = None if state == _IDLE else (job_id, token)
        found.append(Abandoned(worker_id, working_on, estate, state == _WORKING_QUICKLY, is_near, mark))
    estate.unsettled |= {one.worker_id for one in found}
    estate.is_kept = any(one.working_on is not None and not one.may_be_given_up for one in found)
    if not found:
        estate.close()
    return found
