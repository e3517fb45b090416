"""Tell a request of our own page from one that some other website made a browser send.

Browsers say where an unsafe request comes from (`Origin`), and modern ones say of every request how it relates to us
(`Sec-Fetch-Site`). Programs say neither. There is no CORS here: no other website is ever welcome.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from unstuck.http.guard.hosts import Host, read_host

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Origin:
    from_browser: bool
    """It says that a browser sent it."""
    foreign: bool
    """Another website made it."""
    proven: bool
    """It says that our own page made it."""


def judge(headers: Mapping[str, str], host: Host, method: str) -> Origin:
    """Say where a request comes from; header names are in lower case."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    referer = headers.get("referer")
    said = [_same(origin, host)] if origin is not None else []
    if site is not None:
        said.append(site == "same-origin")
    if method not in SAFE and origin is None and site is None and referer is not None:
        said.append(_same(referer, host))
    # A link on another website may lead here: that is a look, not a deed. `none` is a person at the address bar.
    followed = method in SAFE and origin is None and (site == "none" or _is_navigation(headers))
    return Origin(
        from_browser=bool(said) or referer is not None,
        foreign=not all(said) and not followed,
        proven=bool(said) and all(said),
    )


def _is_navigation(headers: Mapping[str, str]) -> bool:
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _same(url: str, host: Host) -> bool:
    """Compare without the scheme: whoever ended HTTPS in front of us did not say so."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and "@" not in parts.netloc and read_host(parts.netloc) == host
