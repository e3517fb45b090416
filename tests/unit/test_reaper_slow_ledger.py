"""A reaper whose every call takes long keeps the watch all the same: in the middle of its rounds, too."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.stored_workers import StoredWorkers, a_stage

from unstuck import host
from unstuck.config import Recovery
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.maintenance.loop import Loop
from unstuck.recovery import leftovers
from unstuck.recovery.reap import Reaper

TIMEOUT_S = 2.0
CALL_S = 0.045
"""With this, a round takes longer than the watch of a fleet that beats every third of a second may pause."""


class Clock:
    """The time of the ledger and of the machine, which goes on only if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        began_s, began_at = host.boottime_s(), time.time()
        monkeypatch.setattr(host, "boottime_s", lambda: began_s + self.now_s)
        monkeypatch.setattr(time, "time", lambda: began_at + self.now_s)


class SlowLedger:
    """A ledger far away: each call of it takes `CALL_S`, half of it on the way there."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self.single_host = False

    def __getattr__(self, part: str) -> "SlowPart":
        return SlowPart(getattr(self._ledger, part), self._clock)


class SlowPart:
    """One part of a ledger far away, or a verb of the ledger itself."""

    def __init__(self, part: Any, clock: Clock) -> None:
        self._part = part
        self._clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._slowly(self._part, *args, **kwargs)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return partial(self._slowly, getattr(self._part, verb))

    def _slowly(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._clock.now_s += CALL_S / 2
        answer = call(*args, **kwargs)
        self._clock.now_s += CALL_S / 2
        return answer


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredWorkers]:
    monkeypatch.setattr(leftovers, "status_page_folder", lambda: tmp_path)
    with a_stage(f"sqlite:///{tmp_path}/jobs.db") as made:
        yield made


@pytest.fixture
def clock(stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(("interval_s", "check_s"), [(TIMEOUT_S / 6, 0.2), (TIMEOUT_S / 6, 1.0), (TIMEOUT_S / 10, 0.1)])
def test_a_silent_worker_is_declared_dead_though_every_call_is_slow(
    stage: StoredWorkers, clock: Clock, interval_s: float, check_s: float
) -> None:
    worker = stage.worker(suspect_after_s=TIMEOUT_S, heartbeat_interval_s=interval_s)
    recovery = Recovery(
        heartbeat_interval=interval_s, heartbeat_timeout=TIMEOUT_S, check_interval=check_s, auto_disable_unhealthy=False
    )
    reaper_loop = Loop(Reaper(SlowLedger(stage.ledger, clock), recovery, by="test"))  # type: ignore[arg-type]
    while stage.record(worker).state is not WorkerState.DEAD:
        assert clock.now_s < 2 * TIMEOUT_S + check_s, "silent for ever"
        clock.now_s += max(reaper_loop.step(), 0.001)
    assert clock.now_s >= TIMEOUT_S
