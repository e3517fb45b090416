"""The side of the broker towards workers: registration, replies and heartbeats."""

from collections.abc import Callable

from unstuck.config import MdpSettings
from unstuck.domain.endings import NotStorable, conclude
from unstuck.domain.frames import pack_frames, read_note, write_map
from unstuck.domain.liveness import Detector
from unstuck.domain.states import LIVE_STATES
from unstuck.ledger.contract.workers import Claimed, HeartbeatAnswer, RemoteHeartbeat, Success
from unstuck.mdp import protocol
from unstuck.mdp.broker import jobs
from unstuck.mdp.broker.batch import GONE, HeldClaim, LateReply, Registration, ResumedWorker, WorkerDeath, WorkerTurn
from unstuck.mdp.broker.departures import Departures
from unstuck.mdp.broker.dispatch import Dispatcher
from unstuck.mdp.broker.introduction import Introduction, read_introduction
from unstuck.mdp.broker.outbox import Outbox
from unstuck.mdp.broker.peer_limits import ReadyLimit
from unstuck.mdp.broker.request_addresses import Address, owner_of, read_address
from unstuck.mdp.broker.requests import RequestTable
from unstuck.mdp.broker.takeover import Takeover
from unstuck.mdp.broker.worker_table import ConnectedWorker, WorkerTable, progress_of

MAX_EARLY_MESSAGES = 16
"""Messages of a worker that are kept until the ledger confirms the job that it came back with."""
MAX_UNKNOWN = 10_000
"""Maximum number of unknown workers whose heartbeats are answered in one heartbeat interval."""
TOO_LATE = "a reply that came too late"
FORGED = "a reply in the name of another worker"
REPLY_TOO_LARGE = "its reply is larger than mdp.max_message_bytes, or has more frames than mdp.max_frames"
REFUSED = {
    protocol.NAME_TAKEN: "a worker whose name another living worker has",
    protocol.TOO_MANY_SERVICES: "a worker of new services when the ledger knows too many",
}
"""Reasons under which refused registrations are counted as dropped messages."""


