"""The broker's rules towards workers: who they are, what they work on, what they hand in, and how they end."""

from dataclasses import replace
from typing import Any

import msgspec

from unstuck.domain.endings import Died, NotStorable, conclude, storable_text
from unstuck.domain.frames import pack_frames, read_note, write_map
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState
from unstuck.ledger.contract.workers import Success
from unstuck.mdp import protocol
from unstuck.mdp.broker import jobs
from unstuck.mdp.broker.batch import GONE, HeldClaim, LateReply, Registration, ResumedWorker, WorkerDeath
from unstuck.mdp.broker.handed_out import mark_of
from unstuck.mdp.broker.prefetch import Prefetch
from unstuck.mdp.broker.request_addresses import Address, key_of, owner_of, read_address
from unstuck.mdp.broker.worker_table import Assignment, ConnectedWorker, progress_of

MAX_NAME_CHARS = 100
MAX_EARLY = 16
"""Words of a worker that are kept until it is known whose job it came back with."""
MAX_METADATA_BYTES = 10_000
MAX_SENT_AWAY = 10_000
"""Strangers that are answered between two ticks."""
TOO_LATE = "a reply that came too late"
FORGED = "a reply in the name of another worker"
REPLY_TOO_LARGE = "its reply is larger than mdp.max_message_bytes, or has more frames than mdp.max_frames"

COUNTED = {
    protocol.NAME_TAKEN: "a worker whose name another living worker has",
    protocol.TOO_MANY_SERVICES: "a worker of new services when the ledger knows too many",
}
"""How it is counted among what was dropped."""


