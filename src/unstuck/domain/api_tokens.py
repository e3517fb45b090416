"""API tokens: how they look, what their scopes allow, and who a caller is.

A token is shown once. The ledger keeps the hash of a proof that only the token's holder can derive, so that
reading the ledger lets nobody in, neither with a token nor with a login.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError

SECRET_BYTES = 32
ID_BYTES = 5
MAX_TOKEN_CHARS = 200
MAX_NAME_CHARS = 100
LEAST_GIVEN_CHARS = 32
"""Of a token that somebody made up themselves."""
ALL = "all"
_SHAPE = re.compile(r"ust_([a-z2-7]{8})_([A-Za-z0-9_-]{43})")


class Scope(StrEnum):
    READ = "read"
    ENQUEUE = "enqueue"
    WORKER = "worker"
    OPERATE = "operate"


def read_scopes(words: Iterable[str]) -> frozenset[Scope]:
    """Read scopes as people write them: none includes another, `all` means every one."""
    wanted = [word.strip().lower() for text in words for word in text.split(",") if word.strip()]
    for word in wanted:
        if word != ALL and word not in list(Scope):
            known = [*(scope.value for scope in Scope), ALL]
            raise ConfigError(f"There is no scope {word!r}.{did_you_mean(word, known)} Known: {', '.join(known)}.")
    if not wanted:
        raise ConfigError(f"A token needs at least one scope: {', '.join([*Scope, ALL])}.")
    return frozenset(Scope) if ALL in wanted else frozenset(Scope(word) for word in wanted)


def mint() -> tuple[str, str]:
    """Make a new token of 256 random bits; give its id and its text."""
    token_id = base64.b32encode(secrets.token_bytes(ID_BYTES)).decode().lower()
    return token_id, f"ust_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"


def id_of(text: str) -> str | None:
    """Give the id inside a token; None for what is none of ours."""
    found = _SHAPE.fullmatch(text)
    return None if found is None else found[1]


def proof_of(text: str) -> bytes:
    """Derive what a login carries instead of the token: it proves that the token was known, and is no token itself."""
    return hashlib.sha256(b"unstuck proof " + text.encode()).digest()


def hash_of(proof: bytes) -> bytes:
    """Derive what is written down. The token is random: nothing slower than this is needed."""
    return hashlib.sha256(proof).digest()


@dataclass(frozen=True)
class Caller:
    name: str
    scopes: frozenset[Scope]
    token_id: str | None = None
    """None: somebody on this machine, where no token is asked for."""
    via: str = "http"
    """`http` for programs, `page` for people: what the audit log says."""


LOCAL = Caller("web", frozenset(Scope))
NOBODY = Caller("", frozenset())
"""Who sees the login form."""
