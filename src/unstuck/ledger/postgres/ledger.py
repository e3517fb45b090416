"""The ledger on PostgreSQL: many machines, one clock, the server's.

The hot verbs are functions in the ledger's own schema (see `functions/`): several statements in one round
trip and one commit, with plans that live in the session without a name, so that a transaction-mode pooler
may stand in between.
"""

from collections.abc import Sequence
from typing import Any

from unstuck.ledger.migrate import WAIT_S, Migration
from unstuck.ledger.postgres.admin import ApiTokenVerbs, AuditVerbs, CountingVerbs
from unstuck.ledger.postgres.enqueue import ClientVerbs, RequestVerbs
from unstuck.ledger.postgres.events import AlertVerbs, TellingVerbs
from unstuck.ledger.postgres.exchange import ExchangeVerbs, LetterVerbs
from unstuck.ledger.postgres.function_files import Function
from unstuck.ledger.postgres.jobs import OperatorVerbs
from unstuck.ledger.postgres.maintenance import UpkeepVerbs
from unstuck.ledger.postgres.migrate import FUNCTIONS, MIGRATIONS, check_schema, migrate
from unstuck.ledger.postgres.queues import OrderVerbs
from unstuck.ledger.postgres.recovery import ReaperVerbs
from unstuck.ledger.postgres.schedules import ScheduleVerbs
from unstuck.ledger.postgres.workers import ForeignVerbs, HealthVerbs


class PostgresLedger(
    ExchangeVerbs,
    LetterVerbs,
    RequestVerbs,
    ForeignVerbs,
    ClientVerbs,
    ReaperVerbs,
    UpkeepVerbs,
    HealthVerbs,
    OperatorVerbs,
    OrderVerbs,
    AlertVerbs,
    TellingVerbs,
    CountingVerbs,
    ApiTokenVerbs,
    AuditVerbs,
    ScheduleVerbs,
):
    """See `unstuck.ledger.contract.Ledger`, which this fulfils."""

    single_host = False

    def migrate(
        self,
        *,
        wait_s: float = WAIT_S,
        migrations: Sequence[Migration] | None = None,
        functions: Sequence[Function] | None = None,
    ) -> list[str]:
        onlooker = self._connection("doctor")
        files = MIGRATIONS if migrations is None else migrations
        theirs = FUNCTIONS if functions is None else functions
        try:
            return migrate(self.read_connection, onlooker, self.schema, self.quoted_schema, files, wait_s, theirs)
        finally:
            onlooker.close()

    def check_schema(self) -> None:
        check_schema(self.read_connection, self.address, self.schema, self.quoted_schema)

    def void_tokens(self) -> int:
        count = int(self.read_connection.write(self.sql["void_tokens"], {})[0][0])
        self.job_ids.forget()
        return count

    def describe(self) -> dict[str, Any]:
        session = self.read_connection.open()
        version = session.connection.info.server_version
        return {
            "database": "postgresql",
            "address": str(self.address),
            "version": f"{version // 10000}.{version % 10000}",
            "schema": self.schema,
            "pooler": session.pooled,
            "bell": self._bell(session.pooled),
        }

    def close(self) -> None:
        for connection in self.connections():
            connection.close()

    def _bell(self, pooled: bool) -> str:
        if not self.settings.notify:
            return "off: workers poll"
        if self.settings.listen_url:
            return "LISTEN on listen_url"
        return "none behind a pooler: workers poll; set listen_url" if pooled else "LISTEN"
