"""The health and memory of this worker, as its heartbeat reports them."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from unstuck import host
from unstuck.domain import worker_health
from unstuck.domain.worker_health import Health
from unstuck.ledger.contract.workers import Claimed, HeartbeatAnswer
from unstuck.logs import logger

MEASURED_EVERY_S = 10.0
WORTH_TELLING = 0.1
"""A change by this share of what was told; whoever looks wants to know the size, not every page."""
LEAST_CHANGE_BYTES = 4 * 1024 * 1024
MOST_PROCESSES = 512


def own_memory_bytes() -> int:
    """Return the resident memory of this process, the fork server, the runners and what they started.

    What they share is counted for each of them."""
    return host.family_memory_bytes(os.getpid(), MOST_PROCESSES)


class MemoryReport:
    """Of one process. Only the heartbeat's thread weighs."""

    def __init__(self, weigh: Callable[[], int] = own_memory_bytes) -> None:
        self._measure_memory = weigh
        self._weighed_s = float("-inf")
        self._told_bytes = 0
        self.memory_bytes = 0

    def told(self, memory_bytes: int) -> None:
        """Note what the ledger knows."""
        self._told_bytes = memory_bytes

    def news(self, now_s: float) -> bool:
        """Say whether the ledger should hear of what is used now."""
        if now_s - self._weighed_s >= MEASURED_EVERY_S:
            self._weighed_s = now_s
            self.memory_bytes = self._measure_memory() or self.memory_bytes
        change_bytes = abs(self.memory_bytes - self._told_bytes)
        return change_bytes > max(WORTH_TELLING * self._told_bytes, LEAST_CHANGE_BYTES)


TOLD_AGAIN_AT = 0.8
"""When the weight has faded to this share of what the ledger was told, it is told again."""

log = logger("unstuck.worker")


@dataclass(frozen=True)
class _Weight:
    value: float
    at_s: float


