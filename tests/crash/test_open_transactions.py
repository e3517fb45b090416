"""A user's transaction stays open for longer than the heartbeat timeout and holds rows that workers need."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.crash.apps import locks
from tests.support.backdoor import PostgresBackdoor
from tests.support.fleet import Fleet, wait_for

from unstuck import App
from unstuck.client.job import Job
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract.diagnosis import SWEEP_TICKET
from unstuck.ledger.contract.jobs import JobFilter

TARGET = "tests.crash.apps.locks:app"
SHORT: dict[str, str] = {"heartbeat_interval": "500ms", "heartbeat_timeout": "3s", "check_interval": "500ms"}
OPEN_S = 5.0
"""How long the user's transaction stays open: clearly longer than the heartbeat timeout."""
PROMPT_S = 2.5
"""How soon an unrelated job is done on a busy machine of two cores; before, it waited for the transaction."""


class LockedFleet(Fleet):
    def _app(self, settings: dict[str, Any]) -> App:
        app = App(self.url, **settings)
        for definition in locks.app.definitions.values():
            app.adopt(definition)
        return app

    def reinforce(self) -> None:
        self.start("--concurrency", "2", target=TARGET)

    def nap(self, name: str, seconds: float) -> Job[Any]:
        notes = self.folder / name
        job: Job[Any] = self.task("nap").enqueue(seconds, str(notes))
        wait_for(notes.exists, "the nap to begin")
        return job


def deaths(fleet: Fleet) -> list[str]:
    return [worker.id for worker in fleet.ledger.workers() if worker.state is WorkerState.DEAD]


def work_beside(fleet: LockedFleet, seconds: float) -> list[float]:
    """Have unrelated jobs done for a while, and give how long each took from its enqueue."""
    took: list[float] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        begun_s = time.monotonic()
        assert fleet.task("add").enqueue(1, 2).result(timeout=10) == 3
        took.append(time.monotonic() - begun_s)
        assert deaths(fleet) == []
        time.sleep(0.1)  # The rhythm of the work, not luck.
    return took


@pytest.fixture
def fleet(ready_pg_url: str, tmp_path: Path) -> Any:
    fleet = LockedFleet(ready_pg_url, tmp_path, **SHORT)
    yield fleet
    fleet.close()


def test_a_transaction_holds_the_unique_key_of_a_schedule(fleet: LockedFleet) -> None:
    for _ in range(2):
        fleet.reinforce()
    long = fleet.nap("long", OPEN_S + 2)
    with psycopg.connect(fleet.url) as connection:
        held = fleet.task("tick").options(unique_key="held", connection=connection).enqueue()
        before = len(ticks_of(fleet, "plain"))
        took = work_beside(fleet, OPEN_S)
        plain = ticks_of(fleet, "plain")
        connection.commit()
    assert max(took) < PROMPT_S, took
    # The other schedule went on meanwhile, tick by tick.
    assert len(plain) - before >= OPEN_S - 2
    wait_for(lambda: fleet.state(held) is JobState.SUCCEEDED, "the job of the transaction to run")
    # The key is free: the schedule goes on, and no tick is enqueued twice.
    known = len(ticks_of(fleet, "keyed"))
    wait_for(lambda: len(ticks_of(fleet, "keyed")) >= known + 2, "the schedule to go on")
    keyed = ticks_of(fleet, "keyed")
    assert len(keyed) == len(set(keyed))
    assert long.result(timeout=30) == "slept"
    assert deaths(fleet) == []
    assert any("blocked by session" in worker.said() for worker in fleet.workers), [
        worker.said() for worker in fleet.workers
    ]


def ticks_of(fleet: Fleet, schedule: str) -> list[str]:
    jobs = fleet.ledger.jobs(JobFilter(limit=1000))
    return [job.enqueued_by for job in jobs if (job.enqueued_by or "").startswith(f"schedule {schedule} ")]  # type: ignore[misc]


@pytest.mark.parametrize("killed", [False, True])
def test_a_transaction_replaces_a_waiting_job_of_a_concurrency_key(fleet: LockedFleet, killed: bool) -> None:
    for _ in range(3 if killed else 2):
        fleet.reinforce()
    serve = fleet.task("serve")
    # The first runs, the second has the key to be replaced and waits in line.
    first = serve.enqueue("ann", 1.5)
    fleet.wait_running(first)
    waiting = serve.options(unique_key="k").enqueue("ann", 0.0)
    long = fleet.nap("long", OPEN_S + 1)
    with psycopg.connect(fleet.url) as connection:
        replace = serve.options(unique_key="k", on_duplicate="replace", connection=connection)
        newest = replace.enqueue("ann", 0.0)
        if killed:
            victim = next(one for one in fleet.workers if one.record() is not None and not holds(fleet, one, long))
            gone = victim.id
            victim.kill()
            wait_for(lambda: deaths(fleet) == [gone], "the killed worker to be declared dead")
            took = []
            until_s = time.monotonic() + OPEN_S
            while time.monotonic() < until_s:
                begun_s = time.monotonic()
                assert fleet.task("add").enqueue(1, 2).result(timeout=10) == 3
                took.append(time.monotonic() - begun_s)
            assert deaths(fleet) == [gone]
        else:
            took = work_beside(fleet, OPEN_S)
            assert fleet.state(first) is JobState.SUCCEEDED, "its end was written beside the open transaction"
        connection.commit()
    assert max(took) < PROMPT_S, took
    assert newest.result(timeout=30) == "ann"
    assert fleet.state(waiting) is JobState.CANCELLED
    assert long.result(timeout=30) == "slept"
    assert len(deaths(fleet)) == killed


