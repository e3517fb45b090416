"""Read the SQL functions of the ledger from `functions/`, where each has its one definition.

A file has comments and statements of this form, and nothing else:

    create or replace function {schema}.is_due(p_queues text[]) returns boolean
    language plpgsql stable
    {nested_loops}
    set lock_timeout = '400ms'
    as $body$
    …
    $body$;

A line that is only a name in braces is a macro: it stands for the `SET` clauses under that name in `macros.sql`, which
may begin with another macro.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

from unstuck.ledger.sql import parse_queries, read_sql

PACKAGE = "unstuck.ledger.postgres.functions"
MACROS = "macros.sql"

_FUNCTION = re.compile(
    r"^create or replace function \{schema\}\.(?P<name>[a-z0-9_]+)(?P<signature>\(.*?)^language .*?^\$body\$;$",
    re.MULTILINE | re.DOTALL,
)
_MACRO = re.compile(r"^\{([a-z_]+)\}$", re.MULTILINE)


@dataclass(frozen=True)
class Function:
    name: str
    signature: str
    """Its arguments and its result."""
    sql: str
    """The statement that creates or replaces it, with `{schema}` still in it."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()[:16]


def read_functions(package: str = PACKAGE) -> tuple[Function, ...]:
    """Return every function of a package by file and place; a name that is used twice is a mistake."""
    macros = parse_macros(read_sql(package, MACROS))
    names = sorted(entry.name for entry in files(package).iterdir() if entry.name.endswith(".sql"))
    found = [one for name in names if name != MACROS for one in parse_functions(name, read_sql(package, name), macros)]
    twice = {one.name for one in found if sum(other.name == one.name for other in found) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} in {package}: there must be one definition")
    return tuple(found)


def parse_macros(text: str) -> dict[str, str]:
    """Return the lines of each macro. One that begins with another stands below it."""
    macros: dict[str, str] = {}
    for name, lines in parse_queries(text).items():
        macros[name] = expand(MACROS, lines, macros)
    return macros


def expand(file: str, text: str, macros: Mapping[str, str]) -> str:
    """Put the lines of each macro in its place."""
    unknown = [name for name in _MACRO.findall(text) if name not in macros]
    if unknown:
        raise ValueError(f"{file} uses the macro {{{unknown[0]}}}, which {MACROS} does not have above that place")
    return _MACRO.sub(lambda match: macros[match[1]], text)


def parse_functions(file: str, text: str, macros: Mapping[str, str]) -> Iterator[Function]:
    """Cut the text of one file into its functions."""
    rest = _FUNCTION.sub("", text)
    left = [line for line in rest.splitlines() if line.strip() and not line.startswith("--")]
    if left:
        raise ValueError(f"{file} has something that is no function: {left[0]}")
    for match in _FUNCTION.finditer(text):
        if "$body$" in match["signature"]:
            raise ValueError(f"{file}: {match['name']} has no line that begins with `language`")
        yield Function(match["name"], " ".join(match["signature"].split()), expand(file, match[0], macros))
