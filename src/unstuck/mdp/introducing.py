"""Find out whether a broker is one of ours, before a worker says words that a foreign one would not understand.

A worker cannot ask: 0.1 has no word for it, and an unknown one may break a foreign broker. A client can: `mmi.notify`
is an ordinary request, to which others say 501.
"""

import time
from enum import Enum, auto

import cbor2
import zmq

from unstuck.mdp import protocol
from unstuck.mdp.client_session import VERSION
from unstuck.mdp.connection import CurveKeys, DealerConnection, new_identity
from unstuck.mdp.protocol import ClientReply, hear_as_client, map_of

SILENCE_S = 2.5
"""A broker that is connected and says nothing for so long is a foreign one."""
TTL_S = 1


class Kind(Enum):
    OURS = auto()
    FOREIGN = auto()
    SILENT = auto()
    """It did not answer. A foreign one, unless ours is very slow."""


class Introduction:
    """One question on a line of its own. `answer` gives nothing until the broker is there and its time is over."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: CurveKeys | None) -> None:
        self.connection = DealerConnection(context, endpoint, keys, new_identity())
        self._silent_at_s: float | None = None
        wish = {"v": VERSION, "events": [], "ttl": TTL_S}
        self.connection.send(protocol.client_request(protocol.MMI_NOTIFY, [cbor2.dumps(wish)]))

    def answer(self) -> Kind | None:
        now_s = time.monotonic()
        for is_there in self.connection.changes():
            self._silent_at_s = now_s + SILENCE_S if is_there else None
        heard = self.connection.receive()
        if heard is not None:
            said = hear_as_client(heard)
            if isinstance(said, ClientReply) and said.service == protocol.MMI_NOTIFY:
                is_ours = len(said.body) > 1 and said.body[0] == protocol.OK and map_of(said.body[1]) is not None
                return Kind.OURS if is_ours else Kind.FOREIGN
        if self._silent_at_s is not None and now_s >= self._silent_at_s:
            return Kind.SILENT
        return None

    @property
    def wait_s(self) -> float | None:
        return None if self._silent_at_s is None else self._silent_at_s - time.monotonic()

    def close(self) -> None:
        self.connection.close()
