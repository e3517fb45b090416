"""A proxy in front of a server that can lose an answer or cut the line at a chosen word."""

import socket
import threading
from types import TracebackType
from urllib.parse import urlsplit


class Proxy:
    """`lose_answer_to(word)`: the next request that holds the word reaches the server, and its answer nobody."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.port is not None
        self._server = ("127.0.0.1", parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = url.replace(f":{parts.port}/", f":{self._listener.getsockname()[1]}/")
        self._word: bytes | None = None
        self.lost = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _end(self._listener)
        for end in self._open:
            _end(end)

    def lose_answer_to(self, word: bytes) -> None:
        self.lost.clear()
        self._word = word

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._open += [client, server]
            cut = threading.Event()
            threading.Thread(target=self._requests, args=(client, server, cut), daemon=True).start()
            threading.Thread(target=self._answers, args=(server, client, cut), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, cut: threading.Event) -> None:
        while data := _receive(client):
            if self._word is not None and self._word in data:
                self._word = None
                cut.set()
            _send(server, data)
        _end(server)

    def _answers(self, server: socket.socket, client: socket.socket, cut: threading.Event) -> None:
        while data := _receive(server):
            if cut.is_set():
                # The server has answered: it is committed, and only we know.
                _end(client)
                self.lost.set()
                return
            _send(client, data)
        _end(client)


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(65536)
    except OSError:
        return b""


def _send(end: socket.socket, data: bytes) -> None:
    try:
        end.sendall(data)
    except OSError:
        pass


def _end(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()
