"""Do what an order asks of the ledger: one exchange per round, and the rarer things beside it."""

import hashlib
import time

from unstuck import host
from unstuck.client.lookout import Lookout
from unstuck.config import Settings
from unstuck.domain.endings import Release
from unstuck.domain.policy import encode_policy
from unstuck.domain.states import LIVING, Door
from unstuck.mdp.broker.asking import Asking
from unstuck.mdp.broker.calls import Call, bare_policy
from unstuck.mdp.broker.orders import Answer, Birth, Hand, Order, Resumed, Stored
from unstuck.notify.ringer import Ringer
from unstuck.reaper.sweep import Reaper
from unstuck.store.contract import Ledger
from unstuck.store.records import (
    Claimed,
    Exchange,
    ExchangeAnswer,
    Letter,
    OnceJob,
    Request,
    TaskRecord,
    Turn,
    TurnAnswer,
    Wish,
    WorkerBirth,
)

TASKS_EVERY_S = 2.0
BY = "broker"
KEY_KEPT_S = 24 * 3600.0
"""How long a call with the same key is the same call."""


class Desk:
    """Belongs to one thread. Every step may be repeated, so that after an outage an order is done from where it was."""

    def __init__(self, ledger: Ledger, settings: Settings, reaper: Reaper) -> None:
        self._ledger = ledger
        self._settings = settings
        self._reaper = reaper
        self._lookout = Lookout(ledger)
        self._ringer = Ringer(ledger.ring)
        self._asking = Asking(ledger, settings)
        self._wishes: dict[str, Wish] = {}
        self._bare = encode_policy(bare_policy(settings.mdp.retry_attempts))
        self._tasks: dict[str, TaskRecord] = {}
        self._tasks_read_s = float("-inf")

    def do(self, order: Order) -> Answer:
        answer = Answer()
        self._read_tasks(answer, anew=bool(order.births))
        for birth in order.births:
            if (resumed := self._resume(birth)) is not None:
                answer.resumed[birth.worker_id] = resumed
            else:
                self._register(birth)
        self._exchange(order, answer)
        words = set()
        for death in order.deaths:
            self._wishes.pop(death.worker_id, None)
            self._reaper.bury(death.worker_id, death.detector, death.evidence)
            answer.buried.append((death, None if death.job_id is None else self._ledger.job(death.job_id)))
            words.add("workers")
        for worker_id, note in order.notes:
            self._ledger.note_progress(worker_id, [note])
        for worker_id in order.retired:
            self._wishes.pop(worker_id, None)
            self._ledger.retire(worker_id)
            words.add("workers")
        if order.overdue:
            cancelled = self._ledger.cancel(order.overdue, f"{BY}: nobody took it in time")
            answer.expired = [job_id for job_id, how in cancelled.items() if how == "cancelled"]
        if order.look_at:
            answer.outcomes = self._ledger.outcomes(order.look_at)
            ended = {outcome.job_id for outcome in answer.outcomes}
            if left := [job_id for job_id in order.look_at if job_id not in ended]:
                answer.glances = self._ledger.glance(left)
        for client in order.returned:
            answer.letters[client] = self._letters(client)
        answer.replies = [(question, self._asking.answer(question)) for question in order.questions]
        if order.births:
            words.add("workers")
        if words:
            self._ringer.ring(words)
        return answer

    def close(self) -> None:
        self._ringer.flush()

    # ------------------------------------------------------------------------------------------

    def _letters(self, client: bytes) -> list[Letter]:
        found: list[Letter] = []
        while page := self._ledger.letters(client, found[-1].job_id if found else 0):
            found += page
        return found

    def _read_tasks(self, answer: Answer, *, anew: bool) -> None:
        if anew or time.monotonic() - self._tasks_read_s > TASKS_EVERY_S:
            answer.tasks = {task.name: task for task in self._ledger.tasks()}
            self._tasks = answer.tasks
            self._tasks_read_s = time.monotonic()

    def _resume(self, birth: Birth) -> Resumed | None:
        """Give a worker that came back its old place, if it still has that and the job that it holds."""
        holding = birth.holding
        if holding is None:
            return None
        worker = self._ledger.foreign_worker(holding.worker_id)
        held = {(job.job_id, job.token): job for job in self._ledger.held(holding.worker_id)}
        job = held.get((holding.job_id, holding.token))
        record = None if job is None else self._ledger.job(holding.job_id)
        if worker is None or worker.door is not Door.MDP or worker.state not in LIVING or job is None or record is None:
            return None
        self._wishes[worker.id] = Wish(worker.queues, worker.tasks, limit=1, start=1)
        return Resumed(
            worker.id,
            Claimed(
                job_id=job.job_id,
                token=job.token,
                task=job.task,
                queue=job.queue,
                running=True,
                payload=record.payload,
                payload_type=record.payload_type,
                policy=job.policy,
                failures=job.failures,
                crashes=job.crashes,
                attempt=record.attempt,
            ),
        )

    def _register(self, birth: Birth) -> None:
        # A bare name changes nothing of what another worker said about the same task.
        tasks = tuple(self._tasks.get(name) or TaskRecord(name, name, self._bare) for name in birth.services)
        queues = tuple(dict.fromkeys(task.queue for task in tasks))
        self._wishes[birth.worker_id] = Wish(queues, birth.services, limit=1, start=1)
        mdp = self._settings.mdp
        self._ledger.register(
            WorkerBirth(
                id=birth.worker_id,
                name=birth.name,
                host=birth.host or host.hostname(),
                # No process of any machine is meant by these: its connection and its beats say whether it lives.
                pid=0,
                boot_id=host.boot_id() if self._ledger.one_host else "",
                pid_namespace="",
                process_started="",
                queues=queues,
                tasks=tasks,
                concurrency=1,
                version="",
                heartbeat_interval_s=mdp.heartbeat_interval_s,
                suspect_after_s=mdp.heartbeat_timeout_s,
                running_stale_after_s=mdp.busy_timeout_s,
                metadata=birth.metadata,
                door=Door.MDP,
            )
        )

    def _exchange(self, order: Order, answer: Answer) -> None:
        turns = [self._turn(worker_id, hand) for worker_id, hand in order.hands.items()]
        plain = [post for post in order.posts if post.call.key is None]
        once = [post for post in order.posts if post.call.key is not None]
        if not (turns or order.posts or order.pulses or order.answered):
            return
        said = self._ledger.exchange(
            Exchange(
                jobs=tuple(post.call.job for post in plain),
                letters=tuple(post.letter for post in plain) if any(post.letter for post in plain) else (),
                once=tuple(OnceJob(_request(post.call), post.call.job, post.letter) for post in once),
                turns=tuple(turns),
                pulses=tuple(order.pulses),
                answered=tuple(order.answered),
            )
        )
        self._stored(order, answer, said)
        self._turned(turns, answer, said.turns)
        answer.beats = {pulse.worker_id: beat for pulse, beat in zip(order.pulses, said.beats, strict=True)}

    def _stored(self, order: Order, answer: Answer, said: ExchangeAnswer) -> None:
        if not order.posts:
            return
        told = [post for post in order.posts if post.letter is not None]
        unserved = dict(
            zip(map(id, told), self._lookout.warnings([post.call.job for post in told]), strict=True) if told else ()
        )
        plain, once = iter(said.enqueued), iter(said.once)
        taken = {claimed.job_id for turn in said.turns or () for claimed in turn.claimed}
        words = set()
        for post in order.posts:
            found = next(plain) if post.call.key is None else next(once)
            assert found is not None
            answer.stored.append(Stored(found.job_id, found.fresh, unserved.get(id(post)) is not None))
            if found.job_id not in taken:
                words.add(f"queue:{post.call.job.queue}")
        # Workers of other doors may serve these queues too, and so may those of another broker.
        if words:
            self._ringer.ring(words)

    def _turned(self, turns: list[Turn], answer: Answer, said: tuple[TurnAnswer, ...] | None) -> None:
        if said is None:
            said = tuple(self._find_out(turn) for turn in turns)
        for turn, one in zip(turns, said, strict=True):
            if not one.alive:
                answer.gone.add(turn.worker_id)
                continue
            answer.superseded |= one.superseded
            if one.claimed:
                answer.claimed[turn.worker_id] = one.claimed[0]

    def _find_out(self, turn: Turn) -> TurnAnswer:
        """The answer of a turn was lost: see what is held, do what was not done, and give back what nobody heard of."""
        held = {(job.job_id, job.token) for job in self._ledger.held(turn.worker_id)}
        handed_in = {(done.job_id, done.token) for done in turn.done}
        handed_in |= {(ending.job_id, ending.token) for ending in turn.endings}
        if handed_in & held:
            return self._ledger.turn(turn)
        if unheard := held - handed_in:
            self._ledger.turn(Turn(turn.worker_id, release=tuple(Release(*key) for key in unheard)))
        return TurnAnswer(True)

    def _turn(self, worker_id: str, hand: Hand) -> Turn:
        return Turn(
            worker_id,
            done=tuple(hand.done),
            endings=tuple(hand.endings),
            release=tuple(hand.release),
            wish=self._wishes.get(worker_id) if hand.wants else None,
        )


def _request(call: Call) -> Request:
    """The key alone says that it is the same: a body may differ in a time stamp."""
    key = hashlib.sha256(f"mdp\0{call.job.task}\0{call.key}".encode()).digest()
    return Request(key, hashlib.sha256(call.job.task.encode()).digest(), KEY_KEPT_S)
