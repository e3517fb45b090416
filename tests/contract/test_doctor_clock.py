"""A worker notes its clock when it registers; a birth that took too long says nothing about clocks."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.builders import birth

from unstuck.config import Settings
from unstuck.ledger.contract.diagnosis import SWEEP_TICKET
from unstuck.ledger.contract.workers import NewWorker
from unstuck.ledger.sqlite.ledger import SqliteLedger
from unstuck.ledger.sqlite.workers import Workers
from unstuck.recovery import reap
from unstuck.runner.tasks import Manifest
from unstuck.worker import main
from unstuck.worker.main import Worker
from unstuck.worker.sd_notify import SdNotifier
from unstuck.worker.signals import StopSignals


class SlowWorkers(Workers):
    slow_s = 0.0

    def register(self, birth: NewWorker) -> bool:
        time.sleep(self.slow_s)
        return super().register(birth)


class SlowLedger(SqliteLedger):
    workers: SlowWorkers

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.workers = SlowWorkers(self.db, self.wakeups, self.gaps)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SlowLedger]:
    ledger = SlowLedger(Settings(url=f"sqlite:///{tmp_path}/jobs.db"))
    ledger.migrate()
    yield ledger
    ledger.close()


def join(ledger: SlowLedger, worker_id: str) -> dict[str, Any]:
    bench: Any = None
    manifest = Manifest((), b"", True)
    worker = Worker(
        bench, manifest, ledger.settings, ledger, ledger.ledger_id(), ("default",), 1, None, True, SdNotifier()
    )
    signals: Any = StopSignals.__new__(StopSignals)
    worker._join(birth(worker_id, metadata={"zone": "a"}), signals)
    return next(record.metadata for record in ledger.workers.list() if record.id == worker_id)


def test_the_clock_is_noted_unless_the_birth_was_slow(ledger: SlowLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "CLOCK_TRUST_S", 3600.0)  # However slow this machine is.
    quick = join(ledger, "quick")
    assert quick["clock_at"] == pytest.approx(time.time(), abs=60)
    monkeypatch.setattr(main, "CLOCK_TRUST_S", 0.01)
    ledger.workers.slow_s = 0.02
    assert join(ledger, "slow") == {"zone": "a"}


def test_the_doctor_and_the_reaper_mean_the_same_ticket() -> None:
    assert SWEEP_TICKET == reap.SWEEP_TICKET
