"""A Majordomo worker registers for the queues that its services have at that moment."""

import pytest
from tests.support.builders import birth

from unstuck.config import Recovery, Settings
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.mdp.broker.batch import Batch, BatchResult, Registration
from unstuck.mdp.broker.batch_runner import BatchRunner
from unstuck.recovery.reap import Reaper


def register(runner: BatchRunner, worker_id: str, service: str) -> None:
    batch = Batch(registrations=[Registration(worker_id, f"name-of-{worker_id}", (service,), "host", {})])
    for step in runner.steps(batch, BatchResult()):
        step.do()


def test_a_task_that_has_just_moved_to_another_queue_is_claimed_from_there(ledger: Ledger) -> None:
    runner = BatchRunner(ledger, Settings(), Reaper(ledger, Recovery(), by="test"))
    register(runner, "m1", "add")
    ledger.workers.register(birth("p1", tasks=(TaskRecord("add", "numbers", b"{}"),), queues=("numbers",)))
    register(runner, "m2", "add")
    queues = {worker.id: worker.queues for worker in ledger.workers.list(living_only=True)}
    assert queues == {"m1": ("add",), "p1": ("numbers",), "m2": ("numbers",)}


def test_the_registration_of_a_worker_wakes_readers_of_the_worker_list(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, topics = BatchRunner(ledger, Settings(), Reaper(ledger, Recovery(), by="test")), set[str]()
    monkeypatch.setattr(runner._wakeups, "send", topics.update)
    register(runner, "m1", "add")
    assert topics == {"workers"}
