"""Crash notifications: who subscribed (`mmi.notify`), what they are sent, and how often."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from unstuck.domain.frames import read_note, write_map
from unstuck.mdp import protocol

KNOWN = ("mmi.service", "mmi.status", "mmi.list", "mmi.workers", "mmi.health", "mmi.notify")
EVENTS = {
    "WORKER_DIED": protocol.WORKER_DIED,
    # The command has one name and what it says (`error`) another: a client may know either.
    "WORKER_CRASHED": protocol.WORKER_DIED,
    "NO_WORKERS": protocol.NO_WORKERS,
}
VERSION = 1
USUAL_LEASE_S = 60.0
LONGEST_LEASE_S = 3600.0
MAX_SUBSCRIPTIONS = 10_000


@dataclass
class _Lease:
    until_s: float
    events: frozenset[bytes]


class Subscriptions:
    """Clients that asked for notices. Nobody else is ever sent anything but replies."""

    def __init__(self) -> None:
        self._leases: dict[bytes, _Lease] = {}
        self._gone: dict[bytes, None] = {}
        """Those of them whose connections ended, in the order of their ends."""

    def is_on(self, client: bytes) -> bool:
        return client in self._leases

    def wants(self, client: bytes, command: bytes) -> bool:
        lease = self._leases.get(client)
        return lease is not None and command in lease.events

    def ask(self, client: bytes, body: tuple[bytes, ...], now_s: float) -> list[bytes]:
        """Take a wish for notices, or refuse it; give the answer."""
        subscription = read_note(body[0]) if len(body) == 1 else None
        if subscription is None or subscription.get("v") != VERSION:
            return [protocol.NOT_IMPLEMENTED]
        # An identity that a socket made up is somebody else's tomorrow.
        if protocol.is_automatic(client) or len(client) < protocol.LEAST_IDENTITY_BYTES:
            return [protocol.REFUSED, write_map({"why": "set a random routing id of at least 16 bytes"})]
        if client not in self._leases and len(self._leases) >= MAX_SUBSCRIPTIONS and not self._gone:
            return [protocol.REFUSED, write_map({"why": "too many clients listen"})]
        events = subscription.get("events", list(EVENTS))
        ttl_s = subscription.get("ttl", USUAL_LEASE_S)
        if not isinstance(events, list) or isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
            return [protocol.NOT_IMPLEMENTED]
        if ttl_s != ttl_s:
            return [protocol.NOT_IMPLEMENTED]
        if any(not isinstance(name, str) or name not in EVENTS for name in events):
            # Who waits for something that is never told would wait in silence.
            return [protocol.NOT_IMPLEMENTED, write_map({"why": f"events are {', '.join(EVENTS)}"})]
        # Bounded before it is made a float: a number of CBOR may be longer than any float.
        lease_s = float(min(max(ttl_s, 1.0), LONGEST_LEASE_S))
        wanted = frozenset(EVENTS[name] for name in events)
        self._gone.pop(client, None)
        if client not in self._leases and len(self._leases) >= MAX_SUBSCRIPTIONS:
            # Whoever is gone makes room: a client that comes back asks again.
            self._end(next(iter(self._gone)))
        self._leases[client] = _Lease(now_s + lease_s, wanted)
        return [protocol.OK, write_map({"lease": lease_s, "v": VERSION})]

    def come_back(self, client: bytes) -> None:
        self._gone.pop(client, None)

    def leave(self, client: bytes) -> None:
        """Note that its connection ended. Its lease goes on, unless there is no room for others."""
        if client in self._leases:
            self._gone[client] = None

    def expire(self, now_s: float) -> list[bytes]:
        over = [client for client, lease in self._leases.items() if lease.until_s < now_s]
        for client in over:
            self._end(client)
        return over

    def _end(self, client: bytes) -> None:
        del self._leases[client]
        self._gone.pop(client, None)


CRASHED = "Worker processing your job has crashed. Job will be retried."
CRASHED_FOR_GOOD = "Worker processing your job has crashed. Job will not be retried."
NOBODY = "No workers are currently available to process this job."
EXPIRED = "No worker took this job in time. It was cancelled."

MAX_MAPS = 50
"""In one message."""
BURST = 20
PER_SECOND = 10.0
"""Messages to one client: the first few at once, then as many in a second, each with all that came meanwhile."""
MAX_KEPT = 1_000
"""Of what one client waits for; the rest is counted."""


@dataclass(frozen=True)
class PendingNotification:
    command: bytes
    job_id: int
    correlation: bytes | None
    map: dict[str, Any]


def crashed(
    service: str, own_id: str, job_id: int, attempt: int, cause: str | None, *, final: bool, at: float
) -> dict[str, Any]:
    message = CRASHED_FOR_GOOD if final else CRASHED
    return _map("WORKER_CRASHED", service, message, own_id, job_id, at, attempt=attempt, final=final, cause=cause)


def nobody(service: str, own_id: str, job_id: int, *, expired: bool, at: float) -> dict[str, Any]:
    return _map("NO_WORKERS", service, EXPIRED if expired else NOBODY, own_id, job_id, at, final=expired)


def _map(error: str, service: str, message: str, own_id: str, job_id: int, at: float, **more: Any) -> dict[str, Any]:
    told = {name: value for name, value in more.items() if value is not None and value is not False}
    return {
        "error": error,
        "service": service,
        "message": message,
        "timestamp": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        "job_id": own_id,
        "ledger_id": job_id,
        **told,
    }


@dataclass
class _ClientQueue:
    waiting: deque[PendingNotification] = field(default_factory=deque)
    urgent: deque[PendingNotification] = field(default_factory=deque)
    """What does not wait for company."""
    tokens: float = BURST
    filled_s: float = 0.0
    due_s: float = 0.0
    suppressed: int = 0


class Notifications:
    """One box per client."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._boxes: dict[bytes, _ClientQueue] = {}

    def add(self, client: bytes, notice: PendingNotification, now_s: float, *, at_once: bool = False) -> None:
        """Keep a notice until it may leave. `at_once`: it waits for no others, and what was said of the same job before
        leaves with it."""
        box = self._boxes.setdefault(client, _ClientQueue(filled_s=now_s))
        if len(box.waiting) + len(box.urgent) >= MAX_KEPT:
            (box.waiting or box.urgent).popleft()
            box.suppressed += 1
        if at_once:
            box.urgent.extend(one for one in box.waiting if one.job_id == notice.job_id)
            box.waiting = deque(one for one in box.waiting if one.job_id != notice.job_id)
            box.urgent.append(notice)
            return
        if not box.waiting:
            box.due_s = now_s + self._delay_s
        box.waiting.append(notice)

    def forget_job(self, client: bytes, job_id: int) -> None:
        """It is answered: nothing more is said of it."""
        box = self._boxes.get(client)
        if box is not None and (box.waiting or box.urgent):
            box.waiting = deque(notice for notice in box.waiting if notice.job_id != job_id)
            box.urgent = deque(notice for notice in box.urgent if notice.job_id != job_id)

    def forget(self, client: bytes) -> None:
        self._boxes.pop(client, None)

    def due(self, now_s: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Give the messages that may leave now: to whom, and their frames."""
        for client, box in self._boxes.items():
            box.tokens = min(BURST, box.tokens + (now_s - box.filled_s) * PER_SECOND)
            box.filled_s = now_s
            if box.waiting and box.due_s <= now_s:
                box.urgent += box.waiting
                box.waiting.clear()
            while box.urgent and box.tokens >= 1:
                box.tokens -= 1
                yield client, self._message(box)

    def next_due_s(self) -> float | None:
        """When to look again."""
        moments = [
            max(0.0 if box.urgent else box.due_s, box.filled_s + max(0.0, 1 - box.tokens) / PER_SECOND)
            for box in self._boxes.values()
            if box.waiting or box.urgent
        ]
        return min(moments, default=None)

    def _message(self, box: _ClientQueue) -> list[bytes]:
        first = box.urgent.popleft()
        batch = [first]
        # Those of one kind and one request share a message; others come with the next.
        kept: deque[PendingNotification] = deque()
        while box.urgent and len(batch) < MAX_MAPS:
            notice = box.urgent.popleft()
            if notice.command == first.command and notice.correlation == first.correlation:
                batch.append(notice)
            elif notice.command == first.command and box.tokens < BURST / 2:
                # In a flood a client gets few messages with many maps, each of which names its job.
                batch.append(notice)
            else:
                kept.append(notice)
        box.urgent = kept + box.urgent
        alone = all(notice.correlation == first.correlation for notice in batch)
        maps = [notice.map if alone else _named(notice) for notice in batch]
        if box.suppressed:
            maps[-1] = {**maps[-1], "suppressed": box.suppressed}
            box.suppressed = 0
        correlation = first.correlation if alone else None
        return protocol.broker_notification(first.command, [write_map(one) for one in maps], correlation)


def _named(notice: PendingNotification) -> dict[str, Any]:
    """Say in the map itself which request it is about, where the message has many."""
    said = read_note(notice.correlation) if notice.correlation else None
    return notice.map if said is None or "id" not in said else {**notice.map, "id": said["id"]}
