"""A ledger in a few lines for the rules of the broker, which know nothing of databases."""

import itertools

from unstuck.config import Mdp
from unstuck.domain.policy import Policy, encode_policy
from unstuck.mdp.broker.core import Broker
from unstuck.mdp.broker.orders import Answer, Order, Stored
from unstuck.store.records import Claimed


class Told:
    """A ledger of the simplest kind: a queue, in which whoever wants gets the first that it may do."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.waiting: dict[int, bytes] = {}
        self.held: dict[int, str] = {}
        """Who has it, by job."""
        self.tasks: dict[int, bytes] = {}
        self.services: dict[str, tuple[str, ...]] = {}

    def do(self, order: Order) -> Answer:
        answer = Answer()
        for birth in order.births:
            self.services[birth.worker_id] = birth.services
        for posted in order.posts:
            job_id = next(self.numbers)
            self.tasks[job_id] = self.waiting[job_id] = posted.call.job.task.encode()
            answer.stored.append(Stored(job_id, fresh=True, unserved=True))
        for worker_id, hand in order.hands.items():
            if worker_id not in self.services:
                answer.gone.add(worker_id)
                continue
            for done in hand.done:
                if self.held.get(done.job_id) == worker_id:
                    del self.held[done.job_id]
                else:
                    answer.superseded.add((done.job_id, done.token))
            for job in hand.release:
                assert self.held[job.job_id] == worker_id
                self._back(job.job_id)
            # Whatever it is known to hold and was not handed in with this is still its own.
            assert {job_id for job_id, _ in hand.holds} <= self._of(worker_id)
            fit = [id for id, task in sorted(self.waiting.items()) if task.decode() in self.services[worker_id]]
            if found := fit[: hand.wants]:
                answer.claimed[worker_id] = tuple(claimed(id, self.waiting.pop(id).decode()) for id in found)
                self.held |= dict.fromkeys(found, worker_id)
        for death in order.deaths:
            self.services.pop(death.worker_id, None)
            lost = self._of(death.worker_id)
            assert lost <= {death.job_id}, "what never reached it goes back before its death is told"
            for job_id in lost:
                self._back(job_id)
            answer.buried.append((death, None))
        answer.replies = [(question, [b"200"]) for question in order.questions]
        return answer

    def _of(self, worker_id: str) -> set[int]:
        return {job_id for job_id, holder in self.held.items() if holder == worker_id}

    def _back(self, job_id: int) -> None:
        del self.held[job_id]
        self.waiting[job_id] = self.tasks[job_id]


def claimed(job_id: int, task: str) -> Claimed:
    return Claimed(
        job_id,
        token=job_id + 100,
        task=task,
        queue=task,
        running=True,
        payload=b"\x91\xc4\x01x",
        payload_type="frames",
        policy=encode_policy(Policy(on_crash="retry")),
        failures=0,
        crashes=0,
        attempt=1,
    )


def broker(**settings: str) -> Broker:
    numbers = itertools.count(1)
    return Broker(Mdp(**settings), lambda: f"id{next(numbers)}", lambda: 1_700_000_000.0)
