"""Open a session to the primary, with a bound on every wait.

A server that hangs while its kernel still answers is an outage like any other, so every call has a deadline here. The
server's own limits are shorter: then it is certain that nothing was written.
"""

import math
import os
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from typing import Any, TypeVar, cast

import msgspec
import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import set_json_loads

from unstuck.config import Settings
from unstuck.errors import LedgerError
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.late_socket import take_socket
from unstuck.ledger.postgres.prepared import allow_preparing

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
    """Return the bounds of the connection for a purpose (see `Database`)."""
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


OLDEST_SERVER = 140000
POLL_S = 0.1
"""How often a call that waits for its answer looks at its deadline."""
_KNOWS_PRIMARY = 140000
"""The first libpq that knows `target_session_attrs=primary`."""

# A cut network is noticed in about ten seconds, whether we wait for an answer or for an acknowledgement.
_NETWORK = {
    "keepalives": 1,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

# The server's side of the same, and: a client that died inside a query is noticed, and nobody sits in a transaction.
# These are session settings, so they are for direct connections only: a pooler would hand them on to strangers.
SESSION_SETTINGS = (
    ("client_connection_check_interval", "1s"),
    ("idle_in_transaction_session_timeout", "60s"),
    ("tcp_keepalives_idle", "5"),
    ("tcp_keepalives_interval", "2"),
    ("tcp_keepalives_count", "4"),
    ("tcp_user_timeout", "15s"),
    # None of our statements is worth compiling, and tables without statistics make the planner think otherwise.
    ("jit", "off"),
    # Whoever waited for a lock must see what was committed meanwhile: a server may have been set to another default.
    ("default_transaction_isolation", "read committed"),
)

_WHO_ANSWERS = b"""
select pg_backend_pid(), (select backend_start from pg_stat_get_activity(pg_backend_pid())), pg_is_in_recovery(),
       has_function_privilege('pg_catalog.pg_control_system()', 'execute')
"""
_INCARNATION_WITHOUT_SYSTEM = b"""
select '-' || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
       || '/' || extract(epoch from pg_postmaster_start_time())::text
"""
# Some services forbid the function, and to name it is refused already.
_INCARNATION = _INCARNATION_WITHOUT_SYSTEM.replace(
    b"'-' ||", b"(select c.system_identifier::text from pg_control_system() c) ||"
)

# Who administers the server may have set less than we would.
_LOWER = b"""
select set_config(%(name)s, %(limit)s, false)
where current_setting(%(name)s)::interval not between '1 ms' and %(limit)s::interval
"""

RV = TypeVar("RV")


class NoAnswer(psycopg.OperationalError):
    """The server did not answer a call in time. The connection is closed: what it would say next is anybody's guess."""


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which no call waits for ever: a hung server whose kernel still answers says nothing at all."""

    answer_s = 60.0
    """How long one call may take."""
    proves_life = False
    """The end of its session would count as evidence of a death."""
    late_socket: socket.socket | None = None
    """Its socket, still open, if an answer was late and the session proves life."""

    def wait(self, gen: PQGen[RV], interval: float = POLL_S, timeout: float | None = None) -> RV:
        """Do what the driver's own `wait` does, until the deadline. Newer drivers have a timeout, older ones not."""
        bounded = self._until(time.monotonic() + self.answer_s, gen)
        return super().wait(bounded, interval) if timeout is None else super().wait(bounded, interval, timeout)

    def _until(self, deadline_s: float, gen: PQGen[RV]) -> PQGen[RV]:
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                # An answer that is there counts, however late we come to read it: we may have been frozen.
                if not ready and time.monotonic() >= deadline_s:
                    if self.proves_life:
                        self.late_socket = take_socket(self.pgconn.socket)
                    self.close()
                    raise NoAnswer(f"no answer within {self.answer_s:.1f} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            return cast(RV, done.value)


@dataclass(frozen=True)
class Session:
    """An open connection with what the server said of it."""

    connection: Connection
    pid: int
    started: datetime | None
    pooled: bool
    """A pooler stands between: no session settings, no LISTEN, and the session proves nothing."""
    server: str
    """The identity of this run of the server, equal to the SQL function `incarnation()`."""


@dataclass(frozen=True)
class Address:
    """Where the ledger is; `str()` of it is fit for people, without the password."""

    parameters: dict[str, Any]
    where: str

    def __str__(self) -> str:
        return self.where

    def hosts(self) -> tuple[str, ...]:
        """Return the hosts that are tried in turn, with their ports if those are named."""
        names = str(
            self.parameters.get("host") or self.parameters.get("hostaddr") or os.environ.get("PGHOST") or "localhost"
        ).split(",")
        ports = str(self.parameters.get("port") or "").split(",")
        # One port is that of every host.
        ports = ports * len(names) if len(ports) == 1 else ports
        return tuple(f"{name}:{port}" if port else name for name, port in zip_longest(names, ports, fillvalue=""))

    def chosen(self) -> str | None:
        """Return which kind of server the URL or the environment asks for, if either does."""
        found = self.parameters.get("target_session_attrs") or os.environ.get("PGTARGETSESSIONATTRS")
        return None if found is None else str(found)


def read_address(url: str) -> Address:
    try:
        parameters: dict[str, Any] = dict(conninfo_to_dict(url))
    except psycopg.Error:
        raise errors.unreadable_url() from None
    host = parameters.get("host") or parameters.get("hostaddr") or "localhost"
    port = f":{parameters['port']}" if parameters.get("port") else ""
    return Address(parameters, f"{host}{port}/{parameters.get('dbname') or parameters.get('user') or ''}")


def connect(address: Address, purpose: str, bounds: Bounds) -> Session:
    """Open a connection in autocommit: one statement is one transaction and one round trip."""
    parameters = {
        **_NETWORK,
        **_primary_first(),
        "connect_timeout": max(2, math.ceil(bounds.connect_s)),
        "application_name": f"unstuck {purpose}",
        **address.parameters,
        "client_encoding": "UTF8",
    }
    try:
        # No prepared statement by name before it is known that no pooler stands between: it would be prepared in
        # another client's session.
        connection = Connection.connect(autocommit=True, prepare_threshold=None, **parameters)
    except psycopg.Error as error:
        # An attempt that timed out stands in a cycle with its own error: its socket would stay open until the garbage
        # is collected, and the server would wait for us there.
        traceback.clear_frames(error.__traceback__)
        raise errors.connect_error(error, address.where) from None
    connection.answer_s = bounds.answer_s
    try:
        return _introduce(connection, address, bounds)
    except psycopg.Error as error:
        connection.close()
        raise errors.lost_error(error, address.where, uncertain=False) from None
    except BaseException:
        connection.close()
        raise


def _primary_first() -> dict[str, str]:
    """Have every host and address tried until one is the primary, unless the user chose otherwise."""
    chosen = "PGTARGETSESSIONATTRS" in os.environ or psycopg.pq.version() < _KNOWS_PRIMARY
    return {} if chosen else {"target_session_attrs": "primary"}


def _introduce(connection: Connection, address: Address, bounds: Bounds) -> Session:
    if connection.info.server_version < OLDEST_SERVER:
        raise LedgerError(
            f"PostgreSQL at {address.where} is older than 14, which Unstuck does not support. Upgrade the server."
        )
    arrays.teach(connection.adapters)
    # Python's own reader takes longer for a list of workers than the server does.
    set_json_loads(msgspec.json.decode, connection)
    # Times as text would come in whatever DateStyle the server has.
    row = connection.execute(_WHO_ANSWERS, binary=True).fetchone()
    assert row is not None
    pid, started, is_standby, may_name_system = row
    if is_standby:
        raise errors.standby_error(address.where)
    server = connection.execute(_INCARNATION if may_name_system else _INCARNATION_WITHOUT_SYSTEM).fetchone()
    assert server is not None
    pooled = pid != connection.info.backend_pid
    if not pooled:
        _settle_in(connection, bounds)
        allow_preparing(connection)
    return Session(connection, pid, started, pooled, server[0])


def _settle_in(connection: Connection, bounds: Bounds) -> None:
    try:
        _set(connection, SESSION_SETTINGS)
    except (psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedObject):
        # Servers on some systems cannot do some of this; the ledger works without.
        for setting in SESSION_SETTINGS:
            with suppress(psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedObject):
                _set(connection, (setting,))
    for name, limit_s in (("lock_timeout", bounds.lock_s), ("statement_timeout", bounds.statement_s)):
        connection.execute(_LOWER, {"name": name, "limit": f"{limit_s * 1000:.0f}ms"})


def _set(connection: Connection, settings: Sequence[tuple[str, str]]) -> None:
    calls = ", ".join(["set_config(%s, %s, false)"] * len(settings))
    connection.execute(f"select {calls}".encode(), [word for setting in settings for word in setting])
