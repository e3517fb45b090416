"""Behind PgBouncer in transaction mode everything works but the bell, and that works with `listen_url`."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from tests.support.builders import QUEUE, TASK, birth, claim_jobs, done, new_job, put, start, state_of, turn
from tests.support.postgres_cluster import needs_pgbouncer, start_pooler

from unstuck.client.doctor.diagnose import diagnose
from unstuck.config import Settings
from unstuck.domain.liveness import Session
from unstuck.domain.states import JobState, WorkerState
from unstuck.errors import LedgerBusy
from unstuck.ledger.contract.workers import ClaimRequest, Exchange, Heartbeat, Turn
from unstuck.ledger.postgres.ledger import PostgresLedger

SKIPPED_AT_LEAST = 10**9
"""What `first_after_restore` skips in any case."""

pytestmark = needs_pgbouncer


@pytest.fixture
def pooled_url(pg_url: str) -> Iterator[str]:
    with start_pooler(pg_url) as pooler:
        yield pooler.url


@pytest.fixture
def pooled(pooled_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=pooled_url))
    ledger.migrate()
    yield ledger
    ledger.close()


def test_a_worker_lives_its_whole_life_behind_a_pooler(pooled: PostgresLedger) -> None:
    assert pooled.describe()["pooler"] is True
    pooled.workers.register(birth("w1"))
    for _ in range(10):
        # More often than there are sessions in the pool: each of them plans for itself.
        put(pooled)
        jobs = claim_jobs(pooled)
        start(pooled, jobs)
        assert turn(pooled, done=map(done, jobs)).superseded == frozenset()
        assert state_of(pooled, jobs[0].job_id) is JobState.SUCCEEDED
        assert pooled.workers.beat(Heartbeat("w1", 0, 0)).state is WorkerState.ACTIVE
        # A transaction of several statements in one round trip stays in one session too.
        ended = pooled.workers.exchange(
            Exchange(jobs=(new_job(),), turns=(Turn("w1", claim_request=ClaimRequest((QUEUE,), (TASK,), 1, start=1)),))
        )
        assert ended.turns is not None
        assert turn(pooled, done=map(done, ended.turns[0].claimed)).superseded == frozenset()
        assert state_of(pooled, ended.enqueued[0].job_id) is JobState.SUCCEEDED
    assert [worker.session for worker in pooled.recovery.watch()] == [Session.UNKNOWN]
    assert pooled.maintenance.take_ticket("sweep", 60)
    pooled.jobs.enqueue([])
    pooled.workers.stop("w1")


def test_a_standby_that_takes_over_behind_a_pooler_gives_out_no_number_of_the_lost_primary(
    pooled: PostgresLedger, pg_url: str
) -> None:
    pooled.workers.register(birth("w1"))
    old_job = put(pooled)
    [old_claim] = claim_jobs(pooled)
    with psycopg.connect(pg_url, autocommit=True) as promoted:
        # As after a promotion: the pooler goes on with another server, and no connection of ours is opened anew.
        promoted.execute("update unstuck.ledger set numbered_on = 'before'")
        new_job_id = put(pooled)
        assert new_job_id > old_job + SKIPPED_AT_LEAST
        promoted.execute("update unstuck.ledger set numbered_on = 'before'")
        [new_claim] = claim_jobs(pooled)
        assert new_claim.token > old_claim.token + SKIPPED_AT_LEAST
        promoted.execute("update unstuck.ledger set numbered_on = 'before'")
        wanted = Turn("w1", claim_request=ClaimRequest((QUEUE,), (TASK,), 1, start=1))
        exchanged = pooled.workers.exchange(Exchange(jobs=(new_job(),), turns=(wanted,)))
        assert exchanged.turns is not None
        assert exchanged.turns[0].claimed[0].token > new_claim.token + SKIPPED_AT_LEAST


def test_behind_a_pooler_a_lock_holds_a_worker_up_for_a_moment_only(pooled: PostgresLedger, pg_url: str) -> None:
    pooled.workers.register(birth("w1"))
    put(pooled)
    with psycopg.connect(pg_url) as stranger:
        stranger.execute("lock table unstuck.jobs in access exclusive mode")
        for call in (lambda: pooled.maintenance.promote_due(10), lambda: claim_jobs(pooled)):
            # The lock is held until both have returned.
            with pytest.raises(LedgerBusy):
                call()
        assert pooled.workers.beat(Heartbeat("w1", 0, 0)).state is WorkerState.ACTIVE
    assert len(claim_jobs(pooled)) == 1
    # Others who get the same session of the server do not get our limits with it.
    assert pooled.db.read_connection.ask(b"select current_setting('lock_timeout')") == [("0",)]


def test_without_a_direct_address_the_bell_only_waits(pooled: PostgresLedger) -> None:
    pooled.workers.register(birth("w1"))
    bell = pooled.workers.listen("w1")
    pooled.notify(["queue:default"])
    assert bell.wait(0.1) == frozenset()
    threading.Timer(0.05, bell.interrupt).start()
    assert bell.wait(30) == frozenset()
    bell.close()


def test_with_a_direct_address_the_bell_is_heard(pooled: PostgresLedger, pooled_url: str, pg_url: str) -> None:
    worker = PostgresLedger(Settings(url=pooled_url, listen_url=pg_url))
    worker.workers.register(birth("w1"))
    bell = worker.workers.listen("w1")
    pooled.notify(["queue:default"])
    assert bell.wait(10) == frozenset({"queue:default"})
    bell.close()
    worker.close()


def test_the_doctor_sees_the_pooler_and_whether_there_is_a_way_around_it(
    pooled: PostgresLedger, pooled_url: str, pg_url: str
) -> None:
    blind = {finding.code for finding in diagnose(Settings(url=pooled_url))}
    assert blind >= {"pooler", "pooler-without-listen-url"}
    seeing = {finding.code for finding in diagnose(Settings(url=pooled_url, listen_url=pg_url))}
    assert "pooler" in seeing
    assert not seeing & {"pooler-without-listen-url", "notify-silent"}
    circle = {finding.code for finding in diagnose(Settings(url=pooled_url, listen_url=pooled_url))}
    assert "notify-silent" in circle
