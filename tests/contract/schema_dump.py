"""Write down what `migrate` makes of an empty database, from the catalogs, so that two versions can be compared.

`python -m tests.contract.schema_dump` writes it for both databases to `tests/contract/schema/`. Run it after a change
of the tables and look at the difference: it is what the new migration does. With `--bodies FOLDER` it writes elsewhere,
and with the bodies of functions and views. That is for comparing two versions of everything.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import psycopg

from unstuck.config import Settings
from unstuck.ledger.sqlite.ledger import SqliteLedger

STORED = Path(__file__).with_name("schema")
POSTGRES = "postgresql.txt"
SQLITE = "sqlite.txt"

_TABLES = """
select c.oid, c.relname, c.relkind::text, coalesce(array_to_string(c.reloptions, ', '), ''), c.relpersistence::text,
       coalesce(c.relacl::text, ''), coalesce(obj_description(c.oid, 'pg_class'), '')
from pg_class c where c.relnamespace = %(schema)s::text::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'c')
order by c.relkind, c.relname
"""
_COLUMNS = """
select concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod),
    case when a.attcollation <> t.typcollation then 'collate ' || a.attcollation::regcollation end,
    case when a.attnotnull then 'not null' end,
    'default ' || pg_get_expr(d.adbin, d.adrelid),
    'identity ' || nullif(a.attidentity::text, ''),
    case when a.attgenerated <> '' then 'generated stored' end,
    case when a.attstorage <> t.typstorage then 'storage ' || a.attstorage::text end,
    'options ' || a.attoptions::text, 'grants ' || a.attacl::text,
    'comment ' || col_description(a.attrelid, a.attnum))
from pg_attribute a join pg_type t on t.oid = a.atttypid
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = %(oid)s and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
# From PostgreSQL 18 on, "not null" is a constraint too. It stands at the column.
_CONSTRAINTS = """
select format('constraint %%s %%s', conname, pg_get_constraintdef(oid)) from pg_constraint
where conrelid = %(oid)s and contype <> 'n' order by conname
"""
_INDEXES = """
select concat_ws(' ', pg_get_indexdef(i.indexrelid), case when not i.indisvalid then 'INVALID' end)
from pg_index i join pg_class c on c.oid = i.indexrelid where i.indrelid = %(oid)s order by c.relname
"""
_TRIGGERS = """
select concat_ws(' ', pg_get_triggerdef(oid), 'enabled ' || tgenabled::text) from pg_trigger
where tgrelid = %(oid)s and not tgisinternal order by tgname
"""
_SEQUENCES = """
select concat_ws(' ', 'sequence', sequencename, data_type, 'start', start_value, 'min', min_value, 'max', max_value,
                 'by', increment_by, 'cache', cache_size, case when cycle then 'cycle' end)
from pg_sequences where schemaname = %(schema)s::text order by sequencename
"""
_FUNCTIONS = """
select concat_ws(' ', 'function', p.proname || '(' || pg_get_function_arguments(p.oid) || ')', 'returns',
           pg_get_function_result(p.oid), 'language', l.lanname, p.provolatile::text, p.proparallel::text,
           case when p.proisstrict then 'strict' end, case when p.prosecdef then 'security definer' end,
           case when p.proleakproof then 'leakproof' end, 'cost ' || p.procost, 'rows ' || nullif(p.prorows, 0),
           'grants ' || p.proacl::text, 'comment ' || obj_description(p.oid, 'pg_proc')),
       coalesce(p.proconfig, '{}'), p.prosrc
from pg_proc p join pg_language l on l.oid = p.prolang
where p.pronamespace = %(schema)s::text::regnamespace order by p.proname, pg_get_function_identity_arguments(p.oid)
"""
_OTHERS = """
select 'type ' || t.typname from pg_type t
where t.typnamespace = %(schema)s::text::regnamespace and t.typtype in ('e', 'd', 'r')
union all select 'operator ' || o.oid::regoperator from pg_operator o
where o.oprnamespace = %(schema)s::text::regnamespace
union all select 'grants ' || n.nspacl::text from pg_namespace n
where n.nspname = %(schema)s::text and n.nspacl is not null
union all select 'rule ' || r.rulename from pg_rewrite r join pg_class c on c.oid = r.ev_class
where c.relnamespace = %(schema)s::text::regnamespace and r.rulename <> '_RETURN'
order by 1
"""


