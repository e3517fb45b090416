"""Serve what one process tallied, from a thread of its own that nobody waits for.

One thread and one request at a time, each with a limit: whoever reads slowly delays other scrapes and nothing else.
"""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unstuck import logs
from unstuck.metrics.counters import Counters
from unstuck.metrics.prometheus import CONTENT_TYPE, OF_ONE_PROCESS, expose

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

LOOPBACK = "127.0.0.1"
REQUEST_TIMEOUT_S = 5.0
LOOK_S = 0.1
PATIENCE_S = 1.0
"""How long the end of a process waits for a scrape that is going on."""

log = logs.logger("unstuck.metrics")


@dataclass(frozen=True)
class Listen:
    port: int
    """0: any free one; the log says which."""
    host: str = LOOPBACK


@contextmanager
def served(counters: Counters, listen: Listen | None) -> Iterator[str | None]:
    """Serve /metrics for the duration of the block, and give where. An address that is taken costs the metrics, not the
    work."""
    server = None if listen is None else _open(counters, listen)
    if server is None:
        yield None
        return
    threading.Thread(target=server.serve_forever, args=(LOOK_S,), name="unstuck-metrics", daemon=True).start()
    log.info("Metrics of this process are served", url=server.url)
    try:
        yield server.url
    finally:
        # It may be with a slow reader, who must not keep us.
        stopping = threading.Thread(target=server.shutdown, daemon=True)
        stopping.start()
        stopping.join(PATIENCE_S)
        server.server_close()


class _Server(socketserver.TCPServer):
    # Not the one of http.server: that asks DNS for our own name before it listens.
    allow_reuse_address = True

    def __init__(self, listen: Listen, handler: "type[BaseHTTPRequestHandler]") -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        super().__init__((listen.host, listen.port), handler)

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who hangs up in the middle is no news."""


def _open(counters: Counters, listen: Listen) -> _Server | None:
    # Here, and not with every command: few workers are asked for metrics of their own.
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S
        server_version = "unstuck"
        sys_version = ""

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = expose(counters.snapshot().totals, prefix=OF_ONE_PROCESS) if found else "See /metrics.\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """A scrape is no news."""

    try:
        return _Server(listen, Handler)
    except (OSError, OverflowError) as error:
        log.error(
            "The metrics of this process cannot be served; choose another --metrics-port",
            host=listen.host,
            port=listen.port,
            error=str(error),
        )
        return None
