"""Do what a batch asks of the ledger, in steps: registrations, the exchange, deaths, lookups and `mmi.` queries."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from unstuck.config import Settings
from unstuck.domain.endings import Attempt, Died, Ending, Release, conclude
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import decode_policy
from unstuck.domain.states import LIVE_STATES, Transport
from unstuck.errors import LedgerBusy, RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import (
    HeldRecord,
    RemoteHeartbeat,
    ReplyAddress,
    Turn,
)
from unstuck.logs import logger
from unstuck.mdp.broker.batch import GONE, Batch, BatchResult, MmiQuery, Registration, WorkerDeath
from unstuck.mdp.broker.exchange import Exchanger
from unstuck.mdp.broker.exchange_parts import Step
from unstuck.mdp.broker.handed_out import AbandonedWorker
from unstuck.mdp.broker.mmi import MmiAnswers
from unstuck.mdp.broker.registrar import Registrar
from unstuck.recovery.reap import Reaper

WATCH_EVERY_S = 1.0
"""How long one read of all workers is used for deaths. It reads every row, and many deaths take several batches."""
BY = "broker"

log = logger("unstuck.mdp.broker")

T = TypeVar("T")
Instead = Callable[[LedgerBusy | RefusedValue], Sequence[Step] | None]


class BatchRunner:
    """Belongs to the ledger thread. Every step may be repeated, so a batch goes on after an outage."""

    def __init__(self, ledger: Ledger, settings: Settings, reaper: Reaper) -> None:
        self._ledger = ledger
        self._settings = settings
        self._reaper = reaper
        self._mmi_answers = MmiAnswers(ledger, settings)
        self._registrar = Registrar(ledger, settings)
        self._exchanger = Exchanger(ledger, self._registrar.claim_requests)
        self._wakeups = self._exchanger.wakeups
        self._alive: set[str] = set()
        """Workers for which heartbeats are sent."""
        self._watched: dict[str, WorkerWatch] = {}
        """All workers, as they were read last."""
        self._watched_s = float("-inf")
        self._has_watched = False
        """All workers were read for the current batch."""
        self._replies: dict[tuple[str, tuple[bytes, ...]], list[bytes]] = {}
        """Replies to the queries of the current batch, since many clients may send the same one."""

    def steps(self, batch: Batch, result: BatchResult) -> list[Step]:
        """Return the steps of a batch, in order.

        After an outage only the step that failed is repeated. A step that needs a lock of another session is deferred,
        and the others go on."""
        self._exchanger.begin(batch)
        self._has_watched = False
        self._replies = {}
        if batch.heartbeats:
            self._alive = {heartbeat.worker_id for heartbeat in batch.heartbeats}
        # Asked before the steps take the registrations out of the batch.
        registers = bool(batch.registrations)
        steps = [Step(lambda: self._registrar.refresh_tasks(batch, result, registers=registers))]
        steps += self._registrations(batch, result)
        if any(worker_turn.late_replies for worker_turn in batch.worker_turns.values()):
            steps.append(Step(lambda: self._admit_late(batch, result)))
        steps += self._exchanger.steps(batch, result)
        steps += self._ends(batch, result)
        steps += self._takeovers(batch, result)
        if batch.overdue:
            # A blocked job is overdue again soon.
            steps.append(Step(lambda: self._expire(batch.overdue, result), lambda _: []))
        if batch.to_poll:
            steps.append(Step(lambda: self._poll(batch.to_poll, result)))
        steps += [Step(partial(self._find_reply_addresses, client, result)) for client in batch.resubscribed]
        steps += [Step(partial(self._ask, query, result)) for query in batch.queries]
        if (again := batch.retried) is not None:
            late = result.retried = BatchResult()
            steps += self._registrations(again, late)
            steps += self._exchanger.steps_again(again, late)
            steps += self._ends(again, late)
            steps += self._takeovers(again, late)
        if registers or batch.deaths or batch.stale_registrations or batch.retired:
            steps.append(Step(lambda: self._wakeups.send({"workers"})))
        return steps

    def _registrations(self, batch: Batch, result: BatchResult) -> list[Step]:
        registrations, batch.registrations = batch.registrations, []
        kept = result.deferred.registrations
        return [
            Step(partial(self._register, registration, batch, result), self._deferring(kept, registration))
            for registration in registrations
        ]

    def _ends(self, batch: Batch, result: BatchResult) -> list[Step]:
        """Return the steps that must follow the turns of their workers."""
        left, defer = result.deferred, self._deferring
        steps = [Step(partial(self._declare_dead, death, result), defer(left.deaths, death)) for death in batch.deaths]
        steps += [Step(partial(self._withdraw, one, result), defer(left.withdrawn, one)) for one in batch.withdrawn]
        steps += [
            Step(
                partial(self._ledger.workers.note_progress, worker_id, [note]),
                defer(left.progress_notes, (worker_id, note)),
            )
            for worker_id, note in batch.progress_notes
        ]
        steps += [
            Step(partial(self._retire_stale, id, result), defer(left.stale_registrations, id))
            for id in batch.stale_registrations
        ]
        steps += [Step(partial(self._retire, id, result), defer(left.retired, id)) for id in batch.retired]
        return steps

    def _takeovers(self, batch: Batch, result: BatchResult) -> list[Step]:
        defer = self._deferring
        kept = result.deferred.abandoned
        return [Step(partial(self._take_over, one, result), defer(kept, one)) for one in batch.abandoned]

    def _deferring(self, kept: list[T], one: T) -> Instead:
        """Return the function that keeps `one` for later if another session holds a lock that it needs."""

        def defer(error: LedgerBusy | RefusedValue) -> Sequence[Step] | None:
            if self._ledger.single_host or not isinstance(error, LedgerBusy):
                return None
            log.warning("What concerns a worker cannot be written yet and is tried again", reason=str(error))
            kept.append(one)
            return []

        return defer

    def send_heartbeats(self) -> None:
        """Send heartbeats while a lock of another session blocks a batch.

        The batch with the next heartbeats waits behind it. If one of these workers dies meanwhile, its death is in that
        batch too."""
        if self._alive:
            self._ledger.workers.record_heartbeats([RemoteHeartbeat(worker_id) for worker_id in sorted(self._alive)])

    def close(self) -> None:
        self._wakeups.flush()

    # Workers --------------------------------------------------------------------------------------

    def _register(self, registration: Registration, batch: Batch, result: BatchResult) -> None:
        if (worker_id := self._registrar.register(registration, result)) is not None:
            self._alive.add(worker_id)
            batch.registrations.append(registration)

    def _admit_late(self, batch: Batch, result: BatchResult) -> None:
        """Accept late replies only with the key of a Majordomo worker that still holds the attempt. Ids of workers are
        public, and tokens can be guessed."""
        for worker_id, worker_turn in list(batch.worker_turns.items()):
            if not worker_turn.late_replies:
                continue
            worker = self._ledger.workers.remote(worker_id)
            held = set()
            genuine = worker_turn.late_replies
            if worker is not None and worker.transport is Transport.MDP and worker.state in LIVE_STATES:
                genuine = [late for late in worker_turn.late_replies if late.owner == worker.owner]
                result.forged += [late.sender for late in worker_turn.late_replies if late.owner != worker.owner]
                held = {(job.job_id, job.token) for job in self._ledger.workers.held(worker_id)} if genuine else set()
            due = [late.done for late in genuine if (late.done.job_id, late.done.token) in held]
            result.refused_replies += len(genuine) - len(due)
            worker_turn.done += due
            worker_turn.late_replies = []
            if worker_turn.empty:
                del batch.worker_turns[worker_id]

    def _declare_dead(self, death: WorkerDeath, result: BatchResult) -> None:
        if result.deferred.concerns(death.worker_id):
            # Its turn is written first.
            result.deferred.deaths.append(death)
            return
        self._registrar.forget(death.worker_id)
        self._alive.discard(death.worker_id)
        self._reaper.report_death(death.worker_id, death.detector, death.evidence, seen=self._seen(death.worker_id))
        result.deaths.append((death, None if death.job_id is None else self._ledger.jobs.get(death.job_id)))

    def _seen(self, worker_id: str) -> WorkerWatch | None:
        """Return a worker as it was read a moment ago. The ledger checks its state again with the death."""
        now_s = time.monotonic()
        is_old = worker_id not in self._watched or now_s - self._watched_s > WATCH_EVERY_S
        if is_old and not self._has_watched:
            self._watched = {worker.id: worker for worker in self._ledger.recovery.watch()}
            self._watched_s = now_s
            self._has_watched = True
        return self._watched.get(worker_id)

    def _withdraw(self, registration: Registration, result: BatchResult) -> None:
        if (resumed := self._registrar.resume(registration)) is not None:
            job_id = None if resumed.job is None else resumed.job.job_id
            self._declare_dead(WorkerDeath(resumed.worker_id, Detector.CONNECTION, GONE, job_id), result)

    def _retire(self, worker_id: str, result: BatchResult) -> None:
        if result.deferred.concerns(worker_id):
            result.deferred.retired.append(worker_id)
            return
        self._registrar.forget(worker_id)
        self._alive.discard(worker_id)
        self._ledger.workers.stop(worker_id)

    def _expire(self, job_ids: list[int], result: BatchResult) -> None:
        # Read again, since a worker of another interface may have started it after the last poll.
        waiting = [position.job_id for position in self._ledger.jobs.positions(job_ids) if position.worker_id is None]
        # A job whose row another session holds would block all the others.
        blocked = self._ledger.workers.blocked_outcomes(waiting)
        free = [job_id for job_id in waiting if job_id not in blocked]
        waited_s = self._settings.mdp.request_ttl_s
        result.expired = self._ledger.jobs.cancel_untaken(free, waited_s, f"{BY}: nobody took it in time")

    def _poll(self, job_ids: list[int], result: BatchResult) -> None:
        result.outcomes = self._ledger.jobs.outcomes(job_ids)
        ended = {outcome.job_id for outcome in result.outcomes}
        if left := [job_id for job_id in job_ids if job_id not in ended]:
            result.positions = self._ledger.jobs.positions(left)

    def _find_reply_addresses(self, client: bytes, result: BatchResult) -> None:
        found: list[ReplyAddress] = []
        while page := self._ledger.workers.reply_addresses(client, found[-1].job_id if found else 0):
            found += page
        result.reply_addresses[client] = found

    def _ask(self, query: MmiQuery, result: BatchResult) -> None:
        key = (query.name, query.body)
        if key not in self._replies:
            self._replies[key] = self._mmi_answers.answer(query)
        result.replies.append((query, self._replies[key]))

    def _retire_stale(self, worker_id: str, result: BatchResult) -> None:
        """Release the other jobs of a worker of an earlier broker that sent its reply. They never reached it."""
        if result.deferred.concerns(worker_id):
            result.deferred.stale_registrations.append(worker_id)
            return
        if left := self._ledger.workers.held(worker_id):
            self._ledger.workers.turn(Turn(worker_id, release=tuple(Release(job.job_id, job.token) for job in left)))
        self._ledger.workers.stop(worker_id)

    def _take_over(self, abandoned: AbandonedWorker, result: BatchResult) -> None:
        """Settle the jobs that a dead broker held for an old worker, except the one whose reply may still come."""
        if result.deferred.concerns(abandoned.worker_id):
            # Its reply has come and waits for a lock.
            result.deferred.abandoned.append(abandoned)
            return
        worker = self._ledger.workers.remote(abandoned.worker_id)
        if worker is not None and worker.state in LIVE_STATES and worker.id not in self._registrar.claim_requests:
            held = self._ledger.workers.held(worker.id)
            kept = None if abandoned.is_given_up else abandoned.working_on
            left = [job for job in held if (job.job_id, job.token) != kept]
            # Only jobs that may run again are prefetched. The reply of any other job was lost.
            lost = [
                job
                for job in left
                if decode_policy(job.policy).on_crash != "retry" or (job.job_id, job.token) == abandoned.working_on
            ]
            if left:
                self._ledger.workers.turn(
                    Turn(
                        worker.id,
                        endings=tuple(_lost(job) for job in lost),
                        release=tuple(Release(job.job_id, job.token) for job in left if job not in lost),
                    )
                )
                self._wakeups.send({f"queue:{job.queue}" for job in left})
                log.warning("A broker died. What it kept for a worker is settled", worker=worker.id, jobs=len(left))
            if len(left) == len(held):
                self._ledger.workers.stop(worker.id)
        if abandoned.is_given_up or not abandoned.may_be_given_up:
            abandoned.record.settled(abandoned.worker_id)


def _lost(job: HeldRecord) -> Ending:
    attempt = Attempt(job.job_id, job.token, decode_policy(job.policy), job.failures, job.crashes, job.cancel_requested)
    return conclude(attempt, Died("its broker died, and no reply of its worker came"))
