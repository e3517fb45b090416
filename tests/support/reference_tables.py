"""Write the tables of the docs that come from the source: `python -m tests.support.reference_tables`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

import unstuck
from unstuck.http import api

ROOT = Path(__file__).resolve().parents[2]


def endpoints() -> list[tuple[str, str, str]]:
    """Return every endpoint of the HTTP API: request, the scopes of which one is needed, what it does."""
    found = []
    for router in api.ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                path = route.path.replace(":path", "")
                summary = (route.summary or route.name.replace("_", " ")).replace("|", "\\|")
                scopes = " or ".join(sorted({scope for one in _calls(route.dependant) for scope in one}))
                found += [(f"{method} {path}", scopes or "–", summary) for method in sorted(route.methods)]
    return sorted(found, key=lambda row: (row[0].split(" ")[1], row[0]))


def _calls(dependant: Any) -> Iterator[tuple[str, ...]]:
    if scopes := getattr(dependant.call, "scopes", ()):
        yield tuple(scope.value for scope in scopes)
    for below in dependant.dependencies:
        yield from _calls(below)


def endpoint_table() -> str:
    rows = [f"| `{request}` | {scopes} | {summary} |" for request, scopes, summary in endpoints()]
    return "\n".join(["| request | scope | what it does |", "|---|---|---|", *rows])


def import_table() -> str:
    """Return where each public name is imported from."""
    config = ("Alerts", "HttpSettings", "MdpSettings")
    rows = [f"| `from unstuck import {name}` |" for name in sorted(unstuck.__all__)]
    rows += [f"| `from unstuck.config import {name}` |" for name in config]
    return "\n".join(["| import |", "|---|", *rows])


TABLES = {"docs/http-api.md": ("endpoints", endpoint_table), "docs/settings.md": ("imports", import_table)}


def written(page: str) -> str:
    """Return a page with its tables made anew."""
    name, make = TABLES[page]
    text = (ROOT / page).read_text()
    begin, end = f"<!-- {name}: made by python -m tests.support.reference_tables -->", f"<!-- end of {name} -->"
    assert begin in text, f"{page} has no place for the table of {name}"
    assert end in text
    return re.sub(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{make()}\n{end}", text, flags=re.DOTALL
    )


def main() -> int:
    for page in TABLES:
        (ROOT / page).write_text(written(page))
        print(f"{page} is written.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
