"""The hot verbs read only the rows that they are about, also with statistics gathered at the worst moment."""

import math
import re
from importlib.resources import files
from typing import Any

import psycopg
import pytest
from tests.support.builders import birth, claim_jobs, crash, crash_retry, done, new_job, start
from tests.support.fleet import wait_for

from unstuck.ledger.contract.workers import AttemptRef, ClaimRequest, Turn
from unstuck.ledger.contract.workflows import NewEdge, NewNode, NewWorkflow
from unstuck.ledger.gaps import Gap
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.turn import turn_values

FINISHED = 20_000
PENDING = 5_000
CROWD = 10_000
BATCH = 100
LEFT = 5 * BATCH
"""So many are still there where most of the pending were taken."""
TIMES_EACH = 8
"""How many row reads per job are still in the nature of the verb; a scan would be thousands."""


def _margin() -> int:
    """Read from the code how far a gap keeps away from what is at each of its ends."""
    text = files("unstuck.ledger.postgres.functions").joinpath("claim_around_gaps.sql").read_text()
    [number] = re.findall(r"c_margin constant integer := (\d+);", text)
    return int(number)


MARGIN = _margin()


@pytest.fixture
def worst(pg_ledger: PostgresLedger, pg_url: str) -> PostgresLedger:
    """Statistics say that nothing is ever ready, waiting or held; then there is a lot."""
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute(
            "insert into unstuck.jobs (id, queue, task, payload, enqueued_at, finished_at, ready, scheduled, state)"
            " select nextval('unstuck.job_ids'), 'default', 'add', '', now(), now(), false, false, 'succeeded'"
            f" from generate_series(1, {FINISHED})"
        )
        connection.execute("vacuum analyze")
        connection.execute("alter table unstuck.jobs set (autovacuum_enabled = off)")
    pg_ledger.workers.register(birth("w1"))
    pg_ledger.jobs.enqueue([new_job() for _ in range(PENDING)])
    return pg_ledger


@pytest.fixture
def unknown(pg_ledger: PostgresLedger, pg_url: str) -> PostgresLedger:
    """Nobody has gathered statistics yet."""
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute("alter table unstuck.jobs set (autovacuum_enabled = off)")
    pg_ledger.workers.register(birth("w1"))
    pg_ledger.jobs.enqueue([new_job(timeout_s=60.0) for _ in range(PENDING)])
    return pg_ledger


def test_a_reaper_looks_only_at_what_is_held_also_where_there_are_no_statistics(unknown: PostgresLedger) -> None:
    claim_jobs(unknown, limit=BATCH, start=BATCH)
    scanned, fetched = reads(unknown, "overdue", {"grace_s": 1.0, "lost_grace_s": 1.0, "limit": 100})
    assert scanned == 0
    assert fetched <= BATCH * TIMES_EACH


def reads(
    ledger: PostgresLedger, name: str, values: dict[str, Any], repeat: int = 1, table: str = "jobs"
) -> tuple[int, int]:
    """Run a verb, and give the rows of the table that its last run read by scanning and by index."""
    connection = ledger.db.turn_connection.open().connection
    for _ in range(repeat):
        with connection.transaction():
            scanned, fetched = _counters(connection, table)
            connection.execute(ledger.db.sql[name], values, binary=True)
            scanned_after, fetched_after = _counters(connection, table)
    return scanned_after - scanned, fetched_after - fetched


def _counters(connection: psycopg.Connection[Any], table: str = "jobs") -> tuple[int, int]:
    row = connection.execute(
        "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relname = %s", (table,)
    ).fetchone()
    assert row is not None
    return row


def is_lean(found: tuple[int, int]) -> bool:
    scanned, fetched = found
    return scanned == 0 and fetched <= BATCH * TIMES_EACH


@pytest.mark.parametrize("queues", [("default",), ("default", "other")])
def test_a_claim_reads_what_it_takes(worst: PostgresLedger, queues: tuple[str, ...]) -> None:
    values = turn_values(Turn("w1", claim_request=ClaimRequest(queues, ("add",), BATCH)))
    # More than five times: from then on the plan is the cached one.
    assert is_lean(reads(worst, "turn", values, repeat=7))


