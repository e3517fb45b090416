"""Know the runners of this worker: who is in which slot, who is busy with what, who is free."""

import math
from collections import deque
from dataclasses import dataclass, field

from unstuck.runner.last_output import LastOutputFile
from unstuck.runner.status_page import StatusPage
from unstuck.worker.fork_client import ForkServerClient
from unstuck.worker.held_jobs import HeldJob
from unstuck.worker.limits import must_stop_at_s
from unstuck.worker.runner_process import RunnerProcess

FIRST_REST_S = 0.1
LONGEST_REST_S = 5.0
"""Runners that cannot even be started (no memory, no more processes) must not be asked for without a pause."""
FIRST_LOOK_S = 0.1
"""Most jobs are over before anybody has to look at them."""
MOST_INHERITED = 0.5
"""A job with a `memory_limit` begins in a process that uses no more than this share of it."""
FASTEST_GROWTH_BYTES_PER_S = 4e9
"""No process fills memory faster than this: one that was light a moment ago need not be weighed again."""
BLOCKED_LOOP_HOLDS_S = 3.0
"""A pulse comes every second at least, but for a busy machine."""
MAX_ALONE = 32
"""So many suspects run alone at once, each in a process of its own."""


def status_page_slots(slots: int) -> int:
    """Give how many slots the shared page of a worker needs: its own, one shared loop, and some for suspects."""
    return slots + 1 + min(slots, MAX_ALONE)


@dataclass(frozen=True, slots=True)
class BlockedLoop:
    """Who keeps an event loop from turning, as its process said last."""

    token: int
    """0 where it is not known who."""
    since_s: float
    heard_s: float
    told: bool = False
    """People heard of it."""

    @property
    def for_s(self) -> float:
        return self.heard_s - self.since_s

    def is_news(self, now_s: float) -> bool:
        """Say whether it is so still: while it lasts it is said with every pulse."""
        return now_s - self.heard_s < BLOCKED_LOOP_HOLDS_S


@dataclass(slots=True, eq=False)
class Slot:
    """A runner and the jobs that it was given, in order; a sync runner is in the first one."""

    runner: RunnerProcess
    is_async: bool
    jobs: dict[int, HeldJob] = field(default_factory=dict)
    to_send: list[HeldJob] = field(default_factory=list)
    since_s: float = 0.0
    """When the first job of a sync runner became the first."""
    opened_s: float = 0.0
    ready_s: float = 0.0
    """When its interpreter first gave a pulse: where runners are spawned, it imports the app before; 0 until then."""
    ended: int = 0
    pidfd: int | None = None
    gone_s: float | None = None
    """When we saw that it is gone, while its exit status is still to come."""
    retiring: bool = False
    alone: bool = False
    """It was opened for one suspect, and ends with it."""
    look_at_s: float = 0.0
    """When its jobs are looked at next; a new job brings it forward."""
    blocker: BlockedLoop | None = None
    room: str = ""
    """The cgroup in which its memory can be bounded; empty where there is none."""
    measure_at_s: float = 0.0
    memory_bytes: int = 0
    """When it was last weighed, with what it had started; 0 before."""
    inherited_bytes: int = 0
    inherited_s: float = 0.0
    """What its process weighed between two jobs, and when."""

    @property
    def slot(self) -> int:
        return self.runner.slot

    @property
    def shared(self) -> bool:
        """Many jobs at once are in it."""
        return self.is_async and not self.alone

    @property
    def silent(self) -> bool:
        """No Python code has run in its process for long: C code holds the GIL."""
        return any(hold.silent_since_s for hold in self.jobs.values())

    def outgrew(self, bound_bytes: float, now_s: float) -> bool:
        """Say whether its process is larger than that; it is weighed only if it could have become so."""
        if self.inherited_bytes + (now_s - self.inherited_s) * FASTEST_GROWTH_BYTES_PER_S > bound_bytes:
            self.inherited_bytes, self.inherited_s = self.runner.memory_bytes(), now_s
        return self.inherited_bytes > bound_bytes


