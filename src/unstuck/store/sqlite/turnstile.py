"""Let threads of one process through one at a time, in the order in which they came."""

import threading
from collections import deque


class Turnstile:
    """A first-come-first-served lock: a busy thread cannot starve the heartbeat."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._line: deque[threading.Lock] = deque()

    def acquire(self, timeout_s: float) -> bool:
        with self._guard:
            if not self._taken:
                self._taken = True
                return True
            gate = threading.Lock()
            gate.acquire()
            self._line.append(gate)
        if gate.acquire(timeout=max(timeout_s, 0.0)):
            return True
        with self._guard:
            try:
                self._line.remove(gate)
            except ValueError:
                # Handed over between the end of our patience and now: it is ours.
                return True
            return False

    def release(self) -> None:
        with self._guard:
            if self._line:
                self._line.popleft().release()
            else:
                self._taken = False
