"""Understand the targets: of which kind each is, what may be shown of it, and by what it is remembered."""

import hashlib
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from unstuck.config import Alerts
from unstuck.config.alerts import WEBHOOK_SCHEMES
from unstuck.domain.errors import ConfigError

FINGERPRINT_CHARS = 32
LEAST_SECRET_CHARS = 16


class Target(msgspec.Struct, frozen=True):
    """One place to tell. Only `shown` and `fingerprint` may leave this room."""

    url: str
    secret: str
    shown: str
    fingerprint: str

    @property
    def is_webhook(self) -> bool:
        return urlsplit(self.url).scheme in WEBHOOK_SCHEMES

    def __repr__(self) -> str:
        return f"Target({self.shown})"

    __str__ = __repr__


def read_targets(rules: Alerts) -> list[Target]:
    """Give the targets of the settings; ConfigError where one cannot work as it is written."""
    targets = [_read(url, rules) for url in rules.targets]
    for target in targets:
        if target.is_webhook and len(target.secret) < LEAST_SECRET_CHARS:
            raise ConfigError(
                f"The webhook {target.shown} needs a secret of at least {LEAST_SECRET_CHARS} characters to be signed "
                "with: set alerts.webhook_secret (or $UNSTUCK_ALERTS_WEBHOOK_SECRET), or write it into the URL: "
                "https://:SECRET@host/path."
            )
    return targets


def _read(url: str, rules: Alerts) -> Target:
    parts = urlsplit(url)
    if parts.scheme not in WEBHOOK_SCHEMES:
        mark = _fingerprint(url)
        # With Apprise the host, too, may be a token: nothing but the service is shown.
        return Target(url, "", f"{parts.scheme}://… ({mark[:6]})", mark)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    where = host if parts.port is None else f"{host}:{parts.port}"
    bare = urlunsplit((parts.scheme, where, parts.path or "/", parts.query, ""))
    own = unquote(parts.password or parts.username or "")
    # A new secret is no new target: it must not lose its place.
    return Target(bare, own or rules.webhook_secret, f"{parts.scheme}://{where}/…", _fingerprint(bare))


def _fingerprint(url: str) -> str:
    return hashlib.sha256(b"unstuck alert target\0" + url.encode()).hexdigest()[:FINGERPRINT_CHARS]