class WorkerSide(Prefetch):
    def _on_worker_message(self, worker: ConnectedWorker, message: protocol.Message) -> None:
        if worker.held_address is not None and not worker.is_registered:
            # Whose job it is will be known in a moment.
            if isinstance(message, protocol.Reply | protocol.WorkerSignal) and len(worker.early_messages) < MAX_EARLY:
                worker.early_messages.append(message)
        elif isinstance(message, protocol.Reply):
            self._on_reply(worker, message)
        elif isinstance(message, protocol.WorkerSignal):
            self._on_signal(worker, message)

    def _on_ready(self, identity: bytes, ready: protocol.Ready, connection: int | None, now_s: float) -> None:
        known = self.workers.by_identity(identity)
        services = tuple(service.decode("ascii") for service in ready.services)
        if known is not None and connection is not None and known.connection != connection:
            # The socket gave the identity to the newer connection: nothing reaches the older one any more.
            self._declare_dead(known, "another worker with its identity took its place")
            known = None
        if known is not None or any(service.startswith("mmi.") for service in services):
            why = "it said READY a second time" if known is not None else "it wanted to serve mmi."
            self.dropped.add(why)
            self._send(identity, protocol.disconnect())
            if known is not None:
                self._end_for_violation(known, why)
            return
        if not self._ready_limit.allow(identity, now_s):
            self.dropped.add("it said READY too often")
            self._send(identity, protocol.disconnect())
            return
        self._unknown_heartbeats.discard(identity)
        self._give_up_abandoned(identity)
        about = read_note(ready.about) or {}
        key = key_of(about.get("instance"))
        if key is not None and self._came_back(key, identity, connection, services, about.get("holding"), now_s):
            return
        worker_id = self._new_id()
        said = about.get("name")
        own_name = storable_text(said, MAX_NAME_CHARS) if isinstance(said, str) else ""
        name = own_name or f"mdp-{services[0]}-{worker_id}"
        host = about.get("host")
        metadata = about.get("metadata")
        worker = ConnectedWorker(
            identity,
            worker_id,
            name,
            services,
            connection,
            now_s,
            now_s,
            key or self._new_key(),
            storable_text(host, MAX_NAME_CHARS) if isinstance(host, str) else "",
            _storable(metadata),
        )
        said = about.get("holding")
        found = read_address(said) if isinstance(said, bytes) else None
        holding = None
        if found is not None:
            worker.held_address = said
            if self.workers.by_id(found.worker_id) is None:
                holding = HeldClaim(found.job_id, found.token, found.worker_id, owner_of(found.key))
        worker.is_unstuck_worker = bool(ready.about)
        self.workers.add(worker)
        owner = owner_of(worker.key)
        self._backlog.add_registration(
            Registration(worker_id, name, services, worker.host, worker.metadata, holding, bool(own_name), owner)
        )

    def _came_back(
        self,
        key: str,
        identity: bytes,
        connection: int | None,
        services: tuple[str, ...],
        holding: object,
        now_s: float,
    ) -> bool:
        """Go on with a worker of ours that comes through a new connection before the end of its former one is known.
        Return False if it is to be registered anew."""
        known = self.workers.by_key(key)
        if known is None:
            return False
        if known.services == services and (known.assignment is None or known.assignment.address == holding):
            self.workers.move(known, identity, connection)
            known.seen_s = now_s
            return True
        self._declare_dead(known, "it came back without the request that it was given")
        return False

    def _give_up_abandoned(self, identity: bytes) -> None:
        """Give up what a worker had when its broker died: it came back to the same address under its own routing id and
        said READY, so it is at work on nothing. A reply that it sent before has come already."""
        mark = mark_of(identity) if self._left_working else b""
        back = [pair for pair in self._left_working if mark and pair[1].is_same_address and pair[1].mark == mark]
        for pair in back:
            self._left_working.remove(pair)
            self._backlog.abandoned.append(replace(pair[1], is_given_up=True))

    def _registered(self, registration: Registration, resumed: ResumedWorker | None, now_s: float) -> None:
        worker = self.workers.by_id(registration.worker_id)
        if worker is None:
            # It went again meanwhile. If we sent it away ourselves the next broker will hear of it.
            if resumed is not None and not self._closing:
                job_id = None if resumed.job is None else resumed.job.job_id
                self._backlog.report_death(WorkerDeath(resumed.worker_id, Detector.CONNECTION, GONE, job_id))
            return
        if resumed is not None:
            held = None if registration.held_claim is None else read_address(worker.held_address or b"")
            # The row has the digest of the key that it came back with.
            self.workers.rename(worker, resumed.worker_id, worker.key if held is None else held.key)
            if resumed.job is not None and worker.held_address is not None:
                worker.assignment = Assignment(resumed.job, worker.held_address, resumed.job.task, now_s)
                worker.held_address = None
                self._held_here(resumed.job)
        worker.is_registered = True
        if not worker.is_unstuck_worker:
            # Ours say themselves what they have.
            self._handed_out.add(worker.worker_id, now_s, worker.identity)
        early, worker.early_messages = worker.early_messages, []
        for message in early:
            self._on_worker_message(worker, message)

    def _refuse(self, registration: Registration, error: str, message: str) -> None:
        self.dropped.add(COUNTED[error])
        if (worker := self.workers.by_id(registration.worker_id)) is not None:
            self.workers.remove(worker)
            about = write_map({"error": error, "message": message}) if worker.is_unstuck_worker else b""
            self._send(worker.identity, protocol.disconnect(about))

    def _on_disconnect(self, identity: bytes) -> None:
        worker = self.workers.by_identity(identity)
        if worker is None:
            return
        if worker.assignment is not None:
            self._declare_dead(worker, "it said DISCONNECT while it worked")
        else:
            self.workers.remove(worker)
            self._remove(worker, None)

    def _on_unknown_worker(self, identity: bytes, message: protocol.Message) -> None:
        """A worker that we do not know: of an earlier broker, or one that we gave up. Its reply may still count.

        It is sent away once for all the beats that it sent meanwhile. Were it sent away for each, it could say READY as
        often, which is a violation, and be sent away for that again without end."""
        if isinstance(message, protocol.Heartbeat):
            if identity in self._unknown_heartbeats or len(self._unknown_heartbeats) >= MAX_SENT_AWAY:
                return
            self._unknown_heartbeats.add(identity)
        if isinstance(message, protocol.Reply) and (found := read_address(message.address)) is not None:
            self._add_late_reply(identity, found, message.body)
        self._send(identity, protocol.disconnect())

    def _on_reply(self, worker: ConnectedWorker, reply: protocol.Reply) -> None:
        assignment = worker.assignment
        if reply.address == worker.held_address:
            self.dropped.add(TOO_LATE)
            worker.held_address = None
            return
        if assignment is None or reply.address != assignment.address:
            self._on_other_reply(worker, reply)
            return
        result = jobs.result_of(assignment.job, reply.body)
        worker.assignment = None
        self._handed_out.take(worker.worker_id)
        worker.settled += 1
        self._worker_turn(worker.worker_id).done.append(Success(assignment.job.job_id, assignment.job.token, result))
        self._next_job(worker, assignment, worker.seen_s)

    def _on_too_large(self, worker: ConnectedWorker, head: protocol.Frames) -> None:
        assignment = worker.assignment
        if assignment is None or list(head[:4]) != [
            protocol.EMPTY,
            protocol.WORKER,
            protocol.REPLY,
            assignment.address,
        ]:
            self._send(worker.identity, protocol.disconnect())
            self._end_for_violation(worker, "it sent a message that is too large")
            return
        worker.assignment = None
        self._handed_out.take(worker.worker_id)
        self._worker_turn(worker.worker_id).endings.append(conclude(assignment.attempt(), NotStorable(REPLY_TOO_LARGE)))
        self.requests.poll_soon(assignment.job.job_id, worker.seen_s, tried=True)
        self._next_job(worker, assignment, worker.seen_s)

    def _on_other_reply(self, worker: ConnectedWorker, reply: protocol.Reply) -> None:
        """A reply to something else than it was asked: of an earlier connection, or of nothing that we know."""
        if (found := read_address(reply.address)) is not None:
            is_genuine = self._add_late_reply(worker.identity, found, reply.body)
            if is_genuine and worker.is_unstuck_worker and found.key == worker.key:
                # It hands in again what it does not know to have arrived.
                return
        self.dropped.add("a reply to something else")
        self._send(worker.identity, protocol.disconnect())
        self._end_for_violation(worker, "it replied to something that it was not asked")

    def _add_late_reply(self, sender: bytes, found: Address, body: tuple[bytes, ...]) -> bool:
        """Let the ledger say whether its token still stands; return False if it has not the key of its worker."""
        worker = self.workers.by_id(found.worker_id)
        if worker is not None and worker.key != found.key:
            self.dropped.add(FORGED)
            return False
        result = pack_frames(body) if found.framed else jobs.json_of(body)
        late = LateReply(Success(found.job_id, found.token, result), owner_of(found.key), sender)
        if not self._backlog.add_late_reply(found.worker_id, late):
            self.dropped.add("a reply to something else, when too many waited")
        return True

    def _forged(self, sender: bytes) -> None:
        """The ledger found a reply without the key of its worker."""
        self.dropped.add(FORGED)
        if (worker := self.workers.by_identity(sender)) is not None:
            self._send(sender, protocol.disconnect())
            self._end_for_violation(worker, "it replied in the name of another worker")

    def _on_signal(self, worker: ConnectedWorker, sign: protocol.WorkerSignal) -> None:
        """PROCESSES says how far it is; FINISHED with an error of our own worker is the end of this try, else its reply
        follows."""
        assignment = worker.assignment
        if sign.command == protocol.PROCESSES:
            about = read_note(sign.about) or {}
            if about.get("draining") is True:
                worker.is_draining = worker.announced_draining = True
            if assignment is not None and sign.address == assignment.address:
                for worker_id, note in progress_of(worker.worker_id, assignment, about, self._wall_clock()):
                    self._backlog.add_progress(worker_id, note)
            return
        if sign.address == worker.held_address and jobs.raised_in(sign.about) is not None:
            worker.held_address = None
            return
        raised = jobs.raised_in(sign.about) if assignment is not None and sign.address == assignment.address else None
        if assignment is None or raised is None:
            return
        worker.assignment = None
        self._worker_turn(worker.worker_id).endings.append(jobs.failed(assignment.attempt(), raised))
        self.requests.poll_soon(assignment.job.job_id, worker.seen_s, tried=True)
        self._next_job(worker, assignment, worker.seen_s)

    def _declare_dead(self, worker: ConnectedWorker, evidence: str, detector: Detector = Detector.CONNECTION) -> None:
        self.workers.remove(worker)
        assignment = None if worker.assignment is None else worker.assignment.job.job_id
        self._remove(worker, WorkerDeath(worker.worker_id, detector, evidence, assignment))

    def _end_for_violation(self, worker: ConnectedWorker, why: str) -> None:
        """End a peer that broke the protocol. Its job is not to blame: if it may run again, it goes back without a
        charge, and waits a little longer each time, as the next worker may be of the same kind."""
        evidence = f"it broke the protocol: {why}"
        if (assignment := worker.assignment) is not None:
            job_id = assignment.job.job_id
            ending = conclude(assignment.attempt(), Died(f"its worker was sent away: {evidence}", counts=False))
            if ending.state is JobState.PENDING:
                ending = msgspec.structs.replace(ending, delay_s=self._returned_jobs.next_delay_s(job_id))
            self._worker_turn(worker.worker_id).endings.append(ending)
        self._declare_dead(worker, evidence)

    def _remove(self, worker: ConnectedWorker, death: WorkerDeath | None) -> None:
        if self._backlog.withdraw_registration(worker.worker_id):
            return
        self._handed_out.remove(worker.worker_id, worker.seen_s)
        self._clear_prefetched(worker, worker.seen_s)
        if worker.is_claiming:
            self._departed[worker.worker_id] = death
        elif death is None:
            self._backlog.retire(worker.worker_id)
        else:
            self._backlog.report_death(death)

    def _disconnect_dead(self, worker: ConnectedWorker) -> None:
        """The ledger took it for dead: whatever it holds is somebody else's, and it must come anew."""
        self.workers.remove(worker)
        self._handed_out.remove(worker.worker_id, worker.seen_s)
        self._backlog.retire(worker.worker_id)
        self._send(worker.identity, protocol.disconnect())


def _storable(metadata: object) -> dict[str, Any]:
    """Give what a worker says of itself as every database takes it; nothing where that cannot be."""
    try:
        said = msgspec.json.encode(metadata)
        if len(said) > MAX_METADATA_BYTES or rb"\u0000" in said:
            return {}
        plain = msgspec.json.decode(said)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return {}
    return plain if isinstance(plain, dict) else {}
