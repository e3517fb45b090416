"""Judge whether a SIGKILL came from a kernel that was out of memory, and how sure that is."""

from pathlib import Path
from typing import Literal

import msgspec

from unstuck.runner import cgroups

Scope = Literal["room", "cgroup", "host"]
NO_LIMIT_BYTES = 1 << 60
"""What version 1 gives as "no limit" is above this."""


class OomEvidence(msgspec.Struct, frozen=True):
    struck: bool
    sure: bool = False
    """It is not merely probable."""
    words: str = ""


class Kills(msgspec.Struct, frozen=True):
    """What was counted at the moment of a death."""

    scope: Scope
    """Whose kills these are: of the runner's own cgroup, of the one it shares with its worker, of the whole host."""
    kills: int
    """Fresh, and not taken as the explanation of another death."""
    deaths: int
    """Runners that SIGKILL ended at that moment, this one included."""
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    rss_bytes: int = 0
    """The most that the runner itself ever held."""


def judge(found: Kills) -> OomEvidence:
    """Say whether, how surely and why. Without a fresh kill it is a plain SIGKILL."""
    if found.kills <= 0:
        return OomEvidence(False)
    numbers = _numbers(found)
    if found.scope == "room":
        return OomEvidence(True, True, f"out of memory: the kernel killed it, by the count of its own cgroup{numbers}")
    if found.scope == "host":
        doubt = "the count is that of the whole host, so another process may have been the victim"
        return OomEvidence(True, False, f"probably out of memory: {_kills(found)} on this host; {doubt}{numbers}")
    here = f"out of memory: {_kills(found)} in the worker's cgroup"
    if found.kills == found.deaths:
        return OomEvidence(True, True, f"{here}{numbers}")
    ended = "1 runner was" if found.deaths == 1 else f"{found.deaths} runners were"
    return OomEvidence(True, False, f"probably {here}; but {ended} ended by SIGKILL{numbers}")


def _kills(found: Kills) -> str:
    return f"the kernel killed {'1 process' if found.kills == 1 else f'{found.kills} processes'} just then"


def _numbers(found: Kills) -> str:
    parts = [f"the runner held up to {_size(found.rss_bytes)}"] if found.rss_bytes else []
    if found.limit_bytes is not None and found.limit_bytes < NO_LIMIT_BYTES:
        peak = "" if found.peak_bytes is None else f" and once held {_size(found.peak_bytes)}"
        parts.append(f"its cgroup may hold {_size(found.limit_bytes)}{peak}")
    return f" ({', '.join(parts)})" if parts else ""


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MB"


WINDOW_S = 1.0
_COUNTER = "oom_kill"


class CounterWatch:
    """Counts kills since a moment ago. A moment is one to two windows: a large process takes some time to die."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._before = self._latest = self._count()

    def age(self) -> None:
        """Let kills grow old: those of more than a moment ago cannot be the cause of a death seen now."""
        self._before, self._latest = self._latest, self._count()

    def fresh(self) -> int:
        """Give how many kills of this moment explain no death yet."""
        return max(0, self._count() - self._before)

    def explained(self) -> None:
        """One of them explains a death, and no other."""
        self._before += 1
        self._latest = max(self._latest, self._before)

    def _count(self) -> int:
        return cgroups.read_counter(self._source, _COUNTER) or 0


class OomWatch:
    """Watches the counters for one fork server: those of rooms, of the cgroup that all share, and of the host."""

    def __init__(self, shared: Path | None, host: Path = Path("/proc/vmstat")) -> None:
        self._shared = shared
        """The file that counts for the cgroup that we and our runners share (`shared_counter`); None without one."""
        self._source = self._shared or host
        self._counter = CounterWatch(self._source)
        self._cgroups: dict[str, CounterWatch] = {}
        self._looked_s = 0.0

    def watch_cgroup(self, group: str) -> None:
        """Watch the room of a new runner, where it has one with a counter of its own."""
        if group:
            self._cgroups[group] = CounterWatch(Path(group) / "memory.events")

    def forget_cgroup(self, group: str) -> None:
        self._cgroups.pop(group, None)

    def look(self, now_s: float) -> None:
        """Let counts grow old; to be called often."""
        if now_s - self._looked_s >= WINDOW_S:
            self._looked_s = now_s
            for counter in (self._counter, *self._cgroups.values()):
                counter.age()

    def explain(self, group: str, deaths: int, max_rss_bytes: int) -> OomEvidence:
        """Judge one of `deaths` runners that SIGKILL ended just now. A kill that explains it explains no other."""
        cgroup = self._cgroups.get(group)
        counter = cgroup or self._counter
        place = Path(group) if cgroup else self._shared.parent if self._shared else None
        scope: Scope = "room" if cgroup else "cgroup" if self._shared else "host"
        limit_bytes, peak_bytes = (None, None) if place is None else memory_of(place)
        evidence = judge(Kills(scope, counter.fresh(), deaths, limit_bytes, peak_bytes, max_rss_bytes))
        if evidence.struck:
            counter.explained()
        return evidence


def shared_counter(proc: Path = cgroups.PROC) -> Path | None:
    """Find the counter of the memory cgroup that we are charged to: of version 1, or of version 2 here or above us."""
    v1 = cgroups.own("memory", proc)
    if v1 is not None and _counts(v1 / "memory.oom_control"):
        return v1 / "memory.oom_control"
    own, top = cgroups.own(proc=proc), cgroups.top(proc=proc)
    if own is None or top is None:
        return None
    for group in (own, *own.parents):
        # `local` counts our cgroup alone; without it the rooms and halls below are counted here too.
        for name in ("memory.events.local", "memory.events"):
            if _counts(group / name):
                return group / name
        if group == top:
            break
    return None


def memory_of(group: Path) -> tuple[int | None, int | None]:
    """Give the limit of a memory cgroup and the most that it ever held, where they are told."""
    for limit, peak in (("memory.max", "memory.peak"), ("memory.limit_in_bytes", "memory.max_usage_in_bytes")):
        if (group / limit).exists():
            return cgroups.read_number(cgroups.read_file(group / limit)), cgroups.read_number(
                cgroups.read_file(group / peak)
            )
    return None, None


def _counts(file: Path) -> bool:
    return cgroups.read_counter(file, _COUNTER) is not None
