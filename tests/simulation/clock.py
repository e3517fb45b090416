"""Keep the clocks of the simulated machines, and show the product the clock of the machine on which it runs just now.

Virtual time is true time. A machine knows two clocks of its own: seconds since its boot, which nobody can set, and the
wall clock, which operators and time servers step. `install` replaces the clocks of this Python process; it is for
processes that do nothing else.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog  # noqa: F401 - loaded by the first log line otherwise, and importing it draws random numbers

from unstuck import host
from unstuck.domain.liveness import Process as Presence

EPOCH_S = 1_700_000_000.0
"""The wall clock at the beginning of every run."""


class VirtualTime(Protocol):
    """What true time is read from."""

    now_s: float


@dataclass
class Machine:
    """A host with its clocks. In a container the boot id and the name may be its own."""

    name: str
    time: VirtualTime
    boot_id: str = ""
    booted_s: float = -1_000.0
    """When it was started, in true time."""
    step_s: float = 0.0
    """How far the wall clock was set from the truth."""
    boot_step_s: float = 0.0
    """How far the clock that serves as the clock of leases was moved: a server's clock, never that of one host."""
    look: Callable[[int, str], Presence] = field(default=lambda pid, started: Presence.UNKNOWN)

    def wall_s(self) -> float:
        return EPOCH_S + self.time.now_s + self.step_s

    def boottime_s(self) -> float:
        return self.time.now_s - self.booted_s + self.boot_step_s


here: list[Machine] = []
"""The machines that are stood on; the last one counts."""


@contextmanager
def stand_on(machine: Machine) -> Iterator[None]:
    """Let the product see the clocks and names of this machine."""
    here.append(machine)
    try:
        yield
    finally:
        here.pop()


def install() -> None:
    """Replace the clocks and the names of this Python process by those of the machine that is stood on."""
    real_s, real_boottime_s = time.time, host.boottime_s
    # These are asked for more often than all others together.
    time.time = lambda: here[-1].wall_s() if here else real_s()
    host.boottime_s = lambda: here[-1].boottime_s() if here else real_boottime_s()
    _replace(time, "monotonic", Machine.boottime_s)
    # What took long by the processor's clock is looked at differently: nothing takes long here.
    _replace(time, "thread_time", lambda machine: 0.0)
    _replace(host, "boot_id", lambda machine: machine.boot_id)
    _replace(host, "hostname", lambda machine: machine.name)
    _replace(host, "pid_namespace", lambda machine: f"pid:[{machine.name}]")
    _replace(host, "look", lambda machine, pid, started: machine.look(pid, started))
    # Every verdict is logged by the product, and told better by the story of the run.
    logging.disable(logging.CRITICAL)


def _replace(module: object, name: str, ask: Callable[..., Any]) -> None:
    real = getattr(module, name)
    setattr(module, name, lambda *args: ask(here[-1], *args) if here else real(*args))
