"""Speak HTTP: hang up on whoever is slow to say what they want, and tell who speaks something else what is wrong.

Whoever is slow holds a connection that others need."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from unstuck.http.problems import Problem

HEAD_S = 15.0
"""For the first line and the headers of a request, from the connection or from their first byte."""


class PatientProtocol(H11Protocol):
    """Uvicorn's own has a timeout between requests, and none for one that never becomes whole."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as every other error; Uvicorn's own words are plain text."""
        if self.cycle is not None and not self.cycle.response_complete:
            # Whoever answers a request whose body turned to rubbish speaks to nobody from now on.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # An answer is on its way already, and nobody can be told two things at once.
            self.transport.close()
            return
        cure = "Send HTTP/1.1 with one Host header and a body that is as long as it says; HTTPS ends in front of this."
        answer = Problem(400, "not_http", "This is not a request that HTTP/1.1 allows.", cure=cure).response()
        headers = [*answer.raw_headers, (b"x-content-type-options", b"nosniff"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=answer.status_code, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEAD_S, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _hang_up(self) -> None:
        self._patience = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
