"""What people see: lists, filters, queues, events, views."""

import itertools

import pytest
from tests.contract.hands import birth, claim, crash, crash_retry, done, failure, put, run, running, turn, verdict
from tests.contract.meddling import Meddler

from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import GuardNone, JobFilter, TaskRecord


def test_jobs_are_listed_newest_first_without_their_payloads(ledger: Ledger, w1: str) -> None:
    first = running(ledger)
    turn(ledger, done=[done(first)])
    second = put(ledger)
    listed = ledger.jobs(JobFilter())
    assert [job.id for job in listed] == [second, first.job_id]
    assert [(job.payload, job.result) for job in listed] == [(b"", None), (b"", None)]


def test_every_filter_narrows_the_list(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ledger.register(birth("w2", tasks=(TaskRecord("mul", "other"),)))
    crashed = running(ledger)
    turn(ledger, endings=[crash(crashed)])
    failed = running(ledger)
    turn(ledger, endings=[failure(failed)])
    waiting = put(ledger, queue="other", task="mul")
    old = put(ledger)
    meddler.age_job(old, 3600)

    def ids(**where: object) -> list[int]:
        return [job.id for job in ledger.jobs(JobFilter(**where))]  # type: ignore[arg-type]

    assert ids(states=(JobState.FAILED,)) == [failed.job_id, crashed.job_id]
    assert ids(states=(JobState.FAILED, JobState.PENDING)) == [old, waiting, failed.job_id, crashed.job_id]
    assert ids(queue="other") == [waiting]
    assert ids(task="mul") == [waiting]
    assert ids(error="WORKER_CRASHED") == [crashed.job_id]
    assert ids(error="WORKER_CRASHED", queue="other") == []
    assert ids(worker_id="w1") == [failed.job_id, crashed.job_id]
    assert ids(older_than_s=1800.0) == [old]
    assert ids(newer_than_s=1800.0) == [waiting, failed.job_id, crashed.job_id]
    assert ids(before_id=failed.job_id) == [crashed.job_id]
    assert ids(limit=2) == [old, waiting]


def test_any_states_are_found_together_newest_first(ledger: Ledger, w1: str) -> None:
    """Each state may be looked up in an index of its own: the list must not show it."""
    turn(ledger, done=[done(running(ledger))])
    turn(ledger, endings=[failure(running(ledger))])
    turn(ledger, endings=[crash(running(ledger))])
    ledger.cancel([put(ledger)], "tester")
    running(ledger)
    put(ledger)
    claim(ledger, limit=1)
    put(ledger)
    put(ledger, delay_s=3600.0)
    every = ledger.jobs(JobFilter())
    for count in range(1, 4):
        for states in itertools.combinations(JobState, count):
            expected = [job.id for job in every if job.state in states]
            assert [job.id for job in ledger.jobs(JobFilter(states=states))] == expected, states
            older = ledger.jobs(JobFilter(states=states, before_id=every[2].id, limit=2))
            assert [job.id for job in older] == [one for one in expected if one < every[2].id][:2], states


def test_a_job_that_does_not_exist_is_none(ledger: Ledger) -> None:
    assert ledger.job(4711) is None
    assert ledger.attempts(4711) == []
    assert ledger.outputs(4711) == []


def test_jobs_are_counted_by_state(ledger: Ledger, w1: str) -> None:
    turn(ledger, done=[done(running(ledger))])
    running(ledger)
    put(ledger), put(ledger)
    claim(ledger, limit=1)
    assert ledger.count_jobs() == {"pending": 1, "claimed": 1, "running": 1, "succeeded": 1}


def test_a_queue_shows_all_that_goes_on_in_it(ledger: Ledger, w1: str, w2: str, meddler: Meddler) -> None:
    turn(ledger, done=[done(running(ledger))])
    running(ledger)
    put(ledger)
    claim(ledger, limit=1)
    oldest = put(ledger)
    put(ledger)
    put(ledger, delay_s=60.0)
    put(ledger, queue="nobody-serves-me")
    meddler.age_job(oldest, 100)
    ledger.condemn("w2", verdict(), GuardNone())
    default, lonely = ledger.queues()
    assert (default.name, default.paused, default.workers) == ("default", False, 1)
    assert (default.pending, default.scheduled, default.claimed, default.running) == (2, 1, 1, 1)
    assert default.oldest_pending_s == pytest.approx(100, abs=5)
    assert (lonely.name, lonely.pending, lonely.workers) == ("nobody-serves-me", 1, 0)


def test_a_queue_of_a_known_task_is_shown_even_when_it_is_empty(ledger: Ledger, w1: str) -> None:
    [queue] = ledger.queues()
    assert (queue.name, queue.pending, queue.oldest_pending_s) == ("default", 0, None)


def test_events_come_oldest_first_and_go_on_after_the_last_one_seen(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, message="one")])
    [job] = run(ledger)
    turn(ledger, endings=[crash_retry(job, message="two")])
    [job] = run(ledger)
    turn(ledger, endings=[failure(job, message="three")])
    events = ledger.events(job_id=job.job_id)
    assert [event.message for event in events] == ["one", "two", "three"]
    assert [event.id for event in events] == sorted(event.id for event in events)
    assert [event.message for event in ledger.events(job_id=job.job_id, limit=2)] == ["two", "three"]
    assert [event.message for event in ledger.events(job_id=job.job_id, after_id=events[0].id, limit=1)] == ["two"]
    assert [event.message for event in ledger.events(after_id=events[0].id)] == ["two", "three"]
    assert [event.message for event in ledger.events(limit=1)] == ["three"]
    assert {event.worker_id for event in ledger.events(worker_id="w1")} == {"w1"}
    assert ledger.events(worker_id="nobody") == []


