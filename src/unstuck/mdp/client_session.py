"""What a client says to a broker and makes of its answers: pure, so that it needs neither socket nor clock.

First it asks `mmi.notify`. A broker of ours says 200: from then on each request carries a correlation frame, many may
be on their way, and news of them comes by itself. Any other answer, or none, means plain 0.1: one request at a time.
"""

import heapq
import itertools
from collections import deque
from enum import Enum, auto
from typing import Any

import cbor2

from unstuck.errors import CallFailed
from unstuck.mdp import protocol
from unstuck.mdp.pending_call import PendingCall
from unstuck.mdp.protocol import ClientReply, Notification, hear_as_client, map_of

VERSION = 1
TTL_S = 60
EVENTS = ("WORKER_CRASHED", "NO_WORKERS")
PATIENCE_S = 1.0
"""So long the first requests wait for the answer to `mmi.notify`."""
MAX_CALLS = 10_000


class Mode(Enum):
    ASKING = auto()
    EXTENDED = auto()
    PLAIN = auto()


class ClientSession:
    """`out` is to be sent in order; with `must_reopen` on a new line, from a new identity."""

    def __init__(self, events: tuple[str, ...] = EVENTS, patience_s: float = PATIENCE_S) -> None:
        self.out: list[list[bytes]] = []
        self.must_reopen = False
        self.status = False
        self.mode = Mode.ASKING
        self._events = events
        self._patience_s = patience_s
        self._waiting: deque[PendingCall] = deque()
        self._correlated: dict[bytes, PendingCall] = {}
        self._plain: PendingCall | None = None
        self._was_lost = False
        self._deadlines: list[tuple[float, int, PendingCall]] = []
        self._order = itertools.count()
        self._ask_at_s = 0.0
        self._decide_at_s = 0.0

    # What happens to it -----------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """Find out who is at the other end."""
        self.mode = Mode.ASKING
        self._decide_at_s = now_s + self._patience_s
        self._ask(now_s)

    def lose(self) -> None:
        """The connection is gone. Another broker may stand there when it is back, so nothing is said until we know."""
        self.mode = Mode.ASKING
        self._decide_at_s = float("inf")
        self._was_lost = True

    def come(self, now_s: float) -> None:
        """The connection is there."""
        if self._was_lost:
            self.begin(now_s)

    def take(self, call: PendingCall, now_s: float) -> None:
        """Somebody wants to call."""
        if len(self._waiting) + len(self._correlated) >= MAX_CALLS:
            text = f"{MAX_CALLS} calls of this client wait for their replies: wait for some of them first."
            call.fail(CallFailed(text, service=call.service, error="TOO_MANY_CALLS", job_id=call.job_id))
            return
        self._waiting.append(call)
        if self.mode is not Mode.PLAIN or not self.status:
            self._run_clock(call, now_s)
        self._move(now_s)

    def hear(self, heard: list[bytes], now_s: float) -> list[dict[str, Any]]:
        """The broker says something. Gives what is to be told to the owner of this client."""
        match hear_as_client(heard):
            case Notification() as notice:
                self._answered()
                return self._read_notice(notice)
            case ClientReply(correlation=bytes() as correlation, body=body):
                self._answered()
                call = self._correlated.pop(correlation, None)
                if call is not None:
                    call.answer(list(body))
            case ClientReply(service=protocol.MMI_NOTIFY, body=body):
                self._answered()
                self._settle_mode(body, now_s)
            case ClientReply(service=service, body=body):
                self._answered()
                call = self._plain
                if call is not None and call.service.encode() == service:
                    self._plain = None
                    call.answer(list(body))
            case None:
                pass
        self._move(now_s)
        return []

    def tick(self, now_s: float) -> None:
        """Time passed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            due_s, _, call = heapq.heappop(self._deadlines)
            if call.expires_at_s == due_s and not call.done():
                self._expire(call, now_s)
        if self.mode is Mode.ASKING and now_s >= self._decide_at_s:
            self.mode = Mode.PLAIN
        if now_s >= self._ask_at_s:
            self._ask(now_s)
        self._move(now_s)

    def end(self, error: Exception) -> None:
        """Nothing will be answered any more."""
        for call in (*self._waiting, *self._correlated.values(), *([self._plain] if self._plain else [])):
            call.fail(error)
        self._waiting.clear()
        self._correlated.clear()
        self._plain = None

    @property
    def due_s(self) -> float:
        """When `tick` has something to do."""
        while self._deadlines and self._deadlines[0][2].done():
            heapq.heappop(self._deadlines)
        first_s = self._deadlines[0][0] if self._deadlines else float("inf")
        decide_s = self._decide_at_s if self.mode is Mode.ASKING else float("inf")
        return min(first_s, decide_s, self._ask_at_s)

    # What it does then ------------------------------------------------------------------------

    def _ask(self, now_s: float) -> None:
        self._ask_at_s = now_s + TTL_S / 3
        wish = {"v": VERSION, "events": list(self._events), "ttl": TTL_S}
        self.out.append(protocol.client_request(protocol.MMI_NOTIFY, [cbor2.dumps(wish)]))

    def _settle_mode(self, body: tuple[bytes, ...], now_s: float) -> None:
        granted = map_of(body[1]) if len(body) > 1 and body[0] == protocol.OK else None
        if granted is None:
            self.mode = Mode.PLAIN
            self._stop_waiting_clocks()
            return
        lease = granted.get("lease")
        lease_s = float(lease) if isinstance(lease, int | float) and 0 < lease <= TTL_S else TTL_S
        self._ask_at_s = now_s + lease_s / 3
        self.mode = Mode.EXTENDED
        if self._was_lost:
            self._repeat()
        self._was_lost = False

    def _repeat(self) -> None:
        # What was on its way when the connection broke may never have arrived. With a key it runs once, however often
        # it is sent, and a question to the broker itself runs nothing.
        for call in self._correlated.values():
            if call.idempotency_key is not None or call.service.startswith("mmi."):
                self._say(call)

    def _move(self, now_s: float) -> None:
        """Send what may be sent."""
        while self._waiting and (self.mode is Mode.EXTENDED or (self.mode is Mode.PLAIN and self._plain is None)):
            call = self._waiting.popleft()
            if call.done():
                continue
            if call.expires_at_s is None:
                self._run_clock(call, now_s)
            if self.mode is Mode.EXTENDED:
                self._correlated[call.correlation] = call
            else:
                self._plain = call
            self._say(call)

    def _say(self, call: PendingCall) -> None:
        correlation = None if call is self._plain else call.correlation
        self.out.append(protocol.client_request(call.service.encode(), call.body, correlation))

    def _read_notice(self, notice: Notification) -> list[dict[str, Any]]:
        told = [one for one in map(map_of, notice.maps) if one is not None]
        meant = None if notice.correlation is None else self._correlated.get(notice.correlation)
        # Several of one moment come without a frame of their own, and name their calls.
        named = self._by_name() if notice.correlation is None else {}
        for one in told:
            call = meant or _looked_up(one.get("id"), named) or _looked_up(one.get("job_id"), named)
            if call is not None:
                call.learn(one)
                if call.done():
                    self._correlated.pop(call.correlation, None)
        return told

    def _by_name(self) -> dict[bytes | str, PendingCall]:
        calls = self._correlated.values()
        return {call.id: call for call in calls} | {call.job_id: call for call in calls if call.job_id is not None}

    # Clocks -----------------------------------------------------------------------------------

    def _run_clock(self, call: PendingCall, now_s: float) -> None:
        call.expires_at_s = now_s + call.timeout_s
        if len(self._deadlines) > 2 * MAX_CALLS:
            # Mostly of calls that were answered long before their time.
            self._deadlines = [deadline for deadline in self._deadlines if not deadline[2].done()]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (call.expires_at_s, next(self._order), call))

    def _stop_waiting_clocks(self) -> None:
        # A plain broker answers one after the other: as long as it does, each has its time from when it is its turn.
        for call in self._waiting:
            call.expires_at_s = None

    def _answered(self) -> None:
        if self.mode is Mode.PLAIN and not self.status:
            self._stop_waiting_clocks()
        self.status = True

    def _expire(self, call: PendingCall, now_s: float) -> None:
        self.status = False
        call.expire()
        self._correlated.pop(call.correlation, None)
        for waiting in self._waiting:
            if waiting.expires_at_s is None:
                self._run_clock(waiting, now_s)
        if call is self._plain:
            self._plain = None
            if self.mode is not Mode.EXTENDED:
                # Its reply may still come, and nothing would tell it from the next one's.
                self.must_reopen = True
                # Nothing more is said on this line.
                self.mode = Mode.ASKING
                self._decide_at_s = float("inf")


def _looked_up(name: object, named: dict[bytes | str, PendingCall]) -> PendingCall | None:
    return named.get(name) if isinstance(name, bytes | str) else None
