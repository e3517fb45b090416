"""`Ledger`: the interface that both databases implement, in nine parts, with its records by subject.

Each part is a protocol beside its records: `jobs.py` has `Jobs`. A class has its `list` last, since the name means the
method from there on.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from unstuck.ledger.contract.admin import Admin
from unstuck.ledger.contract.diagnosis import Blocker, Diagnosis
from unstuck.ledger.contract.events import Events
from unstuck.ledger.contract.jobs import Jobs
from unstuck.ledger.contract.maintenance import Maintenance
from unstuck.ledger.contract.queues import Queues
from unstuck.ledger.contract.recovery import Recovery
from unstuck.ledger.contract.schedules import Schedules
from unstuck.ledger.contract.workers import Listener as Listener
from unstuck.ledger.contract.workers import PipelinedHeartbeats as PipelinedHeartbeats
from unstuck.ledger.contract.workers import Workers
from unstuck.ledger.contract.workflows import Workflows
from unstuck.ledger.migrate import WAIT_S, Migration


class Ledger(Protocol):
    """A database with everything that Unstuck stores. Its verbs are in its nine parts, those about itself here."""

    single_host: bool
    """Whether all that use it share one machine and one boot of it: true of a file, not of a server."""

    @property
    def jobs(self) -> Jobs: ...

    @property
    def workers(self) -> Workers: ...

    @property
    def recovery(self) -> Recovery: ...

    @property
    def maintenance(self) -> Maintenance: ...

    @property
    def workflows(self) -> Workflows: ...

    @property
    def schedules(self) -> Schedules: ...

    @property
    def queues(self) -> Queues: ...

    @property
    def events(self) -> Events: ...

    @property
    def admin(self) -> Admin: ...

    def migrate(self, *, wait_s: float = WAIT_S, migrations: Sequence[Migration] | None = None) -> list[str]:
        """Bring the tables up to date and return the names of what was applied.

        Under a lock, safe to run twice at once, each file in a transaction of its own. Locks of others are waited
        for in short tries, for `wait_s` in all; then MigrationBlocked. SchemaMismatch if the tables no longer work
        with this code. `migrations` are those of this version unless given."""
        ...

    def check_schema(self) -> None:
        """Raise SchemaMismatch, naming the cure, unless this code works with the tables."""
        ...

    def ledger_id(self) -> str:
        """Return which ledger this is: a text that was drawn when its tables were made. From its first use on a ledger
        object raises LedgerReplaced whenever it finds another one in its place, or none."""
        ...

    def expect(self, ledger_id: str) -> None:
        """Accept no other ledger than this one."""
        ...

    def void_tokens(self) -> int:
        """Declare every living worker dead and every token void, after a restore from a backup. Claimed jobs go back to
        their queues, running ones wait for the next sweep. Return the number of workers."""
        ...

    def describe(self) -> dict[str, Any]:
        """Describe this ledger for people: database, version, schema, pooler, wake-ups."""
        ...

    def diagnose(self, *, far_s: float, late_s: float) -> Diagnosis:
        """Look at the ledger's own health, in bounded looks; try a real wake-up if there are any.

        `scheduled` are jobs due in more than `far_s`, `overdue` those that have been due for `late_s`."""
        ...

    def blockers(self, *, open_s: float) -> tuple[Blocker, ...]:
        """Return the transactions that hold locks of the ledger and have been open for longer than `open_s`.

        Needs none of the ledger's own tables, so it answers even if one of them is locked. Looks for a second or two if
        it finds any, to see what waits for them."""
        ...

    def notify(self, words: Iterable[str]) -> None:
        """Wake the listeners that these words concern: 'queue:NAME', 'worker:ID' (control), 'workers' (one was started
        or died).

        Best effort, outside any transaction. Never raises if a listener cannot be reached."""
        ...

    def close(self) -> None: ...
