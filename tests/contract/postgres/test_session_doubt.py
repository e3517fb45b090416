"""A session that is missing proves a death only if nothing else can have ended it or kept it away."""

import socket
import time
from collections.abc import Iterator

import psycopg
import pytest
from tests.support.builders import birth
from tests.support.fleet import wait_for
from tests.support.postgres import PgServer

from unstuck.config import Recovery, Settings
from unstuck.domain.states import WorkerState
from unstuck.domain.watch_clock import Tick
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.recovery.reap import Reaper

GRACE_S = 2.0
VICTIM = "w1"


class Foreign(Reaper):
    """A reaper that sees every worker as if on another host."""

    def __init__(self, ledger: PostgresLedger, recovery: Recovery | None = None) -> None:
        super().__init__(ledger, recovery or Recovery(), by="far away")
        self.observer.on_this_host = lambda worker: False  # type: ignore[method-assign]

    def victim(self) -> WorkerWatch:
        return next(one for one in self.ledger.recovery.watch() if one.id == VICTIM)

    def state(self) -> WorkerState:
        return next(one.state for one in self.ledger.workers.list() if one.id == VICTIM)

    def state_after(self, rounds_s: float) -> WorkerState:
        """Return what the victim is after rounds for this long."""
        until_s = time.monotonic() + rounds_s
        while time.monotonic() < until_s:
            self.sweep(ticket=False)
            time.sleep(0.2)
        return self.state()


@pytest.fixture
def fleet(pg_ledger: PostgresLedger, pg_url: str) -> Iterator[dict[str, PostgresLedger]]:
    """Three workers in processes of their own, as far as the server can tell; `pg_ledger` watches them."""
    ledgers = {name: PostgresLedger(Settings(url=pg_url)) for name in ("w0", VICTIM, "w2")}
    for name, ledger in ledgers.items():
        ledger.workers.register(birth(name, heartbeat_interval_s=5.0, suspect_after_s=60.0))
    yield ledgers
    for ledger in ledgers.values():
        ledger.close()


@pytest.fixture
def reaper(pg_ledger: PostgresLedger, fleet: dict[str, PostgresLedger]) -> Foreign:
    reaper = Foreign(pg_ledger)
    assert reaper.state_after(0.5) is WorkerState.ACTIVE
    return reaper


def vanish(ledger: PostgresLedger) -> None:
    """Close the socket without a word, as the kernel does for a process that is killed."""
    descriptor = ledger.db.service_connection.open().connection.fileno()
    with socket.socket(fileno=descriptor) as end:
        end.shutdown(socket.SHUT_RDWR)
        end.detach()


def terminate(ledger: PostgresLedger, admin: psycopg.Connection) -> None:
    admin.execute("select pg_terminate_backend(%s, 5000)", (ledger.db.service_connection.open().pid,))


