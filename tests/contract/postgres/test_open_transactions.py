"""Another session holds a lock in an open transaction: no verb waits for it for long, and what waited is done later."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psycopg
import pytest
from tests.contract.postgres.test_locks import look, workflow_of
from tests.support.builders import (
    QUEUE,
    TASK,
    birth,
    claim_jobs,
    crash,
    crash_retry,
    done,
    new_job,
    put,
    running,
    state_of,
    turn,
)
from tests.support.fleet import wait_for

from unstuck.client.batcher import EnqueueBatcher
from unstuck.config import Settings
from unstuck.domain.endings import Release
from unstuck.domain.limits import QueueLimit
from unstuck.domain.schedules import ScheduleDefinition, Timing
from unstuck.domain.states import JobState
from unstuck.domain.workflows import WorkflowState
from unstuck.errors import LedgerBusy
from unstuck.ledger.contract.jobs import JobExtras, NewJob
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.schedules import Firing
from unstuck.ledger.contract.workers import ClaimRequest, Exchange, FollowUp, Turn
from unstuck.ledger.postgres import locks
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.mailbox import Mailbox
from unstuck.worker.ledger_thread import LedgerThread

Session = psycopg.Connection[Any]


@pytest.fixture
def ledger(swept_pg_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=swept_pg_url))
    ledger.workers.register(birth("w1"))
    yield ledger
    ledger.close()


@pytest.fixture
def user(swept_pg_url: str) -> Iterator[Session]:
    """A user's session whose transaction stays open until it is committed or rolled back."""
    with psycopg.connect(swept_pg_url, application_name="shop") as session:
        yield session


def beside(act: Callable[[], Any]) -> Any:
    """Act while the user's transaction stays open; LedgerBusy is an answer if a wait for a lock ended by itself.

    A wait without a limit of its own would end with the limit of the statement."""
    try:
        return act()
    except LedgerBusy as error:
        for one in (error, error.__cause__):
            assert "did not finish a statement" not in str(one)
        return error


class LockWaits:
    """Count how often a ledger's sessions wait for a lock that another session does not give up at once."""

    def __init__(self, ledger: PostgresLedger) -> None:
        self.count = 0
        for managed in (ledger.db.turn_connection, ledger.db.service_connection, ledger.db.client_connection):
            connection = managed.open().connection
            connection.execute(b"set deadlock_timeout = '1ms'; set log_lock_waits = on; set client_min_messages = log")
            connection.add_notice_handler(self._heard)

    def _heard(self, notice: psycopg.errors.Diagnostic) -> None:
        self.count += "still waiting for" in (notice.message_primary or "")


def lock_job(user: Session, job_id: int) -> None:
    user.execute("select 1 from unstuck.jobs where id = %s for update", (job_id,))


def keyed(**more: Any) -> NewJob:
    return new_job(unique_key="k", more=JobExtras(**more) if more else None)


# Concurrency keys -----------------------------------------------------------------------------


def test_an_end_is_written_while_another_session_holds_its_concurrency_key(
    ledger: PostgresLedger, user: Session
) -> None:
    ties = JobExtras(concurrency_key="a", concurrency_limit=1)
    first, second = put(ledger, more=ties), put(ledger, more=ties)
    [held] = claim_jobs(ledger, start=1)
    user.execute("select 1 from unstuck.concurrency_keys where key = 'a' for update")
    answer = beside(lambda: turn(ledger, done=[done(held)]))
    assert answer.superseded == frozenset()
    assert state_of(ledger, first) is JobState.SUCCEEDED
    assert claim_jobs(ledger) == []
    # Once it is known that somebody holds it, nobody waits for it again.
    waits = LockWaits(ledger)
    third = put(ledger, more=ties)
    assert waits.count == 0
    promoted = beside(lambda: ledger.maintenance.promote_due(10))
    assert 0.0 < promoted.next_due_in_s <= 1.0, "somebody comes back for it soon"
    user.rollback()
    assert ledger.maintenance.promote_due(10).queues == {QUEUE}
    assert [job.job_id for job in claim_jobs(ledger)] == [second], "and never more than may be"
    assert ledger.maintenance.promote_due(10).next_due_in_s is None
    assert state_of(ledger, third) is JobState.PENDING
    assert not [event for event in ledger.events.list() if event.kind == "line_repaired"]


