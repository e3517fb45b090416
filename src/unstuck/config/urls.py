"""Name a ledger to people and logs, without what is secret in its address."""

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from unstuck.config.settings import Settings

DEFAULT_SCHEMA = "unstuck"

_SECRET = re.compile(r"(?i)((?:^|[?&])(?:password|passfile|sslpassword|sslkey|token|secret)=)[^&]*")


def ledger_name(settings: "Settings") -> str:
    """Return the name of the ledger of these settings: its address without passwords, and its schema if not usual."""
    schema = "" if settings.schema == DEFAULT_SCHEMA or settings.url.startswith("sqlite:") else settings.schema
    return public_url(settings.url) + (f" (schema {schema})" if schema else "")


def public_url(url: str) -> str:
    """Give a ledger's address without its passwords, wherever they stand in it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    who, at, where = parts.netloc.rpartition("@")
    user, colon, _ = who.partition(":")
    netloc = f"{user}:***{at}{where}" if colon else parts.netloc
    shown = parts._replace(netloc=netloc, query=_SECRET.sub(r"\1***", parts.query))
    # Taken apart and put together again, sqlite:///a.db would lose two of its slashes.
    return url if shown == parts else urlunsplit(shown)
