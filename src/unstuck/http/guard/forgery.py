"""Refuse what a strange website made somebody's browser send in their name (CSRF)."""

import hmac
from collections.abc import Mapping

from unstuck.http.guard.bodies import form_field
from unstuck.http.guard.identity import Identity
from unstuck.http.guard.origins import SAFE, Origin
from unstuck.http.problems import Problem

FIELD = "csrf"
HEADER = "x-csrf-token"


def check_origin(origin: Origin) -> None:
    if origin.foreign:
        raise Problem(
            403,
            "foreign_origin",
            "Another website made your browser ask for this.",
            cure="Open the page by its own address. Behind a proxy, have it pass the Host header on unchanged.",
        )


def check_forgery(
    identity: Identity, origin: Origin, method: str, headers: Mapping[str, str], body: bytes, *, api: bool
) -> None:
    """Let an unsafe request of a browser through only with the proof that our own page made it."""
    if method in SAFE or not identity.csrf:
        return
    if identity.by_cookie and not origin.proven:
        raise Problem(403, "foreign_origin", "A login was sent along, but not whose page asked for this.")
    # A program on this machine, where no token is asked for, is no browser and cannot be made to send anything.
    if api and not origin.from_browser and not identity.by_cookie:
        return
    given = headers.get(HEADER) or form_field(headers, body, FIELD)
    if not hmac.compare_digest(given.encode(), identity.csrf.encode()):
        raise Problem(
            403,
            "csrf",
            "The form is too old, or not of this page.",
            cure="Load the page again. Scripts send the value of <meta name=csrf> as X-CSRF-Token.",
        )
