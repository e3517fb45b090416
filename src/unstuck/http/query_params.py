"""Refuse what a caller asks for in a query and the route does not know: a misspelt filter must not widen an answer."""

from collections.abc import Iterator
from typing import Any, cast

from fastapi import Request

from unstuck.domain.text import did_you_mean
from unstuck.http.problems import Problem


async def refuse_unknown_query(request: Request) -> None:
    """Raise 422 for the first parameter of the query that its route does not take."""
    if not request.scope.get("query_string"):
        return
    known = _known(request.scope["route"])
    for name in request.query_params:
        if name not in known:
            takes = f"It takes: {', '.join(known)}." if known else "It takes none."
            raise Problem(
                422,
                "not_valid",
                f"There is no parameter {name[:80]!r} here.{did_you_mean(name, known)} {takes}",
                cure="Put right the parameter that is named, or leave it out.",
            )


def _known(route: Any) -> tuple[str, ...]:
    """Return what a route takes; found once, and kept with it since routes cannot be keys."""
    kept: dict[str, Any] = vars(route)
    if "known_query" not in kept:
        kept["known_query"] = tuple(dict.fromkeys(_names(route.dependant)))
    return cast(tuple[str, ...], kept["known_query"])


def _names(dependant: Any) -> Iterator[str]:
    for field in dependant.query_params:
        yield field.alias
    for inner in dependant.dependencies:
        yield from _names(inner)
