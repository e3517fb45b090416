"""Know through which connection each client speaks, so that nothing is kept for those who are gone."""


class ClientLines:
    """Told in this order, round by round: `heard` and `ended` as they come, then `settle` when all ends are known that
    came before what was heard."""

    def __init__(self) -> None:
        self._line_of: dict[bytes, int] = {}
        self._on_line: dict[int, set[bytes]] = {}
        self._heard: dict[bytes, int] = {}
        self._gone: set[bytes] = set()

    def heard(self, client: bytes, line: int | None) -> None:
        if line is not None and self._line_of.get(client) != line:
            self._heard[client] = line

    @property
    def unsettled(self) -> bool:
        """Somebody was heard through a connection of which nothing was known."""
        return bool(self._heard)

    def ended(self, line: int) -> None:
        for client in self._on_line.pop(line, ()):
            del self._line_of[client]
            self._gone.add(client)

    def settle(self, standing: set[int]) -> set[bytes]:
        """Give the clients that are gone. One that was heard through a connection that stands has come back."""
        for client, line in self._heard.items():
            if line in standing:
                self._forget(client)
                self._line_of[client] = line
                self._on_line.setdefault(line, set()).add(client)
                self._gone.discard(client)
            else:
                self._gone.add(client)
        self._heard = {}
        gone, self._gone = self._gone, set()
        return gone

    def _forget(self, client: bytes) -> None:
        before = self._line_of.pop(client, None)
        if before is not None:
            self._on_line[before].discard(client)
            if not self._on_line[before]:
                del self._on_line[before]
