"""Keep the notes of what operators did."""

from unstuck.store.postgres.base import Verbs
from unstuck.store.records import AuditRecord


class AuditVerbs(Verbs):
    def begin_audit(self, by: str, door: str, verb: str, target: str) -> int:
        values = {"by": by, "door": door, "verb": verb, "target": target}
        return int(self.read_lane.write(self.sql["begin_audit"], values)[0][0])

    def end_audit(self, audit_id: int, outcome: str) -> None:
        self.read("end_audit", id=audit_id, outcome=outcome)

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        return [AuditRecord(*row) for row in self.read("audit", before_id=before_id, limit=limit)]

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        return int(self.serve_once("sweep_audit", older_than_s=older_than_s, limit=limit)[0][0])
