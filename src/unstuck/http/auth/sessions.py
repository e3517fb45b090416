"""The login of a person: a cookie that proves that a token was known, and ends with it.

It needs no table. Whoever reads the ledger has the seal but not the proof; whoever steals a cookie has the proof but
not the seal, so they can neither make one nor prolong one, and the proof is no token.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from unstuck.domain.api_tokens import hash_of
from unstuck.http.auth.tokens import ApiToken

COOKIE = "unstuck_session"
LASTS_S = 12 * 3600
NONCE_BYTES = 12
MAX_COOKIE_CHARS = 400
_SHAPE = re.compile(
    r"(?P<said>(?P<id>[a-z0-9]{1,40})\.(?P<until>[0-9]{1,12})\.[\w-]{16}\.(?P<proof>[\w-]{43}))\.(?P<mac>[\w-]{43})",
    re.ASCII,
)


@dataclass(frozen=True)
class Session:
    token_id: str
    until: int
    proof: bytes
    said: str
    mac: bytes


def begin(key: ApiToken, proof: bytes, now_s: float) -> str:
    """Give the cookie of a new login with this key."""
    nonce = _text(secrets.token_bytes(NONCE_BYTES))
    said = f"{key.id}.{int(now_s) + LASTS_S}.{nonce}.{_text(proof)}"
    return f"{said}.{_text(_mac(key, said))}"


def read(cookie: str) -> Session | None:
    """Read a cookie without believing it."""
    found = _SHAPE.fullmatch(cookie) if len(cookie) <= MAX_COOKIE_CHARS else None
    if found is None:
        return None
    proof, mac = _bytes(found["proof"]), _bytes(found["mac"])
    return Session(found["id"], int(found["until"]), proof, found["said"], mac)


def stands(session: Session, key: ApiToken, now_s: float) -> bool:
    """Believe it: it is ours, unaltered, not over, and made with this very token."""
    genuine = hmac.compare_digest(_mac(key, session.said), session.mac)
    known = hmac.compare_digest(hash_of(session.proof), key.hash)
    return genuine and known and now_s < session.until


def _mac(key: ApiToken, said: str) -> bytes:
    return hmac.digest(key.seal, f"session {said}".encode(), hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
