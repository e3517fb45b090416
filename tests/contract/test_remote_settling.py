"""What a worker over HTTP is told of outcomes that cannot be written: held up by a lock, or no longer its own."""

from collections import Counter
from typing import Any

import psycopg
import pytest
from tests.support.backdoor import PostgresBackdoor
from tests.support.builders import QUEUE, TASK, birth, claim_jobs, done, running, state_of, turn

from unstuck.config import Settings
from unstuck.domain.api_tokens import LOCAL, Caller, Scope
from unstuck.domain.states import AttemptState, JobState, Transport
from unstuck.errors import LedgerBusy
from unstuck.ledger.contract import Ledger
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.metrics.counters import Counters
from unstuck.remote.attempts import RemoteAttempts
from unstuck.remote.messages import ProgressItem, SettleItem, StepItem
from unstuck.remote.registry import RemoteWorker


def test_a_settlement_that_a_lock_holds_up_is_not_late(swept_pg_url: str) -> None:
    ledger = PostgresLedger(Settings(url=swept_pg_url))
    try:
        ledger.workers.register(birth("w1", transport=Transport.HTTP, suspect_after_s=600, running_stale_after_s=600))
        seat = RemoteWorker("w1", "name-of-w1", None, (QUEUE,), (TASK,), 30.0, 600.0)
        hands = RemoteAttempts(ledger, Settings(url=swept_pg_url), lambda queues: None, seat, LOCAL, Counters())
        job = running(ledger, timeout_s=5.0)
        PostgresBackdoor(swept_pg_url).age_job(job.job_id, 600.0)
        said: dict[str, Any] = {"job_id": job.job_id, "token": job.token, "outcome": "succeeded", "result": 3}
        with psycopg.connect(swept_pg_url) as user:
            user.execute("select 1 from unstuck.jobs where id = %s for update", (job.job_id,))
            assert [one.job_id for one in ledger.recovery.overdue(10)] == [job.job_id]
            with pytest.raises(LedgerBusy):
                hands.settle([SettleItem(**said)])
            assert ledger.recovery.overdue(10) == []
        assert hands.settle([SettleItem(**said)])[0]["ok"]
        assert state_of(ledger, job.job_id) is JobState.SUCCEEDED
    finally:
        ledger.close()


class Counting:
    """A ledger, or a part of it, that counts what is asked of it."""

    def __init__(self, ledger: Any, path: str = "", calls: Counter[str] | None = None) -> None:
        self._ledger = ledger
        self._path = path
        self.calls: Counter[str] = Counter() if calls is None else calls

    def __getattr__(self, name: str) -> Any:
        found, path = getattr(self._ledger, name), f"{self._path}{name}"
        if hasattr(Ledger, name) and not callable(found):
            return Counting(found, f"{path}.", self.calls)
        self.calls[path] += 1
        return found


def hands_of(ledger: Any, caller: Caller = LOCAL, name: str = "w1") -> RemoteAttempts:
    seat = RemoteWorker(name, f"name-of-{name}", None, (QUEUE,), (TASK,), 30.0, 600.0)
    return RemoteAttempts(ledger, Settings(), lambda queues: None, seat, caller, Counters())


