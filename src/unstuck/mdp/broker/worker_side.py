"""The broker's rules towards workers: who they are, what they work on, what they hand in, and how they end."""

from typing import Any

import msgspec

from unstuck.domain.envelope import pack, read_map
from unstuck.domain.liveness import Detector
from unstuck.domain.recovery import printable
from unstuck.mdp import frames
from unstuck.mdp.broker import results
from unstuck.mdp.broker.orders import Birth, Death, Holding, Resumed
from unstuck.mdp.broker.peers import Address, Doing, Peer, progress_of, read_address
from unstuck.mdp.broker.piles import Piles
from unstuck.store.records import Done

MAX_NAME_CHARS = 100
MAX_EARLY = 16
"""Words of a worker that are kept until it is known whose job it came back with."""
MAX_METADATA_BYTES = 10_000


class WorkerSide(Piles):
    def _on_word(self, peer: Peer, message: frames.Message) -> None:
        if peer.holding is not None and not peer.born:
            # Whose job it is will be known in a moment.
            if isinstance(message, frames.Reply | frames.Sign) and len(peer.early) < MAX_EARLY:
                peer.early.append(message)
        elif isinstance(message, frames.Reply):
            self._on_reply(peer, message)
        elif isinstance(message, frames.Sign):
            self._on_sign(peer, message)

    def _on_ready(self, identity: bytes, ready: frames.Ready, line: int | None, now_s: float) -> None:
        known = self.peers.by_identity(identity)
        services = tuple(service.decode("ascii") for service in ready.services)
        if known is not None and line is not None and known.line != line:
            # The socket gave the identity to the newer connection: nothing reaches the older one any more.
            self._bury(known, "another worker with its identity took its place")
            known = None
        if known is not None or any(service.startswith("mmi.") for service in services):
            why = "it said READY a second time" if known is not None else "it wanted to serve mmi."
            self.dropped[why] += 1
            self._send(identity, frames.disconnect())
            if known is not None:
                self._bury(known, why)
            return
        about = read_map(ready.about) or {}
        worker_id = self._new_id()
        said = about.get("name")
        own_name = printable(said, MAX_NAME_CHARS) if isinstance(said, str) else ""
        name = own_name or f"mdp-{services[0]}-{worker_id}"
        host = about.get("host")
        metadata = about.get("metadata")
        peer = Peer(
            identity,
            worker_id,
            name,
            services,
            line,
            now_s,
            now_s,
            printable(host, MAX_NAME_CHARS) if isinstance(host, str) else "",
            _storable(metadata),
        )
        said = about.get("holding")
        found = read_address(said) if isinstance(said, bytes) else None
        holding = None
        if found is not None:
            peer.holding = said
            if self.peers.by_id(found.worker_id) is None:
                holding = Holding(found.job_id, found.token, found.worker_id)
        peer.ours = bool(ready.about)
        self.peers.add(peer)
        self._order.births.append(Birth(worker_id, name, services, peer.host, peer.metadata, holding, bool(own_name)))

    def _born(self, birth: Birth, resumed: Resumed | None, now_s: float) -> None:
        peer = self.peers.by_id(birth.worker_id)
        if peer is None:
            # It went again meanwhile. If we sent it away ourselves the next broker will hear of it.
            if resumed is not None and not self._closing:
                job_id = None if resumed.job is None else resumed.job.job_id
                evidence = "its connection ended without a word"
                self._order.deaths.append(Death(resumed.worker_id, Detector.CONNECTION, evidence, job_id))
            return
        if resumed is not None:
            self.peers.rename(peer, resumed.worker_id)
            if resumed.job is not None and peer.holding is not None:
                peer.doing = Doing(resumed.job, peer.holding, resumed.job.task, now_s)
                peer.holding = None
                self._held_here(resumed.job)
        peer.born = True
        early, peer.early = peer.early, []
        for message in early:
            self._on_word(peer, message)

    def _on_bye(self, identity: bytes) -> None:
        peer = self.peers.by_identity(identity)
        if peer is None:
            return
        if peer.doing is not None:
            self._bury(peer, "it said DISCONNECT while it worked")
        else:
            self.peers.remove(peer)
            self._part(peer, None)

    def _on_stranger(self, identity: bytes, message: frames.Message) -> None:
        """A worker that we do not know: of an earlier broker, or one that we gave up. Its reply may still count."""
        if isinstance(message, frames.Reply) and (found := read_address(message.address)) is not None:
            self._hand_in_late(found, message.body)
        self._send(identity, frames.disconnect())

    def _on_reply(self, peer: Peer, reply: frames.Reply) -> None:
        doing = peer.doing
        if reply.address == peer.holding:
            self.dropped["a reply that came too late"] += 1
            peer.holding = None
            return
        if doing is None or reply.address != doing.address:
            self._on_other_reply(peer, reply)
            return
        result = results.result_of(doing.job, reply.body)
        peer.doing = None
        peer.settled += 1
        self._hand(peer.worker_id).done.append(Done(doing.job.job_id, doing.job.token, result))
        self._go_on(peer, doing, peer.seen_s)

    def _on_other_reply(self, peer: Peer, reply: frames.Reply) -> None:
        """A reply to something else than it was asked: of an earlier connection, or of nothing that we know."""
        if (found := read_address(reply.address)) is not None:
            self._hand_in_late(found, reply.body)
            if peer.ours:
                # It hands in again what it does not know to have arrived.
                return
        self.dropped["a reply to something else"] += 1
        self._send(peer.identity, frames.disconnect())
        self._bury(peer, "it replied to something that it was not asked")

    def _hand_in_late(self, found: Address, body: tuple[bytes, ...]) -> None:
        """Let the ledger say whether its token still stands."""
        result = pack(body) if found.framed else results.json_of(body)
        self._hand(found.worker_id).done.append(Done(found.job_id, found.token, result))

    def _on_sign(self, peer: Peer, sign: frames.Sign) -> None:
        """PROCESSES says how far it is; FINISHED with an error of our own worker is the end of this try, else its reply
        follows."""
        doing = peer.doing
        if sign.command == frames.PROCESSES:
            about = read_map(sign.about) or {}
            if about.get("draining") is True:
                peer.leaving = peer.draining = True
            if doing is not None and sign.address == doing.address:
                self._order.notes += progress_of(peer.worker_id, doing, about, self._wall())
            return
        if sign.address == peer.holding and results.raised_in(sign.about) is not None:
            peer.holding = None
            return
        raised = results.raised_in(sign.about) if doing is not None and sign.address == doing.address else None
        if doing is None or raised is None:
            return
        peer.doing = None
        self._hand(peer.worker_id).endings.append(results.failed(doing.attempt(), raised))
        self.requests.look_soon(doing.job.job_id, peer.seen_s)
        self._go_on(peer, doing, peer.seen_s)

    def _bury(self, peer: Peer, evidence: str, detector: Detector = Detector.CONNECTION) -> None:
        self.peers.remove(peer)
        doing = None if peer.doing is None else peer.doing.job.job_id
        self._part(peer, Death(peer.worker_id, detector, evidence, doing))

    def _part(self, peer: Peer, death: Death | None) -> None:
        self._clear_pile(peer, peer.seen_s)
        if peer.asking:
            self._parted[peer.worker_id] = death
        elif death is None:
            self._order.retired.append(peer.worker_id)
        else:
            self._order.deaths.append(death)

    def _lose(self, peer: Peer) -> None:
        """The ledger took it for dead: whatever it holds is somebody else's, and it must come anew."""
        self.peers.remove(peer)
        self._order.retired.append(peer.worker_id)
        self._send(peer.identity, frames.disconnect())


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