class SlotTable:
    def __init__(self, bench: ForkServerClient, slots: int, trace: StatusPage) -> None:
        self.words: LastOutputFile | None = None
        """Where the last words of jobs are kept for others on this host."""
        self._bench = bench
        self._slots = slots
        self._trace = trace
        self._kill_at: dict[int, float] = {}
        self._idle: deque[Slot] = deque()
        self._busy_sync = 0
        self._async_jobs = 0
        self.crews: dict[int, Slot] = {}
        self.opened: list[Slot] = []
        """New since the floor last looked: to be watched by its selector."""
        self.loaded: list[Slot] = []
        """Those with something `to_send`."""
        self.rest_until_s = 0.0
        """No runner is opened before: the last ones died before they began anything."""
        self._stillborn = 0
        self._room_alone = range(slots + 1, trace.slots)
        """Slots behind the shared loop's: for suspects, one process each."""

    def start_failed(self, now_s: float) -> float:
        """Note a runner that died before it began anything; give how long to rest before the next one."""
        pause_s = min(FIRST_REST_S * 2.0 ** min(self._stillborn - 1, 10), LONGEST_REST_S) if self._stillborn else 0.0
        self._stillborn += 1
        self.rest_until_s = now_s + pause_s
        return pause_s

    def saw_life(self) -> None:
        """Note that a runner finished a job."""
        self._stillborn = 0

    def free(self) -> int:
        """Give how many more jobs may run at once."""
        return self._slots - self._busy_sync - self._async_jobs

    def ahead_room(self, depth: int, quick_since_s: float) -> int:
        """Give how many RUNNING jobs may still be queued behind others at the sync runners."""
        return sum(depth + 1 - len(crew.jobs) for crew in self._queues(depth, quick_since_s))

    def _queues(self, depth: int, quick_since_s: float) -> list[Slot]:
        """Give the sync runners that may be given more than they are in: not those busy with a long job."""
        if depth <= 0:
            return []
        return [
            crew
            for crew in self.crews.values()
            if not crew.is_async
            and 0 < len(crew.jobs) <= depth
            and crew.since_s >= quick_since_s
            and crew.gone_s is None
            and not crew.retiring
            and next(iter(crew.jobs.values())).policy.memory_limit_bytes is None
        ]

    def place(self, hold: HeldJob, now_s: float, depth: int, quick_since_s: float) -> Slot | None:
        """Give the job to somebody, or None when all are busy. The floor sends what is in `to_send`."""
        crew = self._choose(hold, now_s, depth, quick_since_s)
        if crew is None:
            return None
        if crew.shared:
            self._async_jobs += 1
        elif not crew.jobs:
            self._busy_sync += 1
            crew.since_s = now_s
            crew.memory_bytes, crew.measure_at_s = 0, now_s
        hold.sent_s = now_s
        crew.look_at_s = min(crew.look_at_s, now_s + FIRST_LOOK_S)
        crew.jobs[hold.token] = hold
        if not crew.to_send:
            self.loaded.append(crew)
        crew.to_send.append(hold)
        return crew

    def _choose(self, hold: HeldJob, now_s: float, depth: int, quick_since_s: float) -> Slot | None:
        if hold.alone:
            return self._open_alone(now_s) if self.free() > 0 else None
        if self.free() > 0:
            return self._async_crew(now_s) if hold.is_async else self._free_sync_crew(hold, now_s)
        # A limit of memory is for one job alone: nothing is queued before it or behind it.
        if hold.is_async or not hold.retries_on_crash or hold.policy.memory_limit_bytes is not None:
            return None
        return min(self._queues(depth, quick_since_s), key=lambda crew: len(crew.jobs), default=None)

    def _async_crew(self, now_s: float) -> Slot | None:
        crew = self.crews.get(self._slots)
        if crew is None:
            return None if now_s < self.rest_until_s else self._open(self._slots, now_s, is_async=True)
        return None if crew.gone_s is not None or crew.retiring else crew

    def _free_sync_crew(self, hold: HeldJob, now_s: float) -> Slot | None:
        limit_bytes = hold.policy.memory_limit_bytes
        while self._idle:
            crew = self._idle.pop()
            if crew.gone_s is not None or crew.retiring or self.crews.get(crew.slot) is not crew:
                continue
            if limit_bytes is None or not crew.outgrew(limit_bytes * MOST_INHERITED, now_s):
                return crew
            # What earlier jobs left in it would be held against this one.
            crew.retiring = True
            crew.runner.retire()
        if now_s < self.rest_until_s:
            return None
        slot = next((slot for slot in range(self._slots) if slot not in self.crews), None)
        return None if slot is None else self._open(slot, now_s, is_async=False)

    def _open_alone(self, now_s: float) -> Slot | None:
        if now_s < self.rest_until_s:
            return None
        slot = next((slot for slot in self._room_alone if slot not in self.crews), None)
        return None if slot is None else self._open(slot, now_s, is_async=True, alone=True)

    def _open(self, slot: int, now_s: float, *, is_async: bool, alone: bool = False) -> Slot:
        crew = Slot(self._bench.start_runner(slot, "async" if is_async else "sync"), is_async, alone=alone)
        crew.opened_s = now_s
        self.crews[slot] = crew
        self._kill_at.pop(slot, None)
        self.opened.append(crew)
        return crew

    def remove_job(self, crew: Slot, token: int) -> HeldJob | None:
        """Take a job off a runner: it ended, was retracted, or is no longer ours."""
        hold = crew.jobs.pop(token, None)
        if hold is None:
            return None
        if self.words is not None:
            self.words.forget(token)
        if crew.shared:
            self._async_jobs -= 1
        elif not crew.jobs:
            self._busy_sync -= 1
            if crew.gone_s is None and not crew.retiring and not crew.is_async:
                self._idle.append(crew)
        return hold

    def remove(self, crew: Slot) -> None:
        """Forget a runner that is gone; its jobs were taken off before."""
        assert not crew.jobs
        if self.crews.get(crew.slot) is crew:
            del self.crews[crew.slot]
        self._set_kill_at(crew.slot, 0.0)

    def renew_leases(self, confirmed_s: float) -> None:
        """Tell the nursery until when each runner may live, should this process freeze."""
        for crew in self.crews.values():
            self.renew_lease(crew, confirmed_s)

    def tighten_lease(self, crew: Slot, holds: list[HeldJob], confirmed_s: float) -> None:
        """Let a runner live no longer than what it is about to get allows."""
        ends = [end_s for hold in holds if (end_s := must_stop_at_s(hold, confirmed_s)) is not None]
        if ends:
            self._set_kill_at(crew.slot, min(min(ends), self._kill_at.get(crew.slot) or math.inf))

    def renew_lease(self, crew: Slot, confirmed_s: float) -> None:
        ends = [end_s for hold in crew.jobs.values() if (end_s := must_stop_at_s(hold, confirmed_s)) is not None]
        self._set_kill_at(crew.slot, min(ends, default=0.0))

    def entered_and_over(self) -> dict[int, int]:
        """Give for each sync runner's slot how many entered attempts have certainly ended."""
        # What is entered and not over is among its jobs.
        return {
            crew.slot: self._trace.entries(crew.slot) - len(crew.jobs)
            for crew in self.crews.values()
            if not crew.is_async
        }

    def note_settled(self, entries: dict[int, int]) -> None:
        """Tell who may have to clean up after us that the ledger knows how these ended."""
        for slot, count in entries.items():
            self._trace.set_settled(slot, count)

    def _set_kill_at(self, slot: int, at_s: float) -> None:
        # Written only when it changes: most jobs come and go under the same lease.
        if self._kill_at.get(slot, 0.0) != at_s:
            self._kill_at[slot] = at_s
            self._trace.set_lease_end(slot, at_s)
