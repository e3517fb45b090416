"""Judge from counters whether a SIGKILL came from a kernel that was out of memory."""

from typing import Literal

import msgspec

Scope = Literal["room", "cgroup", "host"]
NO_LIMIT_BYTES = 1 << 60
"""What version 1 gives as "no limit" is above this."""


class OomEvidence(msgspec.Struct, frozen=True):
    struck: bool
    sure: bool = False
    """Nobody else can have been the victim."""
    words: str = ""


class Kills(msgspec.Struct, frozen=True):
    """What was counted at the moment of a death."""

    scope: Scope
    """Whose kills these are: of the runner's own cgroup, of the one it shares with its worker, of the whole host."""
    kills: int
    """Fresh, and not taken as the explanation of another death."""
    deaths: int
    """Runners that SIGKILL ended at that moment, this one included."""
    strangers: int = 0
    """Processes in the shared cgroup that are neither the worker, its nursery nor a runner."""
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
    if found.strangers:
        others = "1 process that is" if found.strangers == 1 else f"{found.strangers} processes that are"
        doubt = f"the cgroup is shared with {others} no runner"
    elif found.kills != found.deaths:
        ended = "1 runner was" if found.deaths == 1 else f"{found.deaths} runners were"
        doubt = f"but {ended} ended by SIGKILL"
    else:
        return OomEvidence(
            True,
            True,
            f"out of memory: {_kills(found)} in the worker's cgroup, where only a runner can have been it{numbers}",
        )
    return OomEvidence(True, False, f"probably out of memory: {_kills(found)} in the worker's cgroup; {doubt}{numbers}")


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
