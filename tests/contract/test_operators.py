"""What operators do: pause, cancel, retry, purge; each answer says what became of each job."""

import itertools

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import (
    birth,
    claim_jobs,
    crash,
    crash_retry,
    done,
    failure,
    new_job,
    put,
    run,
    running,
    state_of,
    turn,
    verdict,
)

from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import NewApiToken
from unstuck.ledger.contract.jobs import JobFilter, TaskRecord
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import AttemptRef, Output


def test_cancelling_says_what_became_of_each(ledger: Ledger, w1: str) -> None:
    finished = running(ledger)
    turn(ledger, done=[done(finished)])
    ran = running(ledger)
    put(ledger)
    [claimed] = claim_jobs(ledger)
    waiting, later = put(ledger), put(ledger, delay_s=60.0)
    ids = [finished.job_id, ran.job_id, claimed.job_id, waiting, later, 999_999]
    assert ledger.jobs.cancel(ids, "ops") == {
        finished.job_id: "finished",
        ran.job_id: "requested",
        claimed.job_id: "cancelled",
        waiting: "cancelled",
        later: "cancelled",
        999_999: "missing",
    }
    assert state_of(ledger, finished.job_id) is JobState.SUCCEEDED
    assert state_of(ledger, ran.job_id) is JobState.RUNNING
    outcomes = ledger.jobs.outcomes([claimed.job_id, waiting, later])
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert outcome.state is JobState.CANCELLED
        assert outcome.error is not None
        assert outcome.error.code == "CANCELLED"
        assert "ops" in (outcome.error.cause or "")
    assert claim_jobs(ledger) == []


def test_a_worker_can_not_start_what_was_cancelled_in_its_hands(ledger: Ledger, w1: str) -> None:
    put(ledger)
    [job] = claim_jobs(ledger)
    ledger.jobs.cancel([job.job_id], "ops")
    assert turn(ledger, start=[AttemptRef(job.job_id, job.token)]).superseded == {(job.job_id, job.token)}
    assert ledger.workers.held("w1") == []


def test_a_running_job_shows_that_somebody_wants_it_cancelled(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.jobs.cancel([job.job_id], "ops")
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert record.cancel_requested
    assert [held.cancel_requested for held in ledger.workers.held("w1")] == [True]
    assert ledger.events.list(job_id=job.job_id)[-1].kind == "cancel_requested"


def test_a_running_job_that_finishes_anyway_has_succeeded(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.jobs.cancel([job.job_id], "ops")
    turn(ledger, done=[done(job)])
    assert state_of(ledger, job.job_id) is JobState.SUCCEEDED


def test_cancelling_frees_the_unique_key(ledger: Ledger) -> None:
    job_id = put(ledger, unique_key="once")
    ledger.jobs.cancel([job_id], "ops")
    assert ledger.jobs.enqueue([new_job(unique_key="once")])[0].fresh


def test_retrying_says_what_became_of_each(ledger: Ledger, w1: str) -> None:
    succeeded = running(ledger)
    turn(ledger, done=[done(succeeded)])
    failed = running(ledger)
    turn(ledger, endings=[failure(failed)])
    live = put(ledger)
    keyed = put(ledger, unique_key="once")
    ledger.jobs.cancel([keyed], "ops")
    ledger.jobs.enqueue([new_job(unique_key="once")])
    assert ledger.jobs.retry([succeeded.job_id, failed.job_id, live, keyed, 999_999], "ops") == {
        succeeded.job_id: "succeeded",
        failed.job_id: "queued",
        live: "live",
        keyed: "duplicate",
        999_999: "missing",
    }
    assert state_of(ledger, keyed) is JobState.CANCELLED


def test_a_retried_job_starts_with_fresh_counters_and_keeps_its_history(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job)])
    [again] = run(ledger)
    error = JobError("CRASHED_TOO_OFTEN", "too often", "signal 11")
    ending = Ending(again.job_id, again.token, JobState.QUARANTINED, AttemptState.CRASHED, error=error, counter="crash")
    turn(ledger, endings=[ending])
    assert ledger.jobs.retry([job.job_id], "ops") == {job.job_id: "queued"}
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.failures, record.crash_count) == (JobState.PENDING, 0, 0)
    assert (record.error, record.finished_at, record.result, record.worker_id) == (None, None, None, None)
    assert not record.cancel_requested
    assert [(a.token, a.code) for a in ledger.jobs.attempts(job.job_id)] == [
        (job.token, "WORKER_CRASHED"),
        (again.token, "CRASHED_TOO_OFTEN"),
    ]
    assert ledger.events.list(job_id=job.job_id)[-1].kind == "retried"
    [third] = run(ledger)
    turn(ledger, done=[done(third)])
    assert [a.state for a in ledger.jobs.attempts(job.job_id)] == [
        AttemptState.CRASHED,
        AttemptState.CRASHED,
        AttemptState.SUCCEEDED,
    ]


