"""Play the clients: they enqueue jobs, and wait to be told how these end."""

from typing import TYPE_CHECKING

from tests.simulation.scenario import JobPlan
from tests.simulation.worker import QUEUE, TASK

from unstuck.domain.errors import LedgerError, LedgerUnavailable, UncertainCommit
from unstuck.domain.policy import encode_policy
from unstuck.store.records import NewJob

if TYPE_CHECKING:
    from tests.simulation.world import World

LOOK_SHARE = 0.5
"""How often, in timeouts, a client asks how its job ended."""


class Client:
    """One program on a machine of its own; each job has a thread there that waits for it."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.process = world.new_process("client", world.client_machine)
        self.road = world.new_road(self.process)
        for number, plan in enumerate(world.scenario.jobs):
            self._plan(str(number), plan)

    def _plan(self, key: str, plan: JobPlan) -> None:
        self._world.hub.at(plan.at_s, lambda: self._begin(key, plan))

    def _begin(self, key: str, plan: JobPlan) -> None:
        self.process.spawn(f"job {key}", lambda: self._serve(key, plan))

    def _serve(self, key: str, plan: JobPlan) -> None:
        job_id = self._enqueue(key, plan)
        if job_id is not None:
            self._wait(key, job_id)

    def _enqueue(self, key: str, plan: JobPlan) -> int | None:
        history, task = self._world.history, self.process.hub.current
        assert task is not None
        while True:
            try:
                [stored] = self.road.enqueue([new_job(key, plan)])
            except UncertainCommit:
                # Nobody promised anything: it may be there, and then it ends like any other.
                return None
            except LedgerUnavailable:
                task.sleep(1.0)
                continue
            history.acknowledge(key, stored.job_id)
            self._world.tell(f"job {stored.job_id} was acknowledged ({plan.policy.on_crash}, {plan.ends})")
            self.road.ring({f"queue:{QUEUE}"})
            return int(stored.job_id)

    def _wait(self, key: str, job_id: int) -> None:
        task, facts = self.process.hub.current, self._world.history.jobs[key]
        assert task is not None
        while facts.acknowledged == job_id:
            task.wait(LOOK_SHARE * self._world.scenario.timeout_s)
            try:
                outcomes = self.road.outcomes([job_id])
            except LedgerError:
                continue
            if outcomes and facts.acknowledged == job_id:
                self._world.history.told(key, outcomes[0].state.value)
                return


def new_job(key: str, plan: JobPlan) -> NewJob:
    policy = plan.policy
    return NewJob(
        TASK,
        QUEUE,
        key.encode(),
        policy=encode_policy(policy),
        on_crash=policy.on_crash,
        heartbeat=policy.heartbeat,
        heartbeat_timeout_s=policy.heartbeat_timeout_s,
        timeout_s=policy.timeout_s,
        delay_s=plan.delay_s,
    )
