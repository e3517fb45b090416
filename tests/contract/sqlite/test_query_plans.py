"""Query plans: the hot queries use their indexes, with statistics gathered at the worst moment, among many rows."""

import re
import time
from pathlib import Path

import apsw
import pytest
from tests.support.builders import birth, claim_jobs, done, new_job, run, turn

from unstuck.config import Settings
from unstuck.ledger.sqlite.database import SQL
from unstuck.ledger.sqlite.ledger import SqliteLedger

MANY = 300_000
INDEX_OF = {
    "peek_ready": "unstuck_jobs_ready",
    "peek_ready_of_ranks": "unstuck_jobs_ready",
    "peek_ready_of_rank": "unstuck_jobs_ready",
    "ready_inside": "unstuck_jobs_ready",
    "nth_ready": "unstuck_jobs_ready",
    "nth_ready_from_behind": "unstuck_jobs_ready",
    "held_by": "unstuck_jobs_held",
    "cancel_asked": "unstuck_jobs_held",
    "next_due": "unstuck_jobs_scheduled",
    "find_live_key": "unstuck_jobs_active_key",
    "jobs_with_error": "unstuck_jobs_error",
    "jobs_held": "unstuck_jobs_held",
    "jobs_ready": "unstuck_jobs_ready",
    "jobs_waiting": "unstuck_jobs_scheduled",
    "many_pending": "unstuck_jobs_ready",
    "error_codes": "unstuck_jobs_error",
    "count_ready": "unstuck_jobs_ready",
    "count_held": "unstuck_jobs_held",
    "ready_queues": "unstuck_jobs_ready",
    "count_ready_of": "unstuck_jobs_ready",
    "look_ready": "unstuck_jobs_ready",
    "look_scheduled": "unstuck_jobs_scheduled",
    "look_coming": "unstuck_jobs_scheduled",
    "look_overdue": "unstuck_jobs_scheduled",
    "look_quarantined": "unstuck_jobs_error",
    "nodes_inside": "unstuck_workflow_nodes_inside",
    "recount_nodes": "unstuck_workflow_nodes_inside",
    "workflows_in_state": "unstuck_workflows_by_state",
}
BY_KEY = (
    "claim_job",
    "start_job",
    "finish_job",
    "end_job",
    "requeue_job",
    "release_job",
    "outcomes",
    "attempt_in_hand",
)

INSERT = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
INSERT INTO unstuck_jobs
    (id, state, ready, scheduled, held, rank, queue, task, run_at, enqueued_at, finished_at, payload)
SELECT i + {offset}, '{state}', {ready}, 0, 0, 0, 'default', 'add', 0, 0, {finished_at}, x'00' FROM n
"""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> SqliteLedger:
    """Many finished and many pending jobs; statistics were gathered while nothing was ready and nothing was held."""
    path = tmp_path_factory.mktemp("plans") / "jobs.db"
    ledger = SqliteLedger(Settings(url=f"sqlite:///{path}"))
    ledger.migrate()
    connection = apsw.Connection(str(path))
    connection.pragma("synchronous", 0)
    connection.execute(INSERT.format(count=MANY, offset=0, state="succeeded", ready=0, finished_at=1))
    connection.execute("ANALYZE")
    connection.execute(INSERT.format(count=MANY, offset=MANY, state="pending", ready=1, finished_at="NULL"))
    connection.execute("UPDATE unstuck_ledger SET last_job_id = ?", (2 * MANY,))
    connection.close()
    ledger.workers.register(birth("w1"))
    return ledger


def plan(ledger: SqliteLedger, name: str) -> str:
    with ledger.db.read() as cursor:
        rows = cursor.execute(SQL[name], [None] * _bindings(SQL[name]), explain=2).fetchall()
    return "\n".join(str(row[3]) for row in rows)


def _bindings(sql: str) -> int:
    numbered = [int(number) for number in re.findall(r"\?(\d+)", sql)]
    return max(numbered, default=0) or sql.count("?")


@pytest.mark.parametrize("name", INDEX_OF)
def test_a_hot_query_uses_its_index(crowded: SqliteLedger, name: str) -> None:
    text = plan(crowded, name)
    assert f"USING INDEX {INDEX_OF[name]}" in text or f"USING COVERING INDEX {INDEX_OF[name]}" in text, text


@pytest.mark.parametrize("name", BY_KEY)
def test_what_ends_or_starts_an_attempt_goes_by_the_key(crowded: SqliteLedger, name: str) -> None:
    text = plan(crowded, name)
    assert "USING INTEGER PRIMARY KEY" in text, text
    assert "SCAN unstuck_jobs" not in text


NEVER_SORTED = (
    *("peek_ready", "peek_ready_of_ranks", "peek_ready_of_rank", "nth_ready", "nth_ready_from_behind"),
    *("claim_job", "finish_job", "held_by", "next_due"),
)


@pytest.mark.parametrize("name", NEVER_SORTED)
def test_no_hot_query_sorts_or_scans_jobs(crowded: SqliteLedger, name: str) -> None:
    text = plan(crowded, name)
    assert "SCAN j\n" not in text + "\n"
    assert "SCAN unstuck_jobs" not in text
    if name != "held_by":
        assert "TEMP B-TREE FOR ORDER BY" not in text


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("peek_ready_of_ranks", "(queue=? AND rank>? AND rank<?)"),
        ("peek_ready_of_rank", "(queue=? AND rank=? AND id>?)"),
        ("ready_inside", "(queue=? AND rank=? AND id<?)"),
        ("nth_ready", "(queue=? AND rank=? AND id<?)"),
    ],
)
def test_a_look_around_a_gap_begins_and_ends_at_its_bounds(crowded: SqliteLedger, name: str, bounds: str) -> None:
    assert bounds in plan(crowded, name)


def test_claiming_among_many_is_as_quick_as_claiming_among_few(crowded: SqliteLedger, tmp_path: Path) -> None:
    few = SqliteLedger(Settings(url=f"sqlite:///{tmp_path}/few.db"))
    few.migrate()
    few.workers.register(birth("w1"))
    few.jobs.enqueue([new_job() for _ in range(4000)])

    def cpu_s(ledger: SqliteLedger) -> float:
        best = float("inf")
        for _ in range(10):
            before = time.process_time()
            jobs = run(ledger, limit=200)
            turn(ledger, done=[done(job) for job in jobs])
            best = min(best, time.process_time() - before)
            assert len(jobs) == 200
        return best

    assert cpu_s(crowded) < 3 * cpu_s(few) + 0.005


def test_an_idle_poll_reads_past_a_crowd_of_an_unknown_task_once(crowded: SqliteLedger) -> None:
    def cpu_s() -> float:
        before = time.process_time()
        assert claim_jobs(crowded, tasks=("nobody_knows_it",)) == []
        return time.process_time() - before

    first = cpu_s()
    assert min(cpu_s() for _ in range(3)) < first / 5


def test_a_claim_from_several_queues_reads_only_what_it_takes(crowded: SqliteLedger) -> None:
    def cpu_s(task: str, expected: int) -> float:
        before = time.process_time()
        jobs = claim_jobs(crowded, limit=10, queues=("empty", "default", "also-empty"), tasks=(task,))
        assert len(jobs) == expected
        return time.process_time() - before

    reads_all_s = cpu_s("nobody_knows_this_one_either", 0)
    assert min(cpu_s("add", 10) for _ in range(3)) < reads_all_s / 5
