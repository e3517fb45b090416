"""Keep the notes of what operators did."""

import time

from unstuck.store.records import AuditRecord
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.verbs import SQL, Verbs, fetch


class AuditVerbs(Verbs):
    def begin_audit(self, by: str, door: str, verb: str, target: str) -> int:
        refuse_nul(by, door, verb, target)
        with self.db.write() as cursor:
            return int(cursor.execute(SQL["begin_audit"], (time.time(), by, door, verb, target)).get)

    def end_audit(self, audit_id: int, outcome: str) -> None:
        refuse_nul(outcome)
        with self.db.write() as cursor:
            cursor.execute(SQL["end_audit"], (audit_id, outcome))

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        with self.db.read() as cursor:
            return [AuditRecord(*row) for row in fetch(cursor, "audit", (before_id, limit))]

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        with self.db.write() as cursor:
            cursor.execute(SQL["sweep_audit"], (time.time() - older_than_s, limit))
            return int(cursor.connection.changes())
