"""Counts that the processes of one server share: memory that is there before they are forked.

No lock is taken. Two processes that count for one caller in the same microsecond may count one request less, which no
limit depends on.
"""

import mmap
import secrets
import zlib
from dataclasses import dataclass, field

SLOTS = 16_384
"""Callers are told apart by a hash into these; two in one slot share their limits."""
_DOUBLE_BYTES = 8


class Doubles:
    """Rows of numbers in shared memory."""

    def __init__(self, rows: int) -> None:
        self._memory = mmap.mmap(-1, rows * SLOTS * _DOUBLE_BYTES)
        self._values = memoryview(self._memory).cast("d")

    def get(self, row: int, slot: int) -> float:
        return self._values[row * SLOTS + slot]

    def put(self, row: int, slot: int, value: float) -> None:
        self._values[row * SLOTS + slot] = value

    def clear(self, row: int) -> None:
        self._values[row * SLOTS : (row + 1) * SLOTS] = memoryview(bytes(SLOTS * _DOUBLE_BYTES)).cast("d")


class SharedBuckets:
    """Buckets of callers, as `RateLimiter` keeps them: what is left, and since when. An unused bucket is full."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._doubles = Doubles(2)

    def get(self, who: str, full: float) -> tuple[float, float]:
        slot = slot_of(self._salt, who)
        at_s = self._doubles.get(1, slot)
        return (full, 0.0) if at_s == 0.0 else (self._doubles.get(0, slot), at_s)

    def put(self, who: str, left: float, at_s: float) -> None:
        slot = slot_of(self._salt, who)
        self._doubles.put(0, slot, left)
        self._doubles.put(1, slot, at_s)


class OpenRequests:
    """How many requests each process has open, of each caller; each writes only its own row."""

    def __init__(self, processes: int, salt: bytes) -> None:
        self._processes = processes
        self._salt = salt
        self._doubles = Doubles(processes)
        self._totals = Doubles(processes)

    def elsewhere(self, process: int, who: str) -> tuple[int, int]:
        """Return how many requests all other processes have open, and how many of them are this caller's."""
        slot = slot_of(self._salt, who)
        others = [other for other in range(self._processes) if other != process]
        total = sum(self._totals.get(other, 0) for other in others)
        return int(total), int(sum(self._doubles.get(other, slot) for other in others))

    def note(self, process: int, who: str, change: int) -> None:
        slot = slot_of(self._salt, who)
        self._doubles.put(process, slot, self._doubles.get(process, slot) + change)
        self._totals.put(process, 0, self._totals.get(process, 0) + change)

    def clear(self, process: int) -> None:
        """Forget what a process that is gone had open."""
        self._doubles.clear(process)
        self._totals.clear(process)


@dataclass(frozen=True)
class ServerGroup:
    """What the processes of one server have in common. Made before they are forked."""

    processes: int = 1
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(8))

    def __post_init__(self) -> None:
        for name in ("rates", "strangers", "mistakes"):
            object.__setattr__(self, name, SharedBuckets(self.salt) if self.processes > 1 else None)
        shared = OpenRequests(self.processes, self.salt) if self.processes > 1 else None
        object.__setattr__(self, "open_requests", shared)

    rates: SharedBuckets | None = field(init=False)
    strangers: SharedBuckets | None = field(init=False)
    mistakes: SharedBuckets | None = field(init=False)
    open_requests: OpenRequests | None = field(init=False)


@dataclass(frozen=True)
class Member:
    """One process of a server."""

    group: ServerGroup = field(default_factory=ServerGroup)
    number: int = 0

    @property
    def leads(self) -> bool:
        """Return whether this process does what only one of them needs to do: watch over workers, send alerts."""
        return self.number == 0


def slot_of(salt: bytes, who: str) -> int:
    return zlib.crc32(who.encode(), zlib.crc32(salt)) % SLOTS
