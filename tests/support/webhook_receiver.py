"""Receive webhooks for tests: a real HTTP server on a free port, which answers, refuses, redirects or hangs as told."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unstuck.notify.alerts.webhook import DELIVERY, SIGNATURE, TIMESTAMP, sign

SECRET = "a-secret-of-this-test-0123456789"


@dataclass
class Post:
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.raw)
        return parsed

    @property
    def delivery(self) -> str:
        return self.headers[DELIVERY]

    def is_signed(self, secret: str = SECRET) -> bool:
        return self.headers[SIGNATURE] == sign(secret, self.headers[TIMESTAMP], self.raw)


@dataclass
class Receiver:
    url: str = ""
    port: int = 0
    posts: list[Post] = field(default_factory=list)
    status: int = 200
    location: str = ""
    hangs: bool = False
    """Takes the message and never answers."""
    drips: bool = False
    """Answers a byte now and then, for ever."""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def deliveries(self) -> set[str]:
        return {post.delivery for post in self.posts}


@contextmanager
def receiving(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Listen until the block ends."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.posts.append(Post(self.path, dict(self.headers.items()), raw))
            if receiver.hangs:
                receiver.over.wait()
                return
            if receiver.drips:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not receiver.over.wait(0.05):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                return
            self.send_response(receiver.status)
            if receiver.location:
                self.send_header("Location", receiver.location)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 50

        def handle_error(self, *_: object) -> None: ...

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver.port = server.server_address[1]
    receiver.url = f"http{'' if tls is None else 's'}://127.0.0.1:{receiver.port}/hook/token-in-the-path"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