def test_the_limit_that_was_said_while_a_key_was_held_counts_afterwards(ledger: PostgresLedger, user: Session) -> None:
    put(ledger, more=JobExtras(concurrency_key="a", concurrency_limit=1))
    user.execute("select 1 from unstuck.concurrency_keys where key = 'a' for update")
    put(ledger, more=JobExtras(concurrency_key="a", concurrency_limit=2))
    user.rollback()
    ledger.maintenance.promote_due(10)
    assert len(claim_jobs(ledger)) == 2
    assert ledger.queues.concurrency_keys("a")[0].places == 2


def test_many_who_wait_for_a_held_key_hide_no_other_key(
    ledger: PostgresLedger, user: Session, swept_pg_url: str
) -> None:
    put(ledger, more=JobExtras(concurrency_key="held", concurrency_limit=1))
    user.execute("select 1 from unstuck.concurrency_keys where key = 'held' for update")
    with psycopg.connect(swept_pg_url, autocommit=True) as other:
        # As so many enqueues at the held key leave them.
        other.execute(
            "insert into unstuck.postponed_admissions (concurrency_key, held) "
            "select 'held', true from generate_series(1, 2000)"
        )
    ties = JobExtras(concurrency_key="free", concurrency_limit=1)
    put(ledger, unique_key="k", more=ties)
    waits = put(ledger, more=ties)
    with psycopg.connect(swept_pg_url) as shop:
        ledger.jobs.enqueue_on(shop, [keyed(on_duplicate="replace")])
    assert ledger.maintenance.promote_due(10).queues == {QUEUE}
    assert waits in {job.job_id for job in claim_jobs(ledger)}


def test_a_key_that_another_session_has_just_made_is_not_waited_for(ledger: PostgresLedger, user: Session) -> None:
    user.execute("insert into unstuck.concurrency_keys (key) values ('new')")
    job_id = beside(lambda: put(ledger, more=JobExtras(concurrency_key="new", concurrency_limit=1)))
    assert claim_jobs(ledger) == []
    user.rollback()
    ledger.maintenance.promote_due(10)
    assert [job.job_id for job in claim_jobs(ledger)] == [job_id]


def test_a_replacement_in_an_open_transaction_holds_up_nobody(ledger: PostgresLedger, user: Session) -> None:
    ties = JobExtras(concurrency_key="a", concurrency_limit=1)
    put(ledger, more=ties)
    [held] = claim_jobs(ledger, start=1)
    waits = put(ledger, unique_key="k", more=ties)
    newest = ledger.jobs.enqueue_on(user, [keyed(concurrency_key="a", concurrency_limit=1, on_duplicate="replace")])[
        0
    ].job_id
    lock_waits = LockWaits(ledger)
    turn(ledger, done=[done(held)])
    assert lock_waits.count == 0, "it does not even wait for a moment"
    user.commit()
    wait_for(lambda: ledger.maintenance.promote_due(10).queues == {QUEUE}, "the replacement is admitted")
    assert [job.job_id for job in claim_jobs(ledger)] == [newest]
    assert state_of(ledger, waits) is JobState.CANCELLED


