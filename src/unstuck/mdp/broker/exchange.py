"""Write the requests, turns and heartbeats of a batch: all in one commit, or around parts that cannot be written."""

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

import msgspec

from unstuck.client.no_workers import NoWorkerCheck
from unstuck.domain.endings import Attempt, NotStorable, Release, conclude
from unstuck.domain.policy import Policy
from unstuck.errors import LedgerBusy, LedgerError, RefusedValue, UncertainCommit
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Request
from unstuck.ledger.contract.workers import (
    ClaimRequest,
    DeferredOutcome,
    Exchange,
    ExchangeAnswer,
    OnceJob,
    Turn,
    TurnAnswer,
)
from unstuck.logs import logger
from unstuck.mdp.broker.batch import Batch, BatchResult, Stored, WorkerTurn
from unstuck.mdp.broker.exchange_parts import Key, Owner, Part, Step, merge_turn, outcome_keys, turn_keys
from unstuck.mdp.broker.jobs import Call
from unstuck.notify.wakeups import WakeupSender

KEY_KEPT_S = 24 * 3600.0
"""How long a call with the same idempotency key is the same call."""
FIND_S = 2.0
"""How long an exchange is split to find what a lock concerns. Parts that were not tried by then are deferred too."""
RETRY_S = 0.5
"""The same for parts that were deferred before. All else waits meanwhile."""
MAX_NAMED = 5
HELD = "another session of the database holds the row of the worker"

log = logger("unstuck.mdp")


