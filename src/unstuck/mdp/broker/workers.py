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
from unstuck.mdp.broker import jobs, refusals
from unstuck.mdp.broker.batch import GONE, HeldClaim, Late, Registration, ResumedWorker, WorkerDeath
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


class WorkerSide(Prefetch):
    def _on_word(self, peer: ConnectedWorker, message: protocol.Message) -> None:
        if peer.holding is not None and not peer.born:
            # Whose job it is will be known in a moment.
            if isinstance(message, protocol.Reply | protocol.WorkerSignal) and len(peer.early) < MAX_EARLY:
                peer.early.append(message)
        elif isinstance(message, protocol.Reply):
            self._on_reply(peer, message)
        elif isinstance(message, protocol.WorkerSignal):
            self._on_sign(peer, message)

    def _on_ready(self, identity: bytes, ready: protocol.Ready, line: int | None, now_s: float) -> None:
        known = self.peers.by_identity(identity)
        services = tuple(service.decode("ascii") for service in ready.services)
        if known is not None and line is not None and known.line != line:
            # The socket gave the identity to the newer connection: nothing reaches the older one any more.
            self._bury(known, "another worker with its identity took its place")
            known = None
        if known is not None or any(service.startswith("mmi.") for service in services):
            why = "it said READY a second time" if known is not None else "it wanted to serve mmi."
            self.dropped.add(why)
            self._send(identity, protocol.disconnect())
            if known is not None:
                self._expel(known, why)
            return
        if not self._visits.allow(identity, now_s):
            self.dropped.add("it said READY too often")
            self._send(identity, protocol.disconnect())
            return
        self._sent_away.discard(identity)
        self._has_nothing(identity)
        about = read_note(ready.about) or {}
        key = key_of(about.get("instance"))
        if key is not None and self._came_back(key, identity, line, services, about.get("holding"), now_s):
            return
        worker_id = self._new_id()
        said = about.get("name")
        own_name = storable_text(said, MAX_NAME_CHARS) if isinstance(said, str) else ""
        name = own_name or f"mdp-{services[0]}-{worker_id}"
        host = about.get("host")
        metadata = about.get("metadata")
        peer = ConnectedWorker(
            identity,
            worker_id,
            name,
            services,
            line,
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
            peer.holding = said
            if self.peers.by_id(found.worker_id) is None:
                holding = HeldClaim(found.job_id, found.token, found.worker_id, owner_of(found.key))
        peer.ours = bool(ready.about)
        self.peers.add(peer)
        owner = owner_of(peer.key)
        self._backlog.bear(
            Registration(worker_id, name, services, peer.host, peer.metadata, holding, bool(own_name), owner)
        )

    def _came_back(
        self, key: str, identity: bytes, line: int | None, services: tuple[str, ...], holding: object, now_s: float
    ) -> bool:
        """Go on with a worker of ours that comes through a new connection before the end of its former one is known.
        Return False if it is to be registered anew."""
        known = self.peers.by_key(key)
        if known is None:
            return False
        if known.services == services and (known.doing is None or known.doing.address == holding):
            self.peers.move(known, identity, line)
            known.seen_s = now_s
            return True
        self._bury(known, "it came back without the request that it was given")
        return False

    def _has_nothing(self, identity: bytes) -> None:
        """Give up what a worker had when its broker died: it came back to the same address under its own routing id and
        said READY, so it is at work on nothing. A reply that it sent before has come already."""
        mark = mark_of(identity) if self._left_at_work else b""
        back = [pair for pair in self._left_at_work if mark and pair[1].is_near and pair[1].mark == mark]
        for pair in back:
            self._left_at_work.remove(pair)
            self._backlog.abandoned.append(replace(pair[1], is_given_up=True))

    def _born(self, birth: Registration, resumed: ResumedWorker | None, now_s: float) -> None:
        peer = self.peers.by_id(birth.worker_id)
        if peer is None:
            # It went again meanwhile. If we sent it away ourselves the next broker will hear of it.
            if resumed is not None and not self._closing:
                job_id = None if resumed.job is None else resumed.job.job_id
                self._backlog.report_death(WorkerDeath(resumed.worker_id, Detector.CONNECTION, GONE, job_id))
            return
        if resumed is not None:
            held = None if birth.holding is None else read_address(peer.holding or b"")
            # The row has the digest of the key that it came back with.
            self.peers.rename(peer, resumed.worker_id, peer.key if held is None else held.key)
            if resumed.job is not None and peer.holding is not None:
                peer.doing = Assignment(resumed.job, peer.holding, resumed.job.task, now_s)
                peer.holding = None
                self._held_here(resumed.job)
        peer.born = True
        if not peer.ours:
            # Ours say themselves what they have.
            self._handed.add(peer.worker_id, now_s, peer.identity)
        early, peer.early = peer.early, []
        for message in early:
            self._on_word(peer, message)

    def _turn_away(self, birth: Registration, error: str, message: str) -> None:
        self.dropped.add(refusals.COUNTED[error])
        if (peer := self.peers.by_id(birth.worker_id)) is not None:
            self.peers.remove(peer)
            about = write_map({"error": error, "message": message}) if peer.ours else b""
            self._send(peer.identity, protocol.disconnect(about))

    def _on_bye(self, identity: bytes) -> None:
        peer = self.peers.by_identity(identity)
        if peer is None:
            return
        if peer.doing is not None:
            self._bury(peer, "it said DISCONNECT while it worked")
        else:
            self.peers.remove(peer)
            self._part(peer, None)

    def _on_stranger(self, identity: bytes, message: protocol.Message) -> None:
        """A worker that we do not know: of an earlier broker, or one that we gave up. Its reply may still count.

        It is sent away once for all the beats that it sent meanwhile. Were it sent away for each, it could say READY as
        often, which is a violation, and be sent away for that again without end."""
        if isinstance(message, protocol.Heartbeat):
            if identity in self._sent_away or len(self._sent_away) >= MAX_SENT_AWAY:
                return
            self._sent_away.add(identity)
        if isinstance(message, protocol.Reply) and (found := read_address(message.address)) is not None:
            self._hand_in_late(identity, found, message.body)
        self._send(identity, protocol.disconnect())

    def _on_reply(self, peer: ConnectedWorker, reply: protocol.Reply) -> None:
        doing = peer.doing
        if reply.address == peer.holding:
            self.dropped.add(TOO_LATE)
            peer.holding = None
            return
        if doing is None or reply.address != doing.address:
            self._on_other_reply(peer, reply)
            return
        result = jobs.result_of(doing.job, reply.body)
        peer.doing = None
        self._handed.take(peer.worker_id)
        peer.settled += 1
        self._hand(peer.worker_id).done.append(Success(doing.job.job_id, doing.job.token, result))
        self._go_on(peer, doing, peer.seen_s)

    def _on_too_large(self, peer: ConnectedWorker, head: protocol.Frames) -> None:
        doing = peer.doing
        if doing is None or list(head[:4]) != [protocol.EMPTY, protocol.WORKER, protocol.REPLY, doing.address]:
            self._send(peer.identity, protocol.disconnect())
            self._expel(peer, "it sent a message that is too large")
            return
        peer.doing = None
        self._handed.take(peer.worker_id)
        self._hand(peer.worker_id).endings.append(conclude(doing.attempt(), NotStorable(REPLY_TOO_LARGE)))
        self.requests.look_soon(doing.job.job_id, peer.seen_s, tried=True)
        self._go_on(peer, doing, peer.seen_s)

    def _on_other_reply(self, peer: ConnectedWorker, reply: protocol.Reply) -> None:
        """A reply to something else than it was asked: of an earlier connection, or of nothing that we know."""
        if (found := read_address(reply.address)) is not None:
            is_genuine = self._hand_in_late(peer.identity, found, reply.body)
            if is_genuine and peer.ours and found.key == peer.key:
                # It hands in again what it does not know to have arrived.
                return
        self.dropped.add("a reply to something else")
        self._send(peer.identity, protocol.disconnect())
        self._expel(peer, "it replied to something that it was not asked")

    def _hand_in_late(self, sender: bytes, found: Address, body: tuple[bytes, ...]) -> bool:
        """Let the ledger say whether its token still stands; return False if it has not the key of its worker."""
        worker = self.peers.by_id(found.worker_id)
        if worker is not None and worker.key != found.key:
            self.dropped.add(FORGED)
            return False
        result = pack_frames(body) if found.framed else jobs.json_of(body)
        late = Late(Success(found.job_id, found.token, result), owner_of(found.key), sender)
        if not self._backlog.hand_in_late(found.worker_id, late):
            self.dropped.add("a reply to something else, when too many waited")
        return True

    def _forged(self, sender: bytes) -> None:
        """The ledger found a reply without the key of its worker."""
        self.dropped.add(FORGED)
        if (peer := self.peers.by_identity(sender)) is not None:
            self._send(sender, protocol.disconnect())
            self._expel(peer, "it replied in the name of another worker")

    def _on_sign(self, peer: ConnectedWorker, sign: protocol.WorkerSignal) -> None:
        """PROCESSES says how far it is; FINISHED with an error of our own worker is the end of this try, else its reply
        follows."""
        doing = peer.doing
        if sign.command == protocol.PROCESSES:
            about = read_note(sign.about) or {}
            if about.get("draining") is True:
                peer.leaving = peer.draining = True
            if doing is not None and sign.address == doing.address:
                for worker_id, note in progress_of(peer.worker_id, doing, about, self._wall()):
                    self._backlog.note(worker_id, note)
            return
        if sign.address == peer.holding and jobs.raised_in(sign.about) is not None:
            peer.holding = None
            return
        raised = jobs.raised_in(sign.about) if doing is not None and sign.address == doing.address else None
        if doing is None or raised is None:
            return
        peer.doing = None
        self._hand(peer.worker_id).endings.append(jobs.failed(doing.attempt(), raised))
        self.requests.look_soon(doing.job.job_id, peer.seen_s, tried=True)
        self._go_on(peer, doing, peer.seen_s)

    def _bury(self, peer: ConnectedWorker, evidence: str, detector: Detector = Detector.CONNECTION) -> None:
        self.peers.remove(peer)
        doing = None if peer.doing is None else peer.doing.job.job_id
        self._part(peer, WorkerDeath(peer.worker_id, detector, evidence, doing))

    def _expel(self, peer: ConnectedWorker, why: str) -> None:
        """End a peer that broke the protocol. Its job is not to blame: if it may run again, it goes back without a
        charge, and waits a little longer each time, as the next worker may be of the same kind."""
        evidence = f"it broke the protocol: {why}"
        if (doing := peer.doing) is not None:
            job_id = doing.job.job_id
            ending = conclude(doing.attempt(), Died(f"its worker was sent away: {evidence}", counts=False))
            if ending.state is JobState.PENDING:
                ending = msgspec.structs.replace(ending, delay_s=self._blameless.next_delay_s(job_id))
            self._hand(peer.worker_id).endings.append(ending)
        self._bury(peer, evidence)

    def _part(self, peer: ConnectedWorker, death: WorkerDeath | None) -> None:
        if self._backlog.unborn(peer.worker_id):
            return
        self._handed.remove(peer.worker_id, peer.seen_s)
        self._clear_pile(peer, peer.seen_s)
        if peer.asking:
            self._parted[peer.worker_id] = death
        elif death is None:
            self._backlog.retire(peer.worker_id)
        else:
            self._backlog.report_death(death)

    def _lose(self, peer: ConnectedWorker) -> None:
        """The ledger took it for dead: whatever it holds is somebody else's, and it must come anew."""
        self.peers.remove(peer)
        self._handed.remove(peer.worker_id, peer.seen_s)
        self._backlog.retire(peer.worker_id)
        self._send(peer.identity, protocol.disconnect())


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
