"""The rules of the broker, pure: messages, closed connections, ticks and results of the ledger come in, messages and
batches go out.

Nothing here blocks, reads a clock or touches a socket. A reply or notification leaves only after the ledger has
committed what it reports. While one batch is at the ledger, the next one fills. So a slow ledger gets larger batches.
"""

from collections.abc import Callable, Iterable
from math import inf

from unstuck.config import MdpSettings
from unstuck.domain.states import JobState
from unstuck.mdp import protocol
from unstuck.mdp.broker import jobs, request_addresses
from unstuck.mdp.broker.batch import Batch, BatchResult
from unstuck.mdp.broker.clients import ClientSide
from unstuck.mdp.broker.departures import Departures
from unstuck.mdp.broker.dispatch import Dispatcher
from unstuck.mdp.broker.handed_out import AbandonedWorker, HandedOut
from unstuck.mdp.broker.outbox import DroppedMessages, Outbox, Send
from unstuck.mdp.broker.requests import RequestTable
from unstuck.mdp.broker.takeover import Takeover
from unstuck.mdp.broker.worker_table import WorkerTable
from unstuck.mdp.broker.workers import TOO_LATE, WorkerSide


class BrokerCore:
    """Owns the tables and both sides, which never call each other.

    `new_id`, `new_key` and `wall_clock` are given, so that a simulation can repeat itself."""

    def __init__(
        self,
        settings: MdpSettings,
        new_id: Callable[[], str],
        wall_clock: Callable[[], float],
        handed_out: HandedOut | None = None,
        find_abandoned: Callable[[], Iterable[AbandonedWorker]] = tuple,
        dropped: DroppedMessages | None = None,
        new_key: Callable[[], str] = request_addresses.new_key,
    ) -> None:
        self._interval_s = settings.heartbeat_interval_s
        self._heartbeat_s = 0.0
        """When heartbeats were last added to a batch."""
        self.dropped = dropped or DroppedMessages()
        self.outbox = Outbox(self.dropped)
        self.requests = RequestTable()
        self.workers = WorkerTable()
        self._takeover = Takeover(settings, self.outbox, find_abandoned)
        self._dispatcher = Dispatcher(settings, self.outbox, self.requests, self.workers, handed_out or HandedOut())
        self._departures = Departures(self.outbox, self.workers, self._dispatcher)
        self._client_side = ClientSide(settings, self.outbox, self.requests, self.workers, new_id(), wall_clock)
        self._worker_side = WorkerSide(
            settings,
            self.outbox,
            self.requests,
            self.workers,
            self._dispatcher,
            self._departures,
            self._takeover,
            new_id,
            new_key,
            wall_clock,
        )

    # Messages, connections, time ------------------------------------------------------------------

    def on_message(self, identity: bytes, parts: protocol.Frames, connection: int | None, now_s: float) -> None:
        """Handle one message. `connection` is known for READY only."""
        match _read(parts):
            case protocol.Request() as request:
                self._client_side.on_request(identity, request, now_s)
            case protocol.Invalid() as invalid:
                self.outbox.drop(invalid.why)
                if invalid.from_worker:
                    self._worker_side.on_invalid(identity, invalid.why)
            case protocol.Ready() as ready:
                self._worker_side.on_ready(identity, ready, connection, now_s)
            case protocol.Disconnect():
                self._worker_side.on_disconnect(identity)
            case message:
                self._worker_side.on_message(identity, message, now_s)

    def on_too_large(self, identity: bytes, head: protocol.Frames, now_s: float) -> None:
        """Handle a message above the limits, of which `head` are the first frames."""
        self._worker_side.on_too_large(identity, head, now_s)

    def on_connection_closed(self, connection: int, now_s: float) -> None:
        """Declare dead the workers behind a connection. Its last messages must have been handled."""
        self._departures.on_connection_closed(connection)

    def on_client_gone(self, client: bytes) -> None:
        """Forget a client whose connection ended. Its jobs still run, and their results are kept."""
        self._client_side.on_gone(client)

    def on_unreachable(self, identity: bytes) -> None:
        """Declare dead the worker to which a message could not be delivered."""
        self._departures.on_unreachable(identity)

    def on_wakeup(self, topics: frozenset[str]) -> None:
        """Let idle workers of these queues claim again. No topics: all queues may have changed."""
        queues = frozenset(topic.partition(":")[2] for topic in topics if topic.startswith("queue:"))
        self.workers.wake(queues if topics else None, self._client_side.queue_of)

    def on_tick(self, now_s: float, *, all_have_spoken: bool = False) -> None:
        """Find silent workers, send heartbeats and notifications, release prefetched jobs, poll jobs held elsewhere.

        `all_have_spoken`: every connected peer has sent a message, so none of them is silent because it is working."""
        self._worker_side.on_tick(now_s)
        if now_s - self._heartbeat_s >= self._interval_s:
            self._heartbeat_s = now_s
            self._takeover.look(now_s, all_have_spoken=all_have_spoken)
            self._worker_side.on_heartbeat_interval()
            self._client_side.on_heartbeat_interval(now_s)
        self._dispatcher.on_tick(now_s)
        self._client_side.on_tick(now_s)

    def next_tick_s(self, now_s: float) -> float:
        """Return when the next tick is due at the latest."""
        moments = [
            self._heartbeat_s + self._interval_s,
            self._client_side.next_tick_s(),
            self._dispatcher.next_tick_s(),
            self.outbox.next_due_s(),
        ]
        return min(moment for moment in moments if moment is not None)

    def close(self) -> None:
        """Accept no requests, release prefetched jobs, disconnect idle workers."""
        self.outbox.is_closing = True
        self._departures.close()

    # What the socket loop asks --------------------------------------------------------------------

    @property
    def awaits_abandoned(self) -> bool:
        """Return whether an old worker of a dead broker may still be working."""
        return self._takeover.is_waiting

    @property
    def awaits_replies(self) -> bool:
        """Return whether an old worker is working. Unlike a worker of Unstuck, it does not repeat a reply that is lost
        on its way to a closed socket."""
        return any(worker.assignment is not None and not worker.is_unstuck_worker for worker in self.workers)

    @property
    def busy_with_ledger(self) -> bool:
        return self.outbox.is_busy

    # Messages and batches out ---------------------------------------------------------------------

    def take_sends(self) -> list[Send]:
        return self.outbox.take_sends()

    def take_batch(self, now_s: float = inf) -> Batch | None:
        """Return what to write now. None: a batch is in flight, more may come in a moment, or there is nothing."""
        if self.outbox.is_in_flight or self._dispatcher.is_gathering(now_s):
            return None
        self._dispatcher.add_claims()
        return self.outbox.take_batch(self.workers, now_s)

    # Results of the ledger ------------------------------------------------------------------------

    def on_batch_done(self, result: BatchResult, now_s: float) -> None:
        """Apply the result of the batch in flight."""
        batch = self.outbox.take_in_flight(now_s)
        self._dispatcher.on_batch_done(now_s)
        if result.tasks is not None:
            self._client_side.on_tasks(result.tasks)
        self._apply(batch, result, now_s)
        self.outbox.defer(result, now_s)
        if batch.retried is not None and result.retried is not None:
            self._apply(batch.retried, result.retried, now_s)
            self.outbox.defer(result.retried, now_s, again=True)
        self.outbox.relax()
        self._client_side.send_notifications(now_s)
        if self.outbox.is_closing:
            # Workers may have become idle: they have ended their jobs, or claims for them are done.
            self._departures.disconnect_idle()

    def _apply(self, batch: Batch, result: BatchResult, now_s: float) -> None:
        """Apply the result of a batch: registrations, requests, turns, deaths, outcomes, then reply addresses."""
        for registration in batch.registrations:
            self._worker_side.on_registered(registration, result.resumed.get(registration.worker_id), now_s)
        for registration, error, message in result.refused_registrations:
            self._worker_side.on_refused(registration, error, message)
        for post, stored in zip(batch.posts, result.stored, strict=True):
            self._client_side.on_stored(post, stored, now_s)
        self._apply_turns(batch, result, now_s)
        for _ in range(result.refused_replies):
            self.outbox.drop(TOO_LATE)
        for sender in result.forged:
            self._worker_side.on_forged(sender)
        for worker_id, answer in result.heartbeat_answers.items():
            self._worker_side.on_heartbeat_answer(worker_id, answer)
        for death, record in result.deaths:
            if death.job_id is not None:
                self._client_side.on_death(death, record, now_s)
        # Before the outcomes. A job that expired and was polled in the same batch is among them, and after the end of a
        # job there are no notifications.
        for job_id in result.expired:
            self._client_side.on_expired(job_id, now_s)
        for outcome in result.outcomes:
            if outcome.state is JobState.SUCCEEDED and outcome.result is not None:
                self._departures.on_success(outcome.job_id)
            self._client_side.on_outcome(outcome, now_s)
        for position in result.positions:
            self._client_side.on_position(position, now_s)
        # Last, since a job may have been answered just now, after its address was read.
        answered = self.outbox.answered(result)
        for client, reply_addresses in result.reply_addresses.items():
            self._client_side.on_reply_addresses(client, reply_addresses, answered, now_s)
        for query, body in result.replies:
            self._client_side.on_mmi_answer(query, body)

    def _apply_turns(self, batch: Batch, result: BatchResult, now_s: float) -> None:
        for worker_id, worker_turn in batch.worker_turns.items():
            for job in worker_turn.release:
                self.workers.wake_one(job.task)
            is_gone = worker_id in result.gone
            has_settled = False
            for done in worker_turn.done:
                if is_gone or (done.job_id, done.token) in result.superseded:
                    self.outbox.drop(TOO_LATE)
                    continue
                has_settled = True
                self._departures.on_success(done.job_id)
                # A client of another interface reads the result from the ledger.
                self._client_side.on_reply(done.job_id, jobs.body_of(done.result))
            self._worker_side.on_turn(
                worker_id,
                worker_turn,
                result.claimed.get(worker_id, ()),
                now_s,
                is_gone=is_gone,
                has_settled=has_settled,
            )


def _read(parts: protocol.Frames) -> protocol.Message:
    message = protocol.read(parts)
    match message:
        case protocol.Reply(delimited=False) if request_addresses.read_address(message.address) is None:
            return protocol.Invalid("a reply without the empty frame behind its address", from_worker=True)
    return message
