"""Know which scopes each route needs, so that a body is read only for a caller who may send it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastapi import APIRouter
from starlette.routing import Route, compile_path

from unstuck.domain.api_tokens import Caller, Scope
from unstuck.http.auth.callers import lacks
from unstuck.http.problems import method_not_allowed, nothing_at

REMEMBERED = 4_096
"""Paths whose route was found already: busy workers ask for the same few."""
SHORT_CHARS = 200
"""Longer paths are not remembered."""


@dataclass(frozen=True)
class _Known:
    matches: Any
    methods: frozenset[str]
    scopes: tuple[Scope, ...]
    own: tuple[Scope, ...]


class KnownRoutes:
    """All routes of a door, in the order in which they are tried."""

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._by_segments: dict[int, list[_Known]] = {}
        self._of_any_length: list[_Known] = []
        self._find = lru_cache(REMEMBERED)(self._find_now)
        for router in routers:
            for route in router.routes:
                if isinstance(route, Route):
                    self._add(route)

    def check(self, method: str, path: str, caller: Caller) -> None:
        """Raise the problem of a request that will be refused whatever its body is: no such route, or no scope."""
        route = (self._find if len(path) <= SHORT_CHARS else self._find_now)(method, path)
        if isinstance(route, frozenset):
            raise method_not_allowed(method, path, route) if route else nothing_at(path)
        if route.scopes and caller.scopes.isdisjoint((*route.scopes, *route.own)):
            raise lacks(route.scopes[0])

    def _find_now(self, method: str, path: str) -> _Known | frozenset[str]:
        """Return the route of a path, or the methods that it would take."""
        allowed: set[str] = set()
        for route in self._by_segments.get(path.count("/"), self._of_any_length):
            if route.matches(path) is not None:
                if method in route.methods:
                    return route
                allowed |= route.methods
        return frozenset(allowed)

    def _add(self, route: Route) -> None:
        check = next(_checks_of(getattr(route, "dependant", None)), None)
        known = _Known(
            compile_path(route.path)[0].match,
            frozenset(route.methods or ()),
            tuple(getattr(check, "scopes", ())),
            tuple(getattr(check, "own", ())),
        )
        if ":path}" in route.path:
            for routes in (self._of_any_length, *self._by_segments.values()):
                routes.append(known)
        else:
            self._by_segments.setdefault(route.path.count("/"), [*self._of_any_length]).append(known)


def _checks_of(dependant: Any) -> Iterator[Any]:
    """Yield the dependencies that ask for a scope."""
    for inner in dependant.dependencies if dependant is not None else ():
        if hasattr(inner.call, "scopes"):
            yield inner.call
        yield from _checks_of(inner)
