"""Hear every word of the ledger's bell, in a thread: for a process that speaks for many workers."""

import threading
from collections.abc import Callable

from unstuck.domain.errors import UnstuckError
from unstuck.logs import logger
from unstuck.store.contract import Bell, Ledger

LISTEN_S = 5.0
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0

log = logger("unstuck.notify")


class Ear:
    """`heard` is called from its thread: with the words that were rung, and with none when nothing was heard for a
    while, since a ring may have been lost. `opened` is called whenever it begins to hear, also after a failure: what
    was rung before is lost."""

    def __init__(
        self,
        ledger: Callable[[], Ledger],
        heard: Callable[[frozenset[str]], None],
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._heard = heard
        self._opened = opened
        self._bell: Bell | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-ear", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if (bell := self._bell) is not None:
            bell.interrupt()
        self._thread.join(LISTEN_S)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                self._listen()
                retry_s = FIRST_RETRY_S
            except (UnstuckError, OSError) as error:
                log.warning("The bell cannot be heard; looking for jobs now and then", error=str(error))
                self._heard(frozenset())
                self._stopping.wait(retry_s)
                retry_s = min(retry_s * 2, LONGEST_RETRY_S)

    def _listen(self) -> None:
        bell = self._bell = self._ledger().overhear()
        try:
            self._opened()
            while not self._stopping.is_set():
                self._heard(bell.wait(LISTEN_S))
        finally:
            self._bell = None
            bell.close()
