"""Run the web door by itself: `unstuck serve`."""

import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

import uvicorn

from unstuck.config import Settings, Web
from unstuck.domain.errors import ConfigError
from unstuck.http.door import door_of, say_goodbye
from unstuck.http.guard.place import check_token_exists, listening
from unstuck.http.guard.shared import Member, ServerGroup
from unstuck.http.patience import PatientProtocol
from unstuck.http.processes import Processes
from unstuck.logs import logger
from unstuck.store.contract import Ledger

log = logger("unstuck.http")

BACKLOG = 1024
SWITCH_S = 0.0001
GARBAGE = 10_000
GRACE_S = 5
ENDS_WITHIN_S = 10.0
"""So long after it was asked to end it ends, whatever its threads wait for."""
UNREAD_S = 30.0
"""How long an answer waits for a client that reads nothing of it."""
KEEP_ALIVE_S = 65
"""Longer than foreign workers are quiet between two beats, so that they need no new connection for each."""


def listening_socket(web: Web) -> socket.socket:
    """Take the address before anything else is started: one that is taken is a clear error."""
    family = socket.AF_INET6 if ":" in web.host else socket.AF_INET
    # The protocol is named: only for a socket that says TCP asyncio switches Nagle's algorithm off, with which the body
    # of every answer would wait 40 ms for the client to confirm its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Every connection takes this over. Whoever does not read keeps an answer in memory for as long.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
        listener.bind((web.host, web.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        cure = "Choose another with --port (0: any free one)."
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            cure = "Give --host an address of this machine: 127.0.0.1, or 0.0.0.0 for all that it has."
        raise ConfigError(f"Cannot listen on {web.host} port {web.port}: {error.strerror}. {cure}") from error
    return listener


def check_address(web: Web, listener: socket.socket, ledger: Ledger) -> None:
    """Refuse to serve others than this machine before there is a token."""
    check_token_exists(web, listener.getsockname()[0], ledger)


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
    settings: Settings, web: Web, listener: socket.socket, ready: Callable[[str], None], processes: int = 1
) -> int:
    """Serve until a signal ends it, and return the exit code; `ready` is told the address."""
    if processes == 1:
        ready(url_of(listener))
        _serve_here(settings, web, listener, Member())
        return 0
    check_processes(settings)
    ready(url_of(listener))
    return Processes(ServerGroup(processes), partial(_serve_here, settings, web, listener)).run()


def check_processes(settings: Settings) -> None:
    """Refuse several processes where they could not work together."""
    if not hasattr(signal, "sigtimedwait"):
        raise ConfigError("--processes needs Linux. Leave it out, or run several servers behind a proxy.")
    if ":memory:" in settings.url:
        raise ConfigError(
            "--processes needs a ledger in a file or on a server: each process would have its own memory."
        )


def _serve_here(settings: Settings, web: Web, listener: socket.socket, member: Member) -> None:
    """Serve from this process."""
    door = door_of(settings, web, listening(web, listener.getsockname()[0]), member)
    server = PoliteServer(
        lambda: say_goodbye(door),
        uvicorn.Config(
            door,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            http=PatientProtocol,
            # Whoever stands in front may say what it likes about whom it speaks for: we believe nobody.
            proxy_headers=False,
        ),
    )
    # Pages and rounds of the watchman compute in other threads: whoever beats must not wait long for its turn.
    sys.setswitchinterval(SWITCH_S)
    # Nor for the collector: what is there now stays, and to walk through it took a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    server.run(sockets=[listener])
