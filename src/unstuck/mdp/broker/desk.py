"""Do what an order asks of the ledger: one exchange per round, and the rarer things beside it."""

import hashlib
import time
from collections.abc import Callable
from functools import partial

import msgspec

from unstuck import host
from unstuck.client.lookout import Lookout
from unstuck.config import Settings
from unstuck.domain.endings import Release
from unstuck.domain.errors import RefusedValue, UncertainCommit
from unstuck.domain.outcomes import NotStorable
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.recovery import Attempt, conclude
from unstuck.domain.states import LIVING, Door
from unstuck.logs import logger
from unstuck.mdp.broker.asking import Asking
from unstuck.mdp.broker.calls import Call, as_task, bare_policy
from unstuck.mdp.broker.orders import Answer, Birth, Death, Hand, Order, Posted, Question, Resumed, Stored
from unstuck.notify.ringer import Ringer
from unstuck.reaper.sweep import Reaper
from unstuck.store.contract import Ledger
from unstuck.store.holding import claimed_again
from unstuck.store.records import (
    Claimed,
    Exchange,
    ExchangeAnswer,
    ForeignPulse,
    Letter,
    OnceJob,
    Request,
    TaskRecord,
    Turn,
    TurnAnswer,
    Wish,
    WorkerBirth,
    WorkerRecord,
)

TASKS_EVERY_S = 2.0
BY = "broker"
KEY_KEPT_S = 24 * 3600.0
"""How long a call with the same key is the same call."""

