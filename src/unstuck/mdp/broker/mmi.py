"""What the broker answers about itself (8/MMI and our own), and who asked to be told of deaths."""

from dataclasses import dataclass

from unstuck.domain.envelope import read_note, write_map
from unstuck.mdp import frames

KNOWN = ("mmi.service", "mmi.status", "mmi.list", "mmi.workers", "mmi.health", "mmi.notify")
EVENTS = {
    "WORKER_DIED": frames.WORKER_DIED,
    # The command has one name and what it says (`error`) another: a client may know either.
    "WORKER_CRASHED": frames.WORKER_DIED,
    "NO_WORKERS": frames.NO_WORKERS,
}
VERSION = 1
USUAL_LEASE_S = 60.0
LONGEST_LEASE_S = 3600.0
MAX_LISTENERS = 10_000


@dataclass
class _Lease:
    until_s: float
    events: frozenset[bytes]


class Listeners:
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
        wish = read_note(body[0]) if len(body) == 1 else None
        if wish is None or wish.get("v") != VERSION:
            return [frames.NOT_IMPLEMENTED]
        # An identity that a socket made up is somebody else's tomorrow.
        if frames.is_automatic(client) or len(client) < frames.LEAST_IDENTITY_BYTES:
            return [frames.REFUSED, write_map({"why": "set a random routing id of at least 16 bytes"})]
        if client not in self._leases and len(self._leases) >= MAX_LISTENERS and not self._gone:
            return [frames.REFUSED, write_map({"why": "too many clients listen"})]
        events = wish.get("events", list(EVENTS))
        ttl_s = wish.get("ttl", USUAL_LEASE_S)
        if not isinstance(events, list) or isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
            return [frames.NOT_IMPLEMENTED]
        if ttl_s != ttl_s:
            return [frames.NOT_IMPLEMENTED]
        if any(not isinstance(name, str) or name not in EVENTS for name in events):
            # Who waits for something that is never told would wait in silence.
            return [frames.NOT_IMPLEMENTED, write_map({"why": f"events are {', '.join(EVENTS)}"})]
        # Bounded before it is made a float: a number of CBOR may be longer than any float.
        lease_s = float(min(max(ttl_s, 1.0), LONGEST_LEASE_S))
        wanted = frozenset(EVENTS[name] for name in events)
        self._gone.pop(client, None)
        if client not in self._leases and len(self._leases) >= MAX_LISTENERS:
            # Whoever is gone makes room: a client that comes back asks again.
            self._end(next(iter(self._gone)))
        self._leases[client] = _Lease(now_s + lease_s, wanted)
        return [frames.OK, write_map({"lease": lease_s, "v": VERSION})]

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