def test_a_retried_job_holds_its_unique_key_again(ledger: Ledger, w1: str) -> None:
    job = running(ledger, unique_key="once")
    turn(ledger, endings=[crash(job)])
    ledger.jobs.retry([job.job_id], "ops")
    assert ledger.jobs.enqueue([new_job(unique_key="once")])[0].job_id == job.job_id


def test_a_job_cancelled_before_it_ran_can_be_retried(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger)
    ledger.jobs.cancel([job_id], "ops")
    assert ledger.jobs.retry([job_id], "ops") == {job_id: "queued"}
    assert ledger.jobs.attempts(job_id) == []
    assert [job.job_id for job in claim_jobs(ledger)] == [job_id]


def test_purging_cancels_everything_that_waits_in_one_queue(ledger: Ledger, w1: str) -> None:
    ran = running(ledger)
    ids = [put(ledger), put(ledger, delay_s=60.0), put(ledger, unique_key="once")]
    other = put(ledger, queue="other")
    assert ledger.queues.purge("default", "ops") == 3
    assert [state_of(ledger, job_id) for job_id in ids] == [JobState.CANCELLED] * 3
    assert state_of(ledger, ran.job_id) is JobState.RUNNING
    assert state_of(ledger, other) is JobState.PENDING
    assert {outcome.error.code for outcome in ledger.jobs.outcomes(ids) if outcome.error} == {"CANCELLED"}
    assert "purged" in [event.kind for event in ledger.events.list()]
    assert ledger.queues.purge("default", "ops") == 0
    assert ledger.queues.purge("no-such-queue", "ops") == 0


def test_pausing_all_pauses_every_known_queue_once(ledger: Ledger, w1: str) -> None:
    put(ledger, queue="a"), put(ledger, queue="b")
    assert ledger.queues.pause("a", "ops") == ["a"]
    assert ledger.queues.pause("a", "ops") == []
    assert set(ledger.queues.pause(None, "ops")) == {"b", "default"}
    assert claim_jobs(ledger, queues=("a", "b", "default")) == []
    assert [(queue.name, queue.paused) for queue in ledger.queues.list()] == [
        ("a", True),
        ("b", True),
        ("default", True),
    ]
    assert set(ledger.queues.resume(None, "ops")) == {"a", "b", "default"}
    assert ledger.queues.resume(None, "ops") == []
    kinds = [event.kind for event in ledger.events.list()]
    assert kinds.count("queue_paused") == kinds.count("queue_resumed") == 3


def test_a_queue_can_be_paused_before_it_exists(ledger: Ledger, w1: str) -> None:
    assert ledger.queues.pause("tomorrow", "ops") == ["tomorrow"]
    put(ledger, queue="tomorrow")
    assert claim_jobs(ledger, queues=("tomorrow",)) == []
    assert [queue.name for queue in ledger.queues.list() if queue.paused] == ["tomorrow"]