@pytest.fixture
def admin(pg_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(pg_url, autocommit=True) as connection:
        yield connection


def test_a_worker_that_vanishes_is_found_by_its_session(reaper: Foreign, fleet: dict[str, PostgresLedger]) -> None:
    vanish(fleet[VICTIM])
    wait_for(lambda: reaper.state_after(0.3) is WorkerState.DEAD, "the verdict")


def test_a_session_that_someone_terminated_proves_nothing_until_the_next_heartbeat(
    reaper: Foreign, fleet: dict[str, PostgresLedger], admin: psycopg.Connection
) -> None:
    # Its worker may be frozen or cut off at that moment, and would look the same as one that was killed.
    terminate(fleet[VICTIM], admin)
    assert reaper.state_after(GRACE_S + 1.5) is WorkerState.ACTIVE
    fleet[VICTIM].workers.beat(Heartbeat(VICTIM, 0, 0))
    assert reaper.state_after(0.3) is WorkerState.ACTIVE
    vanish(fleet[VICTIM])
    wait_for(lambda: reaper.state_after(0.3) is WorkerState.DEAD, "the verdict")


def test_a_session_that_was_terminated_while_no_reaper_looked_proves_nothing(
    reaper: Foreign, fleet: dict[str, PostgresLedger], admin: psycopg.Connection, pg_url: str
) -> None:
    terminate(fleet[VICTIM], admin)
    late = PostgresLedger(Settings(url=pg_url))
    assert Foreign(late).state_after(GRACE_S + 1.5) is WorkerState.ACTIVE
    late.close()


def test_a_session_lost_while_no_connection_was_free_proves_nothing_when_some_are_free_again(
    reaper: Foreign, fleet: dict[str, PostgresLedger], admin: psycopg.Connection
) -> None:
    database = admin.info.dbname
    admin.execute(f"alter database {database} connection limit 1")
    vanish(fleet[VICTIM])
    assert reaper.state_after(0.5) is WorkerState.ACTIVE
    admin.execute(f"alter database {database} connection limit -1")
    assert reaper.state_after(GRACE_S + 1.5) is WorkerState.ACTIVE


@pytest.mark.parametrize("limit", ["connection limit 1", "allow_connections false"])
def test_limits_of_the_database_count(
    reaper: Foreign, admin: psycopg.Connection, pg_server: PgServer, limit: str
) -> None:
    database = admin.info.dbname
    assert reaper.victim().sessions_doubted_s > 0.0
    pg_server.execute(f"alter database {database} {limit}")
    try:
        assert reaper.victim().sessions_doubted_s == 0.0
    finally:
        pg_server.execute(f"alter database {database} connection limit -1 allow_connections true")


@pytest.mark.parametrize(("writes", "doubted"), [(True, True), (False, False)])
def test_the_limit_of_any_role_counts_that_may_be_the_role_of_a_worker(
    reaper: Foreign, admin: psycopg.Connection, pg_url: str, writes: bool, doubted: bool
) -> None:
    role = f"limited_{admin.info.dbname}"
    admin.execute(f"create role {role} login connection limit 2")
    if writes:
        admin.execute(f"grant update on unstuck.worker_heartbeats to {role}")
    try:
        with psycopg.connect(pg_url, user=role):
            assert (reaper.victim().sessions_doubted_s == 0.0) is doubted
    finally:
        admin.execute(f"drop owned by {role}; drop role {role}")


def test_every_connection_but_the_last_few_counts_as_none(
    reaper: Foreign, admin: psycopg.Connection, pg_url: str
) -> None:
    row = admin.execute(
        "select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
        " - (select count(*) from pg_stat_activity where datid is not null)"
    ).fetchone()
    assert row is not None
    crowd: list[psycopg.Connection] = []
    try:
        assert reaper.victim().sessions_doubted_s > 0.0
        crowd.extend(psycopg.connect(pg_url) for _ in range(row[0] - 3))
        assert reaper.victim().sessions_doubted_s == 0.0
    finally:
        for one in crowd:
            one.close()


def test_a_clock_that_is_set_back_ends_no_doubt_and_keeps_none(
    reaper: Foreign, fleet: dict[str, PostgresLedger], admin: psycopg.Connection
) -> None:
    terminate(fleet["w2"], admin)
    reaper.ledger.recovery.tick(Tick(None, 1.0))
    for changed in ("ledger set sessions_doubted_at = sessions_doubted_at", "worker_heartbeats set beat_at = beat_at"):
        admin.execute(f"update unstuck.{changed} + interval '1 hour'")
    admin.execute(
        "update unstuck.watch_periods set since = since + interval '1 hour', until = until + interval '1 hour'"
    )
    assert reaper.ledger.recovery.tick(Tick(None, 1.0)).set_back_s > 3000
    victim = reaper.victim()
    assert victim.sessions_doubted_s <= max(0.0, victim.since_beat_s)
    fleet[VICTIM].workers.beat(Heartbeat(VICTIM, 0, 0))
    wait_for(lambda: 0.0 < reaper.victim().since_beat_s < reaper.victim().sessions_doubted_s, "the end of the doubt")