class Exchanger:
    """Belongs to the ledger thread. What was written stays in the batch. What another session's lock kept from being
    written goes into `result.deferred`."""

    def __init__(self, ledger: Ledger, claim_requests: Mapping[str, ClaimRequest]) -> None:
        self._ledger = ledger
        self._claim_requests = claim_requests
        self._no_worker_check = NoWorkerCheck(ledger)
        self.wakeups = WakeupSender(ledger.notify)
        self._known: set[Key] = set()
        """Attempts that the workers of this batch are known to hold."""
        self._explained: dict[Key, str] = {}
        """Attempts whose rows another session held when they were deferred, with their workers."""
        self._blocked: set[str] = set()
        """Workers whose rows another session held when their turns were deferred."""
        self._unexplained: dict[Owner, int] = {}
        """Parts that were deferred without a known reason, and how often they were tried alone."""
        self._until_s = inf
        """When to stop looking for the blocked part."""

    def begin(self, batch: Batch) -> None:
        batches = [batch] if batch.retried is None else [batch, batch.retried]
        worker_turns = [worker_turn for one in batches for worker_turn in one.worker_turns.values()]
        self._known = {key for worker_turn in worker_turns for key in worker_turn.known_held}
        # Attempts in another part of the same batch are written soon.
        self._known |= {key for worker_turn in worker_turns for key in outcome_keys(worker_turn)}

    def steps(self, batch: Batch, result: BatchResult) -> list[Step]:
        """Return the steps that write this batch. Until then its requests and turns are taken out of it."""
        part = Part()
        return [Step(partial(self._open, batch, part)), self._step(part, batch, result)]

    def steps_again(self, batch: Batch, result: BatchResult) -> list[Step]:
        """Return the steps for parts that were deferred before. Parts that were blocked for an unknown reason go one by
        one, those that were tried least first."""
        part = _emptied(batch)
        explained = part.take([key for key in part.attempts() if key in self._explained])
        pieces = sorted(part.pieces(), key=lambda piece: self._unexplained.get(piece.name(), 0))
        steps = [self._step(one, batch, result) for one in (explained, *pieces) if not one.empty]
        return [Step(partial(self._allow, RETRY_S)), *steps]

    # ------------------------------------------------------------------------------------------

    def _open(self, batch: Batch, part: Part) -> None:
        whole = _emptied(batch)
        part.posts, part.worker_turns, part.heartbeats, part.answered = (
            whole.posts,
            whole.worker_turns,
            whole.heartbeats,
            whole.answered,
        )
        self._allow(inf)

    def _allow(self, for_s: float) -> None:
        self._until_s = time.monotonic() + for_s

    def _step(self, part: Part, batch: Batch, result: BatchResult) -> Step:
        return Step(partial(self._write, part, batch, result), partial(self._smaller_steps, part, batch, result))

    def _write(self, part: Part, batch: Batch, result: BatchResult) -> None:
        if self._explained or self._blocked:
            # Another session holds rows: the parts that need them are found without waiting for it.
            self._defer_blocked_jobs(part, result)
            self._defer_blocked_workers(part, result)
        if part.empty:
            return
        self._exchange(part, result)
        self._written(part, batch)

    def _written(self, part: Part, batch: Batch) -> None:
        batch.posts += part.posts
        batch.answered += part.answered
        for worker_id, worker_turn in part.worker_turns.items():
            merge_turn(batch.worker_turns.setdefault(worker_id, WorkerTurn()), worker_turn)
        for key in part.attempts():
            self._explained.pop(key, None)
        self._blocked.difference_update(part.worker_turns)
        if self._unexplained:
            for piece in part.pieces():
                self._unexplained.pop(piece.name(), None)
        if given_back := {
            f"queue:{job.queue}" for worker_turn in part.worker_turns.values() for job in worker_turn.release
        }:
            self.wakeups.send(given_back)

    def _smaller_steps(
        self, part: Part, batch: Batch, result: BatchResult, error: LedgerBusy | RefusedValue
    ) -> Sequence[Step] | None:
        if isinstance(error, RefusedValue):
            return self._isolate_refused(part, batch, result, error)
        if self._ledger.single_host:
            # SQLite has one lock for the whole file.
            return None
        if self._defer_blocked_jobs(part, result) or self._defer_blocked_workers(part, result):
            return [self._step(part, batch, result)]
        now_s = time.monotonic()
        self._until_s = min(self._until_s, now_s + FIND_S)
        smaller = part.split()
        if len(smaller) > 1 and now_s < self._until_s:
            return [self._step(one, batch, result) for one in smaller]
        tried = len(smaller) == 1
        for piece in part.pieces():
            name = piece.name()
            if name not in self._unexplained:
                log.warning(
                    "A request or what a worker did cannot be written yet and is tried again", reason=str(error)
                )
            self._unexplained[name] = self._unexplained.get(name, 0) + tried
        _defer(part, result)
        return []

    def _defer_blocked_jobs(self, part: Part, result: BatchResult) -> bool:
        """Defer outcomes of jobs whose rows other sessions hold. Return whether there were any."""
        owners = part.attempts()
        holders = self._ledger.workers.blocked_outcomes([job_id for job_id, _ in owners]) if owners else {}
        stuck = {key: worker_id for key, worker_id in owners.items() if key[0] in holders}
        if not stuck:
            return False
        fresh = [key for key in stuck if key not in self._explained]
        for job_id, _ in fresh[:MAX_NAMED]:
            log.warning(
                "What a worker did cannot be written yet and is tried again", job_id=job_id, reason=holders[job_id]
            )
        if len(fresh) > MAX_NAMED:
            log.warning("What workers did in more jobs cannot be written yet", jobs=len(fresh) - MAX_NAMED)
        self._explained |= stuck
        blocked = part.take(stuck)
        _defer(blocked, result)
        self._note(blocked, set(fresh), holders)
        return True

    def _defer_blocked_workers(self, part: Part, result: BatchResult) -> bool:
        """Defer turns of workers whose rows other sessions hold. Return whether there were any."""
        stuck: set[str] = set()
        # Another session may hold the whole table. Then all is retried.
        with suppress(LedgerBusy):
            stuck = self._ledger.workers.blocked(part.worker_turns) if part.worker_turns else set()
        if not stuck:
            return False
        for worker_id in sorted(stuck - self._blocked)[:MAX_NAMED]:
            log.warning("What a worker did cannot be written yet and is tried again", worker=worker_id, reason=HELD)
        self._blocked |= stuck
        _defer(Part(worker_turns={worker_id: part.worker_turns.pop(worker_id) for worker_id in stuck}), result)
        return True

    def _note(self, blocked: Part, fresh: Collection[Key], holders: Mapping[int, str]) -> None:
        """Note in the ledger that these attempts are over, so that no reaper ends them as late."""
        for worker_id, worker_turn in blocked.worker_turns.items():
            returned = {(job.job_id, job.token) for job in worker_turn.release}
            outcomes = [
                DeferredOutcome(job_id, token, holders[job_id], (job_id, token) in returned)
                for job_id, token in turn_keys(worker_turn)
                if (job_id, token) in fresh
            ]
            if outcomes:
                # Only a hint for others, which must not block anything.
                with suppress(LedgerError):
                    self._ledger.workers.note_deferred(worker_id, outcomes)

    def _isolate_refused(self, part: Part, batch: Batch, result: BatchResult, error: RefusedValue) -> Sequence[Step]:
        """Return one step per request and turn, since one value cannot be stored and nothing was."""
        if len(part.posts) + len(part.worker_turns) > 1 or part.heartbeats or part.answered:
            log.warning("Something cannot be stored; storing it piece by piece", error=str(error))
            parts = [Part(posts=[post]) for post in part.posts]
            parts += [
                Part(worker_turns={worker_id: worker_turn}) for worker_id, worker_turn in part.worker_turns.items()
            ]
            parts.append(Part(heartbeats=part.heartbeats, answered=part.answered))
            return [self._step(one, batch, result) for one in parts if not one.empty]
        for post in part.posts:
            log.warning("A request cannot be stored, and is dropped", service=post.call.job.task, error=str(error))
            batch.posts.append(post)
            result.stored.append(None)
        if not part.worker_turns:
            return []
        [(worker_id, worker_turn)] = part.worker_turns.items()
        return [Step(partial(self._write_failed, worker_id, worker_turn, str(error), batch, result))]

    def _write_failed(
        self, worker_id: str, worker_turn: WorkerTurn, why: str, batch: Batch, result: BatchResult
    ) -> None:
        turn = _without_results(self._turn(worker_id, worker_turn), why)
        self._apply_turns([turn], result, self._ledger.workers.exchange(Exchange(turns=(turn,))).turns)
        self._written(Part(worker_turns={worker_id: worker_turn}), batch)

    # ------------------------------------------------------------------------------------------

    def _exchange(self, part: Part, result: BatchResult) -> None:
        plain = [post for post in part.posts if post.call.key is None]
        once = [post for post in part.posts if post.call.key is not None]
        turns = [self._turn(worker_id, worker_turn) for worker_id, worker_turn in part.worker_turns.items()]
        exchange = Exchange(
            jobs=tuple(post.call.job for post in plain),
            reply_addresses=tuple(post.reply_address for post in plain)
            if any(post.reply_address for post in plain)
            else (),
            once=tuple(OnceJob(_request(post.call), post.call.job, post.reply_address) for post in once),
            turns=tuple(turns),
            heartbeats=tuple(part.heartbeats),
            answered=tuple(part.answered),
        )
        try:
            answer = self._ledger.workers.exchange(exchange)
        except UncertainCommit:
            if part.posts:
                raise
            # Heartbeats and reply addresses may be written twice. Turns are compared with the held jobs.
            beats = self._ledger.workers.exchange(msgspec.structs.replace(exchange, turns=())).heartbeats
            answer = ExchangeAnswer(turns=None, heartbeats=beats)
        self._apply_stored(part, result, answer)
        self._apply_turns(turns, result, answer.turns)
        result.heartbeat_answers |= {
            heartbeat.worker_id: beat for heartbeat, beat in zip(part.heartbeats, answer.heartbeats, strict=True)
        }

    def _apply_stored(self, part: Part, result: BatchResult, answer: ExchangeAnswer) -> None:
        if not part.posts:
            return
        told = [post for post in part.posts if post.reply_address is not None]
        warnings = self._no_worker_check.warnings([post.call.job for post in told]) if told else []
        unserved = {id(post) for post, warning in zip(told, warnings, strict=True) if warning is not None}
        plain, once = iter(answer.enqueued), iter(answer.once)
        taken = {claimed.job_id for turn in answer.turns or () for claimed in turn.claimed}
        topics = set()
        for post in part.posts:
            found = next(plain) if post.call.key is None else next(once)
            # The key includes the service, so the same key always means the same task.
            assert found is not None
            result.stored.append(Stored(found.job_id, found.fresh, id(post) in unserved))
            if found.job_id not in taken:
                topics.add(f"queue:{post.call.job.queue}")
        # Workers of other interfaces or of another broker may serve these queues too.
        if topics:
            self.wakeups.send(topics)

    def _apply_turns(self, turns: list[Turn], result: BatchResult, answer: tuple[TurnAnswer, ...] | None) -> None:
        if answer is None:
            answer = tuple(self._recover_lost_answer(turn) for turn in turns)
        for turn, one in zip(turns, answer, strict=True):
            if not one.alive:
                result.gone.add(turn.worker_id)
                continue
            result.superseded |= one.superseded
            if one.claimed:
                result.claimed[turn.worker_id] = one.claimed

    def _recover_lost_answer(self, turn: Turn) -> TurnAnswer:
        """Compare with the held jobs after the answer of a turn was lost.

        Repeat the turn if it was not written, and release claims that the broker does not know."""
        held = {(job.job_id, job.token) for job in self._ledger.workers.held(turn.worker_id)}
        settled = {(done.job_id, done.token) for done in turn.done}
        settled |= {(ending.job_id, ending.token) for ending in turn.endings}
        if settled & held:
            return self._ledger.workers.turn(turn)
        if unknown := held - settled - self._known:
            self._ledger.workers.turn(Turn(turn.worker_id, release=tuple(Release(*key) for key in unknown)))
        return TurnAnswer(True)

    def _turn(self, worker_id: str, worker_turn: WorkerTurn) -> Turn:
        return Turn(
            worker_id,
            done=tuple(worker_turn.done),
            endings=tuple(worker_turn.endings),
            release=tuple(Release(job.job_id, job.token) for job in worker_turn.release),
            claim_request=self._claim_request(worker_id, worker_turn),
        )

    def _claim_request(self, worker_id: str, worker_turn: WorkerTurn) -> ClaimRequest | None:
        claim_request = self._claim_requests.get(worker_id) if worker_turn.claim_count else None
        if claim_request is None or (worker_turn.claim_count == 1 and worker_turn.is_idle):
            return claim_request
        return msgspec.structs.replace(
            claim_request, limit=worker_turn.claim_count, start=int(worker_turn.is_idle), run_ahead=True
        )


