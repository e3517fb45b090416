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
    # The command has one name and its `error` field another. A client may use either.
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
    """Clients that subscribed to notifications. All others are sent nothing but replies."""

    def __init__(self) -> None:
        self._leases: dict[bytes, _Lease] = {}
        self._disconnected: dict[bytes, None] = {}
        """Subscribers whose connections ended, in that order."""

    def is_subscribed(self, client: bytes) -> bool:
        return client in self._leases

    def wants(self, client: bytes, command: bytes) -> bool:
        lease = self._leases.get(client)
        return lease is not None and command in lease.events

    def subscribe(self, client: bytes, body: tuple[bytes, ...], now_s: float) -> list[bytes]:
        """Accept or refuse a subscription, and return the body of the reply."""
        subscription = read_note(body[0]) if len(body) == 1 else None
        if subscription is None or subscription.get("v") != VERSION:
            return [protocol.NOT_IMPLEMENTED]
        # A routing id that a socket made up may belong to another client later.
        if protocol.is_automatic(client) or len(client) < protocol.LEAST_IDENTITY_BYTES:
            return [protocol.REFUSED, write_map({"why": "set a random routing id of at least 16 bytes"})]
        if client not in self._leases and len(self._leases) >= MAX_SUBSCRIPTIONS and not self._disconnected:
            return [protocol.REFUSED, write_map({"why": "too many clients listen"})]
        events = subscription.get("events", list(EVENTS))
        ttl_s = subscription.get("ttl", USUAL_LEASE_S)
        if not isinstance(events, list) or isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
            return [protocol.NOT_IMPLEMENTED]
        if ttl_s != ttl_s:
            return [protocol.NOT_IMPLEMENTED]
        if any(not isinstance(name, str) or name not in EVENTS for name in events):
            # A client that subscribed to an unknown event would wait forever.
            return [protocol.NOT_IMPLEMENTED, write_map({"why": f"events are {', '.join(EVENTS)}"})]
        # Bounded before it becomes a float, since a CBOR number may be larger than any float.
        lease_s = float(min(max(ttl_s, 1.0), LONGEST_LEASE_S))
        wanted = frozenset(EVENTS[name] for name in events)
        self._disconnected.pop(client, None)
        if client not in self._leases and len(self._leases) >= MAX_SUBSCRIPTIONS:
            # A disconnected client makes room. If it comes back, it subscribes again.
            self._end(next(iter(self._disconnected)))
        self._leases[client] = _Lease(now_s + lease_s, wanted)
        return [protocol.OK, write_map({"lease": lease_s, "v": VERSION})]

    def reconnected(self, client: bytes) -> None:
        self._disconnected.pop(client, None)

    def disconnected(self, client: bytes) -> None:
        """Note that the connection of a client ended. Its lease stays until the room is needed."""
        if client in self._leases:
            self._disconnected[client] = None

    def expire(self, now_s: float) -> list[bytes]:
        over = [client for client, lease in self._leases.items() if lease.until_s < now_s]
        for client in over:
            self._end(client)
        return over

    def _end(self, client: bytes) -> None:
        del self._leases[client]
        self._disconnected.pop(client, None)


CRASHED = "Worker processing your job has crashed. Job will be retried."
CRASHED_FOR_GOOD = "Worker processing your job has crashed. Job will not be retried."
NO_WORKERS = "No workers are currently available to process this job."
EXPIRED = "No worker took this job in time. It was cancelled."

MAX_MAPS = 50
"""Maximum number of maps in one message."""
BURST = 20
PER_SECOND = 10.0
"""Messages to one client: the number sent at once, and per second after that. Each has all that came meanwhile."""
MAX_KEPT = 1_000
"""Maximum number of notifications that wait for one client. The oldest ones beyond it are dropped and counted."""


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
    return _fields("WORKER_CRASHED", service, message, own_id, job_id, at, attempt=attempt, final=final, cause=cause)


def no_workers(service: str, own_id: str, job_id: int, *, expired: bool, at: float) -> dict[str, Any]:
    return _fields("NO_WORKERS", service, EXPIRED if expired else NO_WORKERS, own_id, job_id, at, final=expired)


