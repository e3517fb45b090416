"""A ledger in a few lines for the rules of the broker, which know nothing of databases."""

import itertools

from unstuck.config import MdpSettings
from unstuck.domain.policy import Policy, encode_policy
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp.broker.batch import Batch, BatchResult, Stored
from unstuck.mdp.broker.core import BrokerCore
from unstuck.mdp.broker.exchange_parts import Part


class FakeLedger:
    """A ledger of the simplest kind: a queue, in which whoever wants gets the first that it may do."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.waiting: dict[int, bytes] = {}
        self.held: dict[int, str] = {}
        """Who has it, by job."""
        self.tasks: dict[int, bytes] = {}
        self.services: dict[str, tuple[str, ...]] = {}
        self.locked: set[int] = set()
        """Jobs whose rows another session holds."""
        self.locked_clients: set[bytes] = set()
        """Clients whose requests cannot be written now."""

    def do(self, order: Batch) -> BatchResult:
        answer = self._do(order)
        if order.retried is not None:
            answer.retried = self._do(order.retried)
        return answer

    def _do(self, order: Batch) -> BatchResult:
        answer = BatchResult()
        self._set_aside(order, answer)
        for birth in order.registrations:
            self.services[birth.worker_id] = birth.services
        for posted in order.posts:
            job_id = next(self.numbers)
            self.tasks[job_id] = self.waiting[job_id] = posted.call.job.task.encode()
            answer.stored.append(Stored(job_id, fresh=True, unserved=True))
        for worker_id, hand in order.worker_turns.items():
            if worker_id not in self.services:
                answer.gone.add(worker_id)
                continue
            hand.done, hand.late_replies = [*hand.done, *(late.done for late in hand.late_replies)], []
            for done in hand.done:
                if self.held.get(done.job_id) == worker_id:
                    del self.held[done.job_id]
                else:
                    answer.superseded.add((done.job_id, done.token))
            for job in hand.release:
                assert self.held[job.job_id] == worker_id
                self._back(job.job_id)
            if hand.empty:
                continue
            # Whatever it is known to hold and was not handed in with this is still its own.
            assert {job_id for job_id, _ in hand.known_held} <= self._of(worker_id)
            fit = [id for id, task in sorted(self.waiting.items()) if task.decode() in self.services[worker_id]]
            if found := fit[: hand.claim_count]:
                answer.claimed[worker_id] = tuple(claimed(id, self.waiting.pop(id).decode()) for id in found)
                self.held |= dict.fromkeys(found, worker_id)
        answer.deferred.deaths = [death for death in order.deaths if answer.deferred.concerns(death.worker_id)]
        for death in order.deaths:
            if death in answer.deferred.deaths:
                continue
            self.services.pop(death.worker_id, None)
            lost = self._of(death.worker_id)
            assert lost <= {death.job_id}, "what never reached it goes back before its death is told"
            for job_id in lost:
                self._back(job_id)
            answer.deaths.append((death, None))
        answer.replies = [(question, [b"200"]) for question in order.queries]
        return answer

    def _set_aside(self, order: Batch, answer: BatchResult) -> None:
        part = Part(order.posts, order.worker_turns)
        locked = [key for key in part.attempts() if key[0] in self.locked]
        answer.deferred.worker_turns = part.take(locked).worker_turns
        answer.deferred.posts = [post for post in order.posts if post.request.client in self.locked_clients]
        order.posts = [post for post in order.posts if post.request.client not in self.locked_clients]

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


def broker(**settings: str) -> BrokerCore:
    numbers = itertools.count(1)
    return BrokerCore(MdpSettings(**settings), lambda: f"id{next(numbers)}", lambda: 1_700_000_000.0)