def _emptied(batch: Batch) -> Part:
    part = Part(batch.posts, batch.worker_turns, batch.heartbeats, batch.answered)
    batch.posts, batch.worker_turns, batch.heartbeats, batch.answered = [], {}, [], []
    return part


def _defer(part: Part, result: BatchResult) -> None:
    """Keep a part for later. Heartbeats are not retried, since the next ones follow soon."""
    left = result.deferred
    left.posts += part.posts
    left.answered += part.answered
    for worker_id, worker_turn in part.worker_turns.items():
        merge_turn(left.worker_turns.setdefault(worker_id, WorkerTurn()), worker_turn)


def _request(call: Call) -> Request:
    """Return the idempotency request of a call. Only the key counts, since a body may differ in a time stamp."""
    key = hashlib.sha256(f"mdp\0{call.job.task}\0{call.key}".encode()).digest()
    return Request(key, hashlib.sha256(call.job.task.encode()).digest(), KEY_KEPT_S)


def _without_results(turn: Turn, why: str) -> Turn:
    """Return the turn with its results replaced by failures, since a result cannot be stored."""
    endings = [conclude(Attempt(done.job_id, done.token, Policy(), 0, 0), NotStorable(why)) for done in turn.done]
    return msgspec.structs.replace(turn, done=(), endings=(*turn.endings, *endings))
