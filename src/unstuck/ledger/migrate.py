"""Know the numbered migrations of a dialect, what is still to be applied, and which code the tables work with.

Migrations are files `0001_what_it_does.sql` in a package. Numbers have no gaps, and a file is never changed, only
added. Each dialect applies them under its own lock, one transaction per file, and writes a row about it into its
`migrations` table in the same transaction. The digest in that row tells tables that were made by a draft of a file,
before a release.

Every migration states the oldest code that still works after it, in a line of its own:

    -- works with code from schema: 26

Older code than that is refused (SchemaAhead); code from that number on keeps working beside the newer
tables. Without the line, code of the last release works on. See docs/contributing.md.

On PostgreSQL a view may call functions. They are put in place before the migration that says so:

    -- uses functions: watched_s

    MIGRATIONS = read_migrations("unstuck.ledger.sqlite.schema")
    for migration in pending(MIGRATIONS, applied):
        ...
"""

import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files

from unstuck.domain.jitter import jitter
from unstuck.domain.units import brief
from unstuck.errors import MigrationBlocked, NoLedger, SchemaAhead, SchemaForked, SchemaMismatch
from unstuck.ledger.sql import read_sql
from unstuck.logs import logger
from unstuck.version import VERSION

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_WORKS_WITH = re.compile(r"^-- works with code from schema: *(\d+) *$", re.MULTILINE)
_USES = re.compile(r"^-- uses functions: *([a-z0-9_, ]+?) *$", re.MULTILINE)
CURE_OLD = "Run `unstuck migrate` (or app.migrate())."
CURE_FORKED = (
    "They cannot be migrated: point Unstuck at another ledger, or drop these tables if nothing in them is needed."
)
WAIT_S = 300.0
"""How long a migration waits in all for locks that others hold."""
SAY_AGAIN_S = 10.0
FIRST_PAUSE_S = 0.3
LONGEST_PAUSE_S = 3.0

_COMMENT = re.compile(r"--.*$", re.MULTILINE)

log = logger("unstuck.ledger")


@dataclass(frozen=True)
class AppliedMigration:
    """A row of the ledger's `migrations` table."""

    digest: str | None
    """None: the table is older than the column."""
    works_with: int
    """The oldest schema number whose code works after this migration."""
    version: str
    """The version of Unstuck that applied it."""


Applied = Mapping[int, AppliedMigration]
"""The migrations that are in place, by number."""


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    """The file's name without its ending, such as `0001_schema`."""
    sql: str
    last_released: int = 0
    """The newest migration of the last release of Unstuck; 0 before the first release."""

    @property
    def digest(self) -> str:
        """Tell this file from another of the same number; its comments and its layout may change."""
        return hashlib.sha256(" ".join(_COMMENT.sub("", self.sql).split()).encode()).hexdigest()[:16]

    @property
    def works_with(self) -> int:
        """Return the oldest schema number whose code works after this migration."""
        declared = _WORKS_WITH.search(self.sql)
        if declared is None:
            return self.last_released if 0 < self.last_released < self.number else self.number
        if int(declared[1]) > self.number:
            raise ValueError(f"{self.name} cannot need code that is newer than itself: {declared[0]}")
        return int(declared[1])

    @property
    def uses(self) -> frozenset[str]:
        """Return the names of the functions that must be there before this migration."""
        return frozenset(name for names in _USES.findall(self.sql) for name in names.replace(",", " ").split())


def read_migrations(package: str) -> tuple[Migration, ...]:
    """Return every migration of a package in order."""
    last_released = int(import_module(package).LAST_RELEASED)
    found = []
    for entry in files(package).iterdir():
        match = _FILE.fullmatch(entry.name)
        if match:
            name = entry.name.removesuffix(".sql")
            found.append(Migration(int(match[1]), name, read_sql(package, entry.name), last_released))
    found.sort(key=lambda migration: migration.number)
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"the migrations of {package} are not numbered 1, 2, 3, …")
    return tuple(found)


def pending(migrations: Sequence[Migration], applied: Applied, where: str) -> list[Migration]:
    """Return what is to be applied, in order.

    Raise SchemaMismatch if the tables no longer work with this code, or are not of its kind. `where` names the ledger
    for people."""
    _refuse_forked(migrations, applied, where)
    _refuse_newer(migrations, applied, where)
    return [migration for migration in migrations if migration.number not in applied]


def check_applied(migrations: Sequence[Migration], applied: Applied, where: str) -> None:
    """Raise SchemaMismatch unless this code works with the tables; `where` names the ledger for people."""
    left = pending(migrations, applied, where)
    if len(left) == len(migrations):
        raise NoLedger(f"There is no ledger in {where} yet. {CURE_OLD}")
    if left:
        names = ", ".join(migration.name for migration in left)
        raise SchemaMismatch(f"The tables in {where} are older than this code: {names} not applied. {CURE_OLD}")


def _refuse_forked(migrations: Sequence[Migration], applied: Applied, where: str) -> None:
    others = [one.name for one in migrations if one.number in applied and applied[one.number].digest != one.digest]
    if others:
        raise SchemaForked(
            f"The tables in {where} were made by a version of Unstuck that was never released: its {others[0]} was "
            f"not the one of this version. {CURE_FORKED}"
        )


def _refuse_newer(migrations: Sequence[Migration], applied: Applied, where: str) -> None:
    known = len(migrations)
    newer = [number for number in applied if number > known]
    needed = max((applied[number].works_with for number in newer), default=0)
    if known >= needed:
        return
    newest = max(newer)
    raise SchemaAhead(
        f"The tables in {where} are newer than this code and no longer work with it: they are at migration {newest} "
        f"and need code that knows {needed} or later. This version of Unstuck ({VERSION}) knows {known}. Upgrade "
        f"Unstuck here to {applied[newest].version} or later, or point it at another ledger."
    )


class LockWait:
    """The patience of one `migrate` with locks that others hold: when to try again, what to say, when to give up."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._until_s = time.monotonic() + wait_s
        self._said: tuple[str, float] = ("", 0.0)
        self._pauses = _pauses()

    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def pause(self, name: str, blockers: str, cure: str) -> None:
        """Wait before the next try; raise MigrationBlocked, naming `blockers` and `cure`, if time is up."""
        left_s = self.left_s()
        if not left_s:
            raise MigrationBlocked(
                f"{name} was not applied: for {brief(self._wait_s)} it could not lock what it changes. It was blocked "
                f"by {blockers}. It changed nothing. {cure} Then run `unstuck migrate` again."
            )
        now_s = time.monotonic()
        if blockers != self._said[0] or now_s - self._said[1] >= SAY_AGAIN_S:
            self._said = (blockers, now_s)
            log.warning(f"{name} waits for a lock and tries again for {brief(left_s)}: it is blocked by {blockers}")
        time.sleep(min(next(self._pauses), left_s))


def _pauses() -> Iterator[float]:
    """Grow from a pause as long as the lock timeout: those who queued behind us must get on before we come back."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield jitter.uniform(1.0, 1.5) * pause_s
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
