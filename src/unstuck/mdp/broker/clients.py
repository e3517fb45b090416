"""The side of the broker towards clients: accept requests, reply, poll jobs held elsewhere, notify of crashes."""

from collections.abc import Callable, Sequence
from typing import Any

from unstuck.config import MdpSettings
from unstuck.domain.frames import write_map
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.ledger.contract.jobs import JobPosition, JobRecord, Outcome, TaskRecord
from unstuck.ledger.contract.workers import ReplyAddress
from unstuck.mdp import protocol
from unstuck.mdp.broker import jobs, notifications
from unstuck.mdp.broker.batch import MmiQuery, NewRequest, Stored, WorkerDeath
from unstuck.mdp.broker.notifications import KNOWN, Notifications, PendingNotification, Subscriptions
from unstuck.mdp.broker.outbox import Outbox
from unstuck.mdp.broker.requests import LONGEST_POLL_S, ClientRequest, PendingJob, RequestTable, restored
from unstuck.mdp.broker.worker_table import WorkerTable

MAX_PENDING = 100_000
"""Maximum number of jobs that clients wait for, all clients together. Each is kept in memory."""

FINAL = -1
"""In place of an attempt: the last notification about a job."""


class ClientSide:
    def __init__(
        self,
        settings: MdpSettings,
        outbox: Outbox,
        requests: RequestTable,
        workers: WorkerTable,
        run_id: str,
        wall_clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        # Read once: a setting is parsed on each access.
        self._ttl_s = settings.request_ttl_s
        self._outbox = outbox
        self._requests = requests
        self._workers = workers
        self._run_id = run_id
        self._wall_clock = wall_clock
        self._subscriptions = Subscriptions()
        self._notifications = Notifications(settings.crash_notification_delay_ms / 1000)
        self._tasks: dict[str, TaskRecord] = {}
        self._request_count = 0
        self._gone: set[bytes] = set()
        """Clients that went while their requests were on the way to the ledger."""

    # Messages -------------------------------------------------------------------------------------

    def on_request(self, client: bytes, request: protocol.Request, now_s: float) -> None:
        if request.service.startswith(protocol.MMI):
            self._on_mmi(client, request, now_s)
            return
        is_subscribed = self._subscriptions.is_subscribed(client)
        if request.correlation is not None and not is_subscribed:
            self._outbox.drop("a correlation frame of a client that did not ask for it")
            return
        self._subscriptions.reconnected(client)
        if self._outbox.is_closing:
            return
        calls = jobs.read_calls(request, self._tasks, self._settings.retry_attempts, "mdp")
        if len(self._requests) >= MAX_PENDING:
            self._outbox.drop("a request when too many waited")
            return
        if self._requests.open_of(client) + len(calls) > self._settings.max_requests_per_client:
            self._outbox.drop("a request of a client with too many open")
            return
        self._gone.discard(client)
        self._requests.begin(client, len(calls))
        self._accept(client, request, calls, is_subscribed=is_subscribed)

    def _accept(
        self, client: bytes, request: protocol.Request, calls: Sequence[jobs.Call], *, is_subscribed: bool
    ) -> None:
        service = request.service.decode("ascii")
        self._request_count += 1
        request_id = f"{self._run_id}-{self._request_count}"
        accepted = ClientRequest(client, request.correlation, service, request_id, [None] * len(calls), is_subscribed)
        for place, call in enumerate(calls):
            reply_address = None
            if is_subscribed:
                reply_address = ReplyAddress(
                    client=client,
                    service=service,
                    request_id=request_id,
                    place=place,
                    places=len(calls),
                    correlation=request.correlation,
                    own_id=call.own_id,
                    notify=True,
                )
            self._outbox.batch.posts.append(NewRequest(call, accepted, place, reply_address))
            # An idle worker claims it in the commit that stores it.
            self._workers.wake_one(service)

    def _on_mmi(self, client: bytes, request: protocol.Request, now_s: float) -> None:
        name = request.service.decode("ascii")
        if name not in KNOWN:
            self._reply_to_mmi(client, request, [protocol.NOT_IMPLEMENTED])
        elif request.service == protocol.MMI_NOTIFY:
            reply = self._subscriptions.subscribe(client, request.body, now_s)
            if reply[0] == protocol.OK:
                self._outbox.backlog.add_resubscribed(client)
            self._reply_to_mmi(client, request, reply)
        elif name == "mmi.service" and self._workers.serves(request.body[0].decode("latin-1")):
            self._reply_to_mmi(client, request, [protocol.OK])
        elif not self._outbox.backlog.queries.add(MmiQuery(client, request.correlation, name, request.body)):
            self._outbox.drop("a question that is too large, or of a client with too many open")

    def _reply_to_mmi(self, client: bytes, request: protocol.Request, body: list[bytes]) -> None:
        self._outbox.send(client, protocol.broker_reply(request.service, body, request.correlation))

    def on_gone(self, client: bytes) -> None:
        """Forget a client whose connection ended. Its jobs still run."""
        self._requests.forget(client)
        self._notifications.forget(client)
        self._subscriptions.disconnected(client)
        self._outbox.backlog.forget_client(client)
        if self._requests.open_of(client):
            # The rest is on its way to the ledger.
            self._gone.add(client)

    # Time -----------------------------------------------------------------------------------------

    def on_heartbeat_interval(self, now_s: float) -> None:
        """Find jobs that no worker claimed in time, and end the leases of subscriptions."""
        # Not added to those found before, which are still there while the ledger is away.
        self._outbox.batch.overdue = [
            pending.job_id
            for pending in self._requests.all()
            if not (pending.held_here or pending.held_elsewhere) and now_s - pending.since_s > self._ttl_s
        ]
        for client in self._subscriptions.expire(now_s):
            self._notifications.forget(client)

    def on_tick(self, now_s: float) -> None:
        """Poll jobs held elsewhere, and send notifications that are due."""
        if not self._outbox.batch.to_poll:
            # Otherwise the list would grow during an outage.
            self._outbox.batch.to_poll = self._requests.due(now_s)
        self.send_notifications(now_s)

    def next_tick_s(self) -> float | None:
        moments = [
            None if self._outbox.batch.to_poll else self._requests.next_due_s(),
            self._notifications.next_due_s(),
        ]
        return min((moment for moment in moments if moment is not None), default=None)

    # Results of the ledger ------------------------------------------------------------------------

    def on_tasks(self, tasks: dict[str, TaskRecord]) -> None:
        self._tasks = tasks

    def queue_of(self, service: str) -> str:
        known = self._tasks.get(service)
        return service if known is None else known.queue

    def on_stored(self, post: NewRequest, stored: Stored | None, now_s: float) -> None:
        """Wait for a job from now on. None: it could not be stored."""
        client = post.request.client
        if stored is None:
            self._outbox.drop("a request that cannot be stored")
            self._requests.drop(client, 1)
            return
        if client in self._gone:
            self._requests.drop(client, 1)
            if not self._requests.open_of(client):
                self._gone.discard(client)
            return
        pending = PendingJob(stored.job_id, post.request, post.place, post.call.own_id or str(stored.job_id), now_s)
        is_served = self._workers.serves(post.call.job.task)
        if is_served:
            # One of these workers will probably take it, so there is nothing to poll.
            pending.poll_every_s = LONGEST_POLL_S
        self._requests.add(pending)
        if stored.unserved and not is_served:
            self._notify_no_workers(pending, now_s, expired=False)

    def on_reply(self, job_id: int, body: list[bytes]) -> None:
        """Reply to the clients that wait for a job that has succeeded."""
        for pending in self._requests.take(job_id):
            self._add_answer(pending, body)

    def on_death(self, death: WorkerDeath, record: JobRecord | None, now_s: float) -> None:
        """Notify of the death of a worker, and poll the job that it had."""
        assert death.job_id is not None
        final = record is None or record.state in FINAL_STATES
        if self._settings.notify_worker_crash:
            for pending in self._requests.of(death.job_id):
                self._notify_crash(pending, death.evidence, now_s, final=final)
        self._requests.poll_soon(death.job_id, now_s, tried=True)

    def on_outcome(self, outcome: Outcome, now_s: float) -> None:
        """Reply for a job that ended elsewhere: at a Python worker, by a reaper or an operator."""
        if outcome.state is JobState.SUCCEEDED and outcome.result is not None:
            self.on_reply(outcome.job_id, jobs.body_of(outcome.result))
            return
        crashed = jobs.is_crash(outcome)
        for pending in self._requests.of(outcome.job_id):
            if crashed and self._settings.notify_worker_crash:
                self._notify_crash(pending, jobs.cause(outcome), now_s, final=True)
        # Sent before the job is forgotten: after its reply there are no notifications.
        self.send_notifications(now_s)
        for pending in self._requests.take(outcome.job_id):
            request = pending.request
            several = len(request.answers) > 1
            notified = (FINAL, protocol.WORKER_DIED) in pending.notified
            unwanted = not notified and self._subscriptions.is_subscribed(request.client)
            if several or jobs.is_user_error(outcome) or (request.notify and (not crashed or unwanted)):
                self._add_answer(pending, [write_map(jobs.error_map(outcome, pending.own_id))])
            elif notified:
                self._outbox.batch.answered.append(outcome.job_id)
            # Otherwise there is no reply. Old clients time out, as they always did. A client whose lease has ended
            # gets the error when it subscribes again.

    def on_expired(self, job_id: int, now_s: float) -> None:
        """Notify that a job was cancelled because no worker claimed it in time."""
        for pending in list(self._requests.of(job_id)):
            self._notify_no_workers(pending, now_s, expired=True)
            if len(pending.request.answers) == 1 and (FINAL, protocol.NO_WORKERS) in pending.notified:
                # That was the last message about it, and no reply follows.
                self._requests.forget_one(pending)
                self._outbox.batch.answered.append(job_id)
        self.send_notifications(now_s)
        self._requests.poll_soon(job_id, now_s)

    def on_position(self, position: JobPosition, now_s: float) -> None:
        """Note where a job stands that is held elsewhere."""
        for pending in self._requests.of(position.job_id):
            is_waiting = position.state is JobState.WAITING
            if pending.held_elsewhere or is_waiting or position.attempt > pending.attempt:
                # A worker has it, or had it since the last poll, or the job itself waits for something.
                pending.since_s = now_s
            pending.attempt = max(pending.attempt, position.attempt)
            pending.held_elsewhere = position.worker_id is not None

    def on_reply_addresses(
        self, client: bytes, reply_addresses: Sequence[ReplyAddress], answered: set[int], now_s: float
    ) -> None:
        """Wait again for jobs that a client requested before it subscribed again, except the answered ones."""
        left = [
            one
            for one in reply_addresses
            if one.job_id not in answered and not self._requests.knows(client, one.job_id)
        ]
        for pending in restored(left, now_s):
            self._requests.begin(client, 1)
            self._requests.add(pending)

    def on_mmi_answer(self, query: MmiQuery, body: list[bytes]) -> None:
        self._outbox.send(query.client, protocol.broker_reply(query.name.encode("ascii"), body, query.correlation))

    def _add_answer(self, pending: PendingJob, body: list[bytes]) -> None:
        """Reply to a request if this is the last answer that it waits for."""
        request = pending.request
        request.answers[pending.place] = body
        self._notifications.forget_job(request.client, pending.job_id)
        request.jobs.append(pending.job_id)
        if request.complete:
            reply = protocol.broker_reply(request.service.encode("ascii"), request.body(), request.correlation)
            self._outbox.send(request.client, reply)
            self._requests.complete(request)
            if request.notify:
                # All jobs of a request together: after a restart its reply needs every part of it.
                self._outbox.batch.answered += request.jobs
        else:
            self._requests.keep_part(request, pending.job_id)

    # Notifications --------------------------------------------------------------------------------

    def send_notifications(self, now_s: float) -> None:
        """Send the notifications that are due."""
        for client, message in self._notifications.due(now_s):
            self._outbox.send(client, message)

    def _notify_crash(self, pending: PendingJob, cause: str | None, now_s: float, *, final: bool) -> None:
        fields = notifications.crashed(
            pending.request.service,
            pending.own_id,
            pending.job_id,
            pending.attempt or 1,
            cause,
            final=final,
            at=self._wall_clock(),
        )
        self._notify(pending, protocol.WORKER_DIED, fields, now_s, final=final)

    def _notify_no_workers(self, pending: PendingJob, now_s: float, *, expired: bool) -> None:
        if self._settings.notify_no_workers:
            fields = notifications.no_workers(
                pending.request.service, pending.own_id, pending.job_id, expired=expired, at=self._wall_clock()
            )
            self._notify(pending, protocol.NO_WORKERS, fields, now_s, final=expired)

    def _notify(
        self, pending: PendingJob, command: bytes, fields: dict[str, Any], now_s: float, *, final: bool
    ) -> None:
        """Queue a notification if the client wants it, and has not had it for this attempt."""
        request = pending.request
        key = (pending.attempt if not final else FINAL, command)
        if request.notify and self._subscriptions.wants(request.client, command) and key not in pending.notified:
            pending.notified.add(key)
            notification = PendingNotification(command, pending.job_id, request.correlation, fields)
            # The delay gathers deaths. The end of a call, or a lack of workers, is sent at once.
            at_once = final or command != protocol.WORKER_DIED
            self._notifications.add(request.client, notification, now_s, at_once=at_once)
