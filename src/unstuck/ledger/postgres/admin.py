"""API tokens, the audit log and counters on PostgreSQL.

On the service lane: every request at the door waits for it, and must not wait for what somebody looks up.
"""

from collections.abc import Collection, Sequence

from unstuck.domain.states import LIVE_STATES
from unstuck.ledger.contract.admin import ApiTokenRecord, AuditRecord, Count, Fleet, MinuteCount, NewApiToken
from unstuck.ledger.contract.diagnosis import SWEEP_TICKET
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.database import Verbs


class ApiTokenVerbs(Verbs):
    def add_api_token(self, token: NewApiToken) -> None:
        self.serve_once(
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
        return [ApiTokenRecord(*(*row[:4], tuple(row[4]), *row[5:])) for row in self.serve("api_tokens")]

    def revoke_api_token(self, token_id: str) -> bool:
        return bool(self.serve_once("revoke_api_token", id=token_id))


class AuditVerbs(Verbs):
    def begin_audit(self, by: str, via: str, verb: str, target: str) -> int:
        values = {"by": by, "door": via, "verb": verb, "target": target}
        return int(self.read_connection.write(self.sql["begin_audit"], values)[0][0])

    def end_audit(self, audit_id: int, outcome: str) -> None:
        self.read("end_audit", id=audit_id, outcome=outcome)

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        return [AuditRecord(*row) for row in self.read("audit", before_id=before_id, limit=limit)]

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        return int(self.serve_once("sweep_audit", older_than_s=older_than_s, limit=limit)[0][0])


class CountingVerbs(Verbs):
    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        counts = [*totals, *lately]
        if counts:
            self.serve_once(
                "count",
                lately=arrays.int4s([0] * len(totals) + [1] * len(lately)),
                names=arrays.texts([one.name for one in counts]),
                labels=arrays.texts([one.labels for one in counts]),
                values=arrays.float8s([one.value for one in counts]),
            )

    def counters(self) -> list[Count]:
        return [Count(*row) for row in self.read("counters")]

    def counter_series(self, names: Collection[str], since_minute: int) -> list[MinuteCount]:
        rows = self.read("counter_series", names=arrays.texts(sorted(names)), since=since_minute)
        return [MinuteCount(*row) for row in rows]

    def counter_sums(self, name: str, since_minute: int) -> list[Count]:
        return [Count(*row) for row in self.read("counter_sums", name=name, since=since_minute)]

    def sweep_counters(self, kept_minutes: int, limit: int) -> int:
        return int(self.serve_once("sweep_counters", kept=kept_minutes, limit=limit)[0][0])

    def fleet(self) -> Fleet:
        # On the service lane: reapers ask too, and a worker shall not need one more connection for it.
        rows = self.serve("fleet")
        ticket = self.serve("look_ticket", name=SWEEP_TICKET)
        living = [row for row in rows if row[0] in LIVE_STATES]
        return Fleet(
            workers={row[0]: row[1] for row in rows},
            late=sum(row[2] for row in living),
            silent_s=max((row[3] for row in living), default=0.0),
            unswept_s=ticket[0][0] if ticket else None,
        )