def test_a_claim_reads_the_journals_of_what_it_takes_and_no_others(worst: PostgresLedger, pg_url: str) -> None:
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute("analyze unstuck.journal")
        for queue, entries in (("default", 0), ("other", 2)):
            worst.jobs.enqueue([new_job(queue=queue, priority=1) for _ in range(8 * BATCH)])
            connection.execute(
                "with j as (update unstuck.jobs set journal = %s where queue = %s and rank < 0 returning id)"
                " insert into unstuck.journal (job_id, seq, kind, name, value, at, token)"
                " select j.id, n, 'step', 's', '1', now(), 1 from j, generate_series(1, %s) n",
                (entries > 0 or None, queue, entries),
            )
    for queue, least, most in (("default", 0, 0), ("other", 2 * BATCH, 4 * BATCH)):
        values = turn_values(Turn("w1", claim_request=ClaimRequest((queue,), ("add",), BATCH)))
        scanned, fetched = reads(worst, "turn", values, repeat=7, table="journal")
        assert scanned == 0
        assert least <= fetched <= most


def test_starts_and_ends_read_the_jobs_they_name(worst: PostgresLedger) -> None:
    jobs = claim_jobs(worst, limit=3 * BATCH)
    values = turn_values(Turn("w1", start=tuple(AttemptRef(job.job_id, job.token) for job in jobs[:BATCH])))
    assert is_lean(reads(worst, "turn", values))
    start(worst, jobs[BATCH:])
    assert is_lean(reads(worst, "turn", turn_values(Turn("w1", done=tuple(map(done, jobs[:BATCH]))))))
    retries = tuple(map(crash_retry, jobs[BATCH : 2 * BATCH]))
    assert is_lean(reads(worst, "turn", turn_values(Turn("w1", endings=retries))))


def test_an_idle_poll_reads_next_to_nothing(worst: PostgresLedger) -> None:
    assert reads(worst, "turn", turn_values(Turn("w1", claim_request=ClaimRequest(("other",), ("add",), BATCH)))) == (
        0,
        0,
    )


@pytest.mark.parametrize("queues", [("default",), ("default", "other")])
def test_a_claim_does_not_read_past_a_crowd_of_an_unknown_task_again(
    worst: PostgresLedger, queues: tuple[str, ...]
) -> None:
    crowd_of_an_unknown_task(worst)
    wish = ClaimRequest(queues, ("add",), BATCH)
    around = learn(worst, wish)
    found = reads(worst, "turn", turn_values(Turn("w1", claim_request=wish), around), repeat=7)
    assert found[0] == 0
    assert found[1] <= BATCH * TIMES_EACH + 2 * len(queues) * MARGIN
    assert reads(worst, "turn", turn_values(Turn("w1", claim_request=wish)))[1] > CROWD


def test_an_idle_poll_does_not_read_past_a_crowd_again(worst: PostgresLedger) -> None:
    wish = ClaimRequest(("default",), ("nobody_knows_it",), BATCH)
    around = learn(worst, wish)
    assert reads(worst, "turn", turn_values(Turn("w1", claim_request=wish), around), repeat=7)[1] <= 2 * MARGIN
    assert reads(worst, "turn", turn_values(Turn("w1", claim_request=wish)))[1] >= PENDING


