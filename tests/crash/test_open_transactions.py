"""A user's transaction stays open for longer than the heartbeat timeout and holds rows that workers need."""

from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.crash.apps import locks
from tests.support.backdoor import PostgresBackdoor
from tests.support.fleet import PROMPT, TIMEOUT_S, Fleet, copy_tasks, wait_for

from unstuck import App
from unstuck.client.job import Job
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract.diagnosis import SWEEP_TICKET
from unstuck.ledger.contract.jobs import JobFilter

TARGET = "tests.crash.apps.locks:app"
BESIDE = 20
"""How many unrelated jobs are done while a user's transaction stays open: before, the first one waited for it."""
TICKS = 3


class LockedFleet(Fleet):
    def _app(self, settings: dict[str, Any]) -> App:
        app = App(self.url, **settings)
        copy_tasks(locks.app, app)
        return app

    def reinforce(self) -> None:
        self.start("--concurrency", "2", target=TARGET)

    def nap(self, name: str, seconds: float) -> Job[Any]:
        notes = self.folder / name
        job: Job[Any] = self.task("nap").enqueue(seconds, str(notes))
        wait_for(notes.exists, "the nap to begin")
        return job


def deaths(fleet: Fleet) -> list[str]:
    return [worker.id for worker in fleet.ledger.workers.list() if worker.state is WorkerState.DEAD]


def work_beside(fleet: LockedFleet) -> None:
    """Have unrelated jobs done one after the other. The transaction is open until all have ended, so none waits for
    it."""
    for _ in range(BESIDE):
        assert fleet.task("add").enqueue(1, 2).result(timeout=TIMEOUT_S) == 3


def has_said(fleet: LockedFleet, words: str) -> bool:
    return any(words in worker.said() for worker in fleet.workers)


@pytest.fixture
def fleet(ready_pg_url: str, tmp_path: Path) -> Any:
    fleet = LockedFleet(ready_pg_url, tmp_path, **PROMPT)
    yield fleet
    fleet.close()


def test_a_transaction_holds_the_unique_key_of_a_schedule(fleet: LockedFleet) -> None:
    for _ in range(2):
        fleet.reinforce()
    long = fleet.nap("long", 7.0)
    with psycopg.connect(fleet.url) as connection:
        held = wait_for(lambda: hold_key(fleet, connection), "no tick with that key to be there")
        before = len(ticks_of(fleet, "plain"))
        work_beside(fleet)
        # The other schedule goes on meanwhile, tick by tick.
        wait_for(lambda: len(ticks_of(fleet, "plain")) >= before + TICKS, "the other schedule to go on")
        wait_for(lambda: has_said(fleet, "blocked by session"), "a worker to name the session")
        connection.commit()
    wait_for(lambda: fleet.state(held) is JobState.SUCCEEDED, "the job of the transaction to run")
    # The key is free: the schedule goes on, and no tick is enqueued twice.
    known = len(ticks_of(fleet, "keyed"))
    wait_for(lambda: len(ticks_of(fleet, "keyed")) >= known + 2, "the schedule to go on")
    keyed = ticks_of(fleet, "keyed")
    assert len(keyed) == len(set(keyed))
    assert long.result(timeout=30) == "slept"
    assert deaths(fleet) == []


def hold_key(fleet: LockedFleet, connection: psycopg.Connection[Any]) -> Job[Any] | None:
    """Enqueue a job with the key of the schedule in this transaction, unless a tick of it is there already."""
    job = fleet.task("tick").options(unique_key="held", connection=connection).enqueue()
    if job.fresh:
        return job
    connection.rollback()
    return None