def test_a_replacement_that_is_rolled_back_leaves_nobody_behind(ledger: PostgresLedger, user: Session) -> None:
    """Whoever ended meanwhile passed over the job that the transaction had locked."""
    ties = JobExtras(concurrency_key="a", concurrency_limit=1)
    put(ledger, more=ties)
    [held] = claim_jobs(ledger, start=1)
    waits = put(ledger, unique_key="k", more=ties)
    ledger.jobs.enqueue_on(user, [keyed(concurrency_key="a", concurrency_limit=1, on_duplicate="replace")])
    turn(ledger, done=[done(held)])
    user.rollback()
    ledger.maintenance.promote_due(10)
    assert [job.job_id for job in claim_jobs(ledger)] == [waits]
    assert not [event for event in ledger.events.list() if event.kind == "line_repaired"]


def test_many_keys_that_one_session_holds_cost_one_wait(ledger: PostgresLedger, user: Session) -> None:
    for number in range(20):
        put(ledger, more=JobExtras(concurrency_key=f"a{number}", concurrency_limit=1))
    held = claim_jobs(ledger, start=20)
    for number in range(20):
        put(ledger, more=JobExtras(concurrency_key=f"a{number}", concurrency_limit=1))
    user.execute("select 1 from unstuck.concurrency_keys for update")
    waits = LockWaits(ledger)
    beside(lambda: turn(ledger, done=[done(job) for job in held]))
    assert waits.count == 1
    beside(lambda: ledger.maintenance.check_keys("", 500))
    user.rollback()
    ledger.maintenance.promote_due(10)
    assert len(claim_jobs(ledger)) == 20


# Rows of jobs, workflows and queues -------------------------------------------------------------


def test_an_outcome_whose_row_is_held_is_told_by_name(ledger: PostgresLedger, user: Session) -> None:
    first, second = running(ledger), running(ledger)
    lock_job(user, first.job_id)
    assert isinstance(beside(lambda: turn(ledger, done=[done(first), done(second)])), LedgerBusy)
    pid = user.info.backend_pid
    blocked = beside(lambda: ledger.workers.blocked_outcomes([first.job_id, second.job_id]))
    assert list(blocked) == [first.job_id]
    assert f"blocked by session {pid} (shop, idle in transaction" in blocked[first.job_id]
    beside(lambda: turn(ledger, done=[done(second)]))
    user.rollback()
    assert ledger.workers.blocked_outcomes([first.job_id]) == {}
    turn(ledger, done=[done(first)])
    assert [state_of(ledger, job.job_id) for job in (first, second)] == [JobState.SUCCEEDED] * 2


def test_a_worker_whose_row_is_held_is_found_without_waiting(ledger: PostgresLedger, user: Session) -> None:
    ledger.workers.register(birth("w2"))
    user.execute("select 1 from unstuck.workers where id = 'w1' for update")
    assert beside(lambda: ledger.workers.blocked(["w1", "w2", "never was"])) == {"w1"}
    user.rollback()
    assert ledger.workers.blocked(["w1", "w2"]) == set()


@pytest.mark.parametrize("savepoint", [False, True])
def test_a_node_whose_workflow_is_held_is_told_by_name(ledger: PostgresLedger, user: Session, savepoint: bool) -> None:
    number = workflow_of(ledger, new_job())
    [held] = claim_jobs(ledger, start=1)
    if savepoint:
        user.execute("savepoint one")
    user.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
    assert isinstance(beside(lambda: turn(ledger, done=[done(held)])), LedgerBusy)
    [who] = beside(lambda: ledger.workers.blocked_outcomes([held.job_id])).values()
    assert f"session {user.info.backend_pid}" in who
    user.rollback()
    turn(ledger, done=[done(held)])
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_who_holds_the_whole_table_is_not_waited_for(ledger: PostgresLedger, user: Session) -> None:
    held = running(ledger)
    user.execute("lock table unstuck.jobs in share mode")
    assert isinstance(beside(lambda: turn(ledger, done=[done(held)])), LedgerBusy)
    assert isinstance(beside(lambda: ledger.jobs.enqueue([new_job()], patience_s=0.0)), LedgerBusy)
    beside(lambda: ledger.maintenance.promote_due(10))
    user.rollback()
    turn(ledger, done=[done(held)])
    assert state_of(ledger, held.job_id) is JobState.SUCCEEDED


