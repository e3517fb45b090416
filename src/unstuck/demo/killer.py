"""Kill workers and runners of the demo's fleet with kill -9, and measure how fast the ledger gets over it."""

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from unstuck import host
from unstuck.demo.fleet import Fleet, Member
from unstuck.demo.tasks import app
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.errors import LedgerError
from unstuck.ledger.contract import Ledger
from unstuck.runner.status_page import ASYNC, StatusPage, status_page_path

LOOK_S = 0.01
"""How often the ledger is asked whether it knows; detection times are up to this much too long."""
PATIENCE_S = 60.0
DIE_S = 5.0
JITTER = 0.4

Kind = Literal["worker", "runner"]


class HeldJob(NamedTuple):
    job_id: int
    task: str
    running: bool


HeldJobs = dict[int, HeldJob]
"""What somebody held, by token."""


@dataclass
class Death:
    """One kill, and what became of it."""

    kind: Kind
    name: str
    pid: int
    killed_s: float
    """Monotonic."""
    held: HeldJobs = field(default_factory=dict)
    settled_ms: float | None = None
    """From the kill to the moment when the ledger showed all that it held as settled."""
    detector: str = ""
    cause: str = ""
    requeued: int = 0
    failed: int = 0
    returned: int = 0
    """Given back for free: their code had not begun."""
    over: bool = False
    """Everything above is known."""
    given_up: bool = False
    """It was not settled within our patience."""


class Killer:
    """A thread that strikes every so often until it is stopped. `deaths` grows; `tell` hears of each twice."""

    def __init__(self, fleet: Fleet, ledger: Ledger, every_s: float, tell: Callable[[Death], None]) -> None:
        self.deaths: list[Death] = []
        self._fleet = fleet
        self._ledger = ledger
        self._every_s = every_s
        self._tell = tell
        self._next: Kind = "runner"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._prowl, name="demo-killer", daemon=True)
        self._async = {name for name, task in app.definition().tasks.items() if task.is_async}

    def start(self) -> None:
        if self._every_s > 0:
            self._thread.start()

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(patience_s)

    @property
    def measuring(self) -> bool:
        return self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """No more kills; the last one is still measured."""
        self._stop.set()

    def _prowl(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(time.monotonic(), due_s + self._every_s * random.uniform(1 - JITTER, 1 + JITTER))
            if self._stop.wait(due_s - time.monotonic()):
                return
            try:
                self._strike()
            except LedgerError:
                # The ledger is busy or away: look again at the next turn.
                continue

    def _strike(self) -> None:
        ready = self._fleet.ready_members()
        if not ready:
            return
        victim = random.choice(ready)
        # While somebody else lives the death is seen at once; a fleet of one is watched by its successor.
        alone = len(ready) == 1 and len(self._fleet.members) > 1
        if self._next == "worker" and not alone:
            self._next = "runner"
            self._strike_worker(victim)
        else:
            self._next = "worker"
            self._strike_runner(victim)

    # Workers ----------------------------------------------------------------------------------

    def _strike_worker(self, victim: Member) -> None:
        assert victim.worker_id is not None
        held = self._held_jobs(victim.worker_id)
        victim.killed_s = time.monotonic()
        victim.process.kill()
        death = Death("worker", victim.name, victim.pid, victim.killed_s, held)
        # What it took up between our look and its end counts too; what it finished is sorted out afterwards.
        death.held = {**held, **self._held_jobs(victim.worker_id)}
        self._announce(death)
        if self._measure(death, lambda: self._is_declared_dead(victim.worker_id or "")):
            verdict = next((w.verdict for w in self._ledger.workers.list() if w.id == victim.worker_id), None)
            death.detector = verdict.detector.value if verdict else ""
            death.cause = verdict.evidence if verdict else ""
            self._sort_out(death)
        death.over = True
        self._tell(death)

    def _is_declared_dead(self, worker_id: str) -> bool:
        if self._ledger.workers.held(worker_id):
            return False
        return any(w.id == worker_id and w.state is WorkerState.DEAD for w in self._ledger.workers.list())

    # Runners ----------------------------------------------------------------------------------

    def _strike_runner(self, victim: Member) -> None:
        assert victim.worker_id is not None
        try:
            status_page = StatusPage.open(status_page_path(victim.worker_id))
        except (OSError, ValueError):
            return
        try:
            self._strike_slot(victim, victim.worker_id, status_page)
        finally:
            status_page.close()

    def _strike_slot(self, victim: Member, worker_id: str, status_page: StatusPage) -> None:
        before = self._held_jobs(worker_id)
        busy = [
            slot
            for slot in range(status_page.slots)
            if status_page.occupant(slot)[0] and self._in_slot(status_page, slot, before)
        ]
        if not busy:
            return
        slot = random.choice(busy)
        pid, started = status_page.occupant(slot)
        # Held by a descriptor and compared with its start: never a stranger who got the same pid.
        fd = host.pidfd(pid, started)
        if fd is None:
            return
        try:
            killed_s = time.monotonic()
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], DIE_S)
        finally:
            os.close(fd)
        held = self._in_slot(status_page, slot, {**before, **self._held_jobs(worker_id)})
        death = Death("runner", victim.name, pid, killed_s, held)
        self._announce(death)
        # An async job that had not reached the dead runner is simply run by the next one: only those that
        # died in it are counted, and each left the worker's hands at a moment of its own.
        left_ms: dict[int, float] = {}

        def all_left() -> bool:
            now_ms = (time.monotonic() - killed_s) * 1000
            for token in held.keys() - self._held_jobs(worker_id).keys():
                left_ms.setdefault(token, now_ms)
            return len(left_ms) == len(held)

        if self._measure(death, all_left):
            death.detector = Detector.RUNNER.value
            self._sort_out(death)
            death.settled_ms = max((left_ms[token] for token in death.held), default=None)
        death.over = True
        self._tell(death)

    def _in_slot(self, status_page: StatusPage, slot: int, hands: HeldJobs) -> HeldJobs:
        if status_page.kind(slot) == ASYNC:
            return {token: job for token, job in hands.items() if job.task in self._async and job.running}
        token = status_page.entered(slot)
        return {token: hands[token]} if token in hands else {}

    # Both -------------------------------------------------------------------------------------

    def _held_jobs(self, worker_id: str) -> HeldJobs:
        held = self._ledger.workers.held(worker_id)
        return {job.token: HeldJob(job.job_id, job.task, job.state is JobState.RUNNING) for job in held}

    def _announce(self, death: Death) -> None:
        self.deaths.append(death)
        self._tell(death)

    def _measure(self, death: Death, settled: Callable[[], bool]) -> bool:
        while time.monotonic() - death.killed_s < PATIENCE_S:
            if settled():
                death.settled_ms = (time.monotonic() - death.killed_s) * 1000
                return True
            time.sleep(LOOK_S)
        death.given_up = True
        return False

    def _sort_out(self, death: Death) -> None:
        """Ask the ledger how each try that was in the dead hands ended."""
        for token, hand in list(death.held.items()):
            attempt = next((a for a in self._ledger.jobs.attempts(hand.job_id) if a.token == token), None)
            job = self._ledger.jobs.get(hand.job_id)
            if attempt is None or job is None:
                death.returned += 1
            elif attempt.state is not AttemptState.CRASHED:
                # It ended in the instant before the kill.
                del death.held[token]
            else:
                death.cause = death.cause or attempt.cause or ""
                if job.state is JobState.FAILED:
                    death.failed += 1
                else:
                    death.requeued += 1
