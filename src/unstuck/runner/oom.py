"""Notice that the kernel killed for want of memory, so that a death can be told from a plain SIGKILL."""

from pathlib import Path

WINDOW_S = 1.0
_COUNTER = "oom_kill"


class OomWatch:
    """Counts the kernel's out-of-memory kills: in our own memory cgroup where there is one, else on the host."""

    def __init__(self, source: Path | None = None) -> None:
        self._source = source or _find()
        self._before = self._latest = self._count()
        self._looked_s = 0.0

    def look(self, now_s: float) -> None:
        """Let kills grow old: those of more than a moment ago cannot be the cause of a death seen now.

        A moment is one to two windows: a large process needs some time to die of it."""
        if now_s - self._looked_s >= WINDOW_S:
            self._looked_s = now_s
            self._before, self._latest = self._latest, self._count()

    def struck(self) -> bool:
        """Say whether there was a kill just now, and take it as explained."""
        if self._count() <= self._before:
            return False
        self._before += 1
        return True

    def _count(self) -> int:
        if self._source is None:
            return 0
        try:
            for line in self._source.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == _COUNTER:
                    return int(value)
        except (OSError, ValueError):
            pass
        return 0


def _find() -> Path | None:
    candidates = [*_of_cgroups(), Path("/proc/vmstat")]
    return next((file for file in candidates if _has_counter(file)), None)


def _of_cgroups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if number == "0":
            found += [Path("/sys/fs/cgroup", inside, "memory.events")]
        elif "memory" in controllers.split(","):
            found += [Path("/sys/fs/cgroup/memory", inside, "memory.oom_control")]
    return found


def _has_counter(file: Path) -> bool:
    try:
        return any(line.startswith(f"{_COUNTER} ") for line in file.read_text().splitlines())
    except OSError:
        return False
