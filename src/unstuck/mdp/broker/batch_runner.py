"""Do what a batch asks of the ledger, in steps: registrations, the exchange, deaths, lookups and `mmi.` queries."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.endings import Attempt, Died, Ending, Release, conclude
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import decode_policy, encode_policy
from unstuck.domain.states import LIVE_STATES, Transport
from unstuck.errors import LedgerBusy, NameTaken, RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import (
    Claimed,
    ClaimRequest,
    HeldRecord,
    NewWorker,
    RemoteHeartbeat,
    ReplyAddress,
    Turn,
    WorkerRecord,
)
from unstuck.logs import logger
from unstuck.mdp import protocol
from unstuck.mdp.broker.batch import GONE, Batch, BatchResult, MmiQuery, Registration, ResumedWorker, WorkerDeath
from unstuck.mdp.broker.exchange import Exchanger
from unstuck.mdp.broker.exchange_parts import Step
from unstuck.mdp.broker.handed_out import Abandoned
from unstuck.mdp.broker.jobs import as_task, bare_policy
from unstuck.mdp.broker.mmi import MmiAnswers
from unstuck.recovery.reap import Reaper
from unstuck.remote.redelivery import claimed_again

TASKS_EVERY_S = 2.0
MAX_KNOWN_SERVICES = 10_000
"""Tasks are kept for good, and all of them are read again and again. Workers of this door bring them to this number."""
WATCH_EVERY_S = 1.0
"""How long one look at all workers serves for deaths: it reads every row, and a crowd dies in many orders."""
BY = "broker"

log = logger("unstuck.mdp.broker")

T = TypeVar("T")
Instead = Callable[[LedgerBusy | RefusedValue], Sequence[Step] | None]


class BatchRunner:
    """Belongs to one thread. Every step may be repeated, so that after an outage an order is done from where it was."""

    def __init__(self, ledger: Ledger, settings: Settings, reaper: Reaper) -> None:
        self._ledger = ledger
        self._settings = settings
        self._reaper = reaper
        self._asking = MmiAnswers(ledger, settings)
        self._claim_requests: dict[str, ClaimRequest] = {}
        self._exchanger = Exchanger(ledger, self._claim_requests)
        self._wakeups = self._exchanger.wakeups
        self._bare = encode_policy(bare_policy(settings.mdp.retry_attempts))
        self._tasks: dict[str, TaskRecord] = {}
        self._services: set[str] = set()
        """The names of all tasks, those included that were registered here since they were read."""
        self._tasks_read_s = float("-inf")
        self._alive: set[str] = set()
        """Workers for which heartbeats are sent."""
        self._watched: dict[str, WorkerWatch] = {}
        """All workers, as they were at the last look."""
        self._watched_s = float("-inf")
        self._has_watched = False
        """The present order has looked at all workers."""
        self._said: dict[tuple[str, tuple[bytes, ...]], list[bytes]] = {}
        """What the present order found out: many may ask the same."""

    def steps(self, batch: Batch, answer: BatchResult) -> list[Step]:
        """Return what is to be done, in order. A step that fails for want of the ledger is done again, the others are
        not. A step that needs a lock which another session holds is deferred, and the others go on."""
        self._exchanger.begin(batch)
        self._has_watched = False
        self._said = {}
        if batch.heartbeats:
            self._alive = {heartbeat.worker_id for heartbeat in batch.heartbeats}
        steps = [Step(lambda: self._know_tasks(batch, answer)), *self._registrations(batch, answer)]
        if any(worker_turn.late for worker_turn in batch.worker_turns.values()):
            steps.append(Step(lambda: self._admit_late(batch, answer)))
        steps += self._exchanger.steps(batch, answer)
        steps += self._ends(batch, answer)
        steps += self._estates(batch, answer)
        if batch.overdue:
            # Whatever is blocked is overdue again soon.
            steps.append(Step(lambda: self._expire(batch.overdue, answer), lambda _: []))
        if batch.look_at:
            steps.append(Step(lambda: self._look_at(batch.look_at, answer)))
        steps += [Step(partial(self._find_reply_addresses, client, answer)) for client in batch.returned]
        steps += [Step(partial(self._ask, question, answer)) for question in batch.questions]
        if (again := batch.again) is not None:
            late = answer.again = BatchResult()
            steps += self._registrations(again, late)
            steps += self._exchanger.steps_again(again, late)
            steps += self._ends(again, late)
            steps += self._estates(again, late)
        if batch.registrations or batch.deaths or batch.stale_registrations or batch.retired:
            steps.append(Step(lambda: self._wakeups.send({"workers"})))
        return steps

    def _registrations(self, batch: Batch, answer: BatchResult) -> list[Step]:
        births, batch.registrations = batch.registrations, []
        kept = answer.left.registrations
        return [
            Step(partial(self._register, registration, batch, answer), self._deferring(kept, registration))
            for registration in births
        ]

    def _ends(self, batch: Batch, answer: BatchResult) -> list[Step]:
        """Return the steps for what is said of workers after their turns."""
        left, defer = answer.left, self._deferring
        steps = [Step(partial(self._declare_dead, death, answer), defer(left.deaths, death)) for death in batch.deaths]
        steps += [Step(partial(self._withdraw, one, answer), defer(left.withdrawn, one)) for one in batch.withdrawn]
        steps += [
            Step(partial(self._ledger.note_progress, worker_id, [note]), defer(left.notes, (worker_id, note)))
            for worker_id, note in batch.notes
        ]
        steps += [
            Step(partial(self._clear_up, id, answer), defer(left.stale_registrations, id))
            for id in batch.stale_registrations
        ]
        steps += [Step(partial(self._retire, id, answer), defer(left.retired, id)) for id in batch.retired]
        return steps

    def _estates(self, batch: Batch, answer: BatchResult) -> list[Step]:
        defer = self._deferring
        kept = answer.left.abandoned
        return [Step(partial(self._take_over, one, answer), defer(kept, one)) for one in batch.abandoned]

    def _deferring(self, kept: list[T], one: T) -> Instead:
        """Return what keeps this one for later if another session holds a lock that it needs."""

        def defer(error: LedgerBusy | RefusedValue) -> Sequence[Step] | None:
            if self._ledger.single_host or not isinstance(error, LedgerBusy):
                return None
            log.warning("What concerns a worker cannot be written yet and is tried again", reason=str(error))
            kept.append(one)
            return []

        return defer

    def beat_on(self) -> None:
        """Send heartbeats while a lock of another session keeps an order from the ledger.

        The order with the next heartbeats waits behind it. Should one of these workers die meanwhile, its death is
        in that order too."""
        if self._alive:
            self._ledger.record_heartbeats([RemoteHeartbeat(worker_id) for worker_id in sorted(self._alive)])

    def close(self) -> None:
        self._wakeups.flush()

    # ------------------------------------------------------------------------------------------

    def _register(self, registration: Registration, batch: Batch, answer: BatchResult) -> None:
        if (resumed := self._resume(registration)) is not None:
            answer.resumed[registration.worker_id] = resumed
        elif not self._write_registration(registration, answer):
            return
        self._alive.add(registration.worker_id if resumed is None else resumed.worker_id)
        batch.registrations.append(registration)

    def _admit_late(self, batch: Batch, answer: BatchResult) -> None:
        """Take late replies only with the keys of Majordomo workers that hold what they answer: ids of workers are
        shown to everyone, and those of attempts can be guessed."""
        for worker_id, worker_turn in list(batch.worker_turns.items()):
            if not worker_turn.late:
                continue
            worker = self._ledger.remote_worker(worker_id)
            held = set()
            genuine = worker_turn.late
            if worker is not None and worker.transport is Transport.MDP and worker.state in LIVE_STATES:
                genuine = [late for late in worker_turn.late if late.owner == worker.owner]
                answer.forged += [late.sender for late in worker_turn.late if late.owner != worker.owner]
                held = {(job.job_id, job.token) for job in self._ledger.held(worker_id)} if genuine else set()
            due = [late.done for late in genuine if (late.done.job_id, late.done.token) in held]
            answer.refused += len(genuine) - len(due)
            worker_turn.done += due
            worker_turn.late = []
            if worker_turn.empty:
                del batch.worker_turns[worker_id]

    def _declare_dead(self, death: WorkerDeath, answer: BatchResult) -> None:
        if answer.left.concerns(death.worker_id):
            # What it did before it died is written first.
            answer.left.deaths.append(death)
            return
        self._claim_requests.pop(death.worker_id, None)
        self._alive.discard(death.worker_id)
        self._reaper.report_death(death.worker_id, death.detector, death.evidence, seen=self._seen(death.worker_id))
        answer.deaths.append((death, None if death.job_id is None else self._ledger.job(death.job_id)))

    def _seen(self, worker_id: str) -> WorkerWatch | None:
        """Return a worker as the ledger had it a moment ago; its state is checked again when its death is written."""
        now_s = time.monotonic()
        is_old = worker_id not in self._watched or now_s - self._watched_s > WATCH_EVERY_S
        if is_old and not self._has_watched:
            self._watched = {worker.id: worker for worker in self._ledger.watch()}
            self._watched_s = now_s
            self._has_watched = True
        return self._watched.get(worker_id)

    def _withdraw(self, registration: Registration, answer: BatchResult) -> None:
        if (resumed := self._resume(registration)) is not None:
            job_id = None if resumed.job is None else resumed.job.job_id
            self._declare_dead(WorkerDeath(resumed.worker_id, Detector.CONNECTION, GONE, job_id), answer)

    def _retire(self, worker_id: str, answer: BatchResult) -> None:
        if answer.left.concerns(worker_id):
            answer.left.retired.append(worker_id)
            return
        self._claim_requests.pop(worker_id, None)
        self._alive.discard(worker_id)
        self._ledger.retire(worker_id)

    def _expire(self, job_ids: list[int], answer: BatchResult) -> None:
        # Looked at anew: a worker of another door may have begun it since the last look, and then it was taken in time.
        waiting = [position.job_id for position in self._ledger.job_position(job_ids) if position.worker_id is None]
        # A job whose row another session holds would keep all the others waiting.
        blocked = self._ledger.blocked_outcomes(waiting)
        free = [job_id for job_id in waiting if job_id not in blocked]
        waited_s = self._settings.mdp.request_ttl_s
        answer.expired = self._ledger.cancel_untaken(free, waited_s, f"{BY}: nobody took it in time")

    def _look_at(self, job_ids: list[int], answer: BatchResult) -> None:
        answer.outcomes = self._ledger.outcomes(job_ids)
        ended = {outcome.job_id for outcome in answer.outcomes}
        if left := [job_id for job_id in job_ids if job_id not in ended]:
            answer.glances = self._ledger.job_position(left)

    def _find_reply_addresses(self, client: bytes, answer: BatchResult) -> None:
        found: list[ReplyAddress] = []
        while page := self._ledger.reply_addresses(client, found[-1].job_id if found else 0):
            found += page
        answer.reply_addresses[client] = found

    def _ask(self, question: MmiQuery, answer: BatchResult) -> None:
        key = (question.name, question.body)
        if key not in self._said:
            self._said[key] = self._asking.answer(question)
        answer.replies.append((question, self._said[key]))

    def _know_tasks(self, batch: Batch, answer: BatchResult) -> None:
        unknown = any(post.call.job.task not in self._tasks for post in batch.posts)
        self._read_tasks(answer, anew=bool(batch.registrations) or unknown)
        for place, post in enumerate(batch.posts):
            task = self._tasks.get(post.call.job.task)
            if task is not None and (task.queue, task.policy) != (post.call.job.queue, post.call.job.policy):
                # We know it since a moment ago: its queue may be another than the name of the service.
                batch.posts[place] = msgspec.structs.replace(post, call=as_task(post.call, task))

    def _read_tasks(self, answer: BatchResult, *, anew: bool) -> None:
        if anew or time.monotonic() - self._tasks_read_s > TASKS_EVERY_S:
            answer.tasks = {task.name: task for task in self._ledger.tasks()}
            self._tasks = answer.tasks
            self._services = set(answer.tasks)
            self._tasks_read_s = time.monotonic()

    def _resume(self, registration: Registration) -> ResumedWorker | None:
        """Give a worker that came back its old place, if it still has that, with the job that it holds."""
        worker = self._old_self(registration)
        if worker is None:
            return None
        holding = registration.holding
        own: Claimed | None = None
        never_heard_of = []
        for job in self._ledger.held(worker.id):
            record = self._ledger.job(job.job_id)
            if holding is None or record is None or (job.job_id, job.token) != (holding.job_id, holding.token):
                never_heard_of.append(Release(job.job_id, job.token))
                continue
            own = claimed_again(job, record)
        if never_heard_of:
            self._ledger.turn(Turn(worker.id, release=tuple(never_heard_of)))
        self._claim_requests[worker.id] = ClaimRequest(worker.queues, worker.tasks, limit=1, start=1)
        return ResumedWorker(worker.id, own)

    def _old_self(self, registration: Registration) -> WorkerRecord | None:
        if registration.holding is not None:
            worker = self._ledger.remote_worker(registration.holding.worker_id)
        else:
            worker = self._ledger.remote_worker_named(registration.name) if registration.named else None
        # Whoever has a wish here stands at this broker now.
        if worker is None or worker.state not in LIVE_STATES or worker.id in self._claim_requests:
            return None
        same = (worker.transport, set(worker.tasks)) == (Transport.MDP, set(registration.services))
        same = same and worker.owner == (
            registration.owner if registration.holding is None else registration.holding.owner
        )
        return worker if same and (worker.name == registration.name or not registration.named) else None

    def _clear_up(self, worker_id: str, answer: BatchResult) -> None:
        """A worker of an earlier broker handed in what it had: nothing else that stands there ever reached it."""
        if answer.left.concerns(worker_id):
            answer.left.stale_registrations.append(worker_id)
            return
        if left := self._ledger.held(worker_id):
            self._ledger.turn(Turn(worker_id, release=tuple(Release(job.job_id, job.token) for job in left)))
        self._ledger.retire(worker_id)

    def _take_over(self, abandoned: Abandoned, answer: BatchResult) -> None:
        """Settle what a dead broker kept for an old worker. What that works on stays its own: its reply may come."""
        if answer.left.concerns(abandoned.worker_id):
            # Its reply has come, and waits for a lock.
            answer.left.abandoned.append(abandoned)
            return
        worker = self._ledger.remote_worker(abandoned.worker_id)
        if worker is not None and worker.state in LIVE_STATES and worker.id not in self._claim_requests:
            held = self._ledger.held(worker.id)
            kept = None if abandoned.is_given_up else abandoned.working_on
            left = [job for job in held if (job.job_id, job.token) != kept]
            # Jobs are claimed in advance only if they may run again. Of any other the reply was lost.
            lost = [
                job
                for job in left
                if decode_policy(job.policy).on_crash != "retry" or (job.job_id, job.token) == abandoned.working_on
            ]
            if left:
                self._ledger.turn(
                    Turn(
                        worker.id,
                        endings=tuple(_lost(job) for job in lost),
                        release=tuple(Release(job.job_id, job.token) for job in left if job not in lost),
                    )
                )
                self._wakeups.send({f"queue:{job.queue}" for job in left})
                log.warning("A broker died. What it kept for a worker is settled", worker=worker.id, jobs=len(left))
            if len(left) == len(held):
                self._ledger.retire(worker.id)
        if abandoned.is_given_up or not abandoned.may_be_given_up:
            abandoned.estate.settled(abandoned.worker_id)

    def _write_registration(self, registration: Registration, answer: BatchResult) -> bool:
        """Write a worker down; return False if it is refused, or to be tried again."""
        known = self._services | set(registration.services)
        if len(known) > max(MAX_KNOWN_SERVICES, len(self._services)):
            answer.turned_away.append((registration, protocol.TOO_MANY_SERVICES, too_many_services(MAX_KNOWN_SERVICES)))
            return False
        if registration.named:
            standing = self._ledger.remote_worker_named(registration.name)
            if standing is not None and standing.state in LIVE_STATES and standing.id != registration.worker_id:
                if standing.owner == registration.owner and standing.id in self._claim_requests:
                    # It came back before the end of its former connection was written.
                    answer.left.registrations.append(registration)
                else:
                    answer.turned_away.append(
                        (registration, protocol.NAME_TAKEN, name_taken(registration.name, standing.id))
                    )
                return False
        try:
            self._write(registration)
        except NameTaken:
            # A Python worker has it.
            self._claim_requests.pop(registration.worker_id, None)
            standing_id = self._ledger.living_python_worker(registration.name) or ""
            answer.turned_away.append((registration, protocol.NAME_TAKEN, name_taken(registration.name, standing_id)))
            return False
        if registration.named and self._ledger.remote_worker(registration.worker_id) is None:
            # Another broker was faster.
            self._claim_requests.pop(registration.worker_id, None)
            answer.turned_away.append((registration, protocol.NAME_TAKEN, name_taken(registration.name)))
            return False
        return True

    def _write(self, registration: Registration) -> None:
        # A bare name changes nothing of what another worker said about the same task.
        tasks = tuple(self._tasks.get(name) or TaskRecord(name, name, self._bare) for name in registration.services)
        queues = tuple(dict.fromkeys(task.queue for task in tasks))
        self._claim_requests[registration.worker_id] = ClaimRequest(queues, registration.services, limit=1, start=1)
        self._services |= set(registration.services)
        mdp = self._settings.mdp
        self._ledger.register(
            NewWorker(
                id=registration.worker_id,
                name=registration.name,
                host=registration.host or host.hostname(),
                # No process of any machine is meant by these: its connection and its beats say whether it lives.
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


def _lost(job: HeldRecord) -> Ending:
    attempt = Attempt(job.job_id, job.token, decode_policy(job.policy), job.failures, job.crashes, job.cancel_requested)
    return conclude(attempt, Died("its broker died, and no reply of its worker came"))


def name_taken(name: str, worker_id: str = "") -> str:
    who = f" ({worker_id})" if worker_id else ""
    return f"A worker named {name!r} lives{who}. Choose another name, or stop that worker first."


def too_many_services(most: int) -> str:
    return (
        f"The ledger knows {most:,} tasks or more, and takes no new service over ZeroMQ. Serve known ones, and put "
        "what differs between them into the body."
    )
