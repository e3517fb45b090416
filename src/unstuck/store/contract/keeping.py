"""The life of the ledger itself: its tables, its health, its end."""

from typing import Any, Protocol

from unstuck.store.diagnosis import Diagnosis


class KeepingVerbs(Protocol):
    one_host: bool
    """Everybody who uses it shares one machine, and one boot of it: true of a file, not of a server."""

    def migrate(self) -> list[str]:
        """Bring the tables up to date and give the names of what was applied.

        Under a lock, safe to run twice at once, each file in a transaction of its own. SchemaMismatch when
        the tables are newer than this code knows."""
        ...

    def check_schema(self) -> None:
        """Raise SchemaMismatch, naming the cure, unless the tables fit this code."""
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

    def close(self) -> None: ...
