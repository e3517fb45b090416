"""API tokens, the audit log and counters on PostgreSQL.

On the service lane: every request at the door waits for it, and must not wait for what somebody looks up.
"""

from collections.abc import Collection, Sequence

from unstuck.ledger.contract.admin import ApiTokenRecord, AuditRecord, Count, MinuteCount, NewApiToken
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Database


class Admin:
    """See `unstuck.ledger.contract.admin.Admin`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add_api_token(self, token: NewApiToken) -> None:
        self._db.serve_once(
            "add_api_token",
            id=token.id,
            name=token.name,
            hash=token.hash,
            seal=token.seal,
            scopes=arrays.texts(token.scopes),
            created_by=token.created_by,
            expires_in_s=token.expires_in_s,
        )

    def api_tokens(self) -> list[ApiTokenRecord]:
        return [ApiTokenRecord(*(*row[:4], tuple(row[4]), *row[5:])) for row in self._db.serve("api_tokens")]

    def revoke_api_token(self, token_id: str) -> bool:
        return bool(self._db.serve_once("revoke_api_token", id=token_id))

    def begin_audit(self, by: str, via: str, verb: str, target: str) -> int:
        values = {"by": by, "door": via, "verb": verb, "target": target}
        return int(self._db.read_connection.write(self._db.sql["begin_audit"], values)[0][0])

    def end_audit(self, audit_id: int, outcome: str) -> None:
        self._db.read("end_audit", id=audit_id, outcome=outcome)

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        return [AuditRecord(*row) for row in self._db.read("audit", before_id=before_id, limit=limit)]

    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        counts = [*totals, *lately]
        if counts:
            self._db.serve_once(
                "count",
                lately=arrays.int4s([0] * len(totals) + [1] * len(lately)),
                names=arrays.texts([one.name for one in counts]),
                labels=arrays.texts([one.labels for one in counts]),
                values=arrays.float8s([one.value for one in counts]),
            )

    def counters(self) -> list[Count]:
        return [Count(*row) for row in self._db.read("counters")]

    def counter_series(self, names: Collection[str], since_minute: int) -> list[MinuteCount]:
        rows = self._db.read("counter_series", names=arrays.texts(sorted(names)), since=since_minute)
        return [MinuteCount(*row) for row in rows]

    def counter_sums(self, name: str, since_minute: int) -> list[Count]:
        return [Count(*row) for row in self._db.read("counter_sums", name=name, since=since_minute)]
