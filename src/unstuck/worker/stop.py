"""End a job that must not go on, step by step: note its stack, ask it, ask again, kill its runner.

Only that runner is touched. An async job on a shared loop is cancelled, and the loop killed only if that does not help.
"""

import math

from unstuck.domain.autopsy import DeathKind
from unstuck.domain.endings import Outcome
from unstuck.domain.units import brief
from unstuck.runner.status_page import StatusPage
from unstuck.worker.held_jobs import HeldJob, Stop
from unstuck.worker.slots import Slot

NOTING_S = 0.5
"""So long the pulse of a runner is given to write its stacks down. With many busy threads it waits for its turn."""
MEMORY_GRACE_S = 0.1
MEMORY_NOTING_S = 0.05
"""A process that grows without bounds gets time for its stack, and for nothing else."""

AT_ONCE = frozenset({DeathKind.LEASE, DeathKind.SHARED, DeathKind.UNKNOWN})
"""The job may be somebody else's by now: courtesy would mean that it runs twice."""


class Stopper:
    def __init__(self, status_page: StatusPage, grace_s: float) -> None:
        self._status_page = status_page
        self._grace_s = grace_s

    def begin(self, slot: Slot, held_job: HeldJob, fate: Outcome, kind: DeathKind, now_s: float) -> None:
        """Seal the fate of a job that a runner is in, and take the first step."""
        stop = Stop(fate, kind, now_s, kill_at_s=now_s + self._grace(kind))
        others = [other.stop for other in slot.jobs.values() if other is not held_job and other.stop is not None]
        held_job.stop = stop
        slot.look_at_s = now_s
        if kind in AT_ONCE and not slot.is_async:
            stop.kill_at_s = now_s
            return
        woken = slot.runner.wake()
        if woken:
            # Stopped, it could neither say where it stood nor end in order.
            stop.actions.append("SIGCONT, since its process was stopped")
        if kind is DeathKind.OPERATOR:
            # Whoever cancels a job knows why; for all else the stack is the answer to it.
            self._cancel(slot, held_job, stop)
            return
        if not others:
            slot.runner.stacks.forget()
        # Asked once for all whose time is over at the same moment.
        if not woken and (any(other.stack_until_s for other in others) or slot.runner.stacks.ask()):
            stop.stack_until_s = now_s + (MEMORY_NOTING_S if kind is DeathKind.MEMORY_LIMIT else NOTING_S)
        else:
            # One that was stopped shall not move before it is seen where it stood.
            self._note_by_signal(slot, held_job, stop)

    def _grace(self, kind: DeathKind) -> float:
        return MEMORY_GRACE_S if kind is DeathKind.MEMORY_LIMIT else self._grace_s

    def _note(self, slot: Slot, held_job: HeldJob, stop: Stop, now_s: float) -> None:
        """Go on as soon as the pulse has written the stacks down, or has taken too long."""
        if slot.runner.stacks.told:
            stop.stack_until_s = 0.0
            stop.actions.append("stack noted")
            self._cancel(slot, held_job, stop)
        elif now_s >= stop.stack_until_s:
            # C code holds the GIL, or the machine is very busy.
            stop.stack_until_s = 0.0
            self._note_by_signal(slot, held_job, stop)
        else:
            return
        if stop.kind is not DeathKind.MEMORY_LIMIT:
            # From now on it can end in order, and has all of its time for that.
            stop.begun_s, stop.kill_at_s = now_s, now_s + self._grace_s
        elif slot.runner.stacks.told:
            stop.kill_at_s = now_s

    def _note_by_signal(self, slot: Slot, held_job: HeldJob, stop: Stop) -> None:
        asks = not slot.is_async and stop.kind is not DeathKind.MEMORY_LIMIT
        if asks:
            self._status_page.ask_to_stop(slot.index, held_job.token)
        silent = slot.silent
        noted = slot.runner.interrupt(silent=silent) if asks else slot.runner.dump_stack(silent=silent)
        stop.actions.append("stack noted" if noted else "its stack could not be noted")
        if asks:
            stop.sigterms = 1
            stop.actions.append("SIGTERM")
        self._cancel(slot, held_job, stop)

    def _cancel(self, slot: Slot, held_job: HeldJob, stop: Stop) -> None:
        if slot.is_async:
            slot.runner.cancel(held_job.token)
            stop.actions.append("cancelled on its event loop")

    def press(self, slot: Slot, held_job: HeldJob, now_s: float) -> bool:
        """Take the next step if it is time; True when nothing is left but to kill the runner."""
        stop = held_job.stop
        if stop is None or not stop.kill_at_s:
            return False
        if stop.stack_until_s:
            self._note(slot, held_job, stop, now_s)
        if now_s >= stop.kill_at_s:
            stop.actions.append(f"SIGKILL after {brief(now_s - stop.begun_s)}" if stop.sigterms else "SIGKILL")
            stop.kill_at_s = 0.0
            return True
        if not stop.stack_until_s and now_s >= self._next_s(slot, stop):
            self._status_page.ask_to_stop(slot.index, held_job.token)
            slot.runner.terminate()
            stop.sigterms += 1
            stop.actions.append("SIGTERM" if stop.sigterms == 1 else "SIGTERM again")
        return False

    def next_step_s(self, slot: Slot, held_job: HeldJob) -> float:
        """Give when to look at this job again."""
        stop = held_job.stop
        if stop is None or not stop.kill_at_s:
            return math.inf
        return min(stop.kill_at_s, stop.stack_until_s or self._next_s(slot, stop))

    def _next_s(self, slot: Slot, stop: Stop) -> float:
        """Give when its process is sent SIGTERM next; never where that is not one of the steps."""
        if slot.is_async or stop.kind is DeathKind.MEMORY_LIMIT:
            return math.inf
        if stop.sigterms == 0:
            return stop.begun_s
        # Once more half way: the first one only asked an event loop, where the job runs one of its own.
        return stop.begun_s + self._grace_s / 2 if stop.sigterms == 1 else math.inf