log = logger("unstuck.mdp")


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
        self._known: set[tuple[int, int]] = set()
        """What the workers of this order are known to hold: (job_id, token)."""
        self._alive: set[str] = set()
        """Workers for which heartbeats are sent."""

    def steps(self, order: Order, answer: Answer) -> list[Callable[[], None]]:
        """Give what is to be done, in order. A step that fails for want of the ledger is done again, the others are
        not."""
        steps: list[Callable[[], None]] = [lambda: self._know_tasks(order, answer)]
        steps += [partial(self._bear, birth, answer) for birth in order.births]
        steps.append(lambda: self._exchange(order, answer))
        steps += [partial(self._bury, death, answer) for death in order.deaths]
        steps += [partial(self._ledger.note_progress, worker_id, [note]) for worker_id, note in order.notes]
        steps += [partial(self._clear_up, worker_id) for worker_id in order.left_over]
        steps += [partial(self._retire, worker_id) for worker_id in order.retired]
        if order.overdue:
            steps.append(lambda: self._expire(order.overdue, answer))
        if order.look_at:
            steps.append(lambda: self._look_at(order.look_at, answer))
        steps += [partial(self._find_letters, client, answer) for client in order.returned]
        steps += [partial(self._ask, question, answer) for question in order.questions]
        if order.births or order.deaths or order.left_over or order.retired:
            steps.append(lambda: self._ringer.ring({"workers"}))
        return steps

    def beat_on(self) -> None:
        """Send heartbeats while a lock of another session keeps an order from the ledger.

        The order with the next heartbeats waits behind it. Should one of these workers die meanwhile, its death is
        in that order too."""
        if self._alive:
            self._ledger.beat_foreign([ForeignPulse(worker_id) for worker_id in sorted(self._alive)])

    def close(self) -> None:
        self._ringer.flush()

    # ------------------------------------------------------------------------------------------

    def _bear(self, birth: Birth, answer: Answer) -> None:
        if (resumed := self._resume(birth)) is not None:
            answer.resumed[birth.worker_id] = resumed
        else:
            self._register(birth)
        self._alive.add(birth.worker_id if resumed is None else resumed.worker_id)

    def _bury(self, death: Death, answer: Answer) -> None:
        self._wishes.pop(death.worker_id, None)
        self._alive.discard(death.worker_id)
        self._reaper.bury(death.worker_id, death.detector, death.evidence)
        answer.buried.append((death, None if death.job_id is None else self._ledger.job(death.job_id)))

    def _retire(self, worker_id: str) -> None:
        self._wishes.pop(worker_id, None)
        self._alive.discard(worker_id)
        self._ledger.retire(worker_id)

    def _expire(self, job_ids: list[int], answer: Answer) -> None:
        cancelled = self._ledger.cancel(job_ids, f"{BY}: nobody took it in time")
        answer.expired = [job_id for job_id, how in cancelled.items() if how == "cancelled"]

    def _look_at(self, job_ids: list[int], answer: Answer) -> None:
        answer.outcomes = self._ledger.outcomes(job_ids)
        ended = {outcome.job_id for outcome in answer.outcomes}
        if left := [job_id for job_id in job_ids if job_id not in ended]:
            answer.glances = self._ledger.glance(left)

    def _find_letters(self, client: bytes, answer: Answer) -> None:
        found: list[Letter] = []
        while page := self._ledger.letters(client, found[-1].job_id if found else 0):
            found += page
        answer.letters[client] = found

    def _ask(self, question: Question, answer: Answer) -> None:
        answer.replies.append((question, self._asking.answer(question)))

    def _know_tasks(self, order: Order, answer: Answer) -> None:
        unknown = any(post.call.job.task not in self._tasks for post in order.posts)
        self._read_tasks(answer, anew=bool(order.births) or unknown)
        for place, post in enumerate(order.posts):
            task = self._tasks.get(post.call.job.task)
            if task is not None and (task.queue, task.policy) != (post.call.job.queue, post.call.job.policy):
                # We know it since a moment ago: its queue may be another than the name of the service.
                order.posts[place] = msgspec.structs.replace(post, call=as_task(post.call, task))

    def _read_tasks(self, answer: Answer, *, anew: bool) -> None:
        if anew or time.monotonic() - self._tasks_read_s > TASKS_EVERY_S:
            answer.tasks = {task.name: task for task in self._ledger.tasks()}
            self._tasks = answer.tasks
            self._tasks_read_s = time.monotonic()

    def _resume(self, birth: Birth) -> Resumed | None:
        """Give a worker that came back its old place, if it still has that, with the job that it holds."""
        worker = self._old_self(birth)
        if worker is None:
            return None
        holding = birth.holding
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
        self._wishes[worker.id] = Wish(worker.queues, worker.tasks, limit=1, start=1)
        return Resumed(worker.id, own)

    def _old_self(self, birth: Birth) -> WorkerRecord | None:
        if birth.holding is not None:
            worker = self._ledger.foreign_worker(birth.holding.worker_id)
        else:
            worker = self._ledger.foreign_worker_named(birth.name) if birth.named else None
        # Whoever has a wish here stands at this broker now.
        if worker is None or worker.state not in LIVING or worker.id in self._wishes:
            return None
        same = (worker.door, set(worker.tasks)) == (Door.MDP, set(birth.services))
        return worker if same and (worker.name == birth.name or not birth.named) else None

    def _clear_up(self, worker_id: str) -> None:
        """A worker of an earlier broker handed in what it had: nothing else that stands there ever reached it."""
        if left := self._ledger.held(worker_id):
            self._ledger.turn(Turn(worker_id, release=tuple(Release(job.job_id, job.token) for job in left)))
        self._ledger.retire(worker_id)

    def _free_name(self, birth: Birth) -> str:
        standing = self._ledger.foreign_worker_named(birth.name) if birth.named else None
        taken = standing is not None and standing.state in LIVING and standing.id != birth.worker_id
        return f"{birth.name}-{birth.worker_id}" if taken else birth.name

    def _register(self, birth: Birth) -> None:
        # A bare name changes nothing of what another worker said about the same task.
        tasks = tuple(self._tasks.get(name) or TaskRecord(name, name, self._bare) for name in birth.services)
        queues = tuple(dict.fromkeys(task.queue for task in tasks))
        self._wishes[birth.worker_id] = Wish(queues, birth.services, limit=1, start=1)
        mdp = self._settings.mdp
        self._ledger.register(
            WorkerBirth(
                id=birth.worker_id,
                name=self._free_name(birth),
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
        self._known = {key for hand in order.hands.values() for key in hand.holds}
        if order.pulses:
            self._alive = {pulse.worker_id for pulse in order.pulses}
        if not (turns or order.posts or order.pulses or order.answered):
            return
        answer.stored.clear()
        try:
            self._exchange_all(order.posts, turns, order.pulses, order.answered, answer)
        except RefusedValue as error:
            # One value cannot be stored, and nothing was: whose it is shows when each goes alone.
            log.warning("Something cannot be stored; storing it piece by piece", error=str(error))
            self._exchange_apart(order, turns, answer)
        if given_back := {f"queue:{job.queue}" for hand in order.hands.values() for job in hand.release}:
            self._ringer.ring(given_back)

    def _exchange_apart(self, order: Order, turns: list[Turn], answer: Answer) -> None:
        for post in order.posts:
            try:
                self._exchange_all([post], [], [], [], answer)
            except RefusedValue as error:
                log.warning("A request cannot be stored, and is dropped", service=post.call.job.task, error=str(error))
                answer.stored.append(None)
        for turn in turns:
            try:
                self._exchange_all([], [turn], [], [], answer)
            except RefusedValue as error:
                self._exchange_all([], [_without_results(turn, str(error))], [], [], answer)
        self._exchange_all([], [], order.pulses, order.answered, answer)

    def _exchange_all(
        self, posts: list[Posted], turns: list[Turn], pulses: list[ForeignPulse], answered: list[int], answer: Answer
    ) -> None:
        plain = [post for post in posts if post.call.key is None]
        once = [post for post in posts if post.call.key is not None]
        exchange = Exchange(
            jobs=tuple(post.call.job for post in plain),
            letters=tuple(post.letter for post in plain) if any(post.letter for post in plain) else (),
            once=tuple(OnceJob(_request(post.call), post.call.job, post.letter) for post in once),
            turns=tuple(turns),
            pulses=tuple(pulses),
            answered=tuple(answered),
        )
        try:
            said = self._ledger.exchange(exchange)
        except UncertainCommit:
            if posts:
                raise
            # Beats and letters are the same when done twice; turns are compared with what is held.
            beats = self._ledger.exchange(msgspec.structs.replace(exchange, turns=())).beats
            said = ExchangeAnswer(turns=None, beats=beats)
        self._stored(posts, answer, said)
        self._turned(turns, answer, said.turns)
        answer.beats |= {pulse.worker_id: beat for pulse, beat in zip(pulses, said.beats, strict=True)}

    def _stored(self, posts: list[Posted], answer: Answer, said: ExchangeAnswer) -> None:
        if not posts:
            return
        told = [post for post in posts if post.letter is not None]
        warnings = self._lookout.warnings([post.call.job for post in told]) if told else []
        unserved = {id(post) for post, warning in zip(told, warnings, strict=True) if warning is not None}
        plain, once = iter(said.enqueued), iter(said.once)
        taken = {claimed.job_id for turn in said.turns or () for claimed in turn.claimed}
        words = set()
        for post in posts:
            found = next(plain) if post.call.key is None else next(once)
            # Keys hold the service, so that none can have come with another one.
            assert found is not None
            answer.stored.append(Stored(found.job_id, found.fresh, id(post) in unserved))
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
                answer.claimed[turn.worker_id] = one.claimed

    def _find_out(self, turn: Turn) -> TurnAnswer:
        """The answer of a turn was lost: see what is held, do what was not done, and give back what nobody heard of."""
        held = {(job.job_id, job.token) for job in self._ledger.held(turn.worker_id)}
        handed_in = {(done.job_id, done.token) for done in turn.done}
        handed_in |= {(ending.job_id, ending.token) for ending in turn.endings}
        if handed_in & held:
            return self._ledger.turn(turn)
        if unheard := held - handed_in - self._known:
            self._ledger.turn(Turn(turn.worker_id, release=tuple(Release(*key) for key in unheard)))
        return TurnAnswer(True)

    def _turn(self, worker_id: str, hand: Hand) -> Turn:
        return Turn(
            worker_id,
            done=tuple(hand.done),
            endings=tuple(hand.endings),
            release=tuple(Release(job.job_id, job.token) for job in hand.release),
            wish=self._wish(worker_id, hand),
        )

    def _wish(self, worker_id: str, hand: Hand) -> Wish | None:
        wish = self._wishes.get(worker_id) if hand.wants else None
        if wish is None or (hand.wants == 1 and hand.free):
            return wish
        return msgspec.structs.replace(wish, limit=hand.wants, start=int(hand.free), run_ahead=True)


def _request(call: Call) -> Request:
    """The key alone says that it is the same: a body may differ in a time stamp."""
    key = hashlib.sha256(f"mdp\0{call.job.task}\0{call.key}".encode()).digest()
    return Request(key, hashlib.sha256(call.job.task.encode()).digest(), KEY_KEPT_S)


def _without_results(turn: Turn, why: str) -> Turn:
    """Let those whose reply cannot be stored fail for that, as everywhere."""
    endings = [conclude(Attempt(done.job_id, done.token, Policy(), 0, 0), NotStorable(why)) for done in turn.done]
    return msgspec.structs.replace(turn, done=(), endings=(*turn.endings, *endings))
