"""Bound the memory of a runner's room for the job that is in it.

The kernel counts what the room's processes allocate from then on: what they share with the nursery is not theirs. A job
over the limit is killed with all that it started, and `oom.py` proves it.
"""

from pathlib import Path

from unstuck.runner import cgroups
from unstuck.runner.rooms import UNLIMITED


class MemoryLimits:
    """Sets the limit of rooms, and remembers it: a job without a limit after one without costs a look, no more."""

    def __init__(self) -> None:
        self._set: dict[str, int] = {}
        self._without: set[str] = set()
        """Rooms in which the kernel bounds no memory."""

    def set_memory_limit(self, room: str, limit_bytes: int | None) -> bool:
        """Set or clear (None) the limit of a room (`RunnerBorn.room`); False where the kernel does not enforce it.

        False too where the runner is larger already: the kernel would kill it at once for what earlier jobs left."""
        if self._set.get(room) == limit_bytes:
            return True
        if room in self._without:
            return False
        group = Path(room)
        if limit_bytes is None:
            return self._clear(group)
        if not room or not (group / "memory.max").exists():
            self._without.add(room)
            return False
        if (cgroups.counter(group / "memory.stat", "anon") or 0) > limit_bytes:
            self._clear(group)
            return False
        cgroups.write(group / "memory.swap.max", "0")
        taken = cgroups.write(group / "memory.max", str(limit_bytes))
        if taken:
            self._set[room] = limit_bytes
        return taken

    def _clear(self, group: Path) -> bool:
        self._set.pop(str(group), None)
        cgroups.write(group / "memory.swap.max", UNLIMITED)
        return cgroups.write(group / "memory.max", UNLIMITED)

    def forget(self, room: str) -> None:
        """The runner is gone, and its room with it."""
        self._set.pop(room, None)
        self._without.discard(room)
