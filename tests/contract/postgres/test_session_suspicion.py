"""A suspicion speaks of the session that was missing then, and of no later one."""

import time
from collections.abc import Iterator

import pytest
from tests.contract.postgres.test_session_doubt import GRACE_S, VICTIM, Foreign, vanish
from tests.support.builders import birth
from tests.support.fleet import wait_for

from unstuck.config import Recovery, Settings
from unstuck.domain.liveness import Detector, Session
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.ledger.postgres.ledger import PostgresLedger


@pytest.fixture
def victim(pg_ledger: PostgresLedger, pg_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=pg_url))
    ledger.workers.register(birth(VICTIM, heartbeat_interval_s=5.0, suspect_after_s=60.0))
    yield ledger
    ledger.close()


@pytest.fixture
def reaper(pg_ledger: PostgresLedger, victim: PostgresLedger) -> Foreign:
    reaper = Foreign(pg_ledger)
    assert reaper.state_after(0.5) is WorkerState.ACTIVE
    return reaper


def lose_a_session(reaper: Foreign, victim: PostgresLedger) -> None:
    vanish(victim)
    wait_for(lambda: reaper.state_after(0.1) is WorkerState.SUSPECT, "the suspicion")


def test_a_worker_that_came_back_and_was_cut_off_then_is_not_dead_by_the_session_it_lost_before(
    reaper: Foreign, victim: PostgresLedger
) -> None:
    lose_a_session(reaper, victim)
    # It reconnects, and the network is cut before its heartbeat gets through. The server ends the new session later.
    victim.db.service_connection.open()
    assert reaper.state_after(GRACE_S + 0.5) is WorkerState.SUSPECT
    vanish(victim)
    assert reaper.state_after(1.0) is WorkerState.SUSPECT


def test_a_suspicion_counts_for_nothing_if_the_worker_reconnected_between_the_look_and_the_verdict(
    reaper: Foreign, victim: PostgresLedger
) -> None:
    condemn = reaper.ledger.recovery.declare_dead

    def late(*args: object) -> bool:
        victim.db.service_connection.open()
        return condemn(*args)  # type: ignore[arg-type]

    reaper.ledger.recovery.declare_dead = late  # type: ignore[method-assign]
    lose_a_session(reaper, victim)
    reaper.ledger.recovery.declare_dead = condemn  # type: ignore[method-assign]
    assert reaper.state() is WorkerState.SUSPECT
    assert reaper.state_after(GRACE_S + 0.5) is WorkerState.SUSPECT
    vanish(victim)
    assert reaper.state_after(1.0) is WorkerState.SUSPECT


def test_after_a_heartbeat_the_next_session_is_evidence_again(reaper: Foreign, victim: PostgresLedger) -> None:
    lose_a_session(reaper, victim)
    victim.workers.beat(Heartbeat(VICTIM, 0, 0))
    assert reaper.state_after(0.3) is WorkerState.ACTIVE
    vanish(victim)
    wait_for(lambda: reaper.state_after(0.3) is WorkerState.DEAD, "the verdict")


def test_a_reaper_that_is_late_finds_a_worker_by_its_session_later(
    pg_ledger: PostgresLedger, victim: PostgresLedger
) -> None:
    late_s, cut_off_s = 2.3, 8.5
    reaper = Foreign(pg_ledger, Recovery(heartbeat_interval=1.0))
    reaper.sweep(ticket=False)
    time.sleep(late_s)
    reaper.sweep(ticket=False)
    victim.workers.beat(Heartbeat(VICTIM, 0, 0))
    heard_s = time.monotonic()
    vanish(victim)
    # It sees the session missing, and may not judge by it so soon after a pause. Then it is late again.
    wait_for(lambda: reaper.state_after(0.1) and reaper.victim().session is Session.MISSING, "the end of the session")
    reaper.sweep(ticket=False)
    # By now a reaper that looked for the first time would take the worker for one that was cut off.
    time.sleep(max(late_s, cut_off_s - (time.monotonic() - heard_s)))
    wait_for(lambda: reaper.state_after(0.3) is WorkerState.DEAD, "the verdict")
    [verdict] = [record.verdict for record in pg_ledger.workers.list()]
    assert verdict is not None
    assert verdict.detector is Detector.SESSION