class WorkerSide:
    def __init__(
        self,
        settings: MdpSettings,
        outbox: Outbox,
        requests: RequestTable,
        workers: WorkerTable,
        dispatcher: Dispatcher,
        departures: Departures,
        takeover: Takeover,
        new_id: Callable[[], str],
        new_key: Callable[[], str],
        wall_clock: Callable[[], float],
    ) -> None:
        # Read once: a setting is parsed on each access.
        self._interval_s = settings.heartbeat_interval_s
        self._timeout_s = settings.heartbeat_timeout_s
        self._busy_timeout_s = settings.busy_timeout_s
        self._outbox = outbox
        self._requests = requests
        self._workers = workers
        self._dispatcher = dispatcher
        self._departures = departures
        self._takeover = takeover
        self._new_id = new_id
        self._new_key = new_key
        self._wall_clock = wall_clock
        self._ready_limit = ReadyLimit()
        self._unknown: set[bytes] = set()
        """Unknown workers whose heartbeats were answered since the last heartbeat interval."""

    # READY ----------------------------------------------------------------------------------------

    def on_ready(self, identity: bytes, ready: protocol.Ready, connection: int | None, now_s: float) -> None:
        """Register a worker, or go on with one that came back."""
        known = self._workers.by_identity(identity)
        services = tuple(service.decode("ascii") for service in ready.services)
        if known is not None and connection is not None and known.connection != connection:
            # The socket gave the routing id to the newer connection. Nothing reaches the older one any more.
            self._departures.declare_dead(known, "another worker with its identity took its place")
            known = None
        if known is not None or any(service.startswith("mmi.") for service in services):
            why = "it said READY a second time" if known is not None else "it wanted to serve mmi."
            self._outbox.drop(why)
            self._departures.expel(identity, known, why)
            return
        if not self._ready_limit.allow(identity, now_s):
            self._outbox.drop("it said READY too often")
            self._outbox.send(identity, protocol.disconnect())
            return
        self._unknown.discard(identity)
        self._takeover.on_ready(identity)
        about = read_introduction(ready)
        if about.key is not None and self._came_back(
            about.key, identity, connection, services, about.held_address, now_s
        ):
            return
        worker_id = self._new_id()
        worker = ConnectedWorker(
            identity,
            worker_id,
            about.name or f"mdp-{services[0]}-{worker_id}",
            services,
            connection,
            now_s,
            now_s,
            about.key or self._new_key(),
            about.host,
            about.metadata,
            held_address=about.held_address,
            is_unstuck_worker=bool(ready.about),
        )
        held_claim, owner = self._held_claim(about), owner_of(worker.key)
        self._workers.add(worker)
        self._outbox.backlog.add_registration(
            Registration(
                worker_id, worker.name, services, about.host, about.metadata, held_claim, bool(about.name), owner
            )
        )

    def _came_back(
        self,
        key: str,
        identity: bytes,
        connection: int | None,
        services: tuple[str, ...],
        held_address: bytes | None,
        now_s: float,
    ) -> bool:
        """Go on with a worker that came back through a new connection before its former one is known to be closed.

        Return False if it must be registered."""
        known = self._workers.by_key(key)
        if known is None:
            return False
        if known.services == services and (known.assignment is None or known.assignment.address == held_address):
            self._workers.move(known, identity, connection)
            known.seen_s = now_s
            return True
        self._departures.declare_dead(known, "it came back without the request that it was given")
        return False

    def _held_claim(self, about: Introduction) -> HeldClaim | None:
        """Return the claim of a worker that came back with a job, unless this broker has another worker of its id."""
        held = None if about.held_address is None else read_address(about.held_address)
        if held is None or self._workers.by_id(held.worker_id) is not None:
            return None
        return HeldClaim(held.job_id, held.token, held.worker_id, owner_of(held.key))

    def on_registered(self, registration: Registration, resumed: ResumedWorker | None, now_s: float) -> None:
        """Note that a worker is in the ledger, and handle the messages that it has sent meanwhile."""
        worker = self._workers.by_id(registration.worker_id)
        if worker is None:
            # It left meanwhile. If this broker disconnected it because it shuts down, the worker goes to the next one.
            if resumed is not None and not self._outbox.is_closing:
                job_id = None if resumed.job is None else resumed.job.job_id
                death = WorkerDeath(resumed.worker_id, Detector.CONNECTION, GONE, job_id)
                self._outbox.backlog.report_death(death)
            return
        if resumed is not None:
            held = None if registration.held_claim is None else read_address(worker.held_address or b"")
            # The row has the digest of the key in the address that it came back with.
            self._workers.rename(worker, resumed.worker_id, worker.key if held is None else held.key)
            if resumed.job is not None and worker.held_address is not None:
                self._dispatcher.resume(worker, resumed.job, worker.held_address, now_s)
                worker.held_address = None
        worker.is_registered = True
        self._dispatcher.add(worker, now_s)
        early, worker.early_messages = worker.early_messages, []
        for message in early:
            self._on_known(worker, message)

    def on_refused(self, registration: Registration, error: str, message: str) -> None:
        """Disconnect a worker that the ledger refused."""
        self._outbox.drop(REFUSED[error])
        if (worker := self._workers.by_id(registration.worker_id)) is not None:
            self._workers.remove(worker)
            about = write_map({"error": error, "message": message}) if worker.is_unstuck_worker else b""
            self._outbox.send(worker.identity, protocol.disconnect(about))

    # Other messages -------------------------------------------------------------------------------

    def on_message(self, identity: bytes, message: protocol.Message, now_s: float) -> None:
        """Handle any message but READY and DISCONNECT."""
        worker = self._workers.by_identity(identity)
        if worker is None:
            self._on_unknown(identity, message)
        else:
            worker.seen_s = now_s
            self._on_known(worker, message)

    def _on_known(self, worker: ConnectedWorker, message: protocol.Message) -> None:
        if worker.held_address is not None and not worker.is_registered:
            # The ledger has not yet said whether the worker still holds the job.
            is_about_job = isinstance(message, protocol.Reply | protocol.WorkerSignal)
            if is_about_job and len(worker.early_messages) < MAX_EARLY_MESSAGES:
                worker.early_messages.append(message)
        elif isinstance(message, protocol.Reply):
            self._on_reply(worker, message)
        elif isinstance(message, protocol.WorkerSignal):
            self._on_signal(worker, message)

    def _on_unknown(self, identity: bytes, message: protocol.Message) -> None:
        """Disconnect a worker of an earlier broker, or one that was declared dead. Its reply may still count.

        It gets one DISCONNECT for all the heartbeats that it sent meanwhile. If each were answered, it could send READY
        as often, which is a violation, and would be disconnected for that again and again."""
        if isinstance(message, protocol.Heartbeat):
            if identity in self._unknown or len(self._unknown) >= MAX_UNKNOWN:
                return
            self._unknown.add(identity)
        if isinstance(message, protocol.Reply) and (found := read_address(message.address)) is not None:
            self._add_late_reply(identity, found, message.body)
        self._outbox.send(identity, protocol.disconnect())

    def on_disconnect(self, identity: bytes) -> None:
        worker = self._workers.by_identity(identity)
        if worker is None:
            return
        if worker.assignment is not None:
            self._departures.declare_dead(worker, "it said DISCONNECT while it worked")
        else:
            self._departures.leave(worker)

    def on_invalid(self, identity: bytes, why: str) -> None:
        """Disconnect the sender of an invalid message of a worker."""
        self._departures.expel(identity, self._workers.by_identity(identity), f"it sent {why}")

    def on_too_large(self, identity: bytes, head: protocol.Frames, now_s: float) -> None:
        """Handle a message above the limits, of which `head` are the first frames. If it is the reply of a worker, its
        job fails."""
        worker = self._workers.by_identity(identity)
        if worker is None:
            return
        worker.seen_s = now_s
        done = worker.assignment
        if done is None or list(head[:4]) != [protocol.EMPTY, protocol.WORKER, protocol.REPLY, done.address]:
            self._departures.expel(identity, worker, "it sent a message that is too large")
            return
        self._dispatcher.finish(worker)
        ending = conclude(done.attempt(), NotStorable(REPLY_TOO_LARGE))
        self._outbox.worker_turn(worker.worker_id).endings.append(ending)
        self._requests.poll_soon(done.job.job_id, worker.seen_s, tried=True)
        self._dispatcher.assign_next(worker, done, worker.seen_s)

    def _on_reply(self, worker: ConnectedWorker, reply: protocol.Reply) -> None:
        done = worker.assignment
        if reply.address == worker.held_address:
            self._outbox.drop(TOO_LATE)
            worker.held_address = None
            return
        if done is None or reply.address != done.address:
            self._on_other_reply(worker, reply)
            return
        success = Success(done.job.job_id, done.job.token, jobs.result_of(done.job, reply.body))
        self._dispatcher.finish(worker)
        worker.settled += 1
        self._outbox.worker_turn(worker.worker_id).done.append(success)
        self._dispatcher.assign_next(worker, done, worker.seen_s)

    def _on_other_reply(self, worker: ConnectedWorker, reply: protocol.Reply) -> None:
        """Handle a reply to another request than the current one: of an earlier connection, or of nothing known."""
        if (found := read_address(reply.address)) is not None:
            is_genuine = self._add_late_reply(worker.identity, found, reply.body)
            if is_genuine and worker.is_unstuck_worker and found.key == worker.key:
                # It sends a reply again that may have been lost.
                return
        self._outbox.drop("a reply to something else")
        self._departures.expel(worker.identity, worker, "it replied to something that it was not asked")

    def _add_late_reply(self, sender: bytes, found: Address, body: tuple[bytes, ...]) -> bool:
        """Let the ledger check whether the token of a reply is valid. Return False if the key is wrong."""
        worker = self._workers.by_id(found.worker_id)
        if worker is not None and worker.key != found.key:
            self._outbox.drop(FORGED)
            return False
        result = pack_frames(body) if found.framed else jobs.json_of(body)
        late = LateReply(Success(found.job_id, found.token, result), owner_of(found.key), sender)
        if not self._outbox.backlog.add_late_reply(found.worker_id, late):
            self._outbox.drop("a reply to something else, when too many waited")
        return True

    def on_forged(self, sender: bytes) -> None:
        """Disconnect the sender of a late reply that the ledger found to have the wrong key."""
        self._outbox.drop(FORGED)
        if (worker := self._workers.by_identity(sender)) is not None:
            self._departures.expel(sender, worker, "it replied in the name of another worker")

    def _on_signal(self, worker: ConnectedWorker, signal: protocol.WorkerSignal) -> None:
        """Handle PROCESSES, which reports progress, and FINISHED. With an error, FINISHED ends the attempt; otherwise a
        reply follows."""
        done = worker.assignment
        if signal.command == protocol.PROCESSES:
            about = read_note(signal.about) or {}
            if about.get("draining") is True:
                worker.is_draining = worker.announced_draining = True
            if done is not None and signal.address == done.address:
                for worker_id, progress in progress_of(worker.worker_id, done, about, self._wall_clock()):
                    self._outbox.backlog.add_progress(worker_id, progress)
            return
        if signal.address == worker.held_address and jobs.raised_in(signal.about) is not None:
            worker.held_address = None
            return
        raised = jobs.raised_in(signal.about) if done is not None and signal.address == done.address else None
        if done is None or raised is None:
            return
        self._dispatcher.finish(worker)
        self._outbox.worker_turn(worker.worker_id).endings.append(jobs.failed(done.attempt(), raised))
        self._requests.poll_soon(done.job.job_id, worker.seen_s, tried=True)
        self._dispatcher.assign_next(worker, done, worker.seen_s)

    # Time -----------------------------------------------------------------------------------------

    def on_tick(self, now_s: float) -> None:
        """Declare silent workers dead, and send heartbeats to the others."""
        for worker in self._workers:
            limit_s = self._timeout_s if worker.assignment is None else self._busy_timeout_s
            silent_s = now_s - worker.seen_s
            if silent_s > limit_s:
                self._outbox.send(worker.identity, protocol.disconnect())
                self._departures.declare_dead(worker, f"nothing was heard of it for {silent_s:.1f} s", Detector.LEASE)
            elif now_s - worker.sent_s >= self._interval_s:
                self._outbox.send_to_worker(worker, protocol.heartbeat(), now_s)

    def on_heartbeat_interval(self) -> None:
        """Write heartbeats of all workers with the next batch, in place of those before."""
        self._unknown.clear()
        self._outbox.batch.heartbeats = [_heartbeat(worker) for worker in self._workers if worker.is_registered]

    # Results of the ledger ------------------------------------------------------------------------

    def on_turn(
        self,
        worker_id: str,
        worker_turn: WorkerTurn,
        claimed: tuple[Claimed, ...],
        now_s: float,
        *,
        is_gone: bool,
        has_settled: bool,
    ) -> None:
        """Go on after a turn. `is_gone`: the worker is dead in the ledger. `has_settled`: one of its replies counts."""
        worker = self._workers.by_id(worker_id)
        if worker is None:
            if self._departures.finish(worker_id, worker_turn, claimed):
                return
            if has_settled:
                # Of an earlier broker, or of an earlier connection. It says READY again under a new id. A reply that
                # does not count proves nothing about a worker.
                self._outbox.batch.stale_registrations.append(worker_id)
        elif is_gone:
            self._departures.disconnect_dead(worker)
        elif worker_turn.claim_count:
            self._dispatcher.on_claimed(worker, claimed, worker_turn, now_s)

    def on_heartbeat_answer(self, worker_id: str, answer: HeartbeatAnswer) -> None:
        worker = self._workers.by_id(worker_id)
        if worker is None:
            return
        if answer.state not in LIVE_STATES:
            self._departures.disconnect_dead(worker)
        is_told_to = answer.request is not None or answer.disabled
        worker.is_draining = self._outbox.is_closing or worker.announced_draining or is_told_to


def _heartbeat(worker: ConnectedWorker) -> RemoteHeartbeat:
    settled, worker.settled = worker.settled, 0
    return RemoteHeartbeat(worker.worker_id, running=int(worker.assignment is not None), settled=settled)
