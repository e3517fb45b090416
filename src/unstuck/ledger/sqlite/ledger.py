"""The ledger in a SQLite file: one host, many processes, nothing to install."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from unstuck.config import IN_MEMORY, Settings, sqlite_file
from unstuck.errors import UnstuckError
from unstuck.ledger.contract.diagnosis import Blocker, Diagnosis
from unstuck.ledger.gaps import Gaps
from unstuck.ledger.migrate import WAIT_S, Migration
from unstuck.ledger.sqlite import migrate
from unstuck.ledger.sqlite.admin import Admin
from unstuck.ledger.sqlite.database import Database, fetch, watch_forks
from unstuck.ledger.sqlite.diagnosis import diagnose, find_blockers
from unstuck.ledger.sqlite.events import Events
from unstuck.ledger.sqlite.jobs import Jobs
from unstuck.ledger.sqlite.maintenance import Maintenance, void_tokens
from unstuck.ledger.sqlite.memory import NAME, MemoryDatabase
from unstuck.ledger.sqlite.notifier import ListenerAddresses, Notifier
from unstuck.ledger.sqlite.queues import Queues
from unstuck.ledger.sqlite.recovery import Recovery
from unstuck.ledger.sqlite.schedules import Schedules
from unstuck.ledger.sqlite.workers import Workers
from unstuck.ledger.sqlite.workflows import Workflows


class SqliteLedger:
    """See `unstuck.ledger.contract.Ledger`, which this fulfils. Each part is in the file that is named for it."""

    single_host = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # A holder that is frozen for half of the time in which workers are taken for dead is in everybody's way.
        kill_after_s = settings.recovery.heartbeat_timeout_s / 2
        self.in_memory = settings.url == IN_MEMORY
        db = self.db = (
            MemoryDatabase(kill_after_s=kill_after_s)
            if self.in_memory
            else Database(path_of(settings.url), kill_after_s=kill_after_s)
        )
        self.gaps = Gaps()
        wakeups = self.wakeups = Notifier(self._find_addresses)
        self.jobs = Jobs(db, wakeups)
        self.workers = Workers(db, wakeups, self.gaps)
        self.recovery = Recovery(db, wakeups)
        self.maintenance = Maintenance(db, wakeups)
        self.workflows = Workflows(db, wakeups)
        self.schedules = Schedules(db)
        self.queues = Queues(db, wakeups)
        self.events = Events(db)
        self.admin = Admin(db)
        watch_forks(self)

    def migrate(self, *, wait_s: float = WAIT_S, migrations: Sequence[Migration] | None = None) -> list[str]:
        return migrate.migrate(self.db, migrate.MIGRATIONS if migrations is None else migrations, wait_s)

    def check_schema(self) -> None:
        migrate.check(self.db)

    def ledger_id(self) -> str:
        with self.db.read() as cursor:
            [(found,)] = fetch(cursor, "ledger_id")
        return str(found)

    def expect(self, ledger_id: str) -> None:
        self.db.ledger_id = ledger_id

    def void_tokens(self) -> int:
        return void_tokens(self.db)

    def describe(self) -> dict[str, Any]:
        return {
            "database": "sqlite",
            "path": NAME if self.in_memory else str(self.db.path),
            "version": apsw.sqlite_lib_version(),
            "driver": f"apsw {apsw.apsw_version()}",
            "journal": "memory" if self.in_memory else "wal",
            "synchronous": "off" if self.in_memory else "full",
            "pooler": False,
            "bell": "unix datagrams",
        }

    def diagnose(self, *, far_s: float, late_s: float) -> Diagnosis:
        return diagnose(self.db, self.settings.recovery.rules, far_s=far_s, late_s=late_s)

    def blockers(self, *, open_s: float) -> tuple[Blocker, ...]:
        return find_blockers(self.db, open_s)

    def notify(self, words: Iterable[str]) -> None:
        self.wakeups.notify(words)

    def close(self) -> None:
        self.wakeups.close()
        self.db.close()

    def _find_addresses(self) -> ListenerAddresses:
        try:
            with self.db.read() as cursor:
                rows = fetch(cursor, "bells")
                listeners = fetch(cursor, "listeners")
        except (UnstuckError, OSError):
            return []
        addresses: ListenerAddresses = [
            (worker_id, address, frozenset(msgspec.json.decode(queues))) for worker_id, address, queues in rows
        ]
        return addresses + [(None, address, frozenset()) for (address,) in listeners]

    def before_fork(self) -> None: ...

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None:
        # The bells were rung through the parent's socket, perhaps in the middle of a ring.
        self.wakeups.forget()


def path_of(url: str) -> Path:
    """Return the file that a URL names, by its real path: two names of one ledger share its lock file and wake-ups."""
    path = sqlite_file(url)
    assert path is not None, "only SQLite has a file"
    return Path(os.path.realpath(path))
