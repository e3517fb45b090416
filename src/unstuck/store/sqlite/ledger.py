"""The ledger in a SQLite file: one host, many processes, nothing to install."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from unstuck.config import IN_MEMORY, Settings, sqlite_file
from unstuck.domain.errors import UnstuckError
from unstuck.store.gaps import Gaps
from unstuck.store.migrations import WAIT_S, Migration
from unstuck.store.sqlite import migrating
from unstuck.store.sqlite.alerts import AlertVerbs
from unstuck.store.sqlite.api_tokens import ApiTokenVerbs
from unstuck.store.sqlite.audit import AuditVerbs
from unstuck.store.sqlite.bell import Bells, Ringer
from unstuck.store.sqlite.client import ClientVerbs
from unstuck.store.sqlite.counting import CountingVerbs
from unstuck.store.sqlite.database import Database
from unstuck.store.sqlite.diagnosing import DiagnosingVerbs
from unstuck.store.sqlite.exchanging import ExchangeVerbs
from unstuck.store.sqlite.foreign import ForeignVerbs
from unstuck.store.sqlite.forks import watch_forks
from unstuck.store.sqlite.health import HealthVerbs
from unstuck.store.sqlite.journal import JournalVerbs
from unstuck.store.sqlite.letters import LetterVerbs
from unstuck.store.sqlite.memory import NAME, MemoryDatabase
from unstuck.store.sqlite.operator import OperatorVerbs
from unstuck.store.sqlite.ordering import OrderVerbs
from unstuck.store.sqlite.people import ReadingVerbs
from unstuck.store.sqlite.reaper import ReaperVerbs
from unstuck.store.sqlite.requests import RequestVerbs
from unstuck.store.sqlite.schedules import ScheduleVerbs
from unstuck.store.sqlite.telling import TellingVerbs
from unstuck.store.sqlite.upkeep import UpkeepVerbs
from unstuck.store.sqlite.verbs import fetch
from unstuck.store.sqlite.workflows import WorkflowVerbs


class SqliteLedger(
    ExchangeVerbs,
    LetterVerbs,
    RequestVerbs,
    ClientVerbs,
    ForeignVerbs,
    ReaperVerbs,
    UpkeepVerbs,
    HealthVerbs,
    OperatorVerbs,
    OrderVerbs,
    ReadingVerbs,
    DiagnosingVerbs,
    AlertVerbs,
    TellingVerbs,
    CountingVerbs,
    ApiTokenVerbs,
    AuditVerbs,
    JournalVerbs,
    ScheduleVerbs,
    WorkflowVerbs,
):
    """Satisfies `unstuck.store.contract.Ledger`; the verbs are in the files they are named for."""

    one_host = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # A holder that is frozen for half of the time in which workers are taken for dead is in everybody's way.
        kill_after_s = settings.recovery.heartbeat_timeout_s / 2
        self.in_memory = settings.url == IN_MEMORY
        self.db = (
            MemoryDatabase(kill_after_s=kill_after_s)
            if self.in_memory
            else Database(path_of(settings.url), kill_after_s=kill_after_s)
        )
        self.gaps = Gaps()
        self.ringer = Ringer(self._find_bells)
        watch_forks(self)

    def migrate(self, *, wait_s: float = WAIT_S, migrations: Sequence[Migration] | None = None) -> list[str]:
        return migrating.migrate(self.db, migrating.MIGRATIONS if migrations is None else migrations, wait_s)

    def check_schema(self) -> None:
        migrating.check(self.db)

    def ledger_id(self) -> str:
        with self.db.read() as cursor:
            [(found,)] = fetch(cursor, "ledger_id")
        return str(found)

    def expect(self, ledger_id: str) -> None:
        self.db.ledger_id = ledger_id

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

    def close(self) -> None:
        self.ringer.close()
        self.db.close()

    def _find_bells(self) -> Bells:
        try:
            with self.db.read() as cursor:
                rows = fetch(cursor, "bells")
                listeners = fetch(cursor, "listeners")
        except (UnstuckError, OSError):
            return []
        bells: Bells = [(worker_id, bell, frozenset(msgspec.json.decode(queues))) for worker_id, bell, queues in rows]
        return bells + [(None, address, frozenset()) for (address,) in listeners]

    def before_fork(self) -> None: ...

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None:
        # The bells were rung through the parent's socket, perhaps in the middle of a ring.
        self.ringer.forget()


def path_of(url: str) -> Path:
    """Return the file that a URL names, by its real path: two names of one ledger share its lock file and wake-ups."""
    path = sqlite_file(url)
    assert path is not None, "only SQLite has a file"
    return Path(os.path.realpath(path))