def test_workers_show_what_they_hold_and_the_dead_can_be_left_out(ledger: Ledger, w1: str, w2: str) -> None:
    running(ledger)
    ledger.condemn("w2", verdict(), GuardNone())
    assert [(worker.id, worker.held) for worker in ledger.workers()] == [("w1", 1), ("w2", 0)]
    assert [worker.id for worker in ledger.workers(living_only=True)] == ["w1"]


def test_the_views_of_the_seeds_are_there(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ran = running(ledger)
    put(ledger)
    [claimed] = claim(ledger)
    [(worker_id, status, active, minutes)] = meddler.rows(
        "select worker_id, status, active_tasks, minutes_since_heartbeat "
        "from worker_status where last_seen_at is not null"
    )
    assert (worker_id, status, active) == ("w1", "active", 2)
    assert 0 <= float(minutes) < 1
    beats = meddler.rows(
        "select task_id, sender_id, role, hostname, pid from heartbeats where id is not null and sent_at is not null"
    )
    facts = birth("w1")
    assert sorted(beats) == [
        (ran.job_id, "w1", "runner", facts.host, facts.pid),
        (claimed.job_id, "w1", "claimer", facts.host, facts.pid),
    ]


def test_the_view_of_workers_rounds_alike_and_knows_the_names_that_workers_gave(
    ledger: Ledger, meddler: Meddler
) -> None:
    ledger.register(birth("w-1a2b", name="worker-youtube-01", door="http"))
    job = running(ledger, worker_id="w-1a2b")
    named = "select worker_id, minutes_since_heartbeat from worker_status where name = 'worker-youtube-01'"
    # A beat that seems to come from the future is no silence below zero.
    for moved_s, least, most in ((-91.0, 1.52, 1.9), (300.0, 0.0, 0.0)):
        meddler.move_beats(moved_s)
        [(worker_id, minutes)] = meddler.rows(named)
        assert worker_id == "w-1a2b"
        assert least <= float(minutes) <= most
        assert round(float(minutes), 2) == float(minutes)
        assert not str(minutes).startswith("-")
    assert meddler.rows("select task_id, sender_name from heartbeats") == [(job.job_id, "worker-youtube-01")]


def test_an_attempt_shows_its_deadlines(ledger: Ledger, w1: str) -> None:
    job = running(ledger, timeout_s=100.0, heartbeat_timeout_s=50.0)
    [attempt] = ledger.attempts(job.job_id)
    assert attempt.started_at is not None
    assert attempt.last_heartbeat_at is not None
    assert attempt.deadline == pytest.approx(attempt.started_at + 100, abs=1)
    assert attempt.heartbeat_deadline == pytest.approx(attempt.last_heartbeat_at + 50, abs=1)


def test_the_ledger_says_what_it_is(ledger: Ledger, dialect: str) -> None:
    facts = ledger.describe()
    assert str(facts["database"]).lower().startswith(dialect[:6])
    assert facts["version"]
