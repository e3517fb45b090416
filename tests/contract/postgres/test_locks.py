"""Who holds a lock never waits for another: what operators do at once with turns ends without a deadlock."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
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
    release,
    running,
    state_of,
    turn,
)
from tests.support.fleet import wait_for

from unstuck.config import Settings
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.states import AttemptState, JobState, Transport
from unstuck.domain.workflows import WorkflowState
from unstuck.errors import DuplicateJob
from unstuck.ledger.contract.jobs import JobExtras, NewJob, Progress
from unstuck.ledger.contract.workers import (
    AttemptRef,
    Claimed,
    ClaimRequest,
    Exchange,
    Heartbeat,
    RemoteHeartbeat,
    Turn,
)
from unstuck.ledger.contract.workflows import NewEdge, NewNode, NewWorkflow, WorkflowRecord
from unstuck.ledger.postgres.ledger import PostgresLedger


@pytest.fixture
def ledger(swept_pg_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=swept_pg_url))
    ledger.workers.register(birth("w1"))
    yield ledger
    ledger.close()


def workflow_of(ledger: PostgresLedger, *jobs: NewJob) -> int:
    """Begin a workflow of these jobs, one after the other."""
    places = range(1, len(jobs) + 1)
    nodes = [NewNode(place, 0, f"n{place}", "task", job=job) for place, job in zip(places, jobs, strict=True)]
    edges = tuple(NewEdge(place, place + 1, False) for place in places[:-1])
    whole = NewNode(0, None, "all", "group", source=1)
    return ledger.workflows.begin(NewWorkflow("all", new_job(task="unstuck.workflow"), (whole, *nodes), edges)).job_id


def workflow_of_many(ledger: PostgresLedger, count: int) -> int:
    """Begin a workflow of jobs that do not wait for each other."""
    nodes = [NewNode(place, 0, f"n{place}", "task", job=new_job()) for place in range(1, count + 1)]
    whole = NewNode(0, None, "all", "group", source=1)
    return ledger.workflows.begin(NewWorkflow("all", new_job(task="unstuck.workflow"), (whole, *nodes), ())).job_id


def stopped(job: Claimed) -> Ending:
    """End an attempt as a worker does that was asked to stop it."""
    error = JobError("CANCELLED", "Job was cancelled", "it was asked to stop")
    return Ending(job.job_id, job.token, JobState.CANCELLED, AttemptState.CANCELLED, error=error, event="cancelled")


def look(ledger: PostgresLedger, workflow_id: int) -> WorkflowRecord:
    found = ledger.workflows.get(workflow_id)
    assert found is not None
    return found


def waits(onlooker: "psycopg.Connection[tuple[object, ...]]") -> bool:
    """Say whether a ledger waits for a lock just now."""
    found = onlooker.execute(
        "select 1 from pg_stat_activity where application_name like 'unstuck %%' and wait_event_type = 'Lock'"
        " and datname = current_database()"
    )
    return found.fetchone() is not None


def test_a_cancel_of_many_holds_nothing_while_it_waits_for_one(ledger: PostgresLedger, swept_pg_url: str) -> None:
    runs = running(ledger).job_id
    first, second, third = (job.job_id for job in ledger.jobs.enqueue([new_job()] * 3))
    answers: dict[int, str] = {}
    cancelling = threading.Thread(
        target=lambda: answers.update(ledger.jobs.cancel([first, second, third, runs, 99], "me"))
    )
    with psycopg.connect(swept_pg_url) as turn, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        turn.execute("set lock_timeout = '5s'")
        turn.execute("select 1 from unstuck.jobs where id = %s for update", (second,))
        cancelling.start()
        wait_for(lambda: waits(onlooker), "the cancel waits")
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
    noting = threading.Thread(target=ledger.workers.note_progress, args=("w1", notes))
    with psycopg.connect(swept_pg_url) as turn:
        turn.execute("select 1 from unstuck.jobs where id = %s for update", (jobs[1].job_id,))
        noting.start()
        wait_for(lambda: len(ledger.jobs.progress([job.job_id for job in jobs])) == 2, "the others are noted")
        turn.execute("delete from unstuck.jobs where id = %s", (jobs[1].job_id,))
    noting.join()
    assert set(ledger.jobs.progress([job.job_id for job in jobs])) == {jobs[0].job_id, jobs[2].job_id}


def test_who_waits_for_a_workflow_holds_no_line(ledger: PostgresLedger, swept_pg_url: str) -> None:
    """Whoever has the workflow may be about to release a node into that line."""
    number = workflow_of(ledger, new_job(more=JobExtras(concurrency_key="k", concurrency_limit=1)))
    [held] = claim_jobs(ledger, start=1)
    ending = threading.Thread(target=turn, args=(ledger,), kwargs={"done": [done(held)]})
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
        ending.start()
        wait_for(lambda: waits(onlooker), "the turn waits")
        other.execute("select 1 from unstuck.concurrency_keys where key = 'k' for update nowait")
    ending.join()
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_who_cancels_a_workflow_waits_for_no_node_that_somebody_has_in_hand(
    ledger: PostgresLedger, swept_pg_url: str
) -> None:
    """One that is just starting, or writing something down: it may want another of the same worker next."""
    number = workflow_of(ledger, new_job())
    [held] = claim_jobs(ledger, start=1)
    cancelling = threading.Thread(target=ledger.jobs.cancel, args=([number], "me"))
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        other.execute("select 1 from unstuck.jobs where id = %s for update", (held.job_id,))
        cancelling.start()
        # Not through the ledger: its connection is with the one who cancels, and waits there for the node.
        state = "select state from unstuck.jobs where id = %s"
        wait_for(lambda: onlooker.execute(state, (number,)).fetchone() == ("cancelled",), "it is cancelled")
    cancelling.join()
    # It was only in hand: it is asked all the same.
    turn(ledger, endings=[crash_retry(held)])
    assert state_of(ledger, held.job_id) is JobState.CANCELLED


WAYS: dict[str, tuple[dict[str, Any], Callable[[PostgresLedger, int], object]]] = {
    "cancel": ({}, lambda ledger, job_id: ledger.jobs.cancel([job_id], "me")),
    "cancel of many": ({}, lambda ledger, job_id: ledger.jobs.cancel([job_id, 10**6], "me")),
    "purge": ({}, lambda ledger, _: ledger.queues.purge("default", "me")),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_ends_a_node_that_waits_locks_its_workflow_first(
    ledger: PostgresLedger, swept_pg_url: str, way: str
) -> None:
    """Whoever has the workflow may be about to end all that waits in it."""
    changes, end = WAYS[way]
    number = workflow_of(ledger, new_job(**changes))
    job_id = look(ledger, number).nodes[0].job_id
    assert job_id is not None
    ending = threading.Thread(target=end, args=(ledger, job_id))
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
        ending.start()
        wait_for(lambda: waits(onlooker), "it waits for the workflow")
        other.execute("select 1 from unstuck.jobs where id = %s for update nowait", (job_id,))
    ending.join()
    assert state_of(ledger, job_id) is JobState.CANCELLED
    assert look(ledger, number).state is WorkflowState.FAILED


def test_an_expiry_waits_for_no_workflow(ledger: PostgresLedger, swept_pg_url: str) -> None:
    number = workflow_of(ledger, new_job(more=JobExtras(expires_in_s=0.001)))
    with psycopg.connect(swept_pg_url) as other:
        other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
        wait_for(lambda: ledger.maintenance.expire_due(10).next_in_s == 0.0, "it is expired")
        assert look(ledger, number).state is WorkflowState.RUNNING
    assert ledger.maintenance.expire_due(10).count == 1
    assert look(ledger, number).state is WorkflowState.FAILED


def test_who_queues_a_node_again_locks_its_workflow_first(ledger: PostgresLedger, swept_pg_url: str) -> None:
    number = workflow_of(ledger, new_job())
    [held] = claim_jobs(ledger, start=1)
    turn(ledger, endings=[crash(held)])
    retrying = threading.Thread(target=ledger.jobs.retry, args=([held.job_id], "me"))
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
        retrying.start()
        wait_for(lambda: waits(onlooker), "it waits for the workflow")
        other.execute("select 1 from unstuck.jobs where id = %s for update nowait", (held.job_id,))
    retrying.join()
    assert look(ledger, number).state is WorkflowState.RUNNING


def test_who_removes_old_workflows_waits_for_none(ledger: PostgresLedger, swept_pg_url: str) -> None:
    number, other_number = workflow_of(ledger, new_job()), workflow_of(ledger, new_job())
    turn(ledger, done=[done(held) for held in claim_jobs(ledger, start=2)])
    with psycopg.connect(swept_pg_url) as other:
        other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
        ledger.maintenance.prune(0)
        assert ledger.workflows.get(other_number) is None
        # Whoever has it may be about to open it again, and goes on to its job.
        other.execute("select 1 from unstuck.jobs where id = %s for update nowait", (number,))
    ledger.maintenance.prune(0)
    assert ledger.workflows.get(number) is None


def test_who_removes_old_jobs_leaves_those_of_a_workflow_that_is_just_taken_up_again(
    ledger: PostgresLedger, swept_pg_url: str
) -> None:
    """Its nodes that ended well are not touched by that, but those that come after them need their results."""
    kept = JobExtras(retain_s=0.001)
    plain, brief = (workflow_of(ledger, new_job(more=more), new_job()) for more in (None, kept))
    turn(ledger, done=[done(job) for job in claim_jobs(ledger, start=2)])
    turn(ledger, endings=[crash(job) for job in claim_jobs(ledger, start=2)])
    firsts = [look(ledger, number).nodes[0].job_id for number in (plain, brief)]
    with psycopg.connect(swept_pg_url) as other:
        for number in (plain, brief):
            other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
            other.execute("select unstuck.reopen_workflow_v1(%s, 'me')", (number,))
        ledger.maintenance.prune(0)
        ledger.maintenance.sweep_kept(100)
    assert [state_of(ledger, job_id) for job_id in firsts if job_id is not None] == [JobState.SUCCEEDED] * 2
    turn(ledger, done=[done(job) for job in claim_jobs(ledger, start=2)])
    # They are over: nothing stays behind, whichever goes first.
    ledger.maintenance.prune(0)
    with psycopg.connect(swept_pg_url) as onlooker:
        assert onlooker.execute("select count(*) from unstuck.jobs").fetchone() == (0,)


def interrupt(ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch, query: str, act: Callable[[], object]) -> None:
    """Let something else happen just before (or, of a look, just after) the ledger comes to this query, once."""
    read = ledger.db.read
    left = [act]

    def late(name: str, **values: Any) -> Any:
        rows = read(name, **values)
        if name == query and left:
            left.pop()()
        return rows

    monkeypatch.setattr(ledger.db, "read", late)


@pytest.mark.parametrize("what", ["workflow", "node"])
@pytest.mark.parametrize("in_hand", [True, False])
def test_who_cancels_after_a_workflow_was_taken_up_again_is_heard(
    ledger: PostgresLedger, swept_pg_url: str, monkeypatch: pytest.MonkeyPatch, what: str, in_hand: bool
) -> None:
    number = workflow_of(ledger, new_job())
    [runs] = claim_jobs(ledger, start=1)
    ledger.jobs.cancel([number], "me")
    other_ledger = PostgresLedger(Settings(url=swept_pg_url))
    holder = psycopg.connect(swept_pg_url)

    def cancel() -> None:
        holder.rollback()
        other_ledger.jobs.cancel([number if what == "workflow" else runs.job_id], "me")

    if in_hand:
        holder.execute("select 1 from unstuck.jobs where id = %s for update", (runs.job_id,))
    interrupt(ledger, monkeypatch, "nodes_to_unstop", cancel)
    assert ledger.workflows.retry(number, "me")
    holder.close()
    other_ledger.close()
    assert ledger.workers.beat(Heartbeat("w1", 1, 0)).cancel == ((runs.job_id, runs.token),)
    turn(ledger, endings=[stopped(runs)])
    assert state_of(ledger, runs.job_id) is JobState.CANCELLED
    assert claim_jobs(ledger) == []


@pytest.mark.parametrize("by", ["workflow", "job"])
def test_what_is_in_hand_while_its_workflow_is_taken_up_again_need_not_stop(
    ledger: PostgresLedger, swept_pg_url: str, by: str
) -> None:
    number = workflow_of(ledger, new_job())
    [runs] = claim_jobs(ledger, start=1)
    ledger.jobs.cancel([number], "me")

    def retry() -> None:
        if by == "workflow":
            ledger.workflows.retry(number, "me")
        else:
            ledger.jobs.retry([number], "me")

    retrying = threading.Thread(target=retry)
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        other.execute("select 1 from unstuck.jobs where id = %s for update", (runs.job_id,))
        retrying.start()
        wait_for(lambda: waits(onlooker), "it waits for the node, and for it alone")
    retrying.join()
    assert ledger.workers.beat(Heartbeat("w1", 1, 0)).cancel == ()
    turn(ledger, endings=[stopped(runs)])
    assert [job.job_id for job in claim_jobs(ledger, start=1)] == [runs.job_id]


def test_what_was_in_hand_when_its_workflow_was_cancelled_is_not_stopped_after_a_retry(
    ledger: PostgresLedger, swept_pg_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = workflow_of(ledger, new_job())
    [runs] = claim_jobs(ledger, start=1)
    other_ledger = PostgresLedger(Settings(url=swept_pg_url))
    holder = psycopg.connect(swept_pg_url)
    holder.execute("select 1 from unstuck.jobs where id = %s for update", (runs.job_id,))

    def retry() -> None:
        holder.rollback()
        assert other_ledger.workflows.retry(number, "me")

    interrupt(ledger, monkeypatch, "nodes_to_stop", retry)
    ledger.jobs.cancel([number], "me")
    holder.close()
    other_ledger.close()
    assert ledger.workers.beat(Heartbeat("w1", 1, 0)).cancel == ()
    turn(ledger, done=[done(runs)])
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_a_repair_waits_for_no_workflow(ledger: PostgresLedger, swept_pg_url: str) -> None:
    """It has jobs of those in hand that it repaired before."""
    numbers = [workflow_of(ledger, new_job()) for _ in range(2)]
    spoil = (
        "update unstuck.jobs set state = 'succeeded', ready = false, finished_at = now()"
        " where workflow_id = %s and place = 1"
    )
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        for number in numbers:
            onlooker.execute(spoil, (number,))
        other.execute("select 1 from unstuck.workflows where id = %s for update", (numbers[1],))
        found: list[int] = []
        repairing = threading.Thread(
            target=lambda: found.extend(one.workflow_id for one in ledger.maintenance.repair_workflows(9))
        )
        repairing.start()
        wait_for(lambda: found == [numbers[0]], "the other one is repaired")
    repairing.join()
    assert [one.workflow_id for one in ledger.maintenance.repair_workflows(9)] == [numbers[1]]


def test_workers_are_told_of_cancels_in_one_order(ledger: PostgresLedger, swept_pg_url: str) -> None:
    """Beats of many workers come together, and two who cancel may concern the same ones."""
    ledger.workers.register(birth("w0"))
    number = workflow_of_many(ledger, 2)
    [_], [_] = claim_jobs(ledger, "w1", limit=1, start=1), claim_jobs(ledger, "w0", limit=1, start=1)
    cancelling = threading.Thread(target=ledger.jobs.cancel, args=([number], "me"))
    with psycopg.connect(swept_pg_url) as beats, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        beats.execute("select 1 from unstuck.worker_heartbeats where worker_id = 'w0' for update")
        cancelling.start()
        wait_for(lambda: waits(onlooker), "the cancel waits")
        beats.execute("select 1 from unstuck.worker_heartbeats where worker_id = 'w1' for update nowait")
    cancelling.join()
    assert [len(ledger.workers.beat(Heartbeat(worker, 1, 0)).cancel) for worker in ("w0", "w1")] == [1, 1]


def test_a_turn_that_finds_an_expired_node_does_not_wait_for_its_workflow(
    ledger: PostgresLedger, swept_pg_url: str
) -> None:
    number = workflow_of(ledger, new_job(more=JobExtras(expires_in_s=0.001)))
    with psycopg.connect(swept_pg_url) as other:
        other.execute("select 1 from unstuck.workflows where id = %s for update", (number,))
        wait_for(lambda: claim_jobs(ledger) == [], "it is not handed out")
        assert look(ledger, number).state is WorkflowState.RUNNING
    assert ledger.maintenance.expire_due(10).count == 1
    assert look(ledger, number).state is WorkflowState.FAILED


def test_lines_are_taken_in_their_order_by_who_goes_from_one_to_another(
    ledger: PostgresLedger, swept_pg_url: str
) -> None:
    """The first node leaves line b, and the second, which is released by that, joins line a."""
    lined = [new_job(more=JobExtras(concurrency_key=line, concurrency_limit=1)) for line in "ba"]
    number = workflow_of(ledger, *lined)
    [held] = claim_jobs(ledger, start=1)
    ending = threading.Thread(target=turn, args=(ledger,), kwargs={"done": [done(held)]})
    with psycopg.connect(swept_pg_url) as other, psycopg.connect(swept_pg_url, autocommit=True) as onlooker:
        onlooker.execute("insert into unstuck.concurrency_keys (key) values ('a')")
        other.execute("select 1 from unstuck.concurrency_keys where key = 'a' for update")
        ending.start()
        wait_for(lambda: waits(onlooker), "the turn waits")
        other.execute("select 1 from unstuck.concurrency_keys where key = 'b' for update nowait")
    ending.join()
    [second] = claim_jobs(ledger, start=1)
    turn(ledger, done=[done(second)])
    assert look(ledger, number).state is WorkflowState.SUCCEEDED


def test_who_was_passed_over_because_somebody_had_it_in_hand_is_let_in_by_those_hands(
    ledger: PostgresLedger, swept_pg_url: str
) -> None:
    ties = JobExtras(concurrency_key="k", concurrency_limit=1)
    first, second = put(ledger, more=ties), put(ledger, more=ties)
    [held] = claim_jobs(ledger, start=1)
    assert held.job_id == first
    with psycopg.connect(swept_pg_url) as sender:
        sender.execute("select 1 from unstuck.jobs where id = %s for update", (second,))
        turn(ledger, done=[done(held)])
        assert claim_jobs(ledger) == []
        sender.execute("select * from unstuck.signal_v1(%s, 'go', 'null', 'me', 10)", (second,))
    [held] = claim_jobs(ledger)
    assert held.job_id == second


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
    ties = [
        JobExtras(concurrency_key=f"line {n % 2}", concurrency_limit=2, expires_in_s=None if n % 3 else 0.05)
        for n in range(WIDE)
    ]
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
    held = claim_jobs(ledger, worker_id, limit=4, start=chance.choice([0, 2, 4]))
    began = {job.token for job in held if job.running}
    late = [job for job in held if not job.running]
    chance.shuffle(late)
    back, begun = late[: len(late) // 2], late[len(late) // 2 :]
    answer = ledger.workers.turn(
        Turn(
            worker_id,
            start=tuple(AttemptRef(job.job_id, job.token) for job in begun),
            release=tuple(release(job) for job in back),
        )
    )
    runs = [
        job for job in held if job.token in began or (job in begun and (job.job_id, job.token) not in answer.superseded)
    ]
    endings = [(crash if chance.random() < 0.5 else crash_retry)(job) for job in runs if chance.random() < 0.4]
    ended = {ending.token for ending in endings}
    good = tuple(done(job) for job in runs if job.token not in ended)
    ledger.workers.turn(Turn(worker_id, done=good, endings=tuple(endings)))


def meddle(ledger: PostgresLedger, chance: random.Random) -> None:
    """Do what operators and the reaper do."""
    flows = [one.id for one in ledger.workflows.list(limit=2 * FLOWS)]
    if not flows:
        # Retention, which is one of the verbs below, has removed all of them.
        ledger.workflows.begin(flow())
        return
    number = chance.choice(flows)
    found = ledger.workflows.get(number)
    nodes = [] if found is None else [node.job_id for node in found.nodes if node.job_id is not None]
    verbs: list[Callable[[], Any]] = [
        lambda: ledger.jobs.cancel([chance.choice([number, *nodes])], "me"),
        lambda: ledger.jobs.cancel([*chance.sample(nodes, len(nodes) // 2), number], "me"),
        lambda: ledger.jobs.retry(chance.sample([number, *nodes], 1), "me"),
        lambda: ledger.workflows.retry(number, "me"),
        lambda: ledger.queues.purge("default", "me"),
        lambda: ledger.maintenance.expire_due(100),
        lambda: ledger.maintenance.promote_due(100),
        lambda: ledger.maintenance.repair_workflows(100),
        lambda: ledger.maintenance.prune(0.2),
        lambda: ledger.workflows.begin(flow()),
    ]
    [verb] = chance.choices(verbs, [4, 2, 4, 4, 1, 4, 2, 2, 1, 4])
    try:
        verb()
    except DuplicateJob:
        pytest.fail("no workflow here has a key")


def broker(ledger: PostgresLedger, worker_ids: list[str], chance: random.Random) -> None:
    """Do what a broker does: beats, new jobs, and the turns of several workers are one commit."""
    wish = ClaimRequest((QUEUE,), (TASK,), 2, start=2)
    found = (
        ledger.workers.exchange(Exchange(turns=tuple(Turn(one, claim_request=wish) for one in worker_ids))).turns or ()
    )
    turns = []
    for worker_id, answer in zip(worker_ids, found, strict=True):
        bad = [job for job in answer.claimed if chance.random() < 0.3]
        good = tuple(done(job) for job in answer.claimed if job not in bad)
        turns.append(Turn(worker_id, done=good, endings=tuple(crash(job) for job in bad)))
    chance.shuffle(turns)
    lined = new_job(more=JobExtras(concurrency_key=f"line {chance.randrange(2)}", concurrency_limit=2))
    ledger.workers.exchange(
        Exchange(jobs=(lined,), turns=tuple(turns), heartbeats=tuple(RemoteHeartbeat(one) for one in worker_ids))
    )


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
        ledgers[n].workers.register(birth(f"w{n}"))
        for m in range(3):
            ledgers[n].workers.register(
                birth(f"f{n}{m}", transport=Transport.MDP, suspect_after_s=60.0, running_stale_after_s=60.0)
            )
    for _ in range(FLOWS):
        ledgers[0].workflows.begin(flow())
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
    ledger.maintenance.expire_due(1000)
    ledger.maintenance.promote_due(1000)
    held: list[Claimed] = claim_jobs(ledger, "w0", limit=100, start=100)
    ledger.workers.turn(Turn("w0", done=tuple(done(job) for job in held)))
    assert ledger.maintenance.repair_workflows(100) == []
    return all(one.state in OVER for one in ledger.workflows.list(limit=10_000))
