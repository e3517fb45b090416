"""Watch an answer while it is given: a stream that was begun with a token ends with the token."""

import time
from collections.abc import Callable

from starlette.types import Message, Send

from unstuck.http.guard.keyring import Keyring

LOOK_EVERY_S = 1.0


class TokenEnded(Exception):
    """Ends the handler of a stream whose token was revoked or has expired."""


class Watch:
    def __init__(
        self, send: Send, keyring: Keyring, token_id: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._keyring = keyring
        self._token_id = token_id
        self._clock = clock
        self._looked_at_s = clock()
        self.started = False
        self.ended_by_us = False

    async def send(self, message: Message) -> None:
        self.started = True
        if message.get("more_body") and await self._token_is_over():
            self.ended_by_us = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            raise TokenEnded
        await self._send(message)

    async def _token_is_over(self) -> bool:
        if self._token_id is None or self._clock() - self._looked_at_s < LOOK_EVERY_S:
            return False
        self._looked_at_s = self._clock()
        return await self._keyring.by_id(self._token_id) is None
