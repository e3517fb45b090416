"""A wait status in words and as an autopsy, and our own exit codes."""

import os
import resource
import signal

import msgspec

from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.liveness import Detector
from unstuck.domain.units import brief


def exit_cause(status: int | None, why: str) -> tuple[str, int | None, int | None]:
    """Give (words, exit code, signal) of a wait status; None where there was no process to wait for."""
    reason = f": {why}" if why else ""
    if status is None:
        return why or "it could not be started", None, None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal_name(number)} (signal {number}){reason}", None, number
    code = os.waitstatus_to_exitcode(status)
    return f"exited with code {code}{reason}", code, None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal"


WATCHDOG_EXIT = 70
"""The code of a worker whose own watchdog found it alive but doing nothing."""
LEASH_EXIT = 143
_WORDS = {
    WATCHDOG_EXIT: "its own watchdog found it alive but doing nothing",
    LEASH_EXIT: "its supervisor was gone before it began",
}
OOM = "probably the kernel, for want of memory (its count of such kills rose just then, but others share that count)"


class Exit(msgspec.Struct, frozen=True):
    """What the kernel tells the parent of a process that ended."""

    status: int
    lived_s: float
    max_rss_bytes: int = 0
    """Its highest memory, or that of the largest child that it had waited for."""
    cpu_s: float = 0.0
    why: str = ""
    """What is known beside the status."""

    @property
    def code(self) -> int:
        """The exit code, or minus the signal."""
        return os.waitstatus_to_exitcode(self.status)

    def __str__(self) -> str:
        why = self.why or _WORDS.get(self.code, "")
        used = f"peak memory {self.max_rss_bytes / 1e6:.0f} MB, CPU {brief(self.cpu_s)}"
        how = exit_cause(self.status, "")[0]
        return f"{how} after {brief(self.lived_s)}{f': {why}' if why else ''}; {used}"

    def autopsy(self) -> Autopsy:
        """Give what the parent of a dead worker knows, for whoever asks why."""
        killed = os.WIFSIGNALED(self.status)
        kind = DeathKind.SIGNAL if killed else DeathKind.EXIT
        if self.code == WATCHDOG_EXIT:
            kind = DeathKind.WATCHDOG
        return Autopsy(
            kind=DeathKind.OUT_OF_MEMORY if self.why == OOM else kind,
            summary=str(self),
            detector=Detector.SUPERVISOR,
            signal=signal_name(os.WTERMSIG(self.status)) if killed else None,
            exit_code=None if killed else self.code,
            sure=self.why != OOM,
            doubt=self.why if self.why == OOM else "",
            max_memory_bytes=self.max_rss_bytes or None,
            cpu_s=round(self.cpu_s, 3),
            ran_s=round(self.lived_s, 3),
        )


def exit_of(status: int, usage: resource.struct_rusage, lived_s: float, why: str = "") -> Exit:
    """Put together what `os.wait4` gave."""
    return Exit(status, lived_s, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime, why)


def was_sigkilled(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
