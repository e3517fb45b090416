"""Know the numbered migrations of a dialect and what is still to be applied.

Migrations are files `0001_what_it_does.sql` in a package; numbers have no gaps, and a file that was
released is never changed. Each dialect applies them under its own lock, one transaction per file, and
writes number, name and digest into its `migrations` table in the same transaction: by the digest it is
known that tables were made by a file which was still to be changed, before a release.

    MIGRATIONS = read_migrations("unstuck.store.sqlite.migrations")
    for migration in pending(MIGRATIONS, applied):
        ...
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from unstuck.domain.errors import NoLedger, SchemaAhead, SchemaForked, SchemaMismatch
from unstuck.store.sql import read_sql

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
CURE_OLD = "Run `unstuck migrate` (or app.migrate())."
CURE_NEW = "Upgrade Unstuck here, or point it at another ledger."
CURE_FORKED = (
    "They cannot be migrated: point Unstuck at another ledger, or drop these tables if nothing in them is needed."
)

_COMMENT = re.compile(r"--.*$", re.MULTILINE)

Applied = Mapping[int, str | None]
"""The digests of the migrations that are in place, by number; None where none was kept."""


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    """The file's name without its ending, such as `0001_ledger`."""
    sql: str

    @property
    def digest(self) -> str:
        """Tell this file from another of the same number; its comments and its layout may change."""
        return hashlib.sha256(" ".join(_COMMENT.sub("", self.sql).split()).encode()).hexdigest()[:16]


def read_migrations(package: str) -> tuple[Migration, ...]:
    """Give every migration of a package in order."""
    found = []
    for entry in files(package).iterdir():
        match = _FILE.fullmatch(entry.name)
        if match:
            found.append(Migration(int(match[1]), entry.name.removesuffix(".sql"), read_sql(package, entry.name)))
    found.sort(key=lambda migration: migration.number)
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"the migrations of {package} are not numbered 1, 2, 3, …")
    return tuple(found)


def pending(migrations: Sequence[Migration], applied: Applied, where: str) -> list[Migration]:
    """Give what is to be applied, in order; SchemaMismatch when the tables are newer than this code, or not of its
    kind. `where` names the ledger for people."""
    refuse_newer(migrations, applied)
    _refuse_forked(migrations, applied, where)
    return [migration for migration in migrations if migration.number not in applied]


def check_applied(migrations: Sequence[Migration], applied: Applied, where: str) -> None:
    """Raise SchemaMismatch unless exactly these migrations are in place; `where` names the ledger for people."""
    left = pending(migrations, applied, where)
    if len(left) == len(migrations):
        raise NoLedger(f"There is no ledger in {where} yet. {CURE_OLD}")
    if left:
        names = ", ".join(migration.name for migration in left)
        raise SchemaMismatch(f"The tables in {where} are older than this code: {names} not applied. {CURE_OLD}")


def _refuse_forked(migrations: Sequence[Migration], applied: Applied, where: str) -> None:
    others = [one.name for one in migrations if one.number in applied and applied[one.number] != one.digest]
    if others:
        raise SchemaForked(
            f"The tables in {where} were made by a version of Unstuck that was never released: its {others[0]} was "
            f"not the one of this version. {CURE_FORKED}"
        )


def refuse_newer(migrations: Sequence[Migration], applied: Applied) -> None:
    newest = max(applied, default=0)
    if newest > len(migrations):
        raise SchemaAhead(
            f"The tables of this ledger are newer than this code: they are at migration {newest}, "
            f"and this version of Unstuck knows {len(migrations)}. {CURE_NEW}"
        )
