"""Add to the counters and read them."""

import time
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from unstuck.domain.states import LIVING
from unstuck.store.records import Count, Fleet, MinuteCount
from unstuck.store.sqlite.diagnosing import look_at_ticket
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.silence import read_clock
from unstuck.store.sqlite.verbs import SQL, Verbs, fetch


class CountingVerbs(Verbs):
    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        if not totals and not lately:
            return
        refuse_nul(*(text for one in (*totals, *lately) for text in (one.name, one.labels)))
        with self.db.write() as cursor:
            for minute, counts in ((0, totals), (_this_minute(), lately)):
                cursor.executemany(SQL["count"], [(minute, one.name, one.labels, one.value) for one in counts])

    def counters(self) -> list[Count]:
        with self.db.read() as cursor:
            return [Count(*row) for row in fetch(cursor, "counters")]

    def counter_series(self, names: Collection[str], since_minute: int) -> list[MinuteCount]:
        wanted = msgspec.json.encode(sorted(names)).decode()
        with self.db.read() as cursor:
            return [MinuteCount(*row) for row in fetch(cursor, "counter_series", (since_minute, wanted))]

    def counter_sums(self, name: str, since_minute: int) -> list[Count]:
        with self.db.read() as cursor:
            return [Count(*row) for row in fetch(cursor, "counter_sums", (since_minute, name))]

    def sweep_counters(self, kept_minutes: int, limit: int) -> int:
        with self.db.write() as cursor:
            cursor.execute(SQL["sweep_counters"], (_this_minute() - kept_minutes, limit))
            return cursor.connection.changes()

    def fleet(self) -> Fleet:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            rows = fetch(cursor, "fleet")
            unswept_s = look_at_ticket(cursor)
        living = [(clock.silent_s(row[1]), row[2]) for row in rows if row[0] in LIVING]
        return Fleet(
            workers=dict(Counter(row[0] for row in rows)),
            late=sum(silent_s > 2 * interval_s for silent_s, interval_s in living),
            silent_s=max((silent_s for silent_s, _ in living), default=0.0),
            unswept_s=unswept_s,
        )


def _this_minute() -> int:
    return int(time.time() // 60)
