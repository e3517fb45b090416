"""Keep the clocks of the simulated machines, and show the product the clock of the machine on which it runs just now.

Virtual time is true time. A machine knows two clocks of its own: seconds since its boot, which nobody can set, and the
wall clock, which operators and time servers step. `install` replaces the clocks of this Python process; it is for
processes that do nothing else.
"""

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

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
    _replace(host, "process_state", lambda machine, pid, started: machine.look(pid, started))
    # Every verdict is logged by the product, and told better by the story of the run.
    logging.disable(logging.CRITICAL)


def _replace(module: object, name: str, ask: Callable[..., Any]) -> None:
    real = getattr(module, name)
    setattr(module, name, lambda *args: ask(here[-1], *args) if here else real(*args))


MAX_EVENTS = 2_000_000
"""A run that needs more than this has a loop that does not let time pass."""

Act = Callable[..., None]


class Scheduler:
    """Virtual time, and what happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.main = getcurrent()
        """Where events happen; tasks go back to it when they wait."""
        self._finished = False
        self.events = 0
        self.current: Task | None = None
        """The task that runs just now; None while an event happens that belongs to no task."""

    def at(self, when_s: float, act: Act, *args: Any) -> None:
        """Call `act` at this time, after everything that was put there before."""
        now_s = self.now_s
        heapq.heappush(self._queue, (when_s if when_s > now_s else now_s, next(self._numbers), act, args))

    def after(self, delay_s: float, act: Act, *args: Any) -> None:
        heapq.heappush(self._queue, (self.now_s + max(delay_s, 0.0), next(self._numbers), act, args))

    def run(self, until_s: float) -> None:
        """Let events happen until this time, or until `finish`."""
        assert getcurrent() is self.main, "tasks run inside of events"
        queue, take = self._queue, heapq.heappop
        while queue and not self._finished and queue[0][0] <= until_s:
            self.now_s, _, act, args = take(queue)
            self.events += 1
            if self.events > MAX_EVENTS:
                raise RuntimeError(f"{MAX_EVENTS} events and no end: something spins at {self.now_s:.3f} s")
            act(*args)
        if not self._finished:
            self.now_s = max(self.now_s, until_s)

    def finish(self) -> None:
        """End the run after the present event."""
        self._finished = True


class Process:
    """What is frozen and killed as one: a worker with its threads, a reaper, a client, a runner."""

    def __init__(self, hub: Scheduler, name: str, machine: Machine, pid: int) -> None:
        self.hub = hub
        self.name = name
        self.machine = machine
        self.pid = pid
        self.started = f"{pid}@{hub.now_s:.6f}"
        self.alive = True
        self._frozen = 0
        self._tasks: list[Task] = []
        self._waiting: list[tuple[Act, tuple[Any, ...]]] = []

    @property
    def frozen(self) -> bool:
        return self._frozen > 0

    @property
    def well(self) -> bool:
        return self.alive and not self._frozen

    def spawn(self, name: str, body: Act) -> "Task":
        """Begin a task now, after the present event."""
        self._tasks = [task for task in self._tasks if not task.over]
        task = Task(self, name, body)
        self._tasks.append(task)
        self.hub.at(self.hub.now_s, task.begin)
        return task

    def freeze(self) -> None:
        self._frozen += 1

    def thaw(self) -> None:
        """Go on where it stood; what should have happened meanwhile happens at once."""
        self._frozen -= 1
        if self._frozen == 0 and self.alive:
            waiting, self._waiting = self._waiting, []
            for act, args in waiting:
                # Asked again then: it may be frozen anew by an earlier one of them.
                self.hub.at(self.hub.now_s, self.when_well, act, *args)

    def kill(self) -> None:
        """End all tasks where they stand."""
        if not self.alive:
            return
        self.alive = False
        self._waiting = []
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.end()

    def when_well(self, act: Act, *args: Any) -> None:
        """Do this now, or at the end of the freeze; never after the death."""
        if not self.alive:
            return
        if self._frozen:
            self._waiting.append((act, args))
        else:
            act(*args)


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, name: str, body: Act) -> None:
        self.process = process
        self.name = name
        self._body = body
        self._hub = process.hub
        self._greenlet: greenlet | None = greenlet(self._run, process.hub.main)
        self._naps = 0
        self._napping = False
        self._key: object = None

    @property
    def over(self) -> bool:
        return self._greenlet is None

    def begin(self) -> None:
        self.process.when_well(self._switch, None)

    def sleep(self, delay_s: float) -> None:
        """Suspend for this long by true time."""
        self.wait(delay_s)

    def wait(self, patience_s: float | None, key: object = None) -> Any:
        """Suspend until `wake` with this key, or for this long.

        Return what it was woken with, None when the time was over."""
        assert getcurrent() is self._greenlet, "a task waits only for itself"
        self._naps += 1
        self._napping, self._key = True, key
        if patience_s is not None:
            self._hub.after(patience_s, self._rouse, self._naps, None)
        given = self._hub.main.switch()
        if not self.process.alive:
            raise GreenletExit
        return given

    def wake(self, value: Any = True, key: object = None) -> None:
        """End the present wait, if it is for this key."""
        if self._napping and key is self._key:
            self._hub.at(self._hub.now_s, self._rouse, self._naps, value)

    def resume(self, value: Any, key: object) -> None:
        """End the present wait at once, if it is for this key; called by events alone."""
        if self._napping and key is self._key:
            self._rouse(self._naps, value)

    def end(self) -> None:
        one, self._greenlet = self._greenlet, None
        if one is None or one.dead or not one:
            return
        if one is getcurrent():
            raise GreenletExit
        one.parent = getcurrent()
        one.throw(GreenletExit)

    def _rouse(self, nap: int, value: Any) -> None:
        # Most of these come for a wait that ended long ago: an answer came within its deadline.
        if not self._napping or nap != self._naps:
            return
        process = self.process
        if not process.well:
            process.when_well(self._rouse, nap, value)
            return
        self._napping = False
        self._switch(value)

    def _switch(self, value: Any) -> None:
        one = self._greenlet
        if one is None or one.dead:
            return
        self._hub.current = self
        here.append(self.process.machine)
        try:
            one.switch(value)
        finally:
            here.pop()
            self._hub.current = None

    def _run(self, *_: Any) -> None:
        try:
            self._body()
        except GreenletExit:
            pass
        finally:
            self._greenlet = None


class Pause:
    """An event that is never set: who waits for it lets virtual time pass."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def wait(self, timeout_s: float) -> bool:
        task = self._process.hub.current
        assert task is not None
        if timeout_s > 0:
            task.sleep(timeout_s)
        return False

    def is_set(self) -> bool:
        return False


class NoMailbox:
    """A mailbox for loops that are called step by step: they answer their caller and post nothing."""

    def thread(self, what: str, run: Callable[[], None]) -> None:
        """Begin nothing."""

    def post(self, message: Any) -> None:
        raise AssertionError(f"nobody reads {message!r}")
