"""Keep order in queues: lines, limits, expiry, how long an ended job is kept."""

import time
from collections.abc import Mapping

import apsw
import msgspec

from unstuck.domain.limits import QueueLimit
from unstuck.ledger.contract.jobs import JobLinks
from unstuck.ledger.contract.maintenance import Expired, KeysChecked
from unstuck.ledger.contract.queues import KeyHolder, KeyRecord, QueueLimitRecord
from unstuck.ledger.sqlite.claim import queue_room, write_limits
from unstuck.ledger.sqlite.concurrency import admit
from unstuck.ledger.sqlite.database import SQL, Verbs, fetch, write_event
from unstuck.ledger.sqlite.endings import expire
from unstuck.ledger.sqlite.errors import refuse_nul


class OrderVerbs(Verbs):
    def concurrency_keys(self, key: str | None = None, limit: int = 100) -> list[KeyRecord]:
        with self.db.read() as cursor:
            rows = fetch(cursor, "lines", (key, limit))
        return [KeyRecord(*(*row[:4], _in_line(row[4]))) for row in rows]

    def limit_key(self, key: str, places: int | None, by: str) -> None:
        refuse_nul(key, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["pin_places"], (key, places, by if places is not None else None, time.time()))
            word = "takes its limit from its jobs again" if places is None else f"has {places} places now"
            write_event(cursor, "line_limited", f"Line '{key}' {word} ({by})")
            woken = admit(cursor, {key})
        self.notify_queues(woken)

    def check_keys(self, after: str, limit: int) -> KeysChecked:
        with self.db.read() as cursor:
            keys = [key for (key,) in fetch(cursor, "lines_after", (after, limit))]
            next_after = keys[-1] if len(keys) == limit else None
            suspects = {key for key in keys if _may_need_care(cursor, key)}
            # Blocked jobs whose line has no row: a backup, or somebody's hand.
            place = after
            for _ in range(limit):
                found = cursor.execute(SQL["next_blocked_line"], (place,)).get
                if found is None or (next_after is not None and found > next_after):
                    break
                place = found
                if place not in keys:
                    suspects.add(place)
        if not suspects:
            return KeysChecked(next_after, 0, 0, frozenset())
        repaired, removed, woken = 0, 0, set()
        with self.db.write() as cursor:
            for key in sorted(suspects):
                if let_in := admit(cursor, {key}):
                    repaired += 1
                    woken |= let_in
                    message = f"Line '{key}' had a free place that nobody was let in to; the next went in"
                    write_event(cursor, "line_repaired", message)
                    continue
                cursor.execute(SQL["close_line"], (key,))
                removed += cursor.connection.changes()
        self.notify_queues(woken)
        return KeysChecked(next_after, repaired, removed, frozenset(woken))

    def queue_limits(self) -> list[QueueLimitRecord]:
        records = []
        with self.db.read() as cursor:
            for name, *columns, limited_by in fetch(cursor, "queue_limits"):
                free = queue_room(cursor, name, columns)
                held = cursor.execute(SQL["count_held_of_queue"], (name,)).get
                limit = QueueLimit(*columns[:3])
                records.append(QueueLimitRecord(name, limit, limited_by, held, free.jobs, free.in_s))
        return records

    def declare_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        if limits:
            refuse_nul(*limits)
            with self.db.write() as cursor:
                write_limits(cursor, limits)

    def limit_queue(self, queue: str, limit: QueueLimit, by: str) -> None:
        refuse_nul(queue, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["limit_queue"], (queue, limit.concurrency, limit.rate, limit.window_s, by))
            word = "was limited" if limit else "has no limit any more"
            write_event(cursor, "queue_limited", f"Queue '{queue}' {word} ({by})")
        self.notify_queues([queue])

    def unlimit_queue(self, queue: str, by: str) -> None:
        refuse_nul(queue, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["limit_queue"], (queue, None, None, None, None))
            write_event(cursor, "queue_limited", f"Queue '{queue}' takes its limit from its app again ({by})")
        self.notify_queues([queue])

    def links(self, job_id: int) -> JobLinks | None:
        with self.db.read() as cursor:
            row = cursor.execute(SQL["ties"], (job_id,)).fetchone()
        return None if row is None else JobLinks(*(*row[:2], bool(row[2]), *row[3:]))

    def expire_due(self, limit: int) -> Expired:
        with self.db.read() as cursor:
            next_at = cursor.execute(SQL["next_expiry"]).get
        if next_at is None or next_at > time.time():
            return Expired(0, frozenset(), None if next_at is None else max(next_at - time.time(), 0.0))
        with self.db.write() as cursor:
            found = [job_id for (job_id,) in fetch(cursor, "expired", (time.time(), limit))]
            woken = expire(cursor, found)
            next_at = cursor.execute(SQL["next_expiry"]).get
        self.notify_queues(woken)
        return Expired(len(found), frozenset(woken), None if next_at is None else max(next_at - time.time(), 0.0))


def _in_line(stored: str) -> tuple[KeyHolder, ...]:
    return tuple(KeyHolder(*one) for one in sorted(msgspec.json.decode(stored)))


def _may_need_care(cursor: apsw.Cursor, key: str) -> bool:
    """Say whether a line looks empty, or free while somebody waits; seen without the lock, and so looked at again."""
    taken = cursor.execute(SQL["count_in_line"], (key,)).get
    blocked = cursor.execute(SQL["count_blocked"], (key,)).get
    return bool((blocked > 0 and taken < cursor.execute(SQL["places_of"], (key,)).get) or taken + blocked == 0)
