"""A record in shared memory of the request that each old worker has. If the broker is killed, the next one on this host
reads it.

The broker prefetches jobs for a quick worker. Only the broker knows which of them it sent, and an old worker cannot
report it. The memory outlives the process. The broker holds a lock on it, which the kernel releases when the process
ends, so a free lock means that the broker is dead.
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
"""Further ones are not recorded. If the broker is killed, jobs claimed for them wait for `mdp.busy_timeout`."""
REUSE_AFTER_S = 60.0
"""How long the slot of a worker that left is kept, which is until its end is in the ledger."""

FORGET_AFTER_S = 86_400.0
"""Age at which the record of a dead broker is removed if no other broker of its ledger has settled it."""

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
    """Return the part of the file name that all brokers of a ledger share."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def mark_of(identity: bytes) -> bytes:
    """Return a digest of a routing id that the worker chose, and nothing for one that the socket made up."""
    if is_automatic(identity):
        return b""
    return hashlib.sha256(identity).digest()[:_IDENTITY_BYTES]


def _head_of(address: str) -> bytes:
    return hashlib.sha256(address.encode()).digest()


class HandedOut:
    """The record of a living broker. Without a file it records nothing."""

    def __init__(self, path: Path | None = None, memory: mmap.mmap | None = None, fd: int = -1) -> None:
        self._path = path
        self._memory = memory
        self._fd = fd
        self._slots: dict[str, int] = {}
        self._next = 0
        self._left: deque[tuple[float, int]] = deque()

    @classmethod
    def create(cls, folder: Path, digest: str, address: str = "") -> "HandedOut":
        """Create the file of this broker. If that fails, return a record without a file."""
        name = f"{digest}-{secrets.token_hex(8)}"
        hidden, path = folder / f".{PREFIX}{name}", folder / f"{PREFIX}{name}"
        try:
            fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return cls()
        try:
            os.ftruncate(fd, _SIZE_BYTES)
            # Locked before it can be found, so that no broker takes it for that of a dead one.
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
        """Remove the record, since a broker that shuts down leaves nothing to the next one."""
        if self._path is not None and self._memory is not None:
            self._path.unlink(missing_ok=True)
            self._memory.close()
            os.close(self._fd)
            self._path = self._memory = None

    def add(self, worker_id: str, now_s: float, identity: bytes = b"") -> None:
        """Start the slot of an old worker, which has no request yet."""
        at = self._free_slot(now_s)
        encoded = worker_id.encode()
        if self._memory is None or at is None or len(encoded) > _WORKER_BYTES:
            return
        self._slots[worker_id] = at
        self._memory[at + _WORKER : at + _IDENTITY] = encoded.ljust(_WORKER_BYTES, b"\0")
        self._memory[at + _IDENTITY : at + _SLOT_BYTES] = mark_of(identity).ljust(_IDENTITY_BYTES, b"\0")
        self._mark(at, _IDLE)

    def give(self, worker_id: str, job_id: int, token: int, *, quick: bool) -> None:
        """Record a request before it is sent. `quick`: the worker is fast, and the job may run again."""
        at = self._slots.get(worker_id)
        if at is not None and self._memory is not None:
            self._mark(at, _CHANGING)
            _I64.pack_into(self._memory, at + _JOB, job_id)
            _I64.pack_into(self._memory, at + _TOKEN, token)
            self._mark(at, _WORKING_QUICKLY if quick else _WORKING)

    def take(self, worker_id: str) -> None:
        """Record that its reply has come."""
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
class DeadBrokerRecord:
    """The record of a dead broker. It is removed when all its workers are settled."""

    path: Path
    fd: int
    unsettled: set[str] = field(default_factory=set)
    needs_same_address: bool = False
    """Only a broker at the address of the dead one can learn more about its workers."""

    def settled(self, worker_id: str) -> None:
        self.unsettled.discard(worker_id)
        if self.unsettled:
            return
        if self.needs_same_address:
            self.leave()
        else:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Close the file, and leave the rest to the next broker."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class AbandonedWorker:
    """An old worker whose broker died."""

    worker_id: str
    working_on: tuple[int, int] | None
    """Job and token of the last request sent to it, unless the reply came. Other jobs were never sent, or their replies
    were lost."""
    record: DeadBrokerRecord
    is_quick: bool = False
    """It answered within milliseconds before, and its job may run again."""
    is_same_address: bool = False
    """Its broker listened at the address of this one, so the worker comes back here."""
    mark: bytes = b""
    """Digest of its routing id; see `mark_of`."""
    is_given_up: bool = False
    """Its reply will not come."""

    @property
    def may_be_given_up(self) -> bool:
        """Return whether there can be evidence before the busy timeout that its reply will not come."""
        return self.working_on is not None and (self.is_quick or self.is_same_address)