def _fields(error: str, service: str, message: str, own_id: str, job_id: int, at: float, **more: Any) -> dict[str, Any]:
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
    """Notifications that wait for no others."""
    tokens: float = BURST
    filled_s: float = 0.0
    due_s: float = 0.0
    suppressed: int = 0


class Notifications:
    """Notifications that wait to be sent, in one queue per client."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._queues: dict[bytes, _ClientQueue] = {}

    def add(self, client: bytes, notification: PendingNotification, now_s: float, *, at_once: bool = False) -> None:
        """Queue a notification. `at_once`: it waits for no others, and earlier ones of the same job leave with it."""
        queue = self._queues.setdefault(client, _ClientQueue(filled_s=now_s))
        if len(queue.waiting) + len(queue.urgent) >= MAX_KEPT:
            (queue.waiting or queue.urgent).popleft()
            queue.suppressed += 1
        if at_once:
            queue.urgent.extend(one for one in queue.waiting if one.job_id == notification.job_id)
            queue.waiting = deque(one for one in queue.waiting if one.job_id != notification.job_id)
            queue.urgent.append(notification)
            return
        if not queue.waiting:
            queue.due_s = now_s + self._delay_s
        queue.waiting.append(notification)

    def forget_job(self, client: bytes, job_id: int) -> None:
        """Drop the notifications of a job, since its reply follows."""
        queue = self._queues.get(client)
        if queue is not None and (queue.waiting or queue.urgent):
            queue.waiting = deque(notification for notification in queue.waiting if notification.job_id != job_id)
            queue.urgent = deque(notification for notification in queue.urgent if notification.job_id != job_id)

    def forget(self, client: bytes) -> None:
        self._queues.pop(client, None)

    def due(self, now_s: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the messages that may leave now: the client, and the frames."""
        for client, queue in self._queues.items():
            queue.tokens = min(BURST, queue.tokens + (now_s - queue.filled_s) * PER_SECOND)
            queue.filled_s = now_s
            if queue.waiting and queue.due_s <= now_s:
                queue.urgent += queue.waiting
                queue.waiting.clear()
            while queue.urgent and queue.tokens >= 1:
                queue.tokens -= 1
                yield client, self._message(queue)

    def next_due_s(self) -> float | None:
        """Return when the next message may leave."""
        moments = [
            max(0.0 if queue.urgent else queue.due_s, queue.filled_s + max(0.0, 1 - queue.tokens) / PER_SECOND)
            for queue in self._queues.values()
            if queue.waiting or queue.urgent
        ]
        return min(moments, default=None)

    def _message(self, queue: _ClientQueue) -> list[bytes]:
        first = queue.urgent.popleft()
        batch = [first]
        # Notifications of one kind and one request share a message. Others come with the next.
        kept: deque[PendingNotification] = deque()
        while queue.urgent and len(batch) < MAX_MAPS:
            notification = queue.urgent.popleft()
            if notification.command == first.command and notification.correlation == first.correlation:
                batch.append(notification)
            elif notification.command == first.command and queue.tokens < BURST / 2:
                # In a flood a client gets few messages with many maps. Each map names its job.
                batch.append(notification)
            else:
                kept.append(notification)
        queue.urgent = kept + queue.urgent
        alone = all(notification.correlation == first.correlation for notification in batch)
        maps = [notification.map if alone else _with_request_id(notification) for notification in batch]
        if queue.suppressed:
            maps[-1] = {**maps[-1], "suppressed": queue.suppressed}
            queue.suppressed = 0
        correlation = first.correlation if alone else None
        return protocol.broker_notification(first.command, [write_map(one) for one in maps], correlation)


def _with_request_id(notification: PendingNotification) -> dict[str, Any]:
    """Return the map with the id of its request, for a message about several requests."""
    fields = read_note(notification.correlation) if notification.correlation else None
    return notification.map if fields is None or "id" not in fields else {**notification.map, "id": fields["id"]}