class WorkerHealth:
    """One per process: a worker that comes back under a new id is no healthier for it."""

    def __init__(self, metadata: dict[str, Any] | None = None, memory_report: MemoryReport | None = None) -> None:
        self.disabled = False
        self._memory_report = memory_report
        self._sent_bytes = 0
        self._metadata = metadata or {}
        self._weight = _Weight(0.0, 0.0)
        self._counted = 0
        """Jobs that ended here and have healed already."""
        self._died: deque[tuple[float, int]] = deque(maxlen=worker_health.MAX_JOBS_KEPT)
        """(moment, job id) of the recent dead."""
        self._moment_s = float("-inf")
        self._moment_blame = 0.0
        self._row: dict[int, int] = {}
        """The different jobs that died since one ended otherwise, oldest first, and how often each did."""
        self._guilty: dict[int, None] = {}
        """Jobs that died here before another one ended otherwise: when they die again, it is their doing."""
        self._row_since_s = 0.0
        self._survivor = False
        """Another job ran well beside the last death."""
        self._probes = 0
        """Deaths since everything was seen to die here."""
        self._rest_until_s = 0.0
        self._wait_until_s: float | None = None
        self._sent = self._told = Health()

    # What the runners and the floor call --------------------------------------------------------

    def born(self, metadata: dict[str, Any], *, disabled: bool) -> None:
        """Begin a life: what the registration said must be said again with every change."""
        self._metadata = metadata
        self._sent = self._told = Health()
        self._sent_bytes = metadata.get("memory_bytes", 0)
        if self._memory_report is not None:
            self._memory_report.told(self._sent_bytes)
        self._counted = 0
        self.disabled = disabled
        if disabled:
            log.warning("This host is disabled: the worker takes no jobs until `unstuck workers enable --host` is used")

    @property
    def in_a_row(self) -> int:
        """How many different jobs died in a row; 0 while another one runs well beside them."""
        return 0 if self._survivor else len(self._row)

    @property
    def at_fault(self) -> bool:
        """Everything dies here, so it is not the jobs."""
        return self.in_a_row >= worker_health.IN_A_ROW

    def died_here(self, job_id: int) -> int:
        """Return how often a job died here since another one ended otherwise."""
        return self._row.get(job_id, 0)

    def saw_death(self, job: Claimed, now_s: float | None = None, beside_since_s: float | None = None) -> bool:
        """Note a job whose runner died unasked; not one that we ended ourselves. Return whether others should hear of
        it at once, since everything dies here.

        `beside_since_s` is when the oldest of the other jobs that still run began."""
        now_s = host.boottime_s() if now_s is None else now_s
        another_moment = now_s - self._moment_s > worker_health.SAME_MOMENT_S
        was_at_fault = self.at_fault
        self._extend_row(job.job_id, now_s, beside_since_s, another_moment)
        if self.at_fault and not was_at_fault:
            log.error(
                "Every job dies on this worker: it tries one at a time until one ends otherwise. Look at its host",
                jobs=len(self._row),
            )
        blame = worker_health.blame(job.crashes, job.suspected_crashes, at_fault=self.at_fault)
        if another_moment:
            self._moment_s, self._moment_blame = now_s, 0.0
        self._died.append((self._moment_s, job.job_id))
        added = max(0.0, blame - self._moment_blame)
        self._moment_blame += added
        self._weight = _Weight(self._weight_now(now_s) + added, now_s)
        # Who hands in a death must not take the next job in the same breath: the sick would be the quickest of all.
        rest_s = worker_health.probe_delay_s(self._probes) if self.at_fault else 0.0
        self._rest_until_s = now_s + max(rest_s, worker_health.delay_s(self._weight.value))
        return self.at_fault and (another_moment or len(self._row) == worker_health.IN_A_ROW)

    def saw_processed(self, processed: int, now_s: float) -> None:
        """Note how many jobs ended here in this life."""
        if self._weight.value and processed > self._counted:
            left = worker_health.faded(self._weight.value, now_s - self._weight.at_s, processed - self._counted)
            self._weight = _Weight(left, now_s)
        if processed > self._counted and self._row:
            self._convict_row()
            self._rest_until_s = min(self._rest_until_s, now_s + worker_health.delay_s(self._weight_now(now_s)))
        self._counted = processed

    def hold_back(self, now_s: float, *, busy: bool) -> bool:
        """Say whether to claim nothing at this moment, though there may be work: others may go first."""
        if self.disabled:
            return True
        if not busy and self._wait_until_s is None:
            self._wait_until_s = now_s + worker_health.delay_s(self._weight_now(now_s))
        # Who is at work goes on: where jobs are plenty, nobody is kept from any, but for the rest after a death.
        until_s = self._rest_until_s if busy else max(self._rest_until_s, self._wait_until_s or 0.0)
        if now_s < until_s:
            return True
        self._wait_until_s = None
        return False

    def withheld(self, slots: int, now_s: float) -> int:
        """Give how many slots stay empty."""
        return slots - worker_health.usable_slots(self._weight_now(now_s), slots, at_fault=self.at_fault)

    def wait_s(self, now_s: float, at_most_s: float) -> float:
        """Give how long the floor may sleep before it must ask again."""
        ends = [end_s for end_s in (self._rest_until_s, self._wait_until_s) if end_s is not None and end_s > now_s]
        return at_most_s if self.disabled else min([at_most_s, *(end_s - now_s for end_s in ends)])

    def after_beat(self, answer: HeartbeatAnswer) -> None:
        self._told = self._sent
        if self._memory_report is not None:
            self._memory_report.told(self._sent_bytes)
        if answer.disabled == self.disabled:
            return
        self.disabled = answer.disabled
        if answer.disabled:
            log.warning("This worker was disabled: it finishes what it runs and takes nothing more until it is enabled")
        else:
            log.info("This worker was enabled again")
            # Trusted again is trusted: what is held against it from before would switch it off at once.
            self._weight, self._rest_until_s = _Weight(0.0, 0.0), 0.0
            self._died.clear()
            self._guilty.clear()
            self._forget_row()
            # The ledger forgot it in the same moment.
            self._sent = self._told = Health()

    # What the heartbeat calls -------------------------------------------------------------------

    def news(self, now_s: float | None = None) -> dict[str, Any] | None:
        """Give the metadata for a beat where the health or the memory in it changed; None where the ledger knows it."""
        now_s = host.boottime_s() if now_s is None else now_s
        now, told = self.now(now_s), self._told
        heavier = self._memory_report is not None and self._memory_report.news(now_s)
        if (
            not heavier
            and now.deaths <= told.deaths
            and now.in_a_row == told.in_a_row
            and TOLD_AGAIN_AT * told.weight <= now.weight <= told.weight
        ):
            return None
        self._sent = now
        news = {**self._metadata, "health": msgspec.to_builtins(now)} if now != Health() else dict(self._metadata)
        if self._memory_report is not None:
            self._sent_bytes = news["memory_bytes"] = self._memory_report.memory_bytes
        return news

    def now(self, now_s: float) -> Health:
        weight = self._weight_now(now_s)
        in_a_row = self.in_a_row if now_s - self._moment_s <= worker_health.ROW_KEPT_S else 0
        # Jobs that are excused wait for longer than a weight lasts: the row is told for as long as it counts.
        if not weight and in_a_row < worker_health.IN_A_ROW:
            return Health()
        recent = [item for item in tuple(self._died) if now_s - item[0] <= worker_health.RECENT_S]
        return Health(
            weight=round(weight, 3),
            deaths=len({moment_s for moment_s, _ in recent}),
            jobs=len({job_id for _, job_id in recent}),
            score=round(worker_health.score(weight), 3),
            in_a_row=in_a_row,
        )

    def _extend_row(self, job_id: int, now_s: float, beside_since_s: float | None, another_moment: bool) -> None:
        if now_s - self._moment_s > worker_health.ROW_KEPT_S:
            self._forget_row()
        if not self._row:
            self._row_since_s = now_s
        if self.at_fault and another_moment:
            self._probes += 1
        if job_id in self._row or (len(self._row) < worker_health.MAX_JOBS_KEPT and job_id not in self._guilty):
            self._row[job_id] = self._row.get(job_id, 0) + 1
        self._survivor = (
            beside_since_s is not None
            and beside_since_s < self._row_since_s
            and now_s - beside_since_s >= worker_health.SURVIVED_S
        )

    def _convict_row(self) -> None:
        """Another job ended otherwise: the worker does not kill everything."""
        for job_id in self._row:
            self._guilty.pop(job_id, None)
            self._guilty[job_id] = None
        while len(self._guilty) > worker_health.MAX_GUILTY_KEPT:
            del self._guilty[next(iter(self._guilty))]
        self._forget_row()

    def _forget_row(self) -> None:
        self._row.clear()
        self._survivor, self._probes = False, 0

    def _weight_now(self, now_s: float) -> float:
        known = self._weight
        return worker_health.faded(known.value, now_s - known.at_s) if known.value else 0.0