def dump_postgres(connection: psycopg.Connection, schema: str = "unstuck", *, bodies: bool = False) -> str:
    """Describe every object of the schema. Views and functions have their bodies only if asked for.

    Their bodies stand in one place already, and each version of PostgreSQL prints a view in its own way."""
    return "\n".join(_postgres(connection, schema, bodies)) + "\n"


def _postgres(connection: psycopg.Connection, schema: str, bodies: bool) -> Iterator[str]:
    def listed(query: str, oid: int = 0) -> list[str]:
        rows = connection.execute(query.encode(), {"schema": schema, "oid": oid}).fetchall()
        return [line.replace(f"{schema}.", "") for (line,) in rows]

    yield from listed(_SEQUENCES)
    for oid, name, kind, options, persistence, grants, comment in connection.execute(
        _TABLES.encode(), {"schema": schema}
    ).fetchall():
        yield ""
        about = [f"with ({options})" if options else "", grants, comment, "" if persistence == "p" else persistence]
        yield " ".join(filter(None, [{"r": "table", "v": "view"}.get(kind, kind), name, *about]))
        for query in (_COLUMNS, _CONSTRAINTS, _INDEXES, _TRIGGERS):
            yield from (f"    {line}" for line in listed(query, oid))
        if kind == "v" and bodies:
            yield from listed("select pg_get_viewdef(%(oid)s::oid)", oid)
    for head, settings, body in connection.execute(_FUNCTIONS.encode(), {"schema": schema}).fetchall():
        yield ""
        yield head.replace(f"{schema}.", "")
        yield from (f"    set {setting}" for setting in sorted(settings))
        if bodies:
            yield body
    yield ""
    yield from listed(_OTHERS)


def dump_sqlite(connection: apsw.Connection, *, bodies: bool = False) -> str:
    """Describe every object of the file: what each table's columns are, and the text by which it was made."""
    return "\n".join(_sqlite(connection, bodies)) + "\n"


def _sqlite(connection: apsw.Connection, bodies: bool) -> Iterator[str]:
    found = connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY type DESC, name"
    ).fetchall()
    for kind, name, table, sql in found:
        yield f"{kind} {name} on {table}"
        if kind in ("table", "view"):
            for row in connection.execute(f"SELECT * FROM pragma_table_xinfo('{name}')"):
                yield f"    {row}"
        if kind == "table" or (kind == "view" and bodies):
            yield from (f"    {line}" for line in _pieces(sql))
        elif kind != "view":
            yield f"    {' '.join(sql.split())}"
        yield ""


def _pieces(sql: str) -> list[str]:
    """Cut a statement into its parts, without comments and layout: a column that was added later looks the same."""
    bare = " ".join(re.sub(r"--.*$", "", sql, flags=re.MULTILINE).split()).replace("( ", "(").replace(" )", ")")
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(bare):
        depth += (sign == "(") - (sign == ")")
        if (sign == "," and depth == 1) or (sign == "(" and depth == 1):
            parts.append(bare[start : place + 1].strip(" ,"))
            start = place + 1
    return [part for part in (*parts, bare[start:].strip()) if part]


def write_dumps(folder: Path, *, bodies: bool = False) -> None:
    from tests.support.postgres import start_postgres

    folder.mkdir(parents=True, exist_ok=True)
    with start_postgres() as server, tempfile.TemporaryDirectory() as scratch:
        with psycopg.connect(server.new_ledger(), autocommit=True) as connection:
            (folder / POSTGRES).write_text(dump_postgres(connection, bodies=bodies))
        ledger = SqliteLedger(Settings(url=f"sqlite:///{scratch}/jobs.db"))
        ledger.migrate()
        ledger.close()
        file = apsw.Connection(f"{scratch}/jobs.db")
        (folder / SQLITE).write_text(dump_sqlite(file, bodies=bodies))
        file.close()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--bodies"]:
        write_dumps(Path(arguments[1]), bodies=True)
    else:
        write_dumps(STORED)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