def holds(fleet: Fleet, worker: Any, job: Job[Any]) -> bool:
    record = fleet.ledger.job(job.id)
    return record is not None and record.worker_id == worker.id


def test_a_transaction_replaces_the_job_that_has_the_only_place(fleet: LockedFleet) -> None:
    """Whoever waits behind it is let in after the commit, though the replacement has no concurrency key."""
    serve = fleet.task("serve")
    ready, behind = serve.options(unique_key="k").enqueue("bob", 0.0), serve.enqueue("bob", 0.0)
    with psycopg.connect(fleet.url) as connection:
        replace = fleet.task("add").options(unique_key="k", on_duplicate="replace", connection=connection)
        newest = replace.enqueue(1, 2)
        other = within(lambda: serve.enqueue("bob", 0.0), 2.0)
        connection.commit()
    fleet.reinforce()
    assert newest.result(timeout=10) == 3
    assert [job.result(timeout=30) for job in (behind, other)] == ["bob", "bob"]
    assert fleet.state(ready) is JobState.CANCELLED
    assert not [event for event in fleet.ledger.events(limit=1000) if event.kind == "line_repaired"]


def within(act: Callable[[], Any], seconds: float) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(act()))
    thread.start()
    thread.join(seconds)
    assert answers, f"not done within {seconds} s"
    return answers[0]


def test_a_session_holds_the_row_of_a_running_job(fleet: LockedFleet) -> None:
    """Its outcome waits for the row, and everything else of the worker goes on."""
    fleet.reinforce()
    job = fleet.nap("short", 1.0)
    with psycopg.connect(fleet.url) as connection:
        connection.execute("select 1 from unstuck.jobs where id = %s for update", (job.id,))
        took = work_beside(fleet, OPEN_S)
        assert fleet.state(job) is JobState.RUNNING
        pid = connection.info.backend_pid
        assert f"blocked by session {pid}" in fleet.workers[0].said()
    assert max(took) < PROMPT_S, took
    assert job.result(timeout=30) == "slept"
    assert deaths(fleet) == []
    record = fleet.ledger.job(job.id)
    assert record is not None
    assert record.attempt == 1


def test_an_outcome_waits_for_a_lock_until_long_after_the_deadline_of_its_job(fleet: LockedFleet) -> None:
    """Its code ended in time: that it could not be written is no reason to call it late."""
    fleet.reinforce()
    meddler = PostgresBackdoor(fleet.url)
    with psycopg.connect(fleet.url) as connection:
        fleet.task("add").options(unique_key="held", connection=connection).enqueue(1, 2)
        job = fleet.task("hand_on").enqueue("held")
        wait_for(lambda: "cannot be written yet" in fleet.workers[0].said(), "the outcome to be deferred")
        wait_for(lambda: fleet.ledger.deferred_outcome(job.id) is not None, "the ledger to know that its code ended")
        meddler.age_job(job.id, 600.0)
        swept_s = last_sweep_s(meddler)
        wait_for(lambda: last_sweep_s(meddler) > swept_s + 2, "reapers to look for jobs past their deadline")
        assert fleet.state(job) is JobState.RUNNING
        story = fleet.app.operator.why(job.id)
        assert story.headline.startswith("Its code has ended, try 1;")
        assert f"session {connection.info.backend_pid} (" in story.next
        assert "; its last statement: " in story.next
        connection.commit()
    assert job.result(timeout=30) == "handed on"
    wait_for(lambda: fleet.ledger.deferred_outcome(job.id) is None, "the note to be removed")


@pytest.mark.long
def test_a_worker_that_must_leave_beside_a_lock_names_the_outcome_that_it_loses(fleet: LockedFleet) -> None:
    fleet.start("--concurrency", "2", target=TARGET, UNSTUCK_SHUTDOWN_GRACE="1s")
    leaving = fleet.workers[0]
    with psycopg.connect(fleet.url) as connection:
        fleet.task("add").options(unique_key="held", connection=connection).enqueue(1, 2)
        job = fleet.task("hand_on").enqueue("held")
        wait_for(lambda: fleet.ledger.deferred_outcome(job.id) is not None, "the ledger to know that its code ended")
        fleet.reinforce()
        leaving.stop()
        said = leaving.said()
        assert "The outcome of a job could not be recorded" in said
        assert f"job_id={job.id}" in said
        assert "could not be reached" not in said
        fleet.wait_final(job)
    record = fleet.ledger.job(job.id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.FAILED, 1)
    assert record.error is not None
    assert "its code had ended before that" in (record.error.cause or "")


def last_sweep_s(meddler: PostgresBackdoor) -> float:
    """Return when the ticket for a sweep was last taken, in seconds by the database's clock."""
    return float(meddler.rows(f"select extract(epoch from until) from tickets where name = '{SWEEP_TICKET}'")[0][0])
