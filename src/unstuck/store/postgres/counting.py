"""Add to the counters and read them."""

from collections.abc import Collection, Sequence

from unstuck.domain.states import LIVING
from unstuck.store.diagnosis import SWEEP_TICKET
from unstuck.store.postgres import arrays
from unstuck.store.postgres.base import Verbs
from unstuck.store.records import Count, Fleet, MinuteCount


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
        # On the service lane: watchmen ask too, and a worker shall not need one more connection for it.
        rows = self.serve("fleet")
        ticket = self.serve("look_ticket", name=SWEEP_TICKET)
        living = [row for row in rows if row[0] in LIVING]
        return Fleet(
            workers={row[0]: row[1] for row in rows},
            late=sum(row[2] for row in living),
            silent_s=max((row[3] for row in living), default=0.0),
            unswept_s=ticket[0][0] if ticket else None,
        )
