"""The broker's rules, pure: messages, ends of connections, ticks and answers of the ledger in; sends and orders out.

Nothing here waits, and nothing is sent about a job before the ledger has it. What is to be written is gathered into one
order; while that is on its way the next one fills, so that the slower the ledger is, the more goes with each commit.
"""

from dataclasses import replace
from math import inf

from unstuck.domain.liveness import Detector
from unstuck.domain.states import LIVE_STATES
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp import protocol
from unstuck.mdp.broker import jobs
from unstuck.mdp.broker.batch import GONE, Batch, BatchResult
from unstuck.mdp.broker.clients import ClientSide
from unstuck.mdp.broker.outbox import Send
from unstuck.mdp.broker.prefetch import GATHER_S
from unstuck.mdp.broker.request_addresses import read_address
from unstuck.mdp.broker.requests import LONGEST_POLL_S, PendingJob, restored
from unstuck.mdp.broker.workers import TOO_LATE, WorkerSide


class BrokerCore(ClientSide, WorkerSide):
    """Both sides, and what is between them: time, orders and answers."""

    # What comes in --------------------------------------------------------------------------------

    def on_message(self, identity: bytes, parts: protocol.Frames, connection: int | None, now_s: float) -> None:
        match self._read(parts):
            case protocol.Request() as request:
                self._on_request(identity, request, now_s)
            case protocol.Invalid() as strange:
                self.dropped.add(strange.why)
                worker = self.workers.by_identity(identity)
                if strange.from_worker:
                    self._send(identity, protocol.disconnect())
                    if worker is not None:
                        self._end_for_violation(worker, f"it sent {strange.why}")
            case protocol.Ready() as ready:
                self._on_ready(identity, ready, connection, now_s)
            case protocol.Disconnect():
                self._on_disconnect(identity)
            case message:
                worker = self.workers.by_identity(identity)
                if worker is None:
                    self._on_unknown_worker(identity, message)
                    return
                worker.seen_s = now_s
                self._on_worker_message(worker, message)

    @staticmethod
    def _read(parts: protocol.Frames) -> protocol.Message:
        message = protocol.read(parts)
        if isinstance(message, protocol.Reply) and not message.delimited and read_address(message.address) is None:
            return protocol.Invalid("a reply without the empty frame behind its address", from_worker=True)
        return message

    def on_too_large(self, identity: bytes, head: protocol.Frames, now_s: float) -> None:
        """A message came that is larger than it may be, of which these are the first frames. Nobody waits for a worker
        whose reply it was."""
        worker = self.workers.by_identity(identity)
        if worker is not None:
            worker.seen_s = now_s
            self._on_too_large(worker, head)

    def on_connection_closed(self, connection: int, now_s: float) -> None:
        """A connection ended; whatever came through it was handed to us before."""
        for worker in self.workers.on_connection(connection):
            self._declare_dead(worker, GONE)

    def on_client_gone(self, client: bytes) -> None:
        """The connection of a client ended: what it asked for is done, and kept, but nobody is there to hear of it."""
        self.requests.forget(client)
        self.notifications.forget(client)
        self.subscriptions.disconnected(client)
        self._backlog.forget_client(client)
        if self.requests.open_of(client):
            # The rest is on its way to the ledger.
            self._gone.add(client)

    def on_unreachable(self, identity: bytes) -> None:
        """Something could not be delivered: there is nobody with that identity any more."""
        worker = self.workers.by_identity(identity)
        if worker is not None:
            self._declare_dead(worker, "it could not be reached")

    def on_tick(self, now_s: float) -> None:
        for worker in self.workers:
            limit_s = self._timeout_s if worker.assignment is None else self._busy_timeout_s
            silent_s = now_s - worker.seen_s
            if silent_s > limit_s:
                self._send(worker.identity, protocol.disconnect())
                self._declare_dead(worker, f"nothing was heard of it for {silent_s:.1f} s", Detector.LEASE)
            elif now_s - worker.sent_s >= self._interval_s:
                self._send_to_worker(worker, protocol.heartbeat(), now_s)
        if now_s - self._heartbeat_s >= self._interval_s:
            self._heartbeat_s = now_s
            self._unknown_heartbeats.clear()
            self._take_over(now_s)
            self._batch.heartbeats = [self._heartbeat_of(worker) for worker in self.workers if worker.is_registered]
            # In place of what the last round found: while the ledger is away, that is not asked yet.
            self._batch.overdue = [
                waiting.job_id
                for waiting in self.requests.all()
                if not (waiting.held_here or waiting.held_elsewhere) and now_s - waiting.since_s > self._ttl_s
            ]
            for client in self.subscriptions.expire(now_s):
                self.notifications.forget(client)
        self._release_behind_slow_jobs(now_s)
        if not self._batch.to_poll:
            # Else the last ones were not asked for yet, and in an outage they would become more and more.
            self._batch.to_poll = self.requests.due(now_s)
        self._send_notifications(now_s)

    @property
    def awaits_abandoned(self) -> bool:
        """An old worker of a dead broker may still be at work."""
        return bool(self._left_working)

    def _take_over(self, now_s: float) -> None:
        """Settle what dead brokers of this host held, as far as that is known.

        What an old worker had in hand stays its own at first, since its reply may come. It is given up after the time
        for which an idle worker may be silent if the worker was quick, or if its broker listened at our address and all
        peers that are connected have spoken: one that is still at work would be connected and silent."""
        if not self._closing:
            for one in self._find_abandoned():
                self._backlog.abandoned.append(one)
                if one.may_be_given_up:
                    self._left_working.append((now_s, one))
        kept = []
        for since_s, one in self._left_working:
            waited_s = now_s - since_s
            known = one.is_quick or (one.is_same_address and self.all_have_spoken)
            if waited_s > self._busy_timeout_s or (waited_s >= self._timeout_s and known):
                self._backlog.abandoned.append(replace(one, is_given_up=True))
            else:
                kept.append((since_s, one))
        self._left_working = kept

    def on_wakeup(self, words: frozenset[str]) -> None:
        """Something may have come into these queues, or everything may have changed (no words)."""
        queues = {word.partition(":")[2] for word in words if word.startswith("queue:")}
        for worker in self.workers:
            if worker.found_nothing and (
                not words or any(self._queue(service) in queues for service in worker.services)
            ):
                worker.found_nothing = False

    def close(self) -> None:
        """Take nothing more, and send everybody away who has nothing to do."""
        self._closing = True
        for worker in self.workers:
            worker.is_draining = True
            self._clear_prefetched(worker, worker.seen_s)
        self._send_idle_away()

    def _send_idle_away(self) -> None:
        for worker in self.workers:
            if worker.assignment is None and not worker.is_claiming and worker.held_address is None:
                self.workers.remove(worker)
                self._handed_out.remove(worker.worker_id, worker.seen_s)
                self._send(worker.identity, protocol.disconnect())
                if worker.is_registered:
                    self._backlog.retire(worker.worker_id)
                else:
                    # What stands of it in the ledger is for the next broker, to which it comes.
                    self._backlog.withdraw_registration(worker.worker_id, is_over=False)

    @property
    def busy_with_ledger(self) -> bool:
        waits = not self._batch.empty or not self._backlog.empty or bool(self._deferred)
        return waits or self._in_flight is not None

    @property
    def awaits_replies(self) -> bool:
        """An old worker is at work: unlike ours, it will not say again what is lost on its way to a closed socket."""
        return any(worker.assignment is not None and not worker.is_unstuck_worker for worker in self.workers)

    # What goes out --------------------------------------------------------------------------------

    def take_sends(self) -> list[Send]:
        sends, self._sends = self._sends, []
        return sends

    def take_batch(self, now_s: float = inf) -> Batch | None:
        """Give what is to be written now, if nothing else is on its way, and nothing is gained by waiting for more."""
        if self._in_flight is not None or self._gathers_more(now_s):
            return None
        for worker in self.workers:
            if wanted := self._claim_count(worker):
                worker.is_claiming = True
                worker_turn = self._worker_turn(worker.worker_id)
                worker_turn.claim_count, worker_turn.is_idle = wanted, worker.assignment is None
        self._backlog.fill(self._batch)
        self._deferred.behind(self._batch)
        for worker_id, worker_turn in self._batch.worker_turns.items():
            worker_turn.known_held = self._held_by(worker_id) | self._deferred.ended(worker_id)
        self._batch.retried = self._deferred.take(now_s)
        if self._batch.empty:
            return None
        batch, self._batch = self._batch, Batch()
        self._in_flight = batch
        self._batch_sent_s = now_s
        return batch

    def next_tick_s(self, now_s: float) -> float:
        """When to tick next at the latest."""
        moments = [
            self._heartbeat_s + self._interval_s,
            None if self._batch.to_poll else self.requests.next_due_s(),
            self.notifications.next_due_s(),
            self._next_share_s(),
            self._gather_until_s if self._in_flight is None else None,
            self._deferred.due_s if self._in_flight is None else None,
        ]
        return min(moment for moment in moments if moment is not None)

    # What the ledger answers ----------------------------------------------------------------------

    def on_batch_done(self, result: BatchResult, now_s: float) -> None:
        batch, self._in_flight = self._in_flight, None
        assert batch is not None
        self._backlog.note_duration(now_s - self._batch_sent_s)
        self._gather_until_s = now_s + GATHER_S if self._quick else None
        if result.tasks is not None:
            self.tasks = result.tasks
        self._apply(batch, result, now_s)
        self._deferred.keep(result.deferred, now_s)
        if batch.retried is not None and result.retried is not None:
            self._apply(batch.retried, result.retried, now_s)
            self._deferred.keep(result.retried.deferred, now_s, again=True)
        if not self._deferred:
            self._deferred.relax()
        self._send_notifications(now_s)
        if self._closing:
            # Something was being looked for on their behalf, or they have just done what they had in hand.
            self._send_idle_away()

    def _apply(self, batch: Batch, result: BatchResult, now_s: float) -> None:
        """Take what was done of an order. What was left out of it is kept by the caller."""
        for registration in batch.registrations:
            self._registered(registration, result.resumed.get(registration.worker_id), now_s)
        for registration, error, message in result.refused_registrations:
            self._refuse(registration, error, message)
        for posted, stored in zip(batch.posts, result.stored, strict=True):
            if stored is None:
                self.dropped.add("a request that cannot be stored")
                self.requests.drop(posted.request.client, 1)
                continue
            if posted.request.client in self._gone:
                self.requests.drop(posted.request.client, 1)
                if not self.requests.open_of(posted.request.client):
                    self._gone.discard(posted.request.client)
                continue
            own_id = posted.call.own_id or str(stored.job_id)
            waiting = PendingJob(stored.job_id, posted.request, posted.place, own_id, now_s)
            # Of what our own workers will do we hear by ourselves.
            if self.workers.serves(posted.call.job.task):
                waiting.poll_every_s = LONGEST_POLL_S
            self.requests.add(waiting)
            if stored.unserved and not self.workers.serves(posted.call.job.task):
                self._notify_no_workers(waiting, now_s, expired=False)
        self._turns_answered(batch, result, now_s)
        for _ in range(result.refused_replies):
            self.dropped.add(TOO_LATE)
        for sender in result.forged:
            self._forged(sender)
        for worker_id, beat in result.heartbeat_answers.items():
            worker = self.workers.by_id(worker_id)
            if worker is not None:
                if beat.state not in LIVE_STATES:
                    self._disconnect_dead(worker)
                worker.is_draining = (
                    self._closing or worker.announced_draining or beat.request is not None or beat.disabled
                )
        for death, record in result.deaths:
            if death.job_id is not None:
                self._died(death, record, now_s)
        # Before the outcomes: what was looked at in the same moment is among them, and behind its end nothing is said.
        for job_id in result.expired:
            self._expired(job_id, now_s)
        for outcome in result.outcomes:
            self._ended(outcome, now_s)
        for position in result.positions:
            self._seen(position, now_s)
        # Answered since they were read, by what came before in this result, or marked so as soon as a lock allows it:
        # not once more.
        answered = {*self._batch.answered, *result.deferred.answered, *self._deferred.answered}
        for client, reply_addresses in result.reply_addresses.items():
            left = [
                one
                for one in reply_addresses
                if one.job_id not in answered and not self.requests.knows(client, one.job_id)
            ]
            for waiting in restored(left, now_s):
                self.requests.begin(client, 1)
                self.requests.add(waiting)
        for query, body in result.replies:
            self._send(query.client, protocol.broker_reply(query.name.encode("ascii"), body, query.correlation))

    def _turns_answered(self, batch: Batch, result: BatchResult, now_s: float) -> None:
        for worker_id, worker_turn in batch.worker_turns.items():
            worker = self.workers.by_id(worker_id)
            for given_back in worker_turn.release:
                self.workers.wake_one(given_back.task)
            counted = False
            for done in worker_turn.done:
                if worker_id not in result.gone and (done.job_id, done.token) not in result.superseded:
                    counted = True
                    # Who asked over another door reads it from the ledger.
                    self._finish(done.job_id, jobs.body_of(done.result))
                else:
                    self.dropped.add(TOO_LATE)
            if worker is None:
                if worker_turn.claim_count and worker_id in self._departed:
                    self._departed_answered(worker_id, result.claimed.get(worker_id, ()))
                elif counted:
                    # Of an earlier broker, or of an earlier connection: who it is now says READY anew. A reply that
                    # does not count proves nothing about a worker.
                    self._batch.stale_registrations.append(worker_id)
                continue
            if worker_id in result.gone:
                self._disconnect_dead(worker)
                continue
            if worker_turn.claim_count:
                self._on_claimed(worker, result.claimed.get(worker_id, ()), worker_turn.claim_count, now_s)

    def _departed_answered(self, worker_id: str, jobs: tuple[Claimed, ...]) -> None:
        """What was found for somebody who left meanwhile never reached it: that was no crash of the job."""
        death = self._departed.pop(worker_id)
        if jobs:
            self._worker_turn(worker_id).release.extend(jobs)
        if death is None:
            self._backlog.retire(worker_id)
        else:
            self._backlog.report_death(death)
