"""Know the tokens that stand: read from the ledger all together, at most a few times a second.

All together, since people make few tokens and many requests come with each: so a stranger who tries a million of them
costs the ledger nothing, and a token that was revoked is refused within a second.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from unstuck.domain.api_tokens import MAX_TOKEN_CHARS, Scope, hash_of, id_of, proof_of
from unstuck.errors import UnstuckError
from unstuck.ledger.contract.admin import ApiTokenRecord
from unstuck.logs import logger

FRESH_S = 0.4
"""Younger than this: used as it is. Older: used, and read anew meanwhile."""
STALE_S = 0.9
"""Older than this: nobody comes in before it was read anew."""
LOOK_AGAIN_S = 0.1
"""A token that is not there may have been made a moment ago."""
GIVEN_ID = "environment"

log = logger("unstuck.http")


@dataclass(frozen=True)
class ApiToken:
    id: str
    name: str
    scopes: frozenset[Scope]
    hash: bytes = field(repr=False)
    seal: bytes = field(repr=False)


@dataclass(frozen=True)
class ApiTokens:
    valid: Mapping[str, ApiToken]
    any_ever: bool
    """A token was made once: from then on nobody comes in without one, also when it has expired."""
    read_at_s: float


class TokenCache:
    """Used on the event loop; the ledger is asked in a thread."""

    def __init__(
        self,
        load: Callable[[], list[ApiTokenRecord]],
        given: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._given = None if given is None else _given_token(given)
        self._clock = clock
        self._keys: ApiTokens | None = None
        self._reading: asyncio.Task[ApiTokens] | None = None

    async def keys(self) -> ApiTokens:
        keys, age_s = self._keys, self._age_s()
        if keys is None or age_s > STALE_S:
            return await self._read()
        if age_s > FRESH_S:
            self._begin()
        return keys

    async def find(self, text: str) -> ApiToken | None:
        """Give the key of a token, if it is a valid one."""
        if len(text) > MAX_TOKEN_CHARS or not text.isascii():
            return None
        hashed = hash_of(proof_of(text))
        if self._given is not None and hmac.compare_digest(hashed, self._given.hash):
            return self._given
        token_id = id_of(text)
        key = None if token_id is None else await self.by_id(token_id)
        return key if key is not None and hmac.compare_digest(hashed, key.hash) else None

    async def by_id(self, token_id: str) -> ApiToken | None:
        if token_id == GIVEN_ID:
            return self._given
        came_s = self._clock()
        keys = await self.keys()
        # It may have been made since all was read; only a read that began after we were asked can tell.
        while token_id not in keys.valid and keys.read_at_s < came_s:
            # Also what slows down those who guess.
            await asyncio.sleep(max(0.0, LOOK_AGAIN_S - self._age_s()))
            known = self._keys
            keys = known if known is not None and known.read_at_s >= came_s else await self._read()
        return keys.valid.get(token_id)

    def _age_s(self) -> float:
        return float("inf") if self._keys is None else self._clock() - self._keys.read_at_s

    async def _read(self) -> ApiTokens:
        # One reads for all who wait; somebody who goes away must not end it for the others.
        return await asyncio.shield(self._begin())

    def _begin(self) -> "asyncio.Task[ApiTokens]":
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_now())
            # Nobody may be waiting for it: what went wrong is seen by the next one who does.
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._reading

    async def _read_now(self) -> ApiTokens:
        began_s = self._clock()
        try:
            records = await asyncio.to_thread(self._load)
        except UnstuckError as error:
            log.warning("Tokens cannot be read: nobody comes in", reason=str(error))
            raise
        valid = {record.id: _api_token(record) for record in records if record.valid}
        self._keys = ApiTokens(valid, bool(records) or self._given is not None, began_s)
        return self._keys


def _api_token(record: ApiTokenRecord) -> ApiToken:
    # A scope of a later version is none that this one can grant.
    known = frozenset(Scope(scope) for scope in record.scopes if scope in list(Scope))
    return ApiToken(record.id, record.name, known, record.hash, record.seal)


def _given_token(text: str) -> ApiToken:
    seal = hashlib.sha256(b"unstuck seal " + text.encode()).digest()
    return ApiToken(GIVEN_ID, GIVEN_ID, frozenset(Scope), hash_of(proof_of(text)), seal)
