"""The ledger on PostgreSQL: many machines, one clock, the server's.

The hot verbs are functions in the ledger's own schema (see `functions/`): several statements in one round
trip and one commit, with plans that live in the session without a name, so that a transaction-mode pooler
may stand in between.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from unstuck.config import Settings
from unstuck.ledger.contract.diagnosis import Blocker, Diagnosis
from unstuck.ledger.gaps import Gaps
from unstuck.ledger.migrate import WAIT_S, Migration
from unstuck.ledger.postgres.admin import Admin
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.diagnosis import diagnose
from unstuck.ledger.postgres.enqueue import JobIds, reserve_ids
from unstuck.ledger.postgres.events import Events
from unstuck.ledger.postgres.function_files import Function
from unstuck.ledger.postgres.jobs import Jobs
from unstuck.ledger.postgres.locks import find_blockers
from unstuck.ledger.postgres.maintenance import Maintenance
from unstuck.ledger.postgres.migrate import FUNCTIONS, MIGRATIONS, check_schema, migrate
from unstuck.ledger.postgres.queues import Queues
from unstuck.ledger.postgres.recovery import Recovery
from unstuck.ledger.postgres.schedules import Schedules
from unstuck.ledger.postgres.workers import Workers
from unstuck.ledger.postgres.workflows import Workflows


class PostgresLedger:
    """See `unstuck.ledger.contract.Ledger`, which this fulfils. Each part is in the file that is named for it."""

    single_host = False

    def __init__(self, settings: Settings, database: type[Database] = Database) -> None:
        self.settings = settings
        db = self.db = database(settings)
        job_ids = self.job_ids = JobIds(partial(reserve_ids, db))
        self.gaps = Gaps()
        self.jobs = Jobs(db, job_ids)
        self.workers = Workers(db, job_ids, self.gaps)
        self.recovery = Recovery(db)
        self.maintenance = Maintenance(db)
        self.workflows = Workflows(db, job_ids)
        self.schedules = Schedules(db)
        self.queues = Queues(db)
        self.events = Events(db)
        self.admin = Admin(db)
        self.notify = db.notify

    def migrate(
        self,
        *,
        wait_s: float = WAIT_S,
        migrations: Sequence[Migration] | None = None,
        functions: Sequence[Function] | None = None,
    ) -> list[str]:
        onlooker = self.db.new_connection("doctor")
        files = MIGRATIONS if migrations is None else migrations
        theirs = FUNCTIONS if functions is None else functions
        try:
            return migrate(
                self.db.read_connection, onlooker, self.db.schema, self.db.quoted_schema, files, wait_s, theirs
            )
        finally:
            onlooker.close()

    def check_schema(self) -> None:
        check_schema(self.db.read_connection, self.db.address, self.db.schema, self.db.quoted_schema)

    def ledger_id(self) -> str:
        return str(self.db.read("ledger_id")[0][0])

    def expect(self, ledger_id: str) -> None:
        self.db.known_ledger = ledger_id

    def void_tokens(self) -> int:
        count = int(self.db.read_connection.write(self.db.sql["void_tokens"], {})[0][0])
        self.job_ids.forget()
        return count

    def describe(self) -> dict[str, Any]:
        session = self.db.read_connection.open()
        version = session.connection.info.server_version
        return {
            "database": "postgresql",
            "address": str(self.db.address),
            "version": f"{version // 10000}.{version % 10000}",
            "schema": self.db.schema,
            "pooler": session.pooled,
            "bell": self._bell(session.pooled),
        }

    def diagnose(self, *, far_s: float, late_s: float) -> Diagnosis:
        return diagnose(self.db, far_s=far_s, late_s=late_s)

    def blockers(self, *, open_s: float) -> tuple[Blocker, ...]:
        return find_blockers(self.db, open_s)

    def close(self) -> None:
        for connection in self.db.connections():
            connection.close()

    def _bell(self, pooled: bool) -> str:
        if not self.settings.notify:
            return "off: workers poll"
        if self.settings.listen_url:
            return "LISTEN on listen_url"
        return "none behind a pooler: workers poll; set listen_url" if pooled else "LISTEN"
