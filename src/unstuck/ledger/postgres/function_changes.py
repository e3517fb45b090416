"""Decide which functions of a ledger are replaced or dropped, and write that in SQL.

The ledger's table `functions` says which text of each function is in place. Code replaces those that differ from its
own, unless newer code has migrated the tables: the functions are then of that code, and work with ours as well.

A function that is no longer in `functions/` stays until no code that had it may run on these tables: that code knows
fewer migrations than the oldest code that the tables work with (`works_with`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from unstuck.ledger.postgres.connect import Connection
from unstuck.ledger.postgres.function_files import Function
from unstuck.ledger.sql import in_schema
from unstuck.version import VERSION

READ = "select f.name, f.digest, f.signature, f.number from {schema}.functions f"
_WRITE = """
insert into {schema}.functions as f (name, digest, signature, number, version) values %s
on conflict (name) do update set
    digest = excluded.digest, signature = excluded.signature, number = greatest(f.number, excluded.number),
    version = case when f.digest = excluded.digest then f.version else excluded.version end,
    applied_at = case when f.digest = excluded.digest then f.applied_at else excluded.applied_at end
"""
_FORGET = "delete from {schema}.functions where name = any (%s)"
# Every function of that name: a statement that drops one has to know its arguments.
_DROP = """
do $drop$
declare
    v_function regprocedure;
begin
    for v_function in
        select p.oid from pg_catalog.pg_proc p
        where p.pronamespace = {namespace}::regnamespace and p.proname = any ({names})
    loop
        execute 'drop function ' || v_function;
    end loop;
end
$drop$
"""


@dataclass(frozen=True)
class StoredFunction:
    """A row of the ledger's table `functions`."""

    digest: str
    signature: str
    number: int
    """The newest migration known to the code that had this function last."""


@dataclass(frozen=True)
class FunctionChanges:
    replaced: tuple[Function, ...] = ()
    resigned: frozenset[str] = frozenset()
    """Those of them that have other arguments or another result than before: they are dropped first."""
    confirmed: tuple[Function, ...] = ()
    """In place already, and known to newer code than it was."""
    dropped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.replaced or self.confirmed or self.dropped)

    def only(self, names: Collection[str]) -> "FunctionChanges":
        """Return the part of it that puts these functions in place."""
        return FunctionChanges(tuple(one for one in self.replaced if one.name in names), self.resigned)


def compare(
    functions: Sequence[Function], stored: Mapping[str, StoredFunction], number: int, oldest: int
) -> FunctionChanges:
    """Return what code whose newest migration is `number` changes; `oldest` is the oldest that the tables work with."""
    replaced = changed(functions, stored)
    names = {one.name for one in functions}
    return FunctionChanges(
        replaced,
        frozenset(one.name for one in replaced if one.name in stored and stored[one.name].signature != one.signature),
        tuple(one for one in functions if one not in replaced and stored[one.name].number < number),
        tuple(sorted(name for name, one in stored.items() if name not in names and one.number < oldest)),
    )


def changed(functions: Sequence[Function], stored: Mapping[str, StoredFunction]) -> tuple[Function, ...]:
    """Return those of these functions whose text is not the one that is in place."""
    return tuple(one for one in functions if one.name not in stored or stored[one.name].digest != one.digest)


def create(connection: Connection, quoted: str, changes: FunctionChanges) -> list[bytes]:
    """Return the statements that put functions in place, and drop what no code needs any more."""
    dropped = [*changes.dropped, *(one.name for one in changes.replaced if one.name in changes.resigned)]
    # Functions may call each other in any order, and read tables that the same transaction makes later.
    statements = [b"set local check_function_bodies = off"]
    if dropped:
        text = sql.SQL(_DROP).format(namespace=sql.Literal(quoted), names=sql.Literal(dropped))
        statements.append(text.as_bytes(connection))
    return [*statements, *(in_schema(one.sql, quoted).encode() for one in changes.replaced)]


def note(connection: Connection, quoted: str, changes: FunctionChanges, number: int) -> list[bytes]:
    """Return the statements that write down what was changed by code whose newest migration is `number`."""
    rows = [
        _listed((one.name, one.digest, one.signature, number, VERSION))
        for one in (*changes.replaced, *changes.confirmed)
    ]
    statements = []
    if rows:
        statements.append(_filled(connection, _WRITE, quoted, sql.SQL(", ").join(rows)))
    if changes.dropped:
        statements.append(_filled(connection, _FORGET, quoted, sql.Literal(list(changes.dropped))))
    return statements


def _listed(values: Sequence[object]) -> sql.Composed:
    return sql.SQL("({})").format(sql.SQL(", ").join(sql.Literal(value) for value in values))


def _filled(connection: Connection, query: str, quoted: str, values: sql.Composable) -> bytes:
    before, after = in_schema(query, quoted).split("%s")
    return before.encode() + values.as_bytes(connection) + after.encode()
