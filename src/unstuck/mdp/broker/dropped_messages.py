"""Count messages that are dropped, by why, and say so: as a metric, and in the log from time to time."""

import time
from collections import Counter
from collections.abc import Callable

from unstuck.logs import logger
from unstuck.metrics.catalogue import MDP_DROPPED
from unstuck.metrics.counters import Counters

SAY_EVERY_S = 60.0
"""How often the log says at most that messages of one kind were dropped."""

log = logger("unstuck.mdp")


class DroppedMessages:
    """The reasons are a few sentences of ours: no peer can make up another one."""

    def __init__(self, counters: Counters | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self._said: dict[str, tuple[float, int]] = {}
        """By reason: when the log last said it, and how many there were then."""

    def add(self, why: str) -> None:
        self.counts[why] += 1
        if self._counters is not None:
            self._counters.add(MDP_DROPPED, (why,))
        now_s = self._clock()
        at_s, before = self._said.get(why, (-SAY_EVERY_S, 0))
        if now_s - at_s >= SAY_EVERY_S:
            count = self.counts[why]
            self._said[why] = (now_s, count)
            log.warning("Messages were dropped", why=why, messages=count - before, in_all=count)
