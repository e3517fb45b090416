"""The broker's rules towards clients: take requests, answer them, and tell of deaths who asked to be told."""

from typing import Any

from unstuck.domain.frames import write_map
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.ledger.contract.events import JobPosition
from unstuck.ledger.contract.jobs import JobRecord, Outcome
from unstuck.ledger.contract.workers import ReplyAddress
from unstuck.mdp import protocol
from unstuck.mdp.broker import jobs, notifications
from unstuck.mdp.broker.batch import MmiQuery, NewRequest, WorkerDeath
from unstuck.mdp.broker.jobs import read_calls
from unstuck.mdp.broker.notifications import KNOWN, PendingNotification
from unstuck.mdp.broker.outbox import Outbox
from unstuck.mdp.broker.requests import ClientRequest, PendingJob

MAX_WAITING = 100_000
"""Jobs that somebody waits for, of all clients together: each is kept in memory."""

FINALLY = -1
"""In place of an attempt, for the last notification about a job."""


class ClientSide(Outbox):
    def _on_request(self, client: bytes, request: protocol.Request, now_s: float) -> None:
        if request.service.startswith(protocol.MMI):
            self._on_mmi(client, request, now_s)
            return
        listening = self.subscriptions.is_subscribed(client)
        if request.correlation is not None and not listening:
            self.dropped.add("a correlation frame of a client that did not ask for it")
            return
        self.subscriptions.reconnected(client)
        if self._closing:
            return
        calls = read_calls(request, self.tasks, self._settings.retry_attempts, "mdp")
        if len(self.requests) >= MAX_WAITING:
            self.dropped.add("a request when too many waited")
            return
        if self.requests.open_of(client) + len(calls) > self._settings.max_requests_per_client:
            self.dropped.add("a request of a client with too many open")
            return
        self._gone.discard(client)
        self.requests.begin(client, len(calls))
        service = request.service.decode("ascii")
        self._request_count += 1
        asked_id = f"{self._run_id}-{self._request_count}"
        asked = ClientRequest(client, request.correlation, service, asked_id, [None] * len(calls), listening)
        for place, call in enumerate(calls):
            reply_address = None
            if listening:
                reply_address = ReplyAddress(
                    client=client,
                    service=service,
                    request_id=asked.id,
                    place=place,
                    places=len(calls),
                    correlation=request.correlation,
                    own_id=call.own_id,
                    notify=True,
                )
            self._batch.posts.append(NewRequest(call, asked, place, reply_address))
            # Whoever has a free hand looks in the same commit that takes it in.
            self.workers.wake_one(service)

    def _on_mmi(self, client: bytes, request: protocol.Request, now_s: float) -> None:
        name = request.service.decode("ascii")
        if name not in KNOWN:
            self._answer(client, request, [protocol.NOT_IMPLEMENTED])
        elif request.service == protocol.MMI_NOTIFY:
            answer = self.subscriptions.subscribe(client, request.body, now_s)
            if answer[0] == protocol.OK:
                self._backlog.add_resubscribed(client)
            self._answer(client, request, answer)
        elif name == "mmi.service" and self.workers.serves(request.body[0].decode("latin-1")):
            self._answer(client, request, [protocol.OK])
        elif not self._backlog.queries.add(MmiQuery(client, request.correlation, name, request.body)):
            self.dropped.add("a question that is too large, or of a client with too many open")

    def _answer(self, client: bytes, request: protocol.Request, body: list[bytes]) -> None:
        self._send(client, protocol.broker_reply(request.service, body, request.correlation))

    def _finish(self, job_id: int, body: list[bytes]) -> None:
        """A job has ended: answer everybody who waits for it."""
        self._returned_jobs.forget(job_id)
        for waiting in self.requests.take(job_id):
            self._fill(waiting, body)

    def _fill(self, waiting: PendingJob, body: list[bytes]) -> None:
        asked = waiting.request
        asked.answers[waiting.place] = body
        self.notifications.forget_job(asked.client, waiting.job_id)
        asked.jobs.append(waiting.job_id)
        if asked.complete:
            self._send(
                asked.client, protocol.broker_reply(asked.service.encode("ascii"), asked.body(), asked.correlation)
            )
            self.requests.complete(asked)
            if asked.notify:
                # All of a request together: after a restart its reply needs every part of it.
                self._batch.answered += asked.jobs
        else:
            self.requests.keep_part(asked, waiting.job_id)

    def _died(self, death: WorkerDeath, record: JobRecord | None, now_s: float) -> None:
        assert death.job_id is not None
        final = record is None or record.state in FINAL_STATES
        if self._settings.notify_worker_crash:
            for waiting in self.requests.of(death.job_id):
                self._notify_crash(waiting, death.evidence, now_s, final=final)
        self.requests.poll_soon(death.job_id, now_s, tried=True)

    def _ended(self, outcome: Outcome, now_s: float) -> None:
        """A job ended elsewhere: by a Python worker, a reaper, an operator."""
        if outcome.state is JobState.SUCCEEDED and outcome.result is not None:
            self._finish(outcome.job_id, jobs.body_of(outcome.result))
            return
        crashed = jobs.is_crash(outcome)
        for waiting in self.requests.of(outcome.job_id):
            if crashed and self._settings.notify_worker_crash:
                self._notify_crash(waiting, jobs.cause(outcome), now_s, final=True)
        # Said before it is forgotten: behind its end nothing is said of a job.
        self._send_notifications(now_s)
        for waiting in self.requests.take(outcome.job_id):
            asked = waiting.request
            several = len(asked.answers) > 1
            told = (FINALLY, protocol.WORKER_DIED) in waiting.told
            unwanted = not told and self.subscriptions.is_subscribed(asked.client)
            if several or jobs.is_user_error(outcome) or (asked.notify and (not crashed or unwanted)):
                self._fill(waiting, [write_map(jobs.error_map(outcome, waiting.own_id))])
            elif told:
                self._batch.answered.append(outcome.job_id)
            # Else nobody answers. Old clients time out, as they always did. A client whose lease has run out is told
            # when it asks again.

    def _expired(self, job_id: int, now_s: float) -> None:
        for waiting in list(self.requests.of(job_id)):
            self._notify_no_workers(waiting, now_s, expired=True)
            if len(waiting.request.answers) == 1 and (FINALLY, protocol.NO_WORKERS) in waiting.told:
                # That was the last word about it, and no reply follows.
                self.requests.forget_one(waiting)
                self._batch.answered.append(job_id)
        self._send_notifications(now_s)
        self.requests.poll_soon(job_id, now_s)

    def _seen(self, position: JobPosition, now_s: float) -> None:
        """A job that others work on: a try that is over and was not the last one died, or failed."""
        for waiting in self.requests.of(position.job_id):
            asleep = position.state is JobState.WAITING
            if waiting.held_elsewhere or asleep or position.attempt > waiting.attempt:
                # A worker has it, or had it since the last look, or the job itself waits for something.
                waiting.since_s = now_s
            waiting.attempt = max(waiting.attempt, position.attempt)
            waiting.held_elsewhere = position.worker_id is not None

    def _notify_crash(self, waiting: PendingJob, cause: str | None, now_s: float, *, final: bool) -> None:
        told = notifications.crashed(
            waiting.request.service,
            waiting.own_id,
            waiting.job_id,
            waiting.attempt or 1,
            cause,
            final=final,
            at=self._wall_clock(),
        )
        self._notify(waiting, protocol.WORKER_DIED, told, now_s, final=final)

    def _notify_no_workers(self, waiting: PendingJob, now_s: float, *, expired: bool) -> None:
        if self._settings.notify_no_workers:
            told = notifications.no_workers(
                waiting.request.service, waiting.own_id, waiting.job_id, expired=expired, at=self._wall_clock()
            )
            self._notify(waiting, protocol.NO_WORKERS, told, now_s, final=expired)

    def _notify(
        self, waiting: PendingJob, command: bytes, told: dict[str, Any], now_s: float, *, final: bool = False
    ) -> None:
        asked = waiting.request
        key = (waiting.attempt if not final else FINALLY, command)
        if asked.notify and self.subscriptions.wants(asked.client, command) and key not in waiting.told:
            waiting.told.add(key)
            notification = PendingNotification(command, waiting.job_id, asked.correlation, told)
            # The delay gathers deaths. What ends a call, or says that nobody is there, does not wait.
            self.notifications.add(asked.client, notification, now_s, at_once=final or command != protocol.WORKER_DIED)

    def _send_notifications(self, now_s: float) -> None:
        for client, message in self.notifications.due(now_s):
            self._send(client, message)