def find_abandoned(folder: Path, digest: str, address: str = "", known: Container[Path] = ()) -> list[AbandonedWorker]:
    """Return the old workers of all brokers of this ledger that died on this host, except those in `known` files.
    `address` is our own."""
    found: list[AbandonedWorker] = []
    for path in folder.glob(f"{PREFIX}{digest}-*"):
        with contextlib.suppress(OSError):
            found += [] if path in known else _abandoned_in(path, address)
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_old(path)
    return found


class DeadBrokers:
    """Finds the records of dead brokers for a living one."""

    def __init__(self, folder: Path, digest: str, address: str) -> None:
        self._folder = folder
        self._digest = digest
        self._address = address
        self._records: dict[Path, DeadBrokerRecord] = {}

    def find(self) -> list[AbandonedWorker]:
        """Return the old workers of brokers that died since the last call."""
        found = find_abandoned(self._folder, self._digest, self._address, self._records)
        self._records |= {one.record.path: one.record for one in found}
        return found

    def leave(self) -> None:
        """Leave unsettled records to the next broker."""
        for record in self._records.values():
            record.leave()


def _remove_if_old(path: Path) -> None:
    """Remove an old record of a dead broker of any ledger. The busy timeout has settled its jobs."""
    if time.time() - path.lstat().st_mtime > FORGET_AFTER_S:
        os.close(_locked(path))
        path.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """Open and lock the record of a dead broker. Raise OSError if its broker lives, or if it is not a record."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        # Other users may write into the folder. Only our own files count.
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size != _SIZE_BYTES:
            raise OSError(f"{path} is no record of a broker")
        # This fails if its broker lives.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _abandoned_in(path: Path, address: str) -> list[AbandonedWorker]:
    fd = _locked(path)
    data = os.pread(fd, _SIZE_BYTES, 0)
    is_same_address = data[:_HEAD_BYTES] == _head_of(address)
    record = DeadBrokerRecord(path, fd)
    found = []
    for at in range(_HEAD_BYTES, len(data), _SLOT_BYTES):
        (state,) = _I64.unpack_from(data, at + _STATE)
        if state not in (_IDLE, _WORKING, _WORKING_QUICKLY):
            # The broker was killed in the middle of a change, so the request is unknown.
            continue
        worker_id = data[at + _WORKER : at + _IDENTITY].rstrip(b"\0").decode("ascii", "replace")
        mark = data[at + _IDENTITY : at + _SLOT_BYTES]
        (job_id,), (token,) = _I64.unpack_from(data, at + _JOB), _I64.unpack_from(data, at + _TOKEN)
        working_on = None if state == _IDLE else (job_id, token)
        found.append(AbandonedWorker(worker_id, working_on, record, state == _WORKING_QUICKLY, is_same_address, mark))
    record.unsettled |= {one.worker_id for one in found}
    record.needs_same_address = any(one.working_on is not None and not one.may_be_given_up for one in found)
    if not found:
        record.close()
    return found
