"""Wake-ups: a thread that sends them after commits, coalesced, and a thread that listens.

While one ring is on its way, the words of all that follow gather and go out together.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable

from unstuck.errors import UnstuckError
from unstuck.ledger.contract import Ledger, Listener
from unstuck.logs import logger

Ring = Callable[[Iterable[str]], None]

IDLE_S = 30.0
FLUSH_AT_EXIT_S = 1.0
# A caller's own transaction commits some time after the enqueue; nobody tells us when.
LATER_S = (0.01, 0.1, 0.5)


class WakeupSender:
    def __init__(self, ring: Ring) -> None:
        self._send = ring
        self._condition = threading.Condition()
        self._words: set[str] = set()
        self._later: list[tuple[float, str]] = []
        self._busy = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        atexit.register(self.flush)

    def send(self, words: Iterable[str]) -> None:
        """Have these words rung soon; returns at once."""
        with self._condition:
            self._words.update(words)
            self._wake()

    def send_after_commit(self, words: Iterable[str]) -> None:
        """Have them rung a few times in the next second, for a commit that is not ours."""
        now_s = time.monotonic()
        with self._condition:
            for word in words:
                self._later.extend((now_s + after_s, word) for after_s in LATER_S)
            self._wake()

    def flush(self) -> None:
        """Wait until everything was rung, for a moment at the most: a short script must not exit before."""
        if self._pid != os.getpid():
            return
        deadline_s = time.monotonic() + FLUSH_AT_EXIT_S
        with self._condition:
            while (self._words or self._busy) and (left_s := deadline_s - time.monotonic()) > 0:
                self._condition.wait(left_s)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unstuck-wakeup-sender", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                words = self._take()
                while not words:
                    if not self._condition.wait(self._patience_s()) and not self._words and not self._later:
                        self._thread = None
                        return
                    words = self._take()
                self._busy = True
            try:
                self._send(words)
            except Exception:  # noqa: BLE001 - a bell that is lost costs a poll interval; a dead thread, every bell
                pass
            finally:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()

    def _take(self) -> set[str]:
        now_s = time.monotonic()
        words, self._words = self._words, set()
        if self._later:
            words.update(word for due_s, word in self._later if due_s <= now_s)
            self._later = [item for item in self._later if item[0] > now_s]
        return words

    def _patience_s(self) -> float:
        if not self._later:
            return IDLE_S
        return max(0.001, min(due_s for due_s, _ in self._later) - time.monotonic())


LISTEN_S = 5.0
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0

log = logger("unstuck.notify")


class WakeupListener:
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
        self._on_topics = heard
        self._opened = opened
        self._listener: Listener | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-wakeup-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if (bell := self._listener) is not None:
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
                self._on_topics(frozenset())
                self._stopping.wait(retry_s)
                retry_s = min(retry_s * 2, LONGEST_RETRY_S)

    def _listen(self) -> None:
        bell = self._listener = self._ledger().workers.listen_all()
        try:
            self._opened()
            while not self._stopping.is_set():
                self._on_topics(bell.wait(LISTEN_S))
        finally:
            self._listener = None
            bell.close()
