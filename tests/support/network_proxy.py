"""A TCP proxy between a client and its database: the client's own road, which can fail in the ways that roads do.

It can fall silent as a cut network does, break, be slow, lose one answer, and lead to another server, as a virtual
address does after a failover.
"""

import re
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

LOOK_S = 0.05
CHUNK_BYTES = 65536
CONNECT_S = 2.0
_RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"
"""`struct linger`: on, with no seconds. A close sends RST instead of FIN."""

_PREPARED = re.compile(rb"P....(_pg3_\d+)\x00([^\x00]*)\x00", re.DOTALL)
"""A statement that the driver has prepared under a name (see the messages `Parse` and `Bind` of PostgreSQL)."""
_RUN_BY_NAME = re.compile(rb"B....\x00(_pg3_\d+)\x00", re.DOTALL)

Pair = tuple[socket.socket, socket.socket]
"""The client's end and the server's end of one connection."""


class Proxy:
    """Forwards connections to the server of a URL; `url` is the same address by way of the proxy."""

    def __init__(self, url: str) -> None:
        port = urlsplit(url).port
        assert port is not None, url
        self._target_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = url.replace(f":{port}/", f":{self.port}/")
        self._flowing = threading.Event()
        self._flowing.set()
        self._ended = threading.Event()
        self._delay_s = 0.0
        self._word: bytes | None = None
        self.lost = threading.Event()
        """Set when the answer that `lose_answer_to` named is lost."""
        self._pairs: list[Pair] = []
        self._stranded: list[Pair] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def cut(self) -> None:
        """Lose every packet in silence: connections stay open, nothing arrives, nothing is refused."""
        self._flowing.clear()

    def server_gives_up(self) -> None:
        """End the server's side of every connection while the client hears nothing: its keepalive found nobody."""
        assert not self._flowing.is_set(), "a server gives up on a road that is cut"
        for _, server in self._pairs:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self._flowing.set()

    def strand(self) -> None:
        """Let the connections that exist fall silent for ever: the host that they lead to is lost. New ones work."""
        self._stranded += self._pairs
        self._pairs = []

    def reset(self) -> None:
        """Break every connection at both ends, as a router or firewall does that forgot them."""
        broken, self._pairs, self._stranded = self._pairs + self._stranded, [], []
        for pair in broken:
            for each in pair:
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end(each)

    def delay(self, seconds: float) -> None:
        """Hold back each packet for this long."""
        self._delay_s = seconds

    def point_to(self, port: int) -> None:
        """Lead new connections to another server. Those that exist stay where they are."""
        self._target_port = port

    def lose_answer_to(self, word: bytes) -> None:
        """Let the next request that contains the word reach the server, then lose its answer and the connection.

        A statement that is only prepared is no request yet; one that runs by its name is."""
        self.lost.clear()
        self._word = word

    def close(self) -> None:
        self._ended.set()
        self._flowing.set()
        end(self._listener)
        for pair in self._pairs + self._stranded:
            for each in pair:
                end(each)

    def filter_answers(self) -> Callable[[bytes], bytes]:
        """Return what changes the answers of one connection on their way; subclasses replace it."""
        return lambda data: data

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        self._flowing.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._target_port), timeout=CONNECT_S)
        except OSError:
            end(client)
            return
        server.settimeout(None)
        pair = (client, server)
        self._pairs.append(pair)
        answer_lost = threading.Event()
        threading.Thread(target=self._requests, args=(pair, answer_lost), daemon=True).start()
        threading.Thread(target=self._answers, args=(pair, answer_lost), daemon=True).start()

    def _requests(self, pair: Pair, answer_lost: threading.Event) -> None:
        client, server = pair
        prepared: dict[bytes, bytes] = {}
        while data := self._carried(client, pair):
            asked = _statements(data, prepared)
            if self._word is not None and self._word in asked:
                self._word = None
                answer_lost.set()
            _send(server, data)
        end(server)

    def _answers(self, pair: Pair, answer_lost: threading.Event) -> None:
        client, server = pair
        changed = self.filter_answers()
        while data := self._carried(server, pair):
            if answer_lost.is_set():
                # The server has answered: it is committed, and only we know.
                end(client)
                self.lost.set()
                return
            _send(client, changed(data))
        end(client)

    def _carried(self, source: socket.socket, pair: Pair) -> bytes:
        """Return the next bytes, or none at the end of the connection, as soon as the road lets them pass."""
        try:
            # Not taken from the socket while the road is cut: its buffers fill up, as they would.
            while not self._ended.is_set():
                self._wait_for_road(pair)
                if select.select([source], [], [], LOOK_S)[0] and self._flowing.is_set():
                    break
            data = source.recv(CHUNK_BYTES)
        except (OSError, ValueError):
            data = b""
        if self._delay_s:
            time.sleep(self._delay_s)
        # An end of the connection is a packet as well: while the road is cut, the other side does not learn of it.
        self._wait_for_road(pair)
        return data

    def _wait_for_road(self, pair: Pair) -> None:
        self._flowing.wait()
        while pair in self._stranded and not self._ended.is_set():
            time.sleep(LOOK_S)


def _statements(data: bytes, prepared: dict[bytes, bytes]) -> bytes:
    """Return what a packet asks the server to do; `prepared` is what this connection has prepared."""
    prepared.update(_PREPARED.findall(data))
    by_name = b"".join(prepared.get(name, b"") for name in _RUN_BY_NAME.findall(data))
    return _PREPARED.sub(b"", data) + by_name


def _send(to: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        to.sendall(data)


def end(one: socket.socket) -> None:
    """Shut down and close, whatever state the socket is in."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
