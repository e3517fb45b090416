"""Who holds a lock never waits for another: what operators do at once with turns ends without a deadlock."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from tests.contract.hands import birth, claim, done, new_job, put, running, turn
from tests.fleet import wait_for

from unstuck.config import Settings
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.records import NewNode, NewWorkflow, Progress, Ties


@pytest.fixture
def ledger(swept_pg_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=swept_pg_url))
    ledger.register(birth("w1"))
    yield ledger
    ledger.close()


def test_a_cancel_of_many_holds_nothing_while_it_waits_for_one(ledger: PostgresLedger, swept_pg_url: str) -> None:
    runs = running(ledger).job_id
    first, second, third = (job.job_id for job in ledger.enqueue([new_job()] * 3))
    answers: dict[int, str] = {}
    cancelling = threading.Thread(target=lambda: answers.update(ledger.cancel([first, second, third, runs, 99], "me")))
    with psycopg.connect(swept_pg_url) as turn, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        turn.execute("set lock_timeout = '5s'")
        turn.execute("select 1 from unstuck.jobs where id = %s for update", (second,))
        cancelling.start()
        wait_for(
            lambda: onlooker.execute(
                "select 1 from pg_stat_activity where application_name = 'unstuck read' and wait_event_type = 'Lock'"
                " and datname = current_database()"
            ).fetchone(),
            "the cancel waits",
        )
        for job_id in (third, first, runs):
            turn.execute("select 1 from unstuck.jobs where id = %s for update", (job_id,))
        turn.commit()
        cancelling.join()
    waiting = dict.fromkeys((first, second, third), "cancelled")
    assert answers == {**waiting, runs: "requested", 99: "missing"}
    assert list(answers) == [first, second, third, runs, 99]


def test_a_note_of_progress_waits_for_no_job_that_is_just_ending(ledger: PostgresLedger, swept_pg_url: str) -> None:
    """It would wait with another job in hand, and the turn that ends both would wait for that one."""
    jobs = [running(ledger) for _ in range(3)]
    notes = [Progress(job.job_id, job.token, 5.0, 1, 2, "half") for job in jobs]
    noting = threading.Thread(target=ledger.note_progress, args=("w1", notes))
    with psycopg.connect(swept_pg_url) as turn:
        turn.execute("select 1 from unstuck.jobs where id = %s for update", (jobs[1].job_id,))
        noting.start()
        wait_for(lambda: len(ledger.progress([job.job_id for job in jobs])) == 2, "the others are noted")
        turn.execute("delete from unstuck.jobs where id = %s", (jobs[1].job_id,))
    noting.join()
    assert set(ledger.progress([job.job_id for job in jobs])) == {jobs[0].job_id, jobs[2].job_id}


def test_who_waits_for_a_workflow_holds_no_line(ledger: PostgresLedger, swept_pg_url: str) -> None:
    """Whoever has the workflow may be about to release a node into that line."""
    job = new_job(more=Ties(line="k", line_limit=1))
    nodes = (NewNode(0, None, "all", "group", source=1), NewNode(1, 0, "n1", "task", job=job))
    number = ledger.begin_workflow(NewWorkflow("all", new_job(task="unstuck.workflow"), nodes, ())).job_id
    [held] = claim(ledger, start=1)
    ending = threading.Thread(target=turn, args=(ledger,), kwargs={"done": [done(held)]})
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
        ending.start()
        wait_for(
            lambda: onlooker.execute(
                "select 1 from pg_stat_activity where application_name like 'unstuck %%' and wait_event_type = 'Lock'"
                " and datname = current_database()"
            ).fetchone(),
            "the turn waits",
        )
        other.execute("select 1 from unstuck.lines where key = 'k' for update nowait")
    ending.join()
    found = ledger.workflow(number)
    assert found is not None
    assert found.finished_at is not None


def test_who_was_passed_over_because_somebody_had_it_in_hand_is_let_in_by_those_hands(
    ledger: PostgresLedger, swept_pg_url: str
) -> None:
    ties = Ties(line="k", line_limit=1)
    first, second = put(ledger, more=ties), put(ledger, more=ties)
    [held] = claim(ledger, start=1)
    assert held.job_id == first
    with psycopg.connect(swept_pg_url) as sender:
        sender.execute("select 1 from unstuck.jobs where id = %s for update", (second,))
        turn(ledger, done=[done(held)])
        assert claim(ledger) == []
        sender.execute("select * from unstuck.signal(%s, 'go', 'null', 'me', 10)", (second,))
    [held] = claim(ledger)
    assert held.job_id == second