def test_a_paused_queue_lets_running_jobs_finish(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.queues.pause("default", "ops")
    assert turn(ledger, done=[done(job)]).superseded == frozenset()


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_no_ids_no_answers(ledger: Ledger, verb: str) -> None:
    assert getattr(ledger.jobs, verb)([], "ops") == {}


def test_jobs_are_listed_newest_first_without_their_payloads(ledger: Ledger, w1: str) -> None:
    first = running(ledger)
    turn(ledger, done=[done(first)])
    second = put(ledger)
    listed = ledger.jobs.list(JobFilter())
    assert [job.id for job in listed] == [second, first.job_id]
    assert [(job.payload, job.result) for job in listed] == [(b"", None), (b"", None)]


def test_every_filter_narrows_the_list(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ledger.workers.register(birth("w2", tasks=(TaskRecord("mul", "other"),)))
    crashed = running(ledger)
    turn(ledger, endings=[crash(crashed)])
    failed = running(ledger)
    turn(ledger, endings=[failure(failed)])
    waiting = put(ledger, queue="other", task="mul")
    old = put(ledger)
    meddler.age_job(old, 3600)

    def ids(**where: object) -> list[int]:
        return [job.id for job in ledger.jobs.list(JobFilter(**where))]  # type: ignore[arg-type]

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
    ledger.jobs.cancel([put(ledger)], "tester")
    running(ledger)
    put(ledger)
    claim_jobs(ledger, limit=1)
    put(ledger)
    put(ledger, delay_s=3600.0)
    every = ledger.jobs.list(JobFilter())
    for count in range(1, 4):
        for states in itertools.combinations(JobState, count):
            expected = [job.id for job in every if job.state in states]
            assert [job.id for job in ledger.jobs.list(JobFilter(states=states))] == expected, states
            older = ledger.jobs.list(JobFilter(states=states, before_id=every[2].id, limit=2))
            assert [job.id for job in older] == [one for one in expected if one < every[2].id][:2], states


def test_a_job_that_does_not_exist_is_none(ledger: Ledger) -> None:
    assert ledger.jobs.get(4711) is None
    assert ledger.jobs.attempts(4711) == []
    assert ledger.jobs.outputs(4711) == []


def test_jobs_are_counted_by_state(ledger: Ledger, w1: str) -> None:
    turn(ledger, done=[done(running(ledger))])
    running(ledger)
    put(ledger), put(ledger)
    claim_jobs(ledger, limit=1)
    assert ledger.jobs.count() == {"pending": 1, "claimed": 1, "running": 1, "succeeded": 1}


def test_a_queue_shows_all_that_goes_on_in_it(ledger: Ledger, w1: str, w2: str, meddler: Backdoor) -> None:
    turn(ledger, done=[done(running(ledger))])
    running(ledger)
    put(ledger)
    claim_jobs(ledger, limit=1)
    oldest = put(ledger)
    put(ledger)
    put(ledger, delay_s=60.0)
    put(ledger, queue="nobody-serves-me")
    meddler.age_job(oldest, 100)
    ledger.recovery.declare_dead("w2", verdict(), GuardNone())
    default, lonely = ledger.queues.list()
    assert (default.name, default.paused, default.workers) == ("default", False, 1)
    assert (default.pending, default.scheduled, default.claimed, default.running) == (2, 1, 1, 1)
    assert default.oldest_pending_s == pytest.approx(100, abs=5)
    assert (lonely.name, lonely.pending, lonely.workers) == ("nobody-serves-me", 1, 0)


def test_a_queue_of_a_known_task_is_shown_even_when_it_is_empty(ledger: Ledger, w1: str) -> None:
    [queue] = ledger.queues.list()
    assert (queue.name, queue.pending, queue.oldest_pending_s) == ("default", 0, None)


def test_events_come_oldest_first_and_go_on_after_the_last_one_seen(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, message="one")])
    [job] = run(ledger)
    turn(ledger, endings=[crash_retry(job, message="two")])
    [job] = run(ledger)
    turn(ledger, endings=[failure(job, message="three")])
    events = ledger.events.list(job_id=job.job_id)
    assert [event.message for event in events] == ["one", "two", "three"]
    assert [event.id for event in events] == sorted(event.id for event in events)
    assert [event.message for event in ledger.events.list(job_id=job.job_id, limit=2)] == ["two", "three"]
    assert [event.message for event in ledger.events.list(job_id=job.job_id, after_id=events[0].id, limit=1)] == ["two"]
    assert [event.message for event in ledger.events.list(after_id=events[0].id)] == ["two", "three"]
    assert [event.message for event in ledger.events.list(limit=1)] == ["three"]
    assert {event.worker_id for event in ledger.events.list(worker_id="w1")} == {"w1"}
    assert ledger.events.list(worker_id="nobody") == []


def test_attempts_and_what_they_printed_come_in_the_order_in_which_they_were_claimed(
    ledger: Ledger, open_again: OpenLedger, w1: str, w2: str, url: str
) -> None:
    other = open_again()
    # On PostgreSQL each session has tokens in stock: the other one takes lower ones first.
    turn(other, "w2", done=[done(running(other, "w2"))])
    put(ledger)
    tokens = []
    for place, worker_id in ((ledger, "w1"), (other, "w2")):
        [job] = run(place, worker_id)
        tokens.append(job.token)
        printed = Output(job.job_id, job.token, worker_id.encode(), b"")
        turn(place, worker_id, outputs=[printed], endings=[crash_retry(job)])
    assert [attempt.token for attempt in ledger.jobs.attempts(job.job_id)] == tokens
    assert [output.token for output in ledger.jobs.outputs(job.job_id)] == tokens
    assert [output.stdout for output in Operator(ledger, Settings(url=url)).jobs.outputs(job.job_id)] == [b"w1", b"w2"]