def test_a_claim_passes_over_a_queue_whose_row_is_held(ledger: PostgresLedger, user: Session) -> None:
    ledger.queues.limit(QUEUE, QueueLimit(concurrency=1), "me")
    narrow, plain = put(ledger), put(ledger, queue="plain")
    user.execute("select 1 from unstuck.queues for update")
    wish = ClaimRequest((QUEUE, "plain"), (TASK,), 10)
    answer = beside(lambda: ledger.workers.turn(Turn("w1", claim_request=wish)))
    assert [job.job_id for job in answer.claimed] == [plain]
    user.rollback()
    assert [job.job_id for job in ledger.workers.turn(Turn("w1", claim_request=wish)).claimed] == [narrow]


# Unique keys -------------------------------------------------------------------------------------


def firing(name: str, unique_key: str | None = None) -> Firing:
    return Firing(name, 1, time.time() + 60, time.time(), (new_job(unique_key=unique_key),), None, "")


def test_a_schedule_whose_unique_key_is_held_does_not_fire_yet(ledger: PostgresLedger, user: Session) -> None:
    for name in ("keyed", "plain"):
        timing = Timing(every_s=60.0)
        ledger.schedules.know([ScheduleDefinition(name, TASK, QUEUE, timing, b"")], "operator")
    ledger.jobs.enqueue_on(user, [keyed()])
    error = beside(lambda: ledger.schedules.fire(firing("keyed", "k")))
    assert f"blocked by session {user.info.backend_pid}" in str(error)
    assert ledger.schedules.fire(firing("plain")) is not None
    user.rollback()
    fired = ledger.schedules.fire(firing("keyed", "k"))
    assert fired is not None
    assert len(fired) == 1
    assert ledger.schedules.fire(firing("keyed", "k")) is None, "once"


