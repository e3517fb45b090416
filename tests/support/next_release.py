"""Migrate a ledger as the next version would: our code is then the last release's, and must go on working.

migrate_to_next(url)                       adds a column to every table, an index and functions
migrate_to_next(url, compatible=False)     and says that older code no longer works
"""

from collections.abc import Sequence

from unstuck.config import Settings
from unstuck.ledger.migrate import Migration
from unstuck.ledger.open import open_ledger
from unstuck.ledger.postgres.migrate import MIGRATIONS as POSTGRES
from unstuck.ledger.sqlite.ledger import SqliteLedger
from unstuck.ledger.sqlite.migrate import MIGRATIONS as SQLITE

_POSTGRES = """
do $$ declare t record; begin
    for t in select format('%I.%I', schemaname, tablename) as name from pg_tables where schemaname = 'unstuck' loop
        execute format('alter table %s add column colour text not null default ''grey''', t.name);
    end loop;
end $$;
create index jobs_colour on {schema}.jobs (colour) where colour <> 'grey';
create function {schema}.turn_v2(p_colour text) returns text language sql as 'select p_colour';
create function {schema}.beat_v2(p_colour text) returns text language sql as 'select p_colour';
"""
_SQLITE = "CREATE INDEX unstuck_jobs_colour ON unstuck_jobs (colour) WHERE colour <> 'grey';"


def migrate_to_next(url: str, *, compatible: bool = True) -> str:
    """Return the name of the migration that was applied."""
    ledger = open_ledger(Settings(url=url))
    try:
        if isinstance(ledger, SqliteLedger):
            with ledger.db.read() as cursor:
                tables = cursor.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'unstuck_%'")
                widened = [f"ALTER TABLE {name} ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey';" for (name,) in tables]
            ours, sql = SQLITE, "\n".join([*widened, _SQLITE])
        else:
            ours, sql = POSTGRES, _POSTGRES
        [applied] = ledger.migrate(migrations=_with(ours, sql, len(ours) if compatible else len(ours) + 1))
        return applied
    finally:
        ledger.close()


def _with(ours: Sequence[Migration], sql: str, works_with: int) -> Sequence[Migration]:
    number = len(ours) + 1
    said = f"-- works with code from schema: {works_with}\n"
    return (*ours, Migration(number, f"{number:04}_next", said + sql, last_released=len(ours)))