def ticks_of(fleet: Fleet, schedule: str) -> list[str]:
    jobs = fleet.ledger.jobs.list(JobFilter(limit=1000))
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
    long = fleet.nap("long", 6.0)
    with psycopg.connect(fleet.url) as connection:
        replace = serve.options(unique_key="k", on_duplicate="replace", connection=connection)
        newest = replace.enqueue("ann", 0.0)
        if killed:
            victim = next(one for one in fleet.workers if one.record() is not None and not holds(fleet, one, long))
            gone = victim.id
            victim.kill()
            wait_for(lambda: deaths(fleet) == [gone], "the killed worker to be declared dead")
            work_beside(fleet)
            assert deaths(fleet) == [gone]
        else:
            work_beside(fleet)
            fleet.wait_state(first, JobState.SUCCEEDED)  # Its end is written beside the open transaction.
            assert deaths(fleet) == []
        connection.commit()
    assert newest.result(timeout=30) == "ann"
    assert fleet.state(waiting) is JobState.CANCELLED
    assert long.result(timeout=30) == "slept"
    assert len(deaths(fleet)) == killed


def holds(fleet: Fleet, worker: Any, job: Job[Any]) -> bool:
    record = fleet.ledger.jobs.get(job.id)
    return record is not None and record.worker_id == worker.id


def test_a_transaction_replaces_the_job_that_has_the_only_place(fleet: LockedFleet) -> None:
    """Whoever waits behind it is let in after the commit, though the replacement has no concurrency key."""
    serve = fleet.task("serve")
    ready, behind = serve.options(unique_key="k").enqueue("bob", 0.0), serve.enqueue("bob", 0.0)
    with psycopg.connect(fleet.url) as connection:
        replace = fleet.task("add").options(unique_key="k", on_duplicate="replace", connection=connection)
        newest = replace.enqueue(1, 2)
        other = serve.enqueue("bob", 0.0)
        connection.commit()
    fleet.reinforce()
    assert newest.result(timeout=10) == 3
    assert [job.result(timeout=30) for job in (behind, other)] == ["bob", "bob"]
    assert fleet.state(ready) is JobState.CANCELLED
    assert not [event for event in fleet.ledger.events.list(limit=1000) if event.kind == "line_repaired"]


def test_a_session_holds_the_row_of_a_running_job(fleet: LockedFleet) -> None:
    """Its outcome waits for the row, and everything else of the worker goes on."""
    fleet.reinforce()
    job = fleet.nap("short", 1.0)
    with psycopg.connect(fleet.url) as connection:
        connection.execute("select 1 from unstuck.jobs where id = %s for update", (job.id,))
        work_beside(fleet)
        pid = connection.info.backend_pid
        wait_for(lambda: has_said(fleet, f"blocked by session {pid}"), "the worker to name the session")
        work_beside(fleet)
        assert fleet.state(job) is JobState.RUNNING
    assert job.result(timeout=30) == "slept"
    assert deaths(fleet) == []
    record = fleet.ledger.jobs.get(job.id)
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
        wait_for(
            lambda: fleet.ledger.jobs.deferred_outcome(job.id) is not None, "the ledger to know that its code ended"
        )
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
    wait_for(lambda: fleet.ledger.jobs.deferred_outcome(job.id) is None, "the note to be removed")


@pytest.mark.long
def test_a_worker_that_must_leave_beside_a_lock_names_the_outcome_that_it_loses(fleet: LockedFleet) -> None:
    fleet.start("--concurrency", "2", target=TARGET, UNSTUCK_SHUTDOWN_GRACE="1s")
    leaving = fleet.workers[0]
    with psycopg.connect(fleet.url) as connection:
        fleet.task("add").options(unique_key="held", connection=connection).enqueue(1, 2)
        job = fleet.task("hand_on").enqueue("held")
        wait_for(
            lambda: fleet.ledger.jobs.deferred_outcome(job.id) is not None, "the ledger to know that its code ended"
        )
        fleet.reinforce()
        leaving.stop()
        said = leaving.said()
        assert "The outcome of a job could not be recorded" in said
        assert f"job_id={job.id}" in said
        assert "could not be reached" not in said
        fleet.wait_final(job)
    record = fleet.ledger.jobs.get(job.id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.FAILED, 1)
    assert record.error is not None
    assert "its code had ended before that" in (record.error.cause or "")


def last_sweep_s(meddler: PostgresBackdoor) -> float:
    """Return when the ticket for a sweep was last taken, in seconds by the database's clock."""
    return float(meddler.rows(f"select extract(epoch from until) from tickets where name = '{SWEEP_TICKET}'")[0][0])
