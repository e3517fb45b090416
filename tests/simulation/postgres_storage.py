"""Give each run a PostgreSQL ledger whose time is that of the simulation.

In a copy of the schema every `clock_timestamp()` and `now()` is replaced by a function that reads a table of one row,
and so are the incarnation and the timeline of the server. The row is set before each call. One server serves a whole
campaign; each run has a database of its own, copied from one that was migrated once.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
from tests.pg import PgServer, start_postgres
from tests.simulation.clock import Machine

from unstuck.config import Recovery, Settings
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.postgres.migrating import FUNCTIONS, MIGRATIONS

TEMPLATE = "simulated"
_CLOCK = re.compile(r"(?<![\w.])(?:clock_timestamp|statement_timestamp|now)\(\)")
_TIMELINE = "left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
_TIME = """
create schema simulated;
create unlogged table simulated.time (now timestamptz not null, server text not null);
insert into simulated.time values (to_timestamp(1700000000), '1');
create function simulated.now() returns timestamptz language plpgsql volatile
as $$ declare found timestamptz; begin select t.now into found from simulated.time t; return found; end $$;
create function simulated.server() returns text language plpgsql volatile
as $$ declare found text; begin select t.server into found from simulated.time t; return found; end $$;
"""
_SERVER = """
create or replace function {schema}.incarnation() returns text language plpgsql volatile
as $$ begin return simulated.server(); end $$;
"""
_names = itertools.count(1)
_server: list[PgServer] = []


@contextmanager
def hosting(ledger: str) -> Iterator[None]:
    """Run a server for as long as the block lasts, if this ledger needs one."""
    if ledger != "postgresql":
        yield
        return
    with start_postgres() as server:
        _migrate(server)
        _server[:] = [server]
        try:
            yield
        finally:
            _server.clear()


def _migrate(server: PgServer) -> None:
    server.execute(f"create database {TEMPLATE}")
    server.execute(_TIME, TEMPLATE)
    ledger = PostgresLedger(Settings(url=server.url(TEMPLATE)))
    ledger.migrate(
        migrations=[replace(one, sql=_simulated(one.sql)) for one in MIGRATIONS],
        functions=[replace(one, sql=_simulated(one.sql)) for one in FUNCTIONS],
    )
    server.execute(_SERVER.replace("{schema}", ledger.quoted_schema), TEMPLATE)
    ledger.close()


def _simulated(sql: str) -> str:
    return _CLOCK.sub("simulated.now()", sql).replace(_TIMELINE, "simulated.server()")


class PostgresStorage:
    """The real PostgreSQL ledger, in a database of its own."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._pg = _server[0]
        self._name = self._copy(TEMPLATE)
        self._saved: list[str] = []
        self._open()

    def _open(self) -> None:
        self.ledger = PostgresLedger(Settings(url=self._pg.url(self._name), recovery=self._recovery, notify=False))
        self.ledger.sql = {name: _simulated(sql.decode()).encode() for name, sql in self.ledger.sql.items()}
        self._hand = psycopg.connect(self._pg.url(self._name), autocommit=True)

    def _copy(self, template: str) -> str:
        name = f"s{os.getpid()}_{next(_names)}"
        self._pg.execute(f"create database {name} template {template}")
        return name

    def _close(self) -> None:
        self.ledger.close()
        self._hand.close()

    def notice_failovers(self, is_same: Callable[[], bool]) -> None:
        """Do nothing: the ledger itself notices by its incarnation."""

    def set_time(self, machine: Machine, incarnation: int) -> None:
        """Let the database believe that it runs on this machine, and is this run of the server."""
        now = machine.wall_s()
        self._hand.execute("update simulated.time set now = to_timestamp(%s), server = %s", (now, str(incarnation)))

    def save(self) -> str:
        self._close()
        saved = self._copy(self._name)
        self._saved.append(saved)
        self._open()
        return saved

    def restore(self, saved: str) -> None:
        self._close()
        self._pg.execute(f"drop database {self._name} with (force)")
        self._saved.remove(saved)
        self._name = saved
        self._open()

    def skip_lost_numbers(self) -> None:
        """Do nothing: the ledger itself does, by its timeline."""

    def close(self) -> None:
        self._close()
        for name in (self._name, *self._saved):
            self._pg.execute(f"drop database {name} with (force)")
