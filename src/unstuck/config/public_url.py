"""Show an address to people and logs without what is secret in it."""

import re
from urllib.parse import urlsplit, urlunsplit

_SECRET = re.compile(r"(?i)((?:^|[?&])(?:password|passfile|sslpassword|sslkey|token|secret)=)[^&]*")


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
