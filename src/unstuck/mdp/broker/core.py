"""The broker's rules, pure: messages, ends of connections, ticks and answers of the ledger in; sends and orders out.

Nothing here waits, and nothing is sent about a job before the ledger has it. What is to be written is gathered into one
order; while that is on its way the next one fills, so that the slower the ledger is, the more goes with each commit.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from unstuck.config import Mdp
from unstuck.domain.endings import Release
from unstuck.domain.envelope import pack, read_map, write_map
from unstuck.domain.liveness import Detector
from unstuck.domain.recovery import printable
from unstuck.domain.states import FINAL, LIVING, JobState
from unstuck.mdp import frames
from unstuck.mdp.broker import notices, results
from unstuck.mdp.broker.calls import read_calls
from unstuck.mdp.broker.mmi import KNOWN, Listeners
from unstuck.mdp.broker.notices import Notice, Notices
from unstuck.mdp.broker.orders import Answer, Birth, Death, Hand, Holding, Order, Posted, Question, Resumed
from unstuck.mdp.broker.peers import Address, Doing, Peer, Peers, address_of, progress_of, read_address
from unstuck.mdp.broker.waiting import SLOWEST_LOOK_S, Asked, Requests, Waiting, restored
from unstuck.store.records import Claimed, Done, ForeignPulse, Glance, JobRecord, Letter, Outcome, TaskRecord

MAX_NAME_CHARS = 100
MAX_WAITING = 100_000
"""Jobs that somebody waits for, of all clients together: each is kept in memory."""
MAX_EARLY = 16
"""Words of a worker that are kept until it is known whose job it came back with."""
MAX_METADATA_BYTES = 10_000


@dataclass(frozen=True)
class Send:
    to: bytes
    frames: list[bytes]


class Broker:
    """`new_id` and `wall` are given, so that a simulation can repeat itself."""

    def __init__(self, settings: Mdp, new_id: Callable[[], str], wall: Callable[[], float]) -> None:
        self._settings = settings
        # Read once: a setting is parsed each time it is asked for.
        self._interval_s = settings.heartbeat_interval_s
        self._timeout_s = settings.heartbeat_timeout_s
        self._busy_timeout_s = settings.busy_timeout_s
        self._ttl_s = settings.request_ttl_s
        self._new_id = new_id
        self._run_id = new_id()
        self._asked = 0
        self._wall = wall
        self.peers = Peers()
        self.requests = Requests()
        self.listeners = Listeners()
        self.notices = Notices(settings.crash_notification_delay_ms / 1000)
        self.tasks: dict[str, TaskRecord] = {}
        self.dropped: Counter[str] = Counter()
        """Messages that made no sense, by what was wrong with them."""
        self._order = Order()
        self._under_way: Order | None = None
        self._sends: list[Send] = []
        self._parted: dict[str, Death | None] = {}
        """Who left while a job was looked for on its behalf: that one goes back first. None left in order."""
        self._pulsed_s = 0.0
        self._closing = False

    # What comes in --------------------------------------------------------------------------------

    def on_message(self, identity: bytes, parts: frames.Frames, line: int | None, now_s: float) -> None:
        match frames.read(parts):
            case frames.Request() as request:
                self._on_request(identity, request, now_s)
            case frames.Strange() as strange:
                self.dropped[strange.why] += 1
                peer = self.peers.by_identity(identity)
                if strange.from_worker:
                    self._send(identity, frames.disconnect())
                    if peer is not None:
                        self._bury(peer, f"it sent {strange.why}")
            case frames.Ready() as ready:
                self._on_ready(identity, ready, line, now_s)
            case frames.Bye():
                self._on_bye(identity)
            case message:
                peer = self.peers.by_identity(identity)
                if peer is None:
                    self._on_stranger(identity, message)
                    return
                peer.seen_s = now_s
                self._on_word(peer, message)

    def _on_word(self, peer: Peer, message: frames.Message) -> None:
        if peer.holding is not None and not peer.born:
            # Whose job it is will be known in a moment.
            if isinstance(message, frames.Reply | frames.Sign) and len(peer.early) < MAX_EARLY:
                peer.early.append(message)
        elif isinstance(message, frames.Reply):
            self._on_reply(peer, message)
        elif isinstance(message, frames.Sign):
            self._on_sign(peer, message)

    def on_gone(self, line: int, now_s: float) -> None:
        """A connection ended; whatever came through it was handed to us before."""
        for peer in self.peers.on_line(line):
            self._bury(peer, "its connection ended without a word")

    def on_unreachable(self, identity: bytes) -> None:
        """Something could not be delivered: there is nobody with that identity any more."""
        peer = self.peers.by_identity(identity)
        if peer is not None:
            self._bury(peer, "it could not be reached")

    def on_tick(self, now_s: float) -> None:
        for peer in self.peers:
            limit_s = self._timeout_s if peer.doing is None else self._busy_timeout_s
            silent_s = now_s - peer.seen_s
            if silent_s > limit_s:
                self._send(peer.identity, frames.disconnect())
                self._bury(peer, f"nothing was heard of it for {silent_s:.1f} s", Detector.LEASE)
            elif now_s - peer.told_s >= self._interval_s:
                self._tell(peer, frames.heartbeat(), now_s)
        if now_s - self._pulsed_s >= self._interval_s:
            self._pulsed_s = now_s
            self._order.pulses = [self._pulse(peer) for peer in self.peers if peer.born]
            self._order.overdue += [
                waiting.job_id
                for waiting in self.requests.all()
                if not (waiting.held_here or waiting.held_elsewhere) and now_s - waiting.since_s > self._ttl_s
            ]
            for client in self.listeners.expire(now_s):
                self.notices.forget(client)
        self._order.look_at += self.requests.due(now_s)
        self._send_notices(now_s)

    def on_bell(self, words: frozenset[str]) -> None:
        """Something may have come into these queues, or everything may have changed (no words)."""
        queues = {word.partition(":")[2] for word in words if word.startswith("queue:")}
        for peer in self.peers:
            if peer.empty_handed and (not words or any(self._queue(service) in queues for service in peer.services)):
                peer.empty_handed = False

    def leave(self) -> None:
        """Take nothing more, and send everybody away who has nothing to do."""
        self._closing = True
        for peer in self.peers:
            peer.leaving = True
            if peer.doing is None and not peer.asking:
                self.peers.remove(peer)
                self._send(peer.identity, frames.disconnect())
                if peer.born:
                    self._order.retired.append(peer.worker_id)

    @property
    def busy_with_ledger(self) -> bool:
        return self._under_way is not None or not self._order.empty

    # What goes out --------------------------------------------------------------------------------

    def take_sends(self) -> list[Send]:
        sends, self._sends = self._sends, []
        return sends

    def take_order(self) -> Order | None:
        """Give what is to be written now, if nothing else is on its way."""
        if self._under_way is not None:
            return None
        for peer in self.peers:
            if peer.free:
                peer.asking = True
                self._hand(peer.worker_id).wants = True
        if self._order.empty:
            return None
        order, self._order = self._order, Order()
        self._under_way = order
        return order

    def next_tick_s(self, now_s: float) -> float:
        """When to tick next at the latest."""
        moments = [
            self._pulsed_s + self._interval_s,
            self.requests.next_due_s(),
            self.notices.next_due_s(),
        ]
        return min(moment for moment in moments if moment is not None)

    # Clients --------------------------------------------------------------------------------------

    def _on_request(self, client: bytes, request: frames.Request, now_s: float) -> None:
        if request.service.startswith(frames.MMI):
            self._on_mmi(client, request, now_s)
            return
        listening = self.listeners.is_on(client)
        if request.correlation is not None and not listening:
            self.dropped["a correlation frame of a client that did not ask for it"] += 1
            return
        if self._closing:
            return
        calls = read_calls(request, self.tasks, self._settings.retry_attempts, "mdp")
        if len(self.requests) >= MAX_WAITING:
            self.dropped["a request when too many waited"] += 1
            return
        if self.requests.open_of(client) + len(calls) > self._settings.max_requests_per_client:
            self.dropped["a request of a client with too many open"] += 1
            return
        self.requests.begin(client, len(calls))
        service = request.service.decode("ascii")
        self._asked += 1
        asked_id = f"{self._run_id}-{self._asked}"
        asked = Asked(client, request.correlation, service, asked_id, [None] * len(calls), listening)
        for place, call in enumerate(calls):
            letter = None
            if listening:
                letter = Letter(
                    client=client,
                    service=service,
                    request_id=asked.id,
                    place=place,
                    places=len(calls),
                    correlation=request.correlation,
                    own_id=call.own_id,
                    notify=True,
                )
            self._order.posts.append(Posted(call, asked, place, letter))
            # Whoever has a free hand looks in the same commit that takes it in.
            self.peers.wake_one(service)

    def _on_mmi(self, client: bytes, request: frames.Request, now_s: float) -> None:
        name = request.service.decode("ascii")
        if name not in KNOWN:
            self._answer(client, request, [frames.NOT_IMPLEMENTED])
        elif request.service == frames.MMI_NOTIFY:
            answer = self.listeners.ask(client, request.body, now_s)
            if answer[0] == frames.OK:
                self._order.returned.append(client)
            self._answer(client, request, answer)
        elif name == "mmi.service" and self.peers.serves(request.body[0].decode("latin-1")):
            self._answer(client, request, [frames.OK])
        else:
            self._order.questions.append(Question(client, request.correlation, name, request.body))

    def _answer(self, client: bytes, request: frames.Request, body: list[bytes]) -> None:
        self._send(client, frames.broker_reply(request.service, body, request.correlation))

    def _finish(self, job_id: int, body: list[bytes]) -> None:
        """A job has ended: answer everybody who waits for it."""
        for waiting in self.requests.take(job_id):
            self._fill(waiting, body)

    def _fill(self, waiting: Waiting, body: list[bytes]) -> None:
        asked = waiting.asked
        asked.answers[waiting.place] = body
        self.notices.forget_job(asked.client, waiting.job_id)
        asked.jobs.append(waiting.job_id)
        if asked.complete:
            self._send(
                asked.client, frames.broker_reply(asked.service.encode("ascii"), asked.body(), asked.correlation)
            )
            if asked.notify:
                # All of a request together: after a restart its reply needs every part of it.
                self._order.answered += asked.jobs

    # Workers --------------------------------------------------------------------------------------

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
                peer.doing = Doing(resumed.job, peer.holding, resumed.job.task)
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

    def _bury(self, peer: Peer, evidence: str, detector: Detector = Detector.CONNECTION) -> None:
        self.peers.remove(peer)
        doing = None if peer.doing is None else peer.doing.job.job_id
        self._part(peer, Death(peer.worker_id, detector, evidence, doing))

    def _part(self, peer: Peer, death: Death | None) -> None:
        if peer.asking:
            self._parted[peer.worker_id] = death
        elif death is None:
            self._order.retired.append(peer.worker_id)
        else:
            self._order.deaths.append(death)

    def _give(self, peer: Peer, job: Claimed, now_s: float) -> None:
        service = job.task
        doing = Doing(job, address_of(job, peer.worker_id, service), service)
        peer.doing = doing
        peer.seen_s = now_s
        self._held_here(job)
        self._tell(peer, frames.broker_request(doing.address, results.request_of(job)), now_s)

    def _held_here(self, job: Claimed) -> None:
        for waiting in self.requests.of(job.job_id):
            waiting.held_here = True
            waiting.attempt = job.attempt

    # What the ledger answers ----------------------------------------------------------------------

    def on_answer(self, answer: Answer, now_s: float) -> None:
        order, self._under_way = self._under_way, None
        assert order is not None
        if answer.tasks is not None:
            self.tasks = answer.tasks
        for birth in order.births:
            self._born(birth, answer.resumed.get(birth.worker_id), now_s)
        for posted, stored in zip(order.posts, answer.stored, strict=True):
            if stored is None:
                self.dropped["a request that cannot be stored"] += 1
                self.requests.drop(posted.asked.client, 1)
                continue
            own_id = posted.call.own_id or str(stored.job_id)
            waiting = Waiting(stored.job_id, posted.asked, posted.place, own_id, now_s)
            # Of what our own workers will do we hear by ourselves.
            if self.peers.serves(posted.call.job.task):
                waiting.step_s = SLOWEST_LOOK_S
            self.requests.add(waiting)
            if stored.unserved and not self.peers.serves(posted.call.job.task):
                self._notify_nobody(waiting, now_s, expired=False)
        self._hands_answered(order, answer, now_s)
        for worker_id, beat in answer.beats.items():
            peer = self.peers.by_id(worker_id)
            if peer is not None:
                if beat.state not in LIVING:
                    self._lose(peer)
                peer.leaving = peer.draining or beat.request is not None or beat.disabled
        for death, record in answer.buried:
            if death.job_id is not None:
                self._died(death, record, now_s)
        for outcome in answer.outcomes:
            self._ended(outcome, now_s)
        for glance in answer.glances:
            self._seen(glance, now_s)
        for job_id in answer.expired:
            self._expired(job_id, now_s)
        # Answered since they were read, by what came before in this answer: not once more.
        answered = set(self._order.answered)
        for client, letters in answer.letters.items():
            left = [
                one for one in letters if one.job_id not in answered and not self.requests.knows(client, one.job_id)
            ]
            for waiting in restored(left, now_s):
                self.requests.begin(client, 1)
                self.requests.add(waiting)
        for question, body in answer.replies:
            self._send(question.client, frames.broker_reply(question.name.encode("ascii"), body, question.correlation))
        self._send_notices(now_s)

    def _hands_answered(self, order: Order, answer: Answer, now_s: float) -> None:
        for worker_id, hand in order.hands.items():
            peer = self.peers.by_id(worker_id)
            for done in hand.done:
                if worker_id not in answer.gone and (done.job_id, done.token) not in answer.superseded:
                    # Who asked over another door reads it from the ledger.
                    self._finish(done.job_id, results.body_of(done.result))
                else:
                    self.dropped["a reply that came too late"] += 1
            if peer is None:
                if hand.wants and worker_id in self._parted:
                    self._parted_answered(worker_id, answer.claimed.get(worker_id))
                elif hand.done and worker_id not in answer.gone:
                    # Of an earlier broker, or of an earlier connection: who it is now says READY anew.
                    self._order.left_over.append(worker_id)
                continue
            if worker_id in answer.gone:
                self._lose(peer)
                continue
            if hand.wants:
                peer.asking = False
                job = answer.claimed.get(worker_id)
                if job is None:
                    peer.empty_handed = True
                elif self._closing:
                    self._hand(worker_id).release.append(Release(job.job_id, job.token))
                else:
                    self._give(peer, job, now_s)

    def _parted_answered(self, worker_id: str, job: Claimed | None) -> None:
        """What was found for somebody who left meanwhile never reached it: that was no crash of the job."""
        death = self._parted.pop(worker_id)
        if job is not None:
            self._hand(worker_id).release.append(Release(job.job_id, job.token))
        if death is None:
            self._order.retired.append(worker_id)
        else:
            self._order.deaths.append(death)

    def _lose(self, peer: Peer) -> None:
        """The ledger took it for dead: whatever it holds is somebody else's, and it must come anew."""
        self.peers.remove(peer)
        self._send(peer.identity, frames.disconnect())

    def _died(self, death: Death, record: JobRecord | None, now_s: float) -> None:
        assert death.job_id is not None
        final = record is None or record.state in FINAL
        if self._settings.notify_worker_crash:
            for waiting in self.requests.of(death.job_id):
                self._notify_crash(waiting, death.evidence, now_s, final=final)
        self.requests.look_soon(death.job_id, now_s)

    def _ended(self, outcome: Outcome, now_s: float) -> None:
        """A job ended elsewhere: by a Python worker, a reaper, an operator."""
        if outcome.state is JobState.SUCCEEDED:
            self._finish(outcome.job_id, results.body_of(outcome.result or b""))
            return
        crashed = results.is_crash(outcome)
        for waiting in self.requests.of(outcome.job_id):
            if crashed and self._settings.notify_worker_crash:
                self._notify_crash(waiting, results.cause(outcome), now_s, final=True)
        # Said before it is forgotten: behind its end nothing is said of a job.
        self._send_notices(now_s)
        for waiting in self.requests.take(outcome.job_id):
            several = len(waiting.asked.answers) > 1
            if several or results.is_user_error(outcome) or (waiting.asked.notify and not crashed):
                self._fill(waiting, [write_map(results.error_map(outcome, waiting.own_id))])
            elif waiting.asked.notify:
                self._order.answered.append(outcome.job_id)
            # Else nobody answers: old clients time out, as they always did.

    def _expired(self, job_id: int, now_s: float) -> None:
        for waiting in self.requests.of(job_id):
            self._notify_nobody(waiting, now_s, expired=True)
        self._send_notices(now_s)
        self.requests.look_soon(job_id, now_s)

    def _seen(self, glance: Glance, now_s: float) -> None:
        """A job that others work on: a try that is over and was not the last one died, or failed."""
        for waiting in self.requests.of(glance.job_id):
            waiting.attempt = max(waiting.attempt, glance.attempt)
            waiting.held_elsewhere = glance.worker_id is not None

    # Telling --------------------------------------------------------------------------------------

    def _notify_crash(self, waiting: Waiting, cause: str | None, now_s: float, *, final: bool) -> None:
        told = notices.crashed(
            waiting.asked.service,
            waiting.own_id,
            waiting.job_id,
            waiting.attempt or 1,
            cause,
            final=final,
            at=self._wall(),
        )
        self._notify(waiting, frames.WORKER_DIED, told, now_s, final=final)

    def _notify_nobody(self, waiting: Waiting, now_s: float, *, expired: bool) -> None:
        if self._settings.notify_no_workers:
            told = notices.nobody(
                waiting.asked.service, waiting.own_id, waiting.job_id, expired=expired, at=self._wall()
            )
            self._notify(waiting, frames.NO_WORKERS, told, now_s, final=expired)

    def _notify(
        self, waiting: Waiting, command: bytes, told: dict[str, Any], now_s: float, *, final: bool = False
    ) -> None:
        asked = waiting.asked
        key = (waiting.attempt if not final else -1, command)
        if asked.notify and self.listeners.wants(asked.client, command) and key not in waiting.told:
            waiting.told.add(key)
            self.notices.add(asked.client, Notice(command, waiting.job_id, asked.correlation, told), now_s)

    def _send_notices(self, now_s: float) -> None:
        for client, message in self.notices.due(now_s):
            self._send(client, message)

    # ----------------------------------------------------------------------------------------------

    def _pulse(self, peer: Peer) -> ForeignPulse:
        settled, peer.settled = peer.settled, 0
        return ForeignPulse(peer.worker_id, running=int(peer.doing is not None), settled=settled)

    def _queue(self, service: str) -> str:
        known = self.tasks.get(service)
        return service if known is None else known.queue

    def _hand(self, worker_id: str) -> Hand:
        return self._order.hands.setdefault(worker_id, Hand())

    def _tell(self, peer: Peer, message: list[bytes], now_s: float) -> None:
        peer.told_s = now_s
        self._send(peer.identity, message)

    def _send(self, to: bytes, message: list[bytes]) -> None:
        self._sends.append(Send(to, message))


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
