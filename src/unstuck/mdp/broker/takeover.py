"""Jobs that dead brokers of this host held for old workers: when they may be settled."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from unstuck.config import MdpSettings
from unstuck.mdp.broker.handed_out import AbandonedWorker, mark_of
from unstuck.mdp.broker.outbox import Outbox


class Takeover:
    def __init__(
        self, settings: MdpSettings, outbox: Outbox, find_abandoned: Callable[[], Iterable[AbandonedWorker]]
    ) -> None:
        self._timeout_s = settings.heartbeat_timeout_s
        self._busy_timeout_s = settings.busy_timeout_s
        self._outbox = outbox
        self._find_abandoned = find_abandoned
        self._working: list[tuple[float, AbandonedWorker]] = []
        """Old workers that had a request when their broker died, and since when that is known."""

    @property
    def is_waiting(self) -> bool:
        """Return whether an old worker of a dead broker may still be working."""
        return bool(self._working)

    def look(self, now_s: float, *, all_have_spoken: bool) -> None:
        """Find workers of brokers that died since the last look, and give up those whose replies will not come.

        At first an old worker keeps the job that it has, since its reply may come. After the time for which an idle
        worker may be silent, it is given up if it was quick. If its broker listened at our address, it is given up when
        all connected peers have spoken, because a worker that is still working would be connected and silent."""
        if not self._outbox.is_closing:
            for one in self._find_abandoned():
                self._settle(one)
                if one.may_be_given_up:
                    self._working.append((now_s, one))
        kept = []
        for since_s, one in self._working:
            waited_s = now_s - since_s
            is_silent = one.is_quick or (one.is_same_address and all_have_spoken)
            if waited_s > self._busy_timeout_s or (waited_s >= self._timeout_s and is_silent):
                self._settle(replace(one, is_given_up=True))
            else:
                kept.append((since_s, one))
        self._working = kept

    def on_ready(self, identity: bytes) -> None:
        """Give up the old job of a worker that came back to the same address with its routing id and said READY.

        It is idle, and a reply that it sent before has come already."""
        mark = mark_of(identity) if self._working else b""
        back = [pair for pair in self._working if mark and pair[1].is_same_address and pair[1].mark == mark]
        for pair in back:
            self._working.remove(pair)
            self._settle(replace(pair[1], is_given_up=True))

    def _settle(self, abandoned: AbandonedWorker) -> None:
        self._outbox.backlog.abandoned.append(abandoned)
