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
    job_started_s: float = 0.0
    """When the first job of a sync runner became the first."""
    opened_s: float = 0.0
    ready_s: float = 0.0
    """When its interpreter first gave a pulse: where runners are spawned, it imports the app before; 0 until then."""
    jobs_done: int = 0
    pidfd: int | None = None
    gone_s: float | None = None
    """When we saw that it is gone, while its exit status is still to come."""
    retiring: bool = False
    run_alone: bool = False
    """It was opened for one suspect, and ends with it."""
    look_at_s: float = 0.0
    """When its jobs are looked at next; a new job brings it forward."""
    blocker: BlockedLoop | None = None
    cgroup: str = ""
    """The cgroup in which its memory can be bounded; empty where there is none."""
    measure_at_s: float = 0.0
    memory_bytes: int = 0
    """Memory of the runner and what it started, when last measured; 0 before."""
    inherited_bytes: int = 0
    inherited_s: float = 0.0
    """What its process weighed between two jobs, and when."""

    @property
    def index(self) -> int:
        return self.runner.slot

    @property
    def shared(self) -> bool:
        """Many jobs at once are in it."""
        return self.is_async and not self.run_alone

    @property
    def silent(self) -> bool:
        """No Python code has run in its process for long: C code holds the GIL."""
        return any(held_job.silent_since_s for held_job in self.jobs.values())

    def retire(self) -> None:
        """Let the runner finish what it has, and give it nothing more."""
        self.retiring = True
        self.runner.retire()

    def outgrew(self, bound_bytes: float, now_s: float) -> bool:
        """Say whether its process is larger than that; it is weighed only if it could have become so."""
        if self.inherited_bytes + (now_s - self.inherited_s) * FASTEST_GROWTH_BYTES_PER_S > bound_bytes:
            self.inherited_bytes, self.inherited_s = self.runner.memory_bytes(), now_s
        return self.inherited_bytes > bound_bytes


