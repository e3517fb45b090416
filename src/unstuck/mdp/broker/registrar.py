"""Registration of workers: new ones, those that came back, and those that are refused."""

import time

import msgspec

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.endings import Release
from unstuck.domain.policy import encode_policy
from unstuck.domain.states import LIVE_STATES, Transport
from unstuck.errors import NameTaken
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import Claimed, ClaimRequest, NewWorker, Turn, WorkerRecord
from unstuck.mdp import protocol
from unstuck.mdp.broker.batch import Batch, BatchResult, Registration, ResumedWorker
from unstuck.mdp.broker.jobs import as_task, bare_policy
from unstuck.remote.redelivery import claimed_again

TASKS_EVERY_S = 2.0
MAX_KNOWN_SERVICES = 10_000
"""Maximum number of tasks up to which workers may add new services. Tasks are kept forever and read often."""


class Registrar:
    """Belongs to the ledger thread. It knows the tasks of the ledger and the workers of this broker."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self.claim_requests: dict[str, ClaimRequest] = {}
        """By id of each registered worker of this broker: what to claim for it."""
        self._bare = encode_policy(bare_policy(settings.mdp.retry_attempts))
        self._tasks: dict[str, TaskRecord] = {}
        self._services: set[str] = set()
        """Names of all tasks, including those that were registered here since they were read."""
        self._tasks_read_s = float("-inf")

    def refresh_tasks(self, batch: Batch, result: BatchResult, *, registers: bool) -> None:
        """Read the tasks if they are old, if a request is for an unknown one, or if workers are to be registered."""
        unknown = any(post.call.job.task not in self._tasks for post in batch.posts)
        self._read_tasks(result, is_needed=registers or unknown)
        for place, post in enumerate(batch.posts):
            task = self._tasks.get(post.call.job.task)
            if task is not None and (task.queue, task.policy) != (post.call.job.queue, post.call.job.policy):
                # The task has just become known. Its queue may differ from the name of the service.
                batch.posts[place] = msgspec.structs.replace(post, call=as_task(post.call, task))

    def _read_tasks(self, result: BatchResult, *, is_needed: bool) -> None:
        if is_needed or time.monotonic() - self._tasks_read_s > TASKS_EVERY_S:
            result.tasks = {task.name: task for task in self._ledger.queues.tasks()}
            self._tasks = result.tasks
            self._services = set(result.tasks)
            self._tasks_read_s = time.monotonic()

    # Workers --------------------------------------------------------------------------------------

    def register(self, registration: Registration, result: BatchResult) -> str | None:
        """Return the id of the worker in the ledger; None if it is refused, or if it must be retried."""
        if (resumed := self.resume(registration)) is not None:
            result.resumed[registration.worker_id] = resumed
            return resumed.worker_id
        return registration.worker_id if self._register_new(registration, result) else None

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is no longer connected to this broker."""
        self.claim_requests.pop(worker_id, None)

    def resume(self, registration: Registration) -> ResumedWorker | None:
        """Return the former id of a worker that came back, and the job that it holds; None for a new worker."""
        worker = self._former_worker(registration)
        if worker is None:
            return None
        held_claim = registration.held_claim
        own: Claimed | None = None
        unknown = []
        for job in self._ledger.workers.held(worker.id):
            record = self._ledger.jobs.get(job.job_id)
            if held_claim is None or record is None or (job.job_id, job.token) != (held_claim.job_id, held_claim.token):
                unknown.append(Release(job.job_id, job.token))
                continue
            own = claimed_again(job, record)
        if unknown:
            self._ledger.workers.turn(Turn(worker.id, release=tuple(unknown)))
        self.claim_requests[worker.id] = ClaimRequest(worker.queues, worker.tasks, limit=1, start=1)
        return ResumedWorker(worker.id, own)

    def _former_worker(self, registration: Registration) -> WorkerRecord | None:
        if registration.held_claim is not None:
            worker = self._ledger.workers.remote(registration.held_claim.worker_id)
        else:
            worker = self._ledger.workers.find_remote(registration.name) if registration.named else None
        # A worker with a claim request is connected to this broker now.
        if worker is None or worker.state not in LIVE_STATES or worker.id in self.claim_requests:
            return None
        same = (worker.transport, set(worker.tasks)) == (Transport.MDP, set(registration.services))
        same = same and worker.owner == (
            registration.owner if registration.held_claim is None else registration.held_claim.owner
        )
        return worker if same and (worker.name == registration.name or not registration.named) else None

    def _register_new(self, registration: Registration, result: BatchResult) -> bool:
        """Register a worker. Return False if it is refused, or if it must be retried."""
        known = self._services | set(registration.services)
        if len(known) > max(MAX_KNOWN_SERVICES, len(self._services)):
            result.refused_registrations.append(
                (registration, protocol.TOO_MANY_SERVICES, too_many_services(MAX_KNOWN_SERVICES))
            )
            return False
        if registration.named:
            standing = self._ledger.workers.find_remote(registration.name)
            if standing is not None and standing.state in LIVE_STATES and standing.id != registration.worker_id:
                if standing.owner == registration.owner and standing.id in self.claim_requests:
                    # It came back before the end of its former connection was written.
                    result.deferred.registrations.append(registration)
                else:
                    result.refused_registrations.append(
                        (registration, protocol.NAME_TAKEN, name_taken(registration.name, standing.id))
                    )
                return False
        try:
            self._write(registration)
        except NameTaken:
            # A Python worker has it.
            self.forget(registration.worker_id)
            standing_id = self._ledger.workers.find_python(registration.name) or ""
            result.refused_registrations.append(
                (registration, protocol.NAME_TAKEN, name_taken(registration.name, standing_id))
            )
            return False
        if registration.named and self._ledger.workers.remote(registration.worker_id) is None:
            # Another broker was faster.
            self.forget(registration.worker_id)
            result.refused_registrations.append((registration, protocol.NAME_TAKEN, name_taken(registration.name)))
            return False
        return True

    def _write(self, registration: Registration) -> None:
        # A bare name does not change the policy that another worker registered for the same task.
        tasks = tuple(self._tasks.get(name) or TaskRecord(name, name, self._bare) for name in registration.services)
        queues = tuple(dict.fromkeys(task.queue for task in tasks))
        self.claim_requests[registration.worker_id] = ClaimRequest(queues, registration.services, limit=1, start=1)
        self._services |= set(registration.services)
        mdp = self._settings.mdp
        self._ledger.workers.register(
            NewWorker(
                id=registration.worker_id,
                name=registration.name,
                host=registration.host or host.hostname(),
                # It is not a process that can be inspected. Its connection and heartbeats show whether it is alive.
                pid=0,
                boot_id=host.boot_id() if self._ledger.single_host else "",
                pid_namespace="",
                process_started="",
                queues=queues,
                tasks=tasks,
                concurrency=1,
                version="",
                heartbeat_interval_s=mdp.heartbeat_interval_s,
                suspect_after_s=mdp.heartbeat_timeout_s,
                running_stale_after_s=mdp.busy_timeout_s,
                metadata=registration.metadata,
                transport=Transport.MDP,
                owner=registration.owner,
                rules=self._settings.recovery.rules,
            )
        )


def name_taken(name: str, worker_id: str = "") -> str:
    who = f" ({worker_id})" if worker_id else ""
    return f"A worker named {name!r} lives{who}. Choose another name, or stop that worker first."


def too_many_services(most: int) -> str:
    return (
        f"The ledger knows {most:,} tasks or more, and takes no new service over ZeroMQ. Serve known ones, and put "
        "what differs between them into the body."
    )
