"""Run the server: socket, uvicorn, a timeout for slow clients, a bounded shutdown.

Whoever is slow holds a connection that others need."""

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from unstuck.config import HttpSettings, Settings
from unstuck.errors import ConfigError
from unstuck.http.app import build_app, say_goodbye
from unstuck.http.auth.origins import check_token_exists, listening
from unstuck.http.auth.shared_counters import Member, ServerGroup
from unstuck.http.problems import Problem
from unstuck.http.processes import Processes
from unstuck.ledger.contract import Ledger
from unstuck.logs import logger

MAX_HEAD_BYTES = 64 * 1024
"""What one connection may make us remember beside bodies before a request is whole; the guard counts more closely."""
MAX_PIPELINED = 32
"""Requests that one connection may have sent before the first of them is answered."""

_BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})


class JoinedWrites:
    """A transport that sends what is written in one round of the loop together: else the first lines of every answer
    are a packet of their own, and a second call into the system."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._transport.write(data)


class NotHttp(Exception):
    """A request that the parser takes and this server does not."""


class PatientProtocol(HttpToolsProtocol):
    """Uvicorn's own bounds neither what comes before a request is whole nor how long that takes. It also loses the body
    of a request that offers an upgrade, as Java's client does with every first one."""

    def __init__(
        self, config: Config, server_state: ServerState, *more: Any, head_timeout_s: float, **named: Any
    ) -> None:
        super().__init__(config, server_state, *more, **named)
        self._head_timeout_s = head_timeout_s
        """For the first line and the headers of a request, from the connection or from their first byte."""
        self._patience: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        """The request that is answered now; `cycle` is the one that came last."""
        self._in_head = False
        self._is_repeating = False
        """The parser hears a second time what was heard."""
        self._is_deaf = False
        """Something came that is no HTTP: what follows means nothing."""
        self._unused_bytes = 0
        """What came since something was made of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", JoinedWrites(transport, self.loop)))
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_deaf:
            return
        self._unused_bytes += len(data)
        try:
            self._feed(data)
            if self._unused_bytes > MAX_HEAD_BYTES:
                raise NotHttp
        except (httptools.HttpParserError, NotHttp):
            self.send_400_response("")
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._answering is not None and not self._answering.response_complete:
            # Others may have come behind it, and Uvicorn tells only the last.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._decline_upgrade()
            else:
                return

    def _decline_upgrade(self) -> None:
        """Go on as if no upgrade was offered. The parser left the body unread: another one reads it, which hears a head
        that says nothing but how long it is."""
        head = [b"POST / HTTP/1.1"] + [b": ".join(pair) for pair in self.headers if pair[0] in _BODY_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_repeating = True
        self.parser.feed_data(b"\r\n".join([*head, b"", b""]))

    # What the parser found ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._is_repeating:
            self._in_head = True
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeating:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a body in chunks is no header: whoever stands in front did not look at it.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_repeating:
            self._is_repeating = False
            return
        self._in_head = False
        self._unused_bytes = 0
        self._check_head()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise NotHttp
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _check_head(self) -> None:
        """Refuse what another server might understand in another way."""
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        coded = [value for name, value in self.headers if name == b"transfer-encoding"]
        if (
            version not in ("1.0", "1.1")
            or self.parser.get_method() == b"CONNECT"
            or not self.url.startswith((b"/", b"*"))
            or names.count(b"host") != 1
            or (coded and (version == "1.0" or coded[0].lower() != b"chunked"))
        ):
            raise NotHttp

    def _should_upgrade_to_ws(self) -> bool:
        return False

    # Answering ----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        if self._is_deaf and not self._is_answering and not self.transport.is_closing():
            self._say_what_is_wrong()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, after everything that came before it."""
        self._is_deaf = True
        if self.pipeline and self.cycle.more_body:
            # It waits behind others, and will never be whole.
            self.pipeline.popleft()
        elif self._is_answering and self.cycle.more_body:
            # Whoever answers a request whose body turned to rubbish speaks to nobody from now on.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                # Nobody can be told two things at once.
                self.transport.close()
            else:
                self._say_what_is_wrong()
            return
        if not self._is_answering:
            self._say_what_is_wrong()

    def _say_what_is_wrong(self) -> None:
        """Answer as every other error is answered; Uvicorn's own words are plain text."""
        cure = "Send HTTP/1.1 with one Host header and a body that is as long as it says; HTTPS ends in front of this."
        answer = Problem(400, "not_http", "This is not a request that HTTP/1.1 allows.", cure=cure).response()
        headers = [*answer.raw_headers, (b"x-content-type-options", b"nosniff"), (b"connection", b"close")]
        lines = [STATUS_LINE[400], *(b"%s: %s\r\n" % pair for pair in headers), b"\r\n", bytes(answer.body)]
        self.transport.write(b"".join(lines))
        self.transport.close()

    # Patience -----------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _wait_for_head(self) -> None:
        if self._is_answering:
            self._stop_waiting()
        elif self._patience is None:
            self._patience = self.loop.call_later(self._head_timeout_s, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _hang_up(self) -> None:
        self._patience = None
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()


log = logger("unstuck.http")

BACKLOG = 1024
SWITCH_S = 0.0001
GARBAGE = 10_000
GRACE_S = 5
ENDS_WITHIN_S = 10.0
"""So long after it was asked to end it ends, whatever its threads wait for."""
KEEP_ALIVE_S = 65
"""Longer than foreign workers are quiet between two beats, so that they need no new connection for each."""


def listening_socket(http: HttpSettings) -> socket.socket:
    """Take the address before anything else is started: one that is taken is a clear error."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    # The protocol is named: only for a socket that says TCP asyncio switches Nagle's algorithm off, with which the body
    # of every answer would wait 40 ms for the client to confirm its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Every connection takes this over. Whoever does not read keeps an answer in memory for as long.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(http.unread_timeout_s * 1000))
        listener.bind((http.host, http.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        cure = "Choose another with --port (0: any free one)."
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            cure = "Give --host an address of this machine: 127.0.0.1, or 0.0.0.0 for all that it has."
        raise ConfigError(f"Cannot listen on {http.host} port {http.port}: {error.strerror}. {cure}") from error
    return listener


def check_address(http: HttpSettings, listener: socket.socket, ledger: Ledger) -> None:
    """Refuse to serve others than this machine before there is a token."""
    check_token_exists(http, listener.getsockname()[0], ledger)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class PoliteServer(uvicorn.Server):
    """Ends streams before it waits for requests to end: by themselves they never would."""

    def __init__(self, farewell: Callable[[], None], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._farewell = farewell

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._farewell()
        _end_within(ENDS_WITHIN_S)
        # Whoever asked us to end in order gets an end in order: the signal is not raised again behind it.
        self._captured_signals.clear()
        await super().shutdown(sockets)


def _end_within(patience_s: float) -> None:
    """Have this process end by itself: threads that wait for a database which says nothing would keep it for as long as
    that does. What they would still write is counts; everything else was answered or is asked for again."""
    last_resort = threading.Timer(patience_s, _end_now)
    last_resort.daemon = True
    last_resort.start()


def _end_now() -> None:
    log.warning("Ended without waiting any longer for threads that wait for the ledger")
    os._exit(1)


def serve(
    settings: Settings, http: HttpSettings, listener: socket.socket, ready: Callable[[str], None], processes: int = 1
) -> int:
    """Serve until a signal ends it, and return the exit code; `ready` is told the address."""
    if processes == 1:
        ready(url_of(listener))
        _serve_here(settings, http, listener, Member())
        return 0
    check_processes(settings)
    ready(url_of(listener))
    return Processes(ServerGroup(processes), partial(_serve_here, settings, http, listener)).run()


def check_processes(settings: Settings) -> None:
    """Refuse several processes where they could not work together."""
    if not hasattr(signal, "sigtimedwait"):
        raise ConfigError("--processes needs Linux. Leave it out, or run several servers behind a proxy.")
    if ":memory:" in settings.url:
        raise ConfigError(
            "--processes needs a ledger in a file or on a server: each process would have its own memory."
        )


def _serve_here(settings: Settings, http: HttpSettings, listener: socket.socket, member: Member) -> None:
    """Serve from this process."""
    web_app = build_app(settings, http, listening(http, listener.getsockname()[0]), member)
    server = PoliteServer(
        lambda: say_goodbye(web_app),
        uvicorn.Config(
            web_app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            # Uvicorn only calls it.
            http=cast("type[asyncio.Protocol]", partial(PatientProtocol, head_timeout_s=http.head_timeout_s)),
            # Whoever stands in front may say what it likes about whom it speaks for: we believe nobody.
            proxy_headers=False,
        ),
    )
    # Pages and sweeps of the reaper compute in other threads: a heartbeat must not wait long for its turn.
    sys.setswitchinterval(SWITCH_S)
    # Nor for the collector: what is there now stays, and to walk through it took a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    server.run(sockets=[listener])