class SlotTable:
    def __init__(self, fork_server: ForkServerClient, slots: int, status_page: StatusPage) -> None:
        self.words: LastOutputFile | None = None
        """Where the last words of jobs are kept for others on this host."""
        self._fork_server = fork_server
        self._concurrency = slots
        self._status_page = status_page
        self._kill_at: dict[int, float] = {}
        self._idle: deque[Slot] = deque()
        self._busy_sync = 0
        self._async_jobs = 0
        self.slots: dict[int, Slot] = {}
        self.opened: list[Slot] = []
        """New since the floor last looked: to be watched by its selector."""
        self.loaded: list[Slot] = []
        """Those with something `to_send`."""
        self.rest_until_s = 0.0
        """No runner is opened before: the last ones died before they began anything."""
        self.look_at_s = 0.0
        """When some runner has to be looked at next."""
        self._failed_starts = 0
        self._indexes_for_suspects = range(slots + 1, status_page.slots)
        """Slots behind the shared loop's: for suspects, one process each."""

    def start_failed(self, now_s: float) -> float:
        """Note a runner that died before it began anything; give how long to rest before the next one."""
        pause_s = (
            min(FIRST_REST_S * 2.0 ** min(self._failed_starts - 1, 10), LONGEST_REST_S) if self._failed_starts else 0.0
        )
        self._failed_starts += 1
        self.rest_until_s = now_s + pause_s
        return pause_s

    def saw_life(self) -> None:
        """Note that a runner finished a job."""
        self._failed_starts = 0

    def free(self) -> int:
        """Give how many more jobs may run at once."""
        return self._concurrency - self._busy_sync - self._async_jobs

    def ahead_room(self, depth: int, quick_since_s: float) -> int:
        """Give how many RUNNING jobs may still be queued behind others at the sync runners."""
        return sum(depth + 1 - len(slot.jobs) for slot in self._queues(depth, quick_since_s))

    def _queues(self, depth: int, quick_since_s: float) -> list[Slot]:
        """Give the sync runners that may be given more than they are in: not those busy with a long job."""
        if depth <= 0:
            return []
        return [
            slot
            for slot in self.slots.values()
            if not slot.is_async
            and 0 < len(slot.jobs) <= depth
            and slot.job_started_s >= quick_since_s
            and slot.gone_s is None
            and not slot.retiring
            and next(iter(slot.jobs.values())).policy.memory_limit_bytes is None
        ]

    def assign(self, held_job: HeldJob, now_s: float, depth: int, quick_since_s: float) -> Slot | None:
        """Give the job to somebody, or None when all are busy. The floor sends what is in `to_send`."""
        slot = self._choose(held_job, now_s, depth, quick_since_s)
        if slot is None:
            return None
        if slot.shared:
            self._async_jobs += 1
        elif not slot.jobs:
            self._busy_sync += 1
            slot.job_started_s = now_s
            slot.memory_bytes, slot.measure_at_s = 0, now_s
        held_job.sent_s = now_s
        slot.look_at_s = min(slot.look_at_s, now_s + FIRST_LOOK_S)
        slot.jobs[held_job.token] = held_job
        if not slot.to_send:
            self.loaded.append(slot)
        slot.to_send.append(held_job)
        return slot

    def _choose(self, held_job: HeldJob, now_s: float, depth: int, quick_since_s: float) -> Slot | None:
        if held_job.run_alone:
            return self._open_alone(now_s) if self.free() > 0 else None
        if self.free() > 0:
            return self._shared_loop_slot(now_s) if held_job.is_async else self._free_sync_slot(held_job, now_s)
        # A limit of memory is for one job alone: nothing is queued before it or behind it.
        if held_job.is_async or not held_job.retries_on_crash or held_job.policy.memory_limit_bytes is not None:
            return None
        return min(self._queues(depth, quick_since_s), key=lambda slot: len(slot.jobs), default=None)

    def _shared_loop_slot(self, now_s: float) -> Slot | None:
        slot = self.slots.get(self._concurrency)
        if slot is None:
            return None if now_s < self.rest_until_s else self._open(self._concurrency, now_s, is_async=True)
        return None if slot.gone_s is not None or slot.retiring else slot

    def _free_sync_slot(self, held_job: HeldJob, now_s: float) -> Slot | None:
        limit_bytes = held_job.policy.memory_limit_bytes
        while self._idle:
            slot = self._idle.pop()
            if slot.gone_s is not None or slot.retiring or self.slots.get(slot.index) is not slot:
                continue
            if limit_bytes is None or not slot.outgrew(limit_bytes * MOST_INHERITED, now_s):
                return slot
            # What earlier jobs left in it would be held against this one.
            slot.retire()
        if now_s < self.rest_until_s:
            return None
        index = next((index for index in range(self._concurrency) if index not in self.slots), None)
        return None if index is None else self._open(index, now_s, is_async=False)

    def _open_alone(self, now_s: float) -> Slot | None:
        if now_s < self.rest_until_s:
            return None
        index = next((index for index in self._indexes_for_suspects if index not in self.slots), None)
        return None if index is None else self._open(index, now_s, is_async=True, alone=True)

    def _open(self, index: int, now_s: float, *, is_async: bool, alone: bool = False) -> Slot:
        slot = Slot(self._fork_server.start_runner(index, "async" if is_async else "sync"), is_async, run_alone=alone)
        slot.opened_s = now_s
        self.slots[index] = slot
        self._kill_at.pop(index, None)
        self.opened.append(slot)
        return slot

    def remove_job(self, slot: Slot, token: int) -> HeldJob | None:
        """Take a job off a runner: it ended, was retracted, or is no longer ours."""
        held_job = slot.jobs.pop(token, None)
        if held_job is None:
            return None
        if self.words is not None:
            self.words.forget(token)
        if slot.shared:
            self._async_jobs -= 1
        elif not slot.jobs:
            self._busy_sync -= 1
            if slot.gone_s is None and not slot.retiring and not slot.is_async:
                self._idle.append(slot)
        return held_job

    def remove(self, slot: Slot) -> None:
        """Forget a runner that is gone; its jobs were taken off before."""
        assert not slot.jobs
        if self.slots.get(slot.index) is slot:
            del self.slots[slot.index]
        self._set_kill_at(slot.index, 0.0)

    def renew_leases(self, confirmed_s: float) -> None:
        """Set until when each runner may live if this process freezes; the fork server enforces it."""
        for slot in self.slots.values():
            self.renew_lease(slot, confirmed_s)

    def tighten_lease(self, slot: Slot, held_jobs: list[HeldJob], confirmed_s: float) -> None:
        """Let a runner live no longer than what it is about to get allows."""
        ends = [end_s for held_job in held_jobs if (end_s := must_stop_at_s(held_job, confirmed_s)) is not None]
        if ends:
            self._set_kill_at(slot.index, min(min(ends), self._kill_at.get(slot.index) or math.inf))

    def renew_lease(self, slot: Slot, confirmed_s: float) -> None:
        ends = [
            end_s for held_job in slot.jobs.values() if (end_s := must_stop_at_s(held_job, confirmed_s)) is not None
        ]
        self._set_kill_at(slot.index, min(ends, default=0.0))

    def entered_and_over(self) -> dict[int, int]:
        """Give for each sync runner's slot how many entered attempts have certainly ended."""
        # What is entered and not over is among its jobs.
        return {
            slot.index: self._status_page.entries(slot.index) - len(slot.jobs)
            for slot in self.slots.values()
            if not slot.is_async
        }

    def note_settled(self, entries: dict[int, int]) -> None:
        """Tell who may have to clean up after us that the ledger knows how these ended."""
        for index, count in entries.items():
            self._status_page.set_settled(index, count)

    def _set_kill_at(self, index: int, at_s: float) -> None:
        # Written only when it changes: most jobs come and go under the same lease.
        if self._kill_at.get(index, 0.0) != at_s:
            self._kill_at[index] = at_s
            self._status_page.set_lease_end(index, at_s)