def test_dead_entries_that_an_old_snapshot_keeps_are_not_read_with_every_claim(
    worst: PostgresLedger, pg_url: str
) -> None:
    wish = ClaimRequest(("default",), ("add",), BATCH)
    with psycopg.connect(pg_url) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select count(*) from unstuck.jobs")
        for _ in range((PENDING - LEFT) // BATCH - 1):
            assert len(claim_jobs(worst, limit=BATCH)) == BATCH
        # How old a gap is depends on the time, and with it how many died behind its end: the last claim looks anew.
        worst.gaps.due(wish, math.inf)
        assert len(claim_jobs(worst, limit=BATCH)) == BATCH
        around = worst.gaps.of(wish, 0.0)
        assert around
        # Twice, to see whether there is any and to take some, it reads the dead before what it takes: those of the
        # margin, where it goes around the others; else all. (Then it looks for the gap again, which comes on top.)
        dead = PENDING - LEFT
        assert entries_read(worst, turn_values(Turn("w1", claim_request=wish), around)) <= 2 * (MARGIN + BATCH)
        assert entries_read(worst, turn_values(Turn("w1", claim_request=wish))) >= 2 * dead
        [urgent] = worst.jobs.enqueue([new_job(priority=1)])
        assert claim_jobs(worst, limit=1)[0].job_id == urgent.job_id


def crowd_of_an_unknown_task(ledger: PostgresLedger) -> None:
    ledger.jobs.enqueue([new_job(task="from_the_next_release", priority=1) for _ in range(CROWD)])


def learn(ledger: PostgresLedger, wish: ClaimRequest) -> tuple[Gap, ...]:
    ledger.workers.turn(Turn("w1", claim_request=wish))
    around = ledger.gaps.of(wish, 0.0)
    assert around
    return around


def entries_read(ledger: PostgresLedger, values: dict[str, Any]) -> int:
    """Give how many entries of the ready index a turn reads; it is rolled back."""
    connection = ledger.db.turn_connection.open().connection
    with connection.transaction(force_rollback=True):
        before = connection.execute(b"select unstuck.ready_entries_read()").fetchone()
        connection.execute(ledger.db.sql["turn"], values, binary=True)
        after = connection.execute(b"select unstuck.ready_entries_read()").fetchone()
    assert before is not None
    assert after is not None
    return int(after[0] - before[0])


def test_enqueue_with_keys_reads_its_own(worst: PostgresLedger) -> None:
    worst.jobs.enqueue([new_job(unique_key=f"k{n}") for n in range(BATCH)])
    ids = arrays.int8s(range(10_000_000, 10_000_000 + BATCH))
    defaults = ("payload_types", "policies", "on_crash", "heartbeats", "heartbeat_timeouts_s", "timeouts_s", "ranks")
    names = dict.fromkeys((*defaults, "delays_s", "runs_at", "enqueued_by", "more", "lock_timeout"))
    values = {
        **names,
        "ids": ids,
        "queues": arrays.texts(["default"] * BATCH),
        "tasks": arrays.texts(["add"] * BATCH),
        "payloads": arrays.byteas([b""] * BATCH),
        "unique_keys": arrays.texts([f"k{n}" for n in range(BATCH)]),
    }
    assert is_lean(reads(worst, "enqueue", values))


def test_the_reaper_reads_what_is_held(worst: PostgresLedger) -> None:
    claim_jobs(worst, limit=BATCH)
    assert is_lean(reads(worst, "watch", {"host": None}))
    assert is_lean(reads(worst, "held_by", {"worker_id": "w1", "limit": BATCH}))


@pytest.mark.parametrize("statistics", ["none", "gathered"])
def test_the_ring_reads_those_of_its_own_host(pg_ledger: PostgresLedger, pg_url: str, statistics: str) -> None:
    """Everybody asks for it with every beat: to read all workers each time would be the square of the fleet."""
    for number in range(300):
        pg_ledger.workers.register(birth(f"w{number:03}", host=f"host-{number % 60}"))
    if statistics == "gathered":
        with psycopg.connect(pg_url, autocommit=True) as connection:
            connection.execute("vacuum analyze")
    assert [worker.id for worker in pg_ledger.recovery.peers_of("w120", "host-0", 24)] == [
        "w180",
        "w240",
        "w000",
        "w060",
    ]
    values = {"worker_id": "w120", "host": "host-0", "size": 24}
    for table in ("workers", "worker_heartbeats"):
        scanned, fetched = reads(pg_ledger, "ring_of", values, repeat=7, table=table)
        assert scanned == 0
        assert fetched <= 20


def test_what_is_not_due_is_not_looked_at(worst: PostgresLedger) -> None:
    worst.jobs.enqueue([new_job(delay_s=3600) for _ in range(2000)] + [new_job(run_at=0.0, delay_s=1)])
    assert is_lean(reads(worst, "promote_due", {"limit": BATCH}))


def test_the_doctor_looks_at_no_more_than_it_was_told(worst: PostgresLedger) -> None:
    limits = {"jobs": BATCH, "groups": BATCH}
    assert is_lean(reads(worst, "look_ready", {"queues": 10, "count": BATCH, "jobs": BATCH}))
    assert is_lean(reads(worst, "look_scheduled", {"far_s": 60.0, **limits}))
    assert is_lean(reads(worst, "look_coming", limits))
    assert is_lean(reads(worst, "look_overdue", {"late_s": 60.0, **limits}))
    assert is_lean(reads(worst, "look_quarantined", {"errors": BATCH, "groups": BATCH}))


def test_a_page_of_workflows_reads_no_others(pg_ledger: PostgresLedger, pg_url: str) -> None:
    """The ones that are asked for are among the oldest."""
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute(
            "insert into unstuck.workflows (id, name, state, created_at, finished_at)"
            " select i, 'all', case when i <= 1000 then 'failed' else 'succeeded' end, now(), now()"
            f" from generate_series(1, {FINISHED}) as g(i)"
        )
        connection.execute("vacuum analyze unstuck.workflows")
    page = {"state": "failed", "before_id": 2**62, "limit": 50}
    assert is_lean(reads(pg_ledger, "workflows_in_state", page, table="workflows"))
    assert [one.id for one in pg_ledger.workflows.list("failed", limit=2)] == [1000, 999]
    assert is_lean(reads(pg_ledger, "workflows", {"before_id": 500, "limit": 50}, table="workflows"))


@pytest.mark.parametrize("kind", ["done", "endings"])
def test_ends_of_nodes_read_their_own(pg_ledger: PostgresLedger, pg_url: str, kind: str) -> None:
    """Planned while there was no workflow at all, and then there are many nodes."""
    pg_ledger.workers.register(birth("w1"))
    chain = [NewNode(place, 0, f"n{place}", "task", job=new_job(), on_error="continue") for place in range(1, BATCH)]
    edges = tuple(NewEdge(place, place + 1, False) for place in range(1, BATCH - 1))
    whole = NewNode(0, None, "all", "group")
    flow = NewWorkflow("all", new_job(task="unstuck.workflow"), (whole, *chain), edges)
    for _ in range(FINISHED // BATCH // 4):
        pg_ledger.workflows.begin(flow)
    for table in ("workflow_nodes", "workflow_edges", "node_jobs", "workflows"):
        held = claim_jobs(pg_ledger, limit=BATCH // 4, start=BATCH // 4)
        ends = Turn("w1", done=tuple(done(job) for job in held))
        if kind == "endings":
            ends = Turn("w1", endings=tuple(crash(job) for job in held))
        assert is_lean(reads(pg_ledger, "turn", turn_values(ends), table=table))


def test_ends_of_workflows_read_their_own(pg_ledger: PostgresLedger) -> None:
    """Planned when the first one ended, and there was no other; then few of many end at once."""
    pg_ledger.workers.register(birth("w1"))
    nodes = (NewNode(0, None, "all", "group", source=1), NewNode(1, 0, "n1", "task", job=new_job()))
    flow = NewWorkflow("all", new_job(task="unstuck.workflow"), nodes, ())
    pg_ledger.workflows.begin(flow)
    pg_ledger.workers.turn(Turn("w1", done=(done(claim_jobs(pg_ledger, limit=1, start=1)[0]),)))
    for _ in range(2 * BATCH):
        pg_ledger.workflows.begin(flow)
    few = BATCH // 10
    ends = Turn("w1", done=tuple(done(job) for job in claim_jobs(pg_ledger, limit=few, start=few)))
    scanned, fetched = reads(pg_ledger, "turn", turn_values(ends), table="workflow_nodes")
    assert len(pg_ledger.workflows.list("succeeded")) == few + 1
    assert scanned == 0
    assert fetched <= few * TIMES_EACH


def test_nodes_stay_hot(pg_ledger: PostgresLedger, pg_url: str) -> None:
    """Their releases and their ends are written where they are, and no index hears of it."""
    pg_ledger.workers.register(birth("w1"))
    nodes = [NewNode(place, 0, f"n{place}", "task", job=new_job()) for place in range(1, BATCH + 1)]
    edges = tuple(NewEdge(1, place, False) for place in range(2, BATCH + 1))
    whole = NewNode(0, None, "all", "group", source=1)
    pg_ledger.workflows.begin(NewWorkflow("all", new_job(task="unstuck.workflow"), (whole, *nodes), edges))
    for _ in range(2):
        pg_ledger.workers.turn(
            Turn("w1", done=tuple(done(job) for job in claim_jobs(pg_ledger, limit=BATCH, start=BATCH)))
        )
    [found] = pg_ledger.workflows.list("succeeded")
    assert found.counts == {"succeeded": BATCH}
    pg_ledger.close()
    with psycopg.connect(pg_url, autocommit=True) as connection:
        written = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'workflow_nodes'"
        # Counters of a session are there at the latest when it is over.
        wait_for(lambda: (connection.execute(written).fetchone() or (0,))[0] >= 2 * BATCH, "they are counted")
        updated, hot = connection.execute(written).fetchone() or (0, 0)
    assert hot >= updated * 0.95


def test_beats_stay_hot(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.workers.register(birth("w1"))
    with psycopg.connect(pg_url, autocommit=True) as connection:
        beat = {"worker_id": "w1", "running": 1, "processed": 1, "metadata": None}
        beat |= {"session_pid": None, "session_start": None, "session_server": None}
        with connection.transaction():
            for _ in range(50):
                connection.execute(pg_ledger.db.sql["beat"], beat)
            row = connection.execute(
                "select n_tup_upd, n_tup_hot_upd, n_tup_ins from pg_stat_xact_user_tables "
                "where relname = 'worker_heartbeats'"
            ).fetchone()
    assert row is not None
    assert row[0] == 50
    assert row[1] >= 45
    assert row[2] == 0