def test_workers_show_what_they_hold_and_the_dead_can_be_left_out(ledger: Ledger, w1: str, w2: str) -> None:
    running(ledger)
    ledger.recovery.declare_dead("w2", verdict(), GuardNone())
    assert [(worker.id, worker.held) for worker in ledger.workers.list()] == [("w1", 1), ("w2", 0)]
    assert [worker.id for worker in ledger.workers.list(living_only=True)] == ["w1"]


def test_the_views_of_the_seeds_are_there(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ran = running(ledger)
    put(ledger)
    [claimed] = claim_jobs(ledger)
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
    ledger: Ledger, meddler: Backdoor
) -> None:
    ledger.workers.register(birth("w-1a2b", name="worker-youtube-01", transport="http"))
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
    [attempt] = ledger.jobs.attempts(job.job_id)
    assert attempt.started_at is not None
    assert attempt.last_heartbeat_at is not None
    assert attempt.deadline == pytest.approx(attempt.started_at + 100, abs=1)
    assert attempt.heartbeat_deadline == pytest.approx(attempt.last_heartbeat_at + 50, abs=1)


def test_the_ledger_says_what_it_is(ledger: Ledger, dialect: str) -> None:
    facts = ledger.describe()
    assert str(facts["database"]).lower().startswith(dialect[:6])
    assert facts["version"]


HOUR_S = 3600.0


def token(id: str = "aaaa", *, name: str = "ci", expires_in_s: float | None = None) -> NewApiToken:
    return NewApiToken(id, name, id.encode() * 8, b"seal", ("read", "enqueue"), "ada", expires_in_s)


def test_a_token_is_found_with_all_that_was_written_down(ledger: Ledger) -> None:
    ledger.admin.add_api_token(token())
    found = ledger.admin.api_tokens()[0]
    assert (found.id, found.name, found.hash, found.seal) == ("aaaa", "ci", b"aaaa" * 8, b"seal")
    assert found.scopes == ("read", "enqueue")
    assert (found.created_by, found.expires_at, found.revoked_at, found.valid) == ("ada", None, None, True)


def test_a_revoked_token_stays_in_the_list_and_is_valid_no_more(ledger: Ledger) -> None:
    ledger.admin.add_api_token(token())
    assert ledger.admin.revoke_api_token("aaaa")
    assert not ledger.admin.revoke_api_token("aaaa")
    assert not ledger.admin.revoke_api_token("bbbb")
    assert [(found.valid, found.revoked_at is not None) for found in ledger.admin.api_tokens()] == [(False, True)]


def test_an_expired_token_is_valid_no_more(ledger: Ledger) -> None:
    ledger.admin.add_api_token(token("aaaa", expires_in_s=0.0))
    ledger.admin.add_api_token(token("bbbb", expires_in_s=HOUR_S))
    assert {found.id: found.valid for found in ledger.admin.api_tokens()} == {"aaaa": False, "bbbb": True}


def test_a_note_is_there_before_the_deed_and_says_afterwards_how_it_ended(ledger: Ledger) -> None:
    first = ledger.admin.begin_audit("ada", "cli", "purge", "queue default")
    assert [(note.verb, note.outcome) for note in ledger.admin.audit()] == [("purge", None)]
    second = ledger.admin.begin_audit("bob", "page", "cancel", "job 1")
    ledger.admin.end_audit(first, "3 cancelled")
    assert [(note.id, note.outcome) for note in ledger.admin.audit()] == [(second, None), (first, "3 cancelled")]
    assert [note.id for note in ledger.admin.audit(before_id=second)] == [first]
    assert [note.by for note in ledger.admin.audit(limit=1)] == ["bob"]


def test_old_notes_are_swept_and_young_ones_stay(ledger: Ledger) -> None:
    for number in range(3):
        ledger.admin.begin_audit("ada", "cli", "cancel", f"job {number}")
    assert ledger.maintenance.sweep_audit(HOUR_S, 2) == 0
    assert ledger.maintenance.sweep_audit(0.0, 2) == 2
    assert [note.target for note in ledger.admin.audit()] == ["job 2"]
