"""Give each run a ledger of its own, quickly: a copy of one that was migrated once."""

from collections.abc import Callable
from functools import cache
from typing import Any

from unstuck.config import IN_MEMORY, Recovery, Settings
from unstuck.domain.watch import Change, Period, Tick, advance
from unstuck.store.sqlite import reaper
from unstuck.store.sqlite.ledger import SqliteLedger


class SqliteStorage:
    """The real SQLite ledger, in memory."""

    def __init__(self, recovery: Recovery) -> None:
        self.ledger = SqliteLedger(Settings(url=IN_MEMORY, recovery=recovery))
        self.restore(_migrated())

    def notice_failovers(self, is_same: Callable[[], bool]) -> None:
        """Let ticks notice that another server answers, which happens to no file."""

        def advance_here(last: Period | None, now: float, tick: Tick) -> Change:
            return advance(last, now, tick, same_server=is_same())

        reaper.advance = advance_here  # type: ignore[assignment]

    def set_time(self, now: float, incarnation: int) -> None:
        """Do nothing: it reads the clocks of the simulation itself."""

    def save(self) -> bytes:
        with self.ledger.db.read() as cursor:
            saved: bytes = cursor.connection.serialize("main")
        return saved

    def restore(self, saved: Any) -> None:
        with self.ledger.db._alone() as connection:
            connection.deserialize("main", saved)

    def close(self) -> None:
        self.ledger.close()


@cache
def _migrated() -> bytes:
    ledger = SqliteLedger(Settings(url=IN_MEMORY))
    ledger.migrate()
    with ledger.db.read() as cursor:
        saved: bytes = cursor.connection.serialize("main")
    ledger.close()
    return saved
