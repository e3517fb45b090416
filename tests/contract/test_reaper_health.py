"""The reaper's sweep switches off who keeps crashing: once, aloud, and only where it is allowed to."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.stored_workers import StoredWorkers, a_stage

from unstuck.config import Recovery
from unstuck.domain.liveness import Detector
from unstuck.ledger.contract.workers import Heartbeat
from unstuck.maintenance.worker_health import HealthWatch
from unstuck.recovery.result import SweepResult

SICK = {"health": {"weight": 9.0, "deaths": 9, "jobs": 9}}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[StoredWorkers]:
    with a_stage(f"sqlite:///{tmp_path}/jobs.db") as made:
        yield made


def sicken(stage: StoredWorkers, worker_id: str) -> str:
    stage.ledger.workers.beat(Heartbeat(worker_id, 0, 0, metadata=SICK))
    return worker_id


def off(stage: StoredWorkers) -> list[str]:
    return [worker.id for worker in stage.ledger.workers.list(living_only=True) if worker.disabled is not None]


def test_a_round_switches_the_sick_worker_off_and_the_next_one_has_nothing_to_do(stage: StoredWorkers) -> None:
    sick = sicken(stage, stage.worker())
    stage.worker()
    reaper = stage.reaper(Recovery())
    assert reaper.sweep(ticket=False).disabled == 1
    assert off(stage) == [sick]
    HealthWatch("another").judge(stage.ledger, done := SweepResult())
    assert done.disabled == 0


def test_two_watchmen_judge_once(stage: StoredWorkers) -> None:
    first, second, third = (sicken(stage, stage.worker()) for _ in range(3))
    stage.worker()
    assert stage.reaper(Recovery()).sweep(ticket=False).disabled == 1
    assert stage.reaper(Recovery()).sweep(ticket=False).disabled == 0
    assert len(off(stage)) == 1
    assert off(stage)[0] in (first, second, third)


def test_nobody_is_switched_off_where_the_setting_says_so(stage: StoredWorkers) -> None:
    sicken(stage, stage.worker())
    stage.worker()
    assert stage.reaper(Recovery(auto_disable_unhealthy=False)).sweep(ticket=False).disabled == 0
    assert off(stage) == []


def test_the_one_switched_off_comes_back_when_the_other_dies(stage: StoredWorkers) -> None:
    sick = sicken(stage, stage.worker())
    well = stage.worker()
    watch = HealthWatch("reaper")
    watch.judge(stage.ledger, SweepResult())
    assert off(stage) == [sick]
    stage.reaper(Recovery()).report_death(well, Detector.OPERATOR, "pulled the plug")
    watch.judge(stage.ledger, SweepResult())
    assert off(stage) == []
    assert "nobody else is left" in stage.ledger.events.list(worker_id=sick)[-1].message


def test_what_an_operator_switched_off_stays_off(stage: StoredWorkers) -> None:
    alone = stage.worker()
    stage.ledger.workers.disable(alone, "maintenance", "ops")
    HealthWatch("reaper").judge(stage.ledger, SweepResult())
    assert off(stage) == [alone]
