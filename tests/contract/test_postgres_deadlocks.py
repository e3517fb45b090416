"""Whatever is done to the same workflows at once, nobody waits for ever for another: the server counts no deadlock."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.contract.hands import QUEUE, TASK, birth, claim, crash, crash_retry, done, new_job, release
from tests.fleet import wait_for

from unstuck.config import Settings
from unstuck.domain.errors import DuplicateJob
from unstuck.domain.states import Door
from unstuck.domain.workflow import WorkflowState
from unstuck.store.postgres.ledger import PostgresLedger
from unstuck.store.records import (
    Claimed,
    Exchange,
    ForeignPulse,
    Held,
    NewEdge,
    NewNode,
    NewWorkflow,
    Ties,
    Turn,
    Wish,
)

FLOWS = 4
WIDE = 6
WORKERS = 3
SPAN_S = 6.0
OVER = (WorkflowState.SUCCEEDED, WorkflowState.FAILED, WorkflowState.CANCELLED)


@pytest.fixture
def open_ledger(swept_pg_url: str) -> Iterator[Callable[[], PostgresLedger]]:
    opened: list[PostgresLedger] = []

    def open_one() -> PostgresLedger:
        opened.append(PostgresLedger(Settings(url=swept_pg_url)))
        return opened[-1]

    yield open_one
    for ledger in opened:
        ledger.close()


def flow() -> NewWorkflow:
    """One, then a group of many in two lines that may expire, then one that waits for the group."""
    ties = [Ties(line=f"line {n % 2}", line_limit=2, expires_in_s=None if n % 3 else 0.05) for n in range(WIDE)]
    inside = [NewNode(3 + n, 2, f"m{n}", "task", job=new_job(more=more)) for n, more in enumerate(ties)]
    nodes = (
        NewNode(0, None, "all", "group", source=1),
        NewNode(1, 0, "first", "task", job=new_job()),
        NewNode(2, 0, "group", "group", on_error="continue", source=3),
        *inside,
        NewNode(3 + WIDE, 0, "last", "task", job=new_job()),
    )
    edges = [NewEdge(1, node.place, False) for node in inside]
    return NewWorkflow(
        "all",
        new_job(task="unstuck.workflow"),
        nodes,
        (*edges, NewEdge(2, 3 + WIDE, False), NewEdge(1, 3 + WIDE, False)),
    )


def work(ledger: PostgresLedger, worker_id: str, chance: random.Random) -> None:
    """Do what a worker's turns do: start, end well and badly, give back."""
    held = claim(ledger, worker_id, limit=4, start=chance.choice([0, 2, 4]))
    began = {job.token for job in held if job.running}
    late = [job for job in held if not job.running]
    chance.shuffle(late)
    back, begun = late[: len(late) // 2], late[len(late) // 2 :]
    answer = ledger.turn(
        Turn(
            worker_id,
            start=tuple(Held(job.job_id, job.token) for job in begun),
            release=tuple(release(job) for job in back),
        )
    )
    runs = [
        job for job in held if job.token in began or (job in begun and (job.job_id, job.token) not in answer.superseded)
    ]
    endings = [(crash if chance.random() < 0.5 else crash_retry)(job) for job in runs if chance.random() < 0.4]
    ended = {ending.token for ending in endings}
    good = tuple(done(job) for job in runs if job.token not in ended)
    ledger.turn(Turn(worker_id, done=good, endings=tuple(endings)))


def meddle(ledger: PostgresLedger, chance: random.Random) -> None:
    """Do what operators and the reaper do."""
    flows = [one.id for one in ledger.workflows(limit=2 * FLOWS)]
    number = chance.choice(flows)
    found = ledger.workflow(number)
    nodes = [] if found is None else [node.job_id for node in found.nodes if node.job_id is not None]
    verbs: list[Callable[[], Any]] = [
        lambda: ledger.cancel([chance.choice([number, *nodes])], "me"),
        lambda: ledger.cancel([*chance.sample(nodes, len(nodes) // 2), number], "me"),
        lambda: ledger.retry(chance.sample([number, *nodes], 1), "me"),
        lambda: ledger.retry_workflow(number, "me"),
        lambda: ledger.purge("default", "me"),
        lambda: ledger.expire_due(100),
        lambda: ledger.promote_due(100),
        lambda: ledger.repair_workflows(100),
        lambda: ledger.prune(0.2),
        lambda: ledger.begin_workflow(flow()),
    ]
    [verb] = chance.choices(verbs, [4, 2, 4, 4, 1, 4, 2, 2, 1, 4])
    try:
        verb()
    except DuplicateJob:
        pytest.fail("no workflow here has a key")


def broker(ledger: PostgresLedger, worker_ids: list[str], chance: random.Random) -> None:
    """Do what a broker does: beats, new jobs, and the turns of several workers are one commit."""
    wish = Wish((QUEUE,), (TASK,), 2, start=2)
    found = ledger.exchange(Exchange(turns=tuple(Turn(one, wish=wish) for one in worker_ids))).turns or ()
    turns = []
    for worker_id, answer in zip(worker_ids, found, strict=True):
        bad = [job for job in answer.claimed if chance.random() < 0.3]
        good = tuple(done(job) for job in answer.claimed if job not in bad)
        turns.append(Turn(worker_id, done=good, endings=tuple(crash(job) for job in bad)))
    chance.shuffle(turns)
    lined = new_job(more=Ties(line=f"line {chance.randrange(2)}", line_limit=2))
    ledger.exchange(Exchange(jobs=(lined,), turns=tuple(turns), pulses=tuple(ForeignPulse(one) for one in worker_ids)))


def deadlocks(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("select deadlocks from pg_stat_database where datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("brokers", [0, 2])
def test_nobody_deadlocks(open_ledger: Callable[[], PostgresLedger], swept_pg_url: str, brokers: int) -> None:
    before = deadlocks(swept_pg_url)
    ledgers = [open_ledger() for _ in range(WORKERS + 3)]
    for n in range(WORKERS):
        ledgers[n].register(birth(f"w{n}"))
        for m in range(3):
            ledgers[n].register(birth(f"f{n}{m}", door=Door.MDP, suspect_after_s=60.0, running_stale_after_s=60.0))
    for _ in range(FLOWS):
        ledgers[0].begin_workflow(flow())
    until = time.monotonic() + SPAN_S
    failed: list[BaseException] = []

    def keep_on(place: int) -> None:
        chance = random.Random(place)
        try:
            while time.monotonic() < until:
                if place < brokers:
                    broker(ledgers[place], [f"f{place}{m}" for m in range(3)], chance)
                elif place < WORKERS:
                    work(ledgers[place], f"w{place}", chance)
                else:
                    meddle(ledgers[place], chance)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=keep_on, args=(place,)) for place in range(len(ledgers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    # Sessions hand in what they counted at the latest when they are over.
    for ledger in ledgers:
        ledger.close()
    assert deadlocks(swept_pg_url) == before
    # And nothing was left behind: what still goes on comes to its end.
    last = open_ledger()
    wait_for(lambda: _comes_to_its_end(last), "all workflows end", patience_s=60)


def _comes_to_its_end(ledger: PostgresLedger) -> bool:
    ledger.expire_due(1000)
    ledger.promote_due(1000)
    held: list[Claimed] = claim(ledger, "w0", limit=100, start=100)
    ledger.turn(Turn("w0", done=tuple(done(job) for job in held)))
    assert ledger.repair_workflows(100) == []
    return all(one.state in OVER for one in ledger.workflows(limit=10_000))
