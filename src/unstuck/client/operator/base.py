"""The ground that the operator's verbs stand on: whose they are, and where they are written down."""

import getpass
import os
import socket

from unstuck.client.auditing import Auditor
from unstuck.config import Settings
from unstuck.store.contract import Ledger


class Verbs:
    def __init__(self, ledger: Ledger, settings: Settings, by: str | None = None, door: str = "python") -> None:
        self._ledger = ledger
        self._settings = settings
        self._by = by or whoami()
        self._audit = Auditor(ledger, door)

    def _ring(self, words: set[str]) -> None:
        if words:
            self._ledger.ring(words)


def whoami() -> str:
    """Name the person at this keyboard, as well as the system knows them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
