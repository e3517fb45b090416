"""Bound every wait of a connection: for a lock, for a statement, for an answer and for the connection itself.

A server that hangs while its kernel still answers is an outage like any other, so every call has a deadline here. The
server's own limits are shorter: then it is certain that nothing was written.
"""

from dataclasses import dataclass

from unstuck.config import Settings

LOCK_S = 1.5
"""How long workers wait for a lock. What cannot proceed is deferred. It is longer than the server's usual
`deadlock_timeout` (1 s): a deadlock of ours is resolved by repeating one side at once."""
LOCK_SHARE = 0.75
"""The part of a statement's time that it may wait for one lock."""
LEAST_STATEMENT_S = 1.0
"""A busy machine may need this long for a small statement, however short the heartbeat interval is."""
MOST_SERVICE_STATEMENT_S = 10.0
ANSWER_GRACE_S = 1.0
"""How much longer than the server's own limit we wait for its answer."""
LEAST_TURN_ANSWER_S = 5.0
MOST_TURN_ANSWER_S = 15.0
CLIENT_LOCK_S = 10.0
CLIENT_STATEMENT_S = 15.0
READ_STATEMENT_S = 30.0
ANSWER_MARGIN_S = 5.0
LEAST_CONNECT_S = 2.0
PATIENT_S = 3600.0
"""For migrations and repairs, which rewrite whole tables."""


@dataclass(frozen=True)
class Bounds:
    lock_s: float
    """`lock_timeout` of the session."""
    statement_s: float
    """`statement_timeout` of the session. It does not cover the commit."""
    answer_s: float
    """How long we wait for the answer to one call before the connection is dropped."""
    connect_s: float
    """How long we try each address of the URL."""
    each_transaction: bool = False
    """Behind a pooler, where a session keeps no settings, send the server's limits with every call."""


def bounds_of(purpose: str, settings: Settings) -> Bounds:
    """Return the bounds of the connection for a purpose (see `Verbs`)."""
    interval_s = settings.recovery.heartbeat_interval_s
    connect_s = min(settings.connect_timeout_s, max(LEAST_CONNECT_S, interval_s))
    match purpose:
        case "service" | "beats" | "bell" | "listen":
            # Half of the interval at most, so that a heartbeat that waits behind one statement is still in time.
            statement_s = min(max(LEAST_STATEMENT_S, interval_s / 2), MOST_SERVICE_STATEMENT_S)
            answer_s = statement_s + ANSWER_GRACE_S
            lock_s = min(LOCK_S, LOCK_SHARE * statement_s)
            return Bounds(lock_s, statement_s, answer_s, connect_s, each_transaction=True)
        case "turn":
            half_s = settings.recovery.heartbeat_timeout_s / 2
            answer_s = min(max(LEAST_TURN_ANSWER_S, half_s), MOST_TURN_ANSWER_S)
            return Bounds(LOCK_S, answer_s * 2 / 3, answer_s, connect_s, each_transaction=True)
        case "client":
            answer_s = CLIENT_STATEMENT_S + ANSWER_MARGIN_S
            return Bounds(CLIENT_LOCK_S, CLIENT_STATEMENT_S, answer_s, settings.connect_timeout_s)
        case "read" | "doctor":
            answer_s = READ_STATEMENT_S + ANSWER_MARGIN_S
            return Bounds(CLIENT_LOCK_S, READ_STATEMENT_S, answer_s, settings.connect_timeout_s)
        case _:
            raise AssertionError(f"unknown purpose {purpose!r}")
