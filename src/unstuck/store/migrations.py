"""Know the numbered migrations of a dialect and what is still to be applied.

Migrations are files `0001_what_it_does.sql` in a package; numbers have no gaps, and a file that was
released is never changed. Each dialect applies them under its own lock, one transaction per file, and
writes number and name into its `migrations` table in the same transaction.

    MIGRATIONS = read_migrations("unstuck.store.sqlite.migrations")
    for migration in pending(MIGRATIONS, applied_numbers):
        ...
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files

from unstuck.domain.errors import NoLedger, SchemaAhead, SchemaMismatch
from unstuck.store.sql import read_sql

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
CURE_OLD = "Run `unstuck migrate` (or app.migrate())."
CURE_NEW = "Upgrade Unstuck here, or point it at another ledger."


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    """The file's name without its ending, such as `0001_ledger`."""
    sql: str


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


def pending(migrations: Sequence[Migration], applied: Collection[int]) -> list[Migration]:
    """Give what is to be applied, in order; SchemaMismatch when the tables are newer than this code."""
    refuse_newer(migrations, applied)
    return [migration for migration in migrations if migration.number not in applied]


def check_applied(migrations: Sequence[Migration], applied: Collection[int], where: str) -> None:
    """Raise SchemaMismatch unless exactly these migrations are in place; `where` names the ledger for people."""
    refuse_newer(migrations, applied)
    left = pending(migrations, applied)
    if len(left) == len(migrations):
        raise NoLedger(f"There is no ledger in {where} yet. {CURE_OLD}")
    if left:
        names = ", ".join(migration.name for migration in left)
        raise SchemaMismatch(f"The tables in {where} are older than this code: {names} not applied. {CURE_OLD}")


def refuse_newer(migrations: Sequence[Migration], applied: Collection[int]) -> None:
    newest = max(applied, default=0)
    if newest > len(migrations):
        raise SchemaAhead(
            f"The tables of this ledger are newer than this code: they are at migration {newest}, "
            f"and this version of Unstuck knows {len(migrations)}. {CURE_NEW}"
        )
