"""Play the clients: they enqueue jobs, and wait for their ends as the product's clients do."""

import threading
from typing import TYPE_CHECKING

from tests.simulation.scenario import JobPlan
from tests.simulation.worker import LEAST_NAP_S, QUEUE, TASK

from unstuck.domain.policy import encode_policy
from unstuck.errors import JobNotFound, LedgerUnavailable, UncertainCommit
from unstuck.ledger.contract.jobs import NewJob, Outcome
from unstuck.notify.results import Answer, ResultWatcher

if TYPE_CHECKING:
    from tests.simulation.world import World


class Client:
    """One program on a machine of its own. The product's `ResultWatcher` asks there for the ends of all of its jobs."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.process = world.new_process("client", world.client_machine)
        self.road = world.new_road(self.process)
        self.waiting: set[str] = set()
        """The jobs whose end has not been told yet."""
        self._watcher = ResultWatcher(lambda: self.road, lambda _: None, lambda job_id: JobNotFound(str(job_id)))  # type: ignore[arg-type,return-value]
        # The task below does what its thread does.
        self._watcher._thread = threading.current_thread()
        self._watching = self.process.spawn("waiting", self._watch)
        for number, plan in enumerate(world.scenario.jobs):
            self._plan(str(number), plan)

    def _plan(self, key: str, plan: JobPlan) -> None:
        self._world.hub.at(plan.at_s, lambda: self._begin(key, plan))

    def _begin(self, key: str, plan: JobPlan) -> None:
        self.process.spawn(f"job {key}", lambda: self._serve(key, plan))

    def _serve(self, key: str, plan: JobPlan) -> None:
        job_id = self._enqueue(key, plan)
        if job_id is not None:
            self.waiting.add(key)
            self._watcher.wait(job_id, lambda answer: self._told(key, answer))
            self._watching.wake()

    def _enqueue(self, key: str, plan: JobPlan) -> int | None:
        history, task = self._world.history, self.process.hub.current
        assert task is not None
        while True:
            try:
                [stored] = self.road.jobs.enqueue([new_job(key, plan)])
            except UncertainCommit:
                # Nobody promised anything: it may be there, and then it ends like any other.
                return None
            except LedgerUnavailable:
                task.sleep(1.0)
                continue
            history.acknowledge(key, stored.job_id)
            self._world.tell(f"job {stored.job_id} was acknowledged ({plan.policy.on_crash}, {plan.ends})")
            self.road.notify({f"queue:{QUEUE}"})
            return int(stored.job_id)

    def _watch(self) -> None:
        task = self.process.hub.current
        assert task is not None
        while True:
            wait_s = self._watcher.due_in_s()
            if wait_s != 0.0:
                task.wait(wait_s if wait_s is None else max(wait_s, LEAST_NAP_S))
            self._watcher.step()

    def _told(self, key: str, answer: Answer) -> None:
        self.waiting.discard(key)
        self._world.history.told(key, answer.state.value if isinstance(answer, Outcome) else repr(answer))


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
