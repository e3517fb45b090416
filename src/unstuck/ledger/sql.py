"""Read named queries from the `.sql` files of a package.

A file holds blocks; each begins with its name, and the lines above the statement say why it is safe:

    -- name: beat
    -- One narrow row, no index on what changes: stays HOT.
    update {schema}.worker_heartbeats set beat_at = now() where worker_id = %(worker_id)s;

    queries = load_queries("unstuck.ledger.postgres.queries", "workers.sql", "jobs.sql", schema='"unstuck"')
    queries["beat"]

Comments before the statement, and the closing semicolon, are left out of what is given, so that a
statement reaches the database bare. `{schema}` becomes the quoted schema name where one is given; SQLite
has none. Nothing else is ever put into SQL: values travel as parameters.
"""

import re
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

_NAME = re.compile(r"^-- name: *([a-z][a-z0-9_]*) *$", re.MULTILINE)
SCHEMA = "{schema}"


def load_queries(package: str, *names: str, schema: str | None = None) -> Mapping[str, str]:
    """Give the statements of these files of `package` by name; a name that is used twice is a mistake."""
    queries: dict[str, str] = {}
    for name in names:
        for query, statement in parse_queries(read_sql(package, name)).items():
            if query in queries:
                raise ValueError(f"query {query!r} of {name} has a namesake in {package}")
            queries[query] = in_schema(statement, schema)
    return MappingProxyType(queries)


def parse_queries(text: str) -> dict[str, str]:
    """Cut the text of one file into its named statements."""
    _, *parts = _NAME.split(text)
    queries: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        statement = _without_leading_comments(body).strip().removesuffix(";").rstrip()
        if not statement:
            raise ValueError(f"query {name!r} is empty")
        if name in queries:
            raise ValueError(f"query {name!r} is there twice")
        queries[name] = statement
    return queries


def read_sql(package: str, name: str) -> str:
    """Give the text of one `.sql` file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def in_schema(text: str, schema: str | None) -> str:
    """Put the (quoted) schema name in its place."""
    return text if schema is None else text.replace(SCHEMA, schema)


def _without_leading_comments(body: str) -> str:
    lines = body.splitlines()
    first = next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("--")), len(lines))
    return "\n".join(lines[first:])
