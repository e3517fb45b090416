"""API tokens, the audit log and counters on SQLite."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unstuck.ledger.contract.admin import ApiTokenRecord, AuditRecord, Count, MinuteCount, NewApiToken
from unstuck.ledger.sqlite.database import SQL, Database, fetch
from unstuck.ledger.sqlite.errors import refuse_nul


class Admin:
    """See `unstuck.ledger.contract.admin.Admin`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add_api_token(self, token: NewApiToken) -> None:
        refuse_nul(token.id, token.name, token.created_by)
        now = time.time()
        expires_at = None if token.expires_in_s is None else now + token.expires_in_s
        scopes = msgspec.json.encode(token.scopes).decode()
        values = (token.id, token.name, token.hash, token.seal, scopes, now, token.created_by, expires_at)
        with self._db.write() as cursor:
            cursor.execute(SQL["add_api_token"], values)

    def api_tokens(self) -> list[ApiTokenRecord]:
        now = time.time()
        with self._db.read() as cursor:
            rows = fetch(cursor, "api_tokens")
        return [_record(row, now) for row in rows]

    def revoke_api_token(self, token_id: str) -> bool:
        refuse_nul(token_id)
        with self._db.write() as cursor:
            cursor.execute(SQL["revoke_api_token"], (token_id, time.time()))
            return bool(cursor.connection.changes())

    def begin_audit(self, by: str, via: str, verb: str, target: str) -> int:
        refuse_nul(by, via, verb, target)
        with self._db.write() as cursor:
            return int(cursor.execute(SQL["begin_audit"], (time.time(), by, via, verb, target)).get)

    def end_audit(self, audit_id: int, outcome: str) -> None:
        refuse_nul(outcome)
        with self._db.write() as cursor:
            cursor.execute(SQL["end_audit"], (audit_id, outcome))

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        with self._db.read() as cursor:
            return [AuditRecord(*row) for row in fetch(cursor, "audit", (before_id, limit))]

    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        if not totals and not lately:
            return
        refuse_nul(*(text for one in (*totals, *lately) for text in (one.name, one.labels)))
        with self._db.write() as cursor:
            for minute, counts in ((0, totals), (this_minute(), lately)):
                cursor.executemany(SQL["count"], [(minute, one.name, one.labels, one.value) for one in counts])

    def counters(self) -> list[Count]:
        with self._db.read() as cursor:
            return [Count(*row) for row in fetch(cursor, "counters")]

    def counter_series(self, names: Collection[str], since_minute: int) -> list[MinuteCount]:
        wanted = msgspec.json.encode(sorted(names)).decode()
        with self._db.read() as cursor:
            return [MinuteCount(*row) for row in fetch(cursor, "counter_series", (since_minute, wanted))]

    def counter_sums(self, name: str, since_minute: int) -> list[Count]:
        with self._db.read() as cursor:
            return [Count(*row) for row in fetch(cursor, "counter_sums", (since_minute, name))]


def _record(row: Sequence[Any], now: float) -> ApiTokenRecord:
    expires_at, revoked_at = row[-2:]
    valid = revoked_at is None and (expires_at is None or expires_at > now)
    return ApiTokenRecord(*(*row[:4], tuple(msgspec.json.decode(row[4])), *row[5:], valid))


def this_minute() -> int:
    return int(time.time() // 60)
