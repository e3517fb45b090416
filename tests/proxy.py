"""A TCP proxy between a worker and its database that can fall silent, as a cut network does."""

import select
import socket
import threading


class Proxy:
    """Forwards connections to a port of this machine. While `cut`, bytes are neither refused nor delivered."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._flowing = threading.Event()
        self._flowing.set()
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self._ended.set()
        self._flowing.set()
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        try:
            while not self._ended.is_set():
                self._flowing.wait()
                ready, _, _ = select.select([near, far], [], [], 0.2)
                for source in ready:
                    if not self._flowing.is_set():
                        break
                    data = source.recv(65536)
                    if not data:
                        return
                    other[source].sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            near.close()
            far.close()
