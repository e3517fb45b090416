"""How workers leave the broker: they shut down, die, break the protocol, or are dead in the ledger."""

import msgspec

from unstuck.domain.endings import Died, conclude
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp import protocol
from unstuck.mdp.broker.batch import GONE, WorkerDeath, WorkerTurn
from unstuck.mdp.broker.dispatch import Dispatcher
from unstuck.mdp.broker.outbox import Outbox
from unstuck.mdp.broker.peer_limits import ReturnedJobs
from unstuck.mdp.broker.worker_table import ConnectedWorker, WorkerTable


class Departures:
    def __init__(self, outbox: Outbox, workers: WorkerTable, dispatcher: Dispatcher) -> None:
        self._outbox = outbox
        self._workers = workers
        self._dispatcher = dispatcher
        self._returned_jobs = ReturnedJobs()
        self._departed: dict[str, WorkerDeath | None] = {}
        """Workers that left while a claim for them was in flight, which is released first. None: they shut down."""

    def on_connection_closed(self, connection: int) -> None:
        for worker in self._workers.on_connection(connection):
            self.declare_dead(worker, GONE)

    def on_unreachable(self, identity: bytes) -> None:
        if (worker := self._workers.by_identity(identity)) is not None:
            self.declare_dead(worker, "it could not be reached")

    def declare_dead(self, worker: ConnectedWorker, evidence: str, detector: Detector = Detector.CONNECTION) -> None:
        job_id = None if worker.assignment is None else worker.assignment.job.job_id
        self.leave(worker, WorkerDeath(worker.worker_id, detector, evidence, job_id))

    def leave(self, worker: ConnectedWorker, death: WorkerDeath | None = None) -> None:
        """Remove a worker, release its prefetched jobs, and write its end. Without a death, it shut down."""
        self._workers.remove(worker)
        if self._outbox.backlog.withdraw_registration(worker.worker_id):
            return
        self._dispatcher.remove(worker)
        self._dispatcher.release_prefetched(worker, worker.seen_s)
        if worker.is_claiming:
            self._departed[worker.worker_id] = death
        else:
            self._write_end(worker.worker_id, death)

    def finish(self, worker_id: str, worker_turn: WorkerTurn, claimed: tuple[Claimed, ...]) -> bool:
        """Release jobs that were claimed for a worker that left meanwhile, and write its end. Return False for others.

        The jobs never reached it, so no crash counts."""
        if not worker_turn.claim_count or worker_id not in self._departed:
            return False
        death = self._departed.pop(worker_id)
        if claimed:
            self._outbox.worker_turn(worker_id).release.extend(claimed)
        self._write_end(worker_id, death)
        return True

    def _write_end(self, worker_id: str, death: WorkerDeath | None) -> None:
        if death is None:
            self._outbox.backlog.retire(worker_id)
        else:
            self._outbox.backlog.report_death(death)

    def expel(self, identity: bytes, worker: ConnectedWorker | None, why: str) -> None:
        """Disconnect a peer that broke the protocol.

        Its job is not to blame: if it may run again, no crash counts. It waits a little longer each time, since the
        next worker may be of the same kind."""
        self._outbox.send(identity, protocol.disconnect())
        if worker is None:
            return
        evidence = f"it broke the protocol: {why}"
        if (assignment := worker.assignment) is not None:
            ending = conclude(assignment.attempt(), Died(f"its worker was sent away: {evidence}", counts=False))
            if ending.state is JobState.PENDING:
                delay_s = self._returned_jobs.next_delay_s(assignment.job.job_id)
                ending = msgspec.structs.replace(ending, delay_s=delay_s)
            self._outbox.worker_turn(worker.worker_id).endings.append(ending)
        self.declare_dead(worker, evidence)

    def on_success(self, job_id: int) -> None:
        """Forget how often a job was returned by workers that broke the protocol."""
        self._returned_jobs.forget(job_id)

    def disconnect_dead(self, worker: ConnectedWorker) -> None:
        """Disconnect a worker that is dead in the ledger. It has lost its jobs, and must register again."""
        self._workers.remove(worker)
        self._dispatcher.remove(worker)
        self._outbox.backlog.retire(worker.worker_id)
        self._outbox.send(worker.identity, protocol.disconnect())

    def close(self) -> None:
        """Let no worker take a further job, and disconnect the idle ones."""
        for worker in self._workers:
            worker.is_draining = True
            self._dispatcher.release_prefetched(worker, worker.seen_s)
        self.disconnect_idle()

    def disconnect_idle(self) -> None:
        for worker in self._workers:
            if worker.assignment is None and not worker.is_claiming and worker.held_address is None:
                self._workers.remove(worker)
                self._dispatcher.remove(worker)
                self._outbox.send(worker.identity, protocol.disconnect())
                if worker.is_registered:
                    self._outbox.backlog.retire(worker.worker_id)
                else:
                    # What the ledger has of it is for the next broker, to which it goes.
                    self._outbox.backlog.withdraw_registration(worker.worker_id, is_over=False)
