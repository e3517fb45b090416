"""How quiet a worker was when its session ended, as one reaper saw it."""

import pytest

from unstuck import host
from unstuck.domain.liveness import Detector, Session
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.recovery.evidence import Observer, SessionActivity


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.beat_s = self.now_s
        monkeypatch.setattr(host, "boottime_s", lambda: self.now_s)

    def seen(self, session: Session, session_id: str = "1/1", **changes: object) -> WorkerWatch:
        """Return the worker as a look at this moment shows it."""
        who = ("w1", "w1", "elsewhere", 7, "boot", "pids", "0", "")
        facts = {
            "since_beat_s": self.now_s - self.beat_s,
            "session_id": session_id,
            "session_idle_s": 0.0 if session is Session.PRESENT else None,
        }
        return WorkerWatch(*who, WorkerState.ACTIVE, 0.0, 60.0, None, 1, session, 0.0, **{**facts, **changes})  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_reaper_that_is_late_judges_by_what_it_saw_first(clock: Clock) -> None:
    activity = SessionActivity()
    assert activity.quiet_s(clock.seen(Session.PRESENT), remember=True) == 0.0
    clock.now_s += 2.0
    assert activity.quiet_s(clock.seen(Session.MISSING), remember=True) == 2.0
    clock.now_s += 20.0
    assert activity.quiet_s(clock.seen(Session.MISSING), remember=True) == 2.0


def test_a_worker_that_was_silent_before_its_session_ended_stays_cut_off(clock: Clock) -> None:
    activity = SessionActivity()
    activity.quiet_s(clock.seen(Session.PRESENT), remember=True)
    clock.now_s += 17.0
    assert activity.quiet_s(clock.seen(Session.MISSING), remember=True) == 17.0


@pytest.mark.parametrize("between", [Session.PRESENT, Session.UNKNOWN])
def test_a_session_that_was_there_again_ends_later(clock: Clock, between: Session) -> None:
    activity = SessionActivity()
    activity.quiet_s(clock.seen(Session.MISSING), remember=True)
    clock.now_s += 1.0
    activity.quiet_s(clock.seen(between, session_idle_s=1.0), remember=True)
    clock.now_s += 17.0
    assert activity.quiet_s(clock.seen(Session.MISSING), remember=True) == 18.0


def test_another_session_that_came_and_went_between_two_looks_ended_later(clock: Clock) -> None:
    activity = SessionActivity()
    activity.quiet_s(clock.seen(Session.MISSING, "1/1"), remember=True)
    clock.now_s += 17.0
    assert activity.quiet_s(clock.seen(Session.MISSING, "2/2"), remember=True) == 17.0


def test_a_reaper_that_reconnected_remembers_nothing_until_it_can_tell_whose_sessions_were_lost(clock: Clock) -> None:
    activity = SessionActivity()
    activity.quiet_s(clock.seen(Session.PRESENT), remember=True)
    clock.now_s += 2.0
    assert activity.quiet_s(clock.seen(Session.MISSING), remember=True) == 2.0
    clock.now_s += 5.0
    assert activity.quiet_s(clock.seen(Session.MISSING), remember=False) == 7.0
    clock.now_s += 5.0
    assert activity.quiet_s(clock.seen(Session.MISSING), remember=True) == 12.0


@pytest.mark.parametrize(
    ("detector", "suspected_session", "expected"),
    [
        (Detector.SESSION, "1/1", Detector.SESSION),
        (Detector.SESSION, "2/2", None),
        (Detector.SESSION, None, None),
        (Detector.LEASE, None, Detector.LEASE),
    ],
)
def test_a_suspicion_speaks_of_one_session(
    clock: Clock, detector: Detector, suspected_session: str | None, expected: Detector | None
) -> None:
    worker = clock.seen(Session.MISSING, "1/1", suspected_by=detector, suspected_session=suspected_session)
    assert Observer(single_host=False).evidence(worker, 100.0, connected=True).suspected_by is expected