def test_an_enqueue_waits_for_a_key_and_names_who_holds_it(
    ledger: PostgresLedger, user: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    [theirs] = ledger.jobs.enqueue_on(user, [keyed()])
    error = beside(lambda: ledger.jobs.enqueue([keyed()], patience_s=0.3))
    assert isinstance(error, LedgerBusy)
    assert f"blocked by session {user.info.backend_pid} (shop, idle in transaction" in str(error)
    # Others of the same process are not held up by it.
    assert beside(lambda: ledger.jobs.enqueue([new_job()]))[0].fresh
    user.commit()
    [ours] = ledger.jobs.enqueue([keyed()])
    assert (ours.job_id, ours.fresh) == (theirs.job_id, False)


def test_one_blocked_enqueue_of_a_batch_fails_alone(
    ledger: PostgresLedger, user: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unstuck.client.batcher.PATIENCE_S", 0.1)
    ledger.jobs.enqueue_on(user, [keyed()])
    coalescer = EnqueueBatcher(lambda jobs: ledger.jobs.enqueue(jobs, patience_s=0.0))
    assert isinstance(beside(lambda: coalescer.enqueue([keyed()])), LedgerBusy)
    assert beside(lambda: coalescer.enqueue([new_job()]))[0].fresh


def test_an_attempt_whose_follow_up_has_a_held_key_does_not_end_yet(ledger: PostgresLedger, user: Session) -> None:
    held = running(ledger)
    ledger.jobs.enqueue_on(user, [keyed()])
    follow = [FollowUp(held.job_id, held.token, keyed())]
    assert isinstance(beside(lambda: turn(ledger, done=[done(held)], follow=follow)), LedgerBusy)
    assert ledger.workers.blocked_outcomes([held.job_id]) == {}
    user.rollback()
    turn(ledger, done=[done(held)], follow=follow)
    assert state_of(ledger, held.job_id) is JobState.SUCCEEDED


def test_many_outcomes_that_are_blocked_hide_none_that_is_not(ledger: PostgresLedger, user: Session) -> None:
    """Every fourth of many outcomes waits for a key of its follow-up: the others are written in a few tries."""
    ledger.jobs.enqueue([new_job() for _ in range(32)])
    jobs = claim_jobs(ledger, start=100)
    blocked = {job.job_id for job in jobs[::4]}
    ledger.jobs.enqueue_on(user, [new_job(unique_key=f"k{job_id}") for job_id in sorted(blocked)])
    follow = tuple(FollowUp(job.job_id, job.token, new_job(unique_key=f"k{job.job_id}")) for job in jobs)
    mailbox = Mailbox()
    wheel = LedgerThread(ledger, "w1", mailbox)
    wheel.start()
    left: Turn | None = Turn("w1", done=tuple(map(done, jobs)), follow=follow)
    tries = 0
    while left is not None and {item.job_id for item in left.done} != blocked:
        tries += 1
        assert tries <= 8, f"{len(left.done)} are left"
        wheel.turn(left)
        [message] = wait_for(mailbox.take, "the turn is done")
        left = message.deferred
    wheel.stop(5)
    mailbox.close()


def test_a_turn_is_written_but_for_what_is_blocked(ledger: PostgresLedger, user: Session) -> None:
    """One outcome waits for its row, one for the key of its follow-up; a third and the claim of a fourth go on."""
    by_row, by_key, plain = (running(ledger) for _ in range(3))
    fresh = put(ledger)
    lock_job(user, by_row.job_id)
    ledger.jobs.enqueue_on(user, [keyed()])
    mailbox = Mailbox()
    wheel = LedgerThread(ledger, "w1", mailbox)
    wheel.start()
    outcomes = tuple(done(job) for job in (by_row, by_key, plain))
    follow = (FollowUp(by_key.job_id, by_key.token, keyed()),)
    wheel.turn(Turn("w1", done=outcomes, follow=follow, claim_request=ClaimRequest((QUEUE,), (TASK,), 10, start=1)))
    [first] = wait_for(mailbox.take, "the turn is done")
    assert [item.job_id for item in first.turn.done] == [plain.job_id]
    assert [job.job_id for job in first.answer.claimed] == [fresh]
    assert {item.job_id for item in first.deferred.done} == {by_row.job_id, by_key.job_id}
    assert [item.token for item in first.deferred.follow] == [by_key.token]
    assert [state_of(ledger, job.job_id) for job in (by_row, by_key)] == [JobState.RUNNING] * 2
    # Sent again beside something new, which does not wait for it any more.
    [new] = first.answer.claimed
    wheel.turn(msgspec.structs.replace(first.deferred, done=(*first.deferred.done, done(new))))
    [second] = wait_for(mailbox.take, "the turn is done")
    assert [item.job_id for item in second.turn.done] == [new.job_id]
    user.rollback()
    wheel.turn(second.deferred)
    [third] = wait_for(mailbox.take, "the turn is done")
    assert third.deferred is None
    assert third.answer.superseded == frozenset()
    assert [state_of(ledger, job.job_id) for job in (by_row, by_key)] == [JobState.SUCCEEDED] * 2
    assert [job.job_id for job in claim_jobs(ledger)] != [], "what was to follow did"
    wheel.stop(5)
    mailbox.close()


# Everything else -----------------------------------------------------------------------------------

SWEEPS: dict[str, Callable[[PostgresLedger], object]] = {
    "promote": lambda ledger: ledger.maintenance.promote_due(10),
    "expire": lambda ledger: ledger.maintenance.expire_due(10),
    "tend": lambda ledger: ledger.maintenance.check_keys("", 10),
    "repair": lambda ledger: ledger.maintenance.repair_workflows(10),
    "sweep kept": lambda ledger: ledger.maintenance.sweep_kept(10),
    "sweep old": lambda ledger: ledger.maintenance.sweep_old(0, 0, 1e9, 10),
    "prune": lambda ledger: ledger.maintenance.prune(0),
    "overdue": lambda ledger: ledger.recovery.overdue(10),
    "note": lambda ledger: ledger.workers.note_progress("w1", []),
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_waits_for_no_row_that_another_session_holds(ledger: PostgresLedger, user: Session, sweep: str) -> None:
    """One of each kind: done, running, waiting, expired, in line, of a workflow, with keys of both kinds."""
    running(ledger)
    turn(ledger, done=[done(running(ledger, more=JobExtras(retain_s=0.0)))])
    turn(ledger, endings=[crash_retry(running(ledger), delay_s=0.001)])
    put(ledger, more=JobExtras(expires_in_s=0.001))
    put(ledger, more=JobExtras(concurrency_key="a", concurrency_limit=1))
    put(ledger, more=JobExtras(concurrency_key="a", concurrency_limit=1))
    put(ledger, unique_key="u", more=JobExtras(unique_for_s=0.001))
    workflow_of(ledger, new_job(), new_job())
    for table in ("jobs", "concurrency_keys", "workflows", "unique_keys"):
        user.execute(f"select 1 from unstuck.{table} for update")  # type: ignore[arg-type]
    waits = LockWaits(ledger)
    SWEEPS[sweep](ledger)
    assert waits.count == 0
    user.rollback()
    SWEEPS[sweep](ledger)


OPERATORS: dict[str, Callable[[PostgresLedger, int], object]] = {
    "cancel": lambda ledger, job_id: ledger.jobs.cancel([job_id], "me"),
    "retry": lambda ledger, job_id: ledger.jobs.retry([job_id], "me"),
    "signal": lambda ledger, job_id: ledger.jobs.signal(job_id, "go", b"null", "me"),
    "limit": lambda ledger, _: ledger.queues.limit_key("a", 3, "me"),
}


@pytest.mark.parametrize("act", OPERATORS)
def test_an_operator_is_told_who_holds_a_row(
    ledger: PostgresLedger, user: Session, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = locks.past_locks
    monkeypatch.setattr(locks, "past_locks", lambda db, lane, call, _=0.0: patience(db, lane, call, 0.0))
    job_id = put(ledger, more=JobExtras(concurrency_key="a", concurrency_limit=1))
    for table in ("jobs", "concurrency_keys"):
        user.execute(f"select 1 from unstuck.{table} for update")  # type: ignore[arg-type]
    error = beside(lambda: OPERATORS[act](ledger, job_id))
    assert isinstance(error, LedgerBusy)
    assert f"session {user.info.backend_pid} (shop" in str(error)
    user.rollback()
    OPERATORS[act](ledger, job_id)


def test_the_reaper_settles_what_is_free(ledger: PostgresLedger, user: Session) -> None:
    jobs = [running(ledger) for _ in range(2)]
    lock_job(user, jobs[0].job_id)
    settled = beside(lambda: ledger.recovery.settle("w1", [crash(job) for job in jobs], [], GuardNone()))
    assert settled == {(jobs[1].job_id, jobs[1].token)}
    user.rollback()
    assert ledger.recovery.settle("w1", [crash(jobs[0])], [], GuardNone()) == {(jobs[0].job_id, jobs[0].token)}


def test_an_exchange_does_not_wait_for_a_row(ledger: PostgresLedger, user: Session) -> None:
    jobs = [running(ledger) for _ in range(2)]
    lock_job(user, jobs[0].job_id)
    exchange = Exchange(jobs=(new_job(),), turns=(Turn("w1", done=tuple(done(job) for job in jobs)),))
    assert isinstance(beside(lambda: ledger.workers.exchange(exchange)), LedgerBusy)
    back = Exchange(turns=(Turn("w1", release=(Release(jobs[0].job_id, jobs[0].token),)),))
    assert isinstance(beside(lambda: ledger.workers.exchange(back)), LedgerBusy)
    user.rollback()
    assert ledger.workers.exchange(exchange).turns is not None
