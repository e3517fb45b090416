"""Play a runner: a process in which user code runs until it returns, raises, or is killed."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unstuck.domain.endings import Died, Outcome, Raised, Succeeded
from unstuck.worker.held_jobs import HeldJob

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess


@dataclass(frozen=True)
class Exit:
    """What a worker hears of the end of a job in a runner."""

    token: int
    outcome: Outcome


class Runner:
    def __init__(self, life: "WorkerProcess", held_job: HeldJob) -> None:
        self.life = life
        self.hold = held_job
        self.token = held_job.token
        self.stopped = False
        """It was told to stop: what it becomes is decided."""
        timeout_s = held_job.policy.timeout_s
        self.deadline_s = math.inf if timeout_s is None else held_job.sent_s + timeout_s
        world = life.world
        self.facts = world.history.facts_of(held_job.job)
        self.plan = self.facts.plan
        self.process = world.new_process(f"runner of {held_job.job.job_id}", life.place.machine)
        world.history.begins(self)
        self.process.spawn("user code", self._run)

    def _run(self) -> None:
        task = self.process.hub.current
        assert task is not None
        task.sleep(self.plan.runs_s)
        match self.plan.ends:
            case "well":
                self._over(Succeeded(b"1"))
            case "raises":
                self._over(Raised("ValueError", "as planned", ""))
            case "kills":
                self._over(Died("exit code 139"))

    def dies(self) -> None:
        """End by itself, as by a segmentation fault."""
        self._over(Died("signal 11"))

    def stop(self, fate: Outcome) -> None:
        """Be killed by its own worker or fork server, which says what becomes of it."""
        if not self.stopped:
            self._over(fate)

    def kill(self) -> None:
        """Be killed; nobody wants to hear of it."""
        self.stopped = True
        self.life.world.history.ends(self)
        self.process.hub.after(0.0, self.process.kill)

    def _over(self, outcome: Outcome) -> None:
        if self.stopped:
            return
        self.kill()
        self.life.world.history.came_to(self, outcome)
        self.life.post(Exit(self.token, outcome))