def test_a_thousand_unknown_outcomes_cost_as_many_reads_as_one(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", transport=Transport.HTTP))
    jobs = [running(ledger) for _ in range(5)]
    for verb, made in (
        ("settle", lambda key: SettleItem(**key, outcome="succeeded")),
        ("progress", lambda key: ProgressItem(**key, done=1)),
        ("steps", lambda key: StepItem(**key, seq=1)),
    ):
        counted = []
        for many in (1, 1_000):
            # Some of them exist and were never handed out so, most do not exist.
            keys = [{"job_id": place + 1, "token": 10**9 + place} for place in range(many)]
            counting = Counting(ledger)
            results = getattr(hands_of(counting), verb)([made(key) for key in keys])
            assert [(one["job_id"], one["status"]) for one in results] == [
                (key["job_id"], "superseded") for key in keys
            ]
            counted.append(counting.calls)
        assert counted[0] == counted[1], verb
        assert counted[0]["jobs.fates"] == 1
    assert {job.job_id for job in ledger.workers.held("w1")} == {job.job_id for job in jobs}


def test_many_steps_of_a_job_cost_one_reading_of_its_journal_and_its_signals(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", transport=Transport.HTTP))
    one, other = ({"job_id": job.job_id, "token": job.token} for job in (running(ledger), running(ledger)))
    for value in (b"1", b"2"):
        assert ledger.jobs.signal(one["job_id"], "go", value, "me") == "kept"
    asked = [
        *(StepItem(**key, seq=seq, name=f"s{seq}") for seq in range(1, 9) for key in (one, other)),
        StepItem(**one, seq=3, name="s3"),
        StepItem(**one, seq=4, name="something else"),
        StepItem(**one, seq=9, signal=1),
        StepItem(**one, seq=9, signal=1),
        StepItem(**one, seq=10, signal=1),
        StepItem(**one, seq=10, signal=2),
        StepItem(**other, seq=0, value=1),
    ]
    counting = Counting(ledger)
    results = hands_of(counting).steps(asked)
    assert [(said["job_id"], said["status"]) for said in results] == [
        *((key["job_id"], "written") for _ in range(8) for key in (one, other)),
        (one["job_id"], "already"),
        (one["job_id"], "step_mismatch"),
        (one["job_id"], "written"),
        (one["job_id"], "already"),
        (one["job_id"], "taken"),
        (one["job_id"], "written"),
        (other["job_id"], "written"),
    ]
    assert (counting.calls["jobs.journal"], counting.calls["jobs.signals"]) == (2, 1)
    assert [entry.seq for entry in ledger.jobs.journal(one["job_id"])] == list(range(1, 11))


def test_what_became_of_attempts_is_told_alike_by_both_databases(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", transport=Transport.HTTP))
    ledger.workers.register(birth("w2"))
    held, succeeded, retried = running(ledger), running(ledger), running(ledger)
    turn(ledger, done=[done(succeeded)])
    failed = hands_of(ledger).settle([SettleItem(job_id=retried.job_id, token=retried.token, outcome="interrupted")])
    assert failed[0]["ok"]
    ledger.jobs.retry([retried.job_id], by="test")
    again = claim_jobs(ledger, "w2")
    assert [job.job_id for job in again] == [retried.job_id]
    keys = [(one.job_id, one.token) for one in (held, succeeded, retried, *again)] + [(10**6, 1), (held.job_id, 10**6)]
    told = [
        (fate.state, fate.holder_id, fate.holder_name, fate.worker_id, fate.last_attempt_state)
        for fate in ledger.jobs.fates(keys)
    ]
    assert told == [
        (JobState.RUNNING, "w1", "name-of-w1", "w1", None),
        (JobState.SUCCEEDED, "w1", "name-of-w1", "w1", AttemptState.SUCCEEDED),
        (JobState.CLAIMED, "w2", None, "w1", AttemptState.DRAINED),
        (JobState.CLAIMED, "w2", None, "w2", None),
        (None, None, None, None, None),
        (JobState.RUNNING, "w1", "name-of-w1", None, None),
    ]
    assert [(fate.job_id, fate.token) for fate in ledger.jobs.fates(keys)] == keys


def test_a_caller_that_may_not_read_is_told_nothing_of_jobs_that_were_never_its_own(ledger: Ledger) -> None:
    ledger.workers.register(birth("w1", transport=Transport.HTTP))
    ledger.workers.register(birth("w2", transport=Transport.HTTP))
    theirs = running(ledger, worker_id="w2")
    blind = Caller("t", frozenset({Scope.WORKER}), "t1")
    said = [
        hands_of(ledger, blind).settle([SettleItem(job_id=job_id, token=theirs.token, outcome="succeeded")])[0]
        for job_id in (theirs.job_id, 10**6)
    ]
    assert [one["job"] for one in said] == [None, None]
    # One that exists and one that does not are told in the same words.
    first, second = (one["detail"].replace(f"Job {one['job_id']} ", "Job N ") for one in said)
    assert first == second
    seeing = hands_of(ledger).settle([SettleItem(job_id=theirs.job_id, token=theirs.token, outcome="succeeded")])[0]
    assert seeing["job"]["worker"] == "w2"
    # Its own it hears of, whatever became of it.
    own = running(ledger)
    ledger.jobs.cancel([own.job_id], by="test")
    ended = hands_of(ledger, blind).settle([SettleItem(job_id=own.job_id, token=own.token, outcome="failed")])[0]
    assert ended["ok"]
    repeated = hands_of(ledger, blind).settle([SettleItem(job_id=own.job_id, token=own.token, outcome="succeeded")])[0]
    assert repeated["job"]["state"] == "cancelled"
