"""The life of the ledger itself: its tables, its health, its end."""

from collections.abc import Sequence
from typing import Any, Protocol

from unstuck.store.diagnosis import Blocker, Diagnosis
from unstuck.store.migrations import WAIT_S, Migration


class KeepingVerbs(Protocol):
    one_host: bool
    """Everybody who uses it shares one machine, and one boot of it: true of a file, not of a server."""

    def migrate(self, *, wait_s: float = WAIT_S, migrations: Sequence[Migration] | None = None) -> list[str]:
        """Bring the tables up to date and return the names of what was applied.

        Under a lock, safe to run twice at once, each file in a transaction of its own. Locks of others are waited
        for in short tries, for `wait_s` in all; then MigrationBlocked. SchemaMismatch if the tables no longer work
        with this code. `migrations` are those of this version unless said."""
        ...

    def check_schema(self) -> None:
        """Raise SchemaMismatch, naming the cure, unless this code works with the tables."""
        ...

    def ledger_id(self) -> str:
        """Return which ledger this is: a text that was drawn when its tables were made. From its first use on a ledger
        object raises LedgerReplaced whenever it finds another one in its place, or none."""
        ...

    def expect(self, ledger_id: str) -> None:
        """Take no other ledger than this one."""
        ...

    def void_tokens(self) -> int:
        """After a restore from a backup: every living worker is dead, every token is void, what was held
        goes back to the queue (claimed) or waits for the next sweep (running). Gives the number of workers."""
        ...

    def describe(self) -> dict[str, Any]:
        """Say what this ledger is, for people: database, version, schema, pooler, bell."""
        ...

    def diagnose(self, *, far_s: float, late_s: float) -> Diagnosis:
        """Look at the ledger's own health, in bounded looks; really rings the bell where there is one.

        `scheduled` are jobs due in more than `far_s`, `overdue` those that have been due for `late_s`."""
        ...

    def blockers(self, *, open_s: float) -> tuple[Blocker, ...]:
        """Return the transactions that hold locks of the ledger and have been open for longer than `open_s`.

        Needs none of the ledger's own tables, so it answers even if one of them is locked. Looks for a second or two if
        it finds any, to see what waits for them."""
        ...

    def close(self) -> None: ...
