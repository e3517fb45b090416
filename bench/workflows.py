"""Measure the cost of dependencies: nodes of workflows beside plain jobs, in turns in one worker.

A workflow here has a hundred nodes: one, ninety-eight that wait for it, and one that waits for all those. Its jobs are
enqueued as it moves on, and that counts. Plain jobs are measured twice: all there before the clock starts, and enqueued
while it runs, a hundred in a commit, by a process that does nothing else.
"""

from functools import partial
from statistics import median

from bench.databases import Database, Postgres
from bench.fleet import Stage, stage_on
from bench.processes import wait_for
from bench.report import Table
from bench.throughput import WARM_UP_JOBS, drain_staged, jobs_for
from unstuck import WorkflowRun

NODES = 100
SHAPES = (("noop_async_retry", 200), ("noop_retry", 8))


def run(databases: list[Database], seconds: float, turns: int) -> Table:
    table = Table(
        "workflows",
        "Workflows: nodes beside plain jobs",
        ("jobs/s", "nodes/s", "ratio", "least ratio", "greatest", "enqueued meanwhile/s", "ratio to those"),
    )
    for database in databases:
        for task, concurrency in SHAPES:
            plain, meanwhile, nodes = _in_turns(database, task, concurrency, seconds, turns)
            ratios = [own / other for own, other in zip(nodes, plain, strict=True)]
            to_those = median(own / other for own, other in zip(nodes, meanwhile, strict=True))
            label = f"{database.name}, {task} × {concurrency}"
            figures = (median(plain), median(nodes), median(ratios), min(ratios), max(ratios))
            table.add(label, *figures, median(meanwhile), to_those)
    table.notes += [
        f"a workflow has {NODES} nodes: one, then {NODES - 2} at once, then one that waits for them",
        "the median of turns; jobs of nodes are enqueued while the clock runs: `ratio` compares them with plain ones",
        "that were there before, `ratio to those` with plain ones that were enqueued meanwhile, a hundred at once",
    ]
    return table


def _in_turns(
    database: Database, task: str, concurrency: int, seconds: float, turns: int
) -> tuple[list[float], list[float], list[float]]:
    plain, meanwhile, nodes = [], [], []
    with stage_on(database) as stage:
        stage.workers.start(1, "--concurrency", str(concurrency))
        drain_staged(stage, task, WARM_UP_JOBS)
        jobs = jobs_for(drain_staged(stage, task, WARM_UP_JOBS).per_s, seconds) // NODES * NODES
        _flow(stage, task, NODES)
        for _ in range(turns):
            plain.append(drain_staged(stage, task, jobs).per_s)
            nodes.append(_flow(stage, task, jobs))
            meanwhile.append(_meanwhile(stage, task, jobs))
    return plain, meanwhile, nodes


def _flow(stage: Stage, task: str, nodes: int) -> float:
    """Run workflows with `nodes` nodes in all; return nodes per second, from the first claim to the last end."""
    stage.pause()
    runs = [_start(stage, task) for _ in range(nodes // NODES)]
    stage.resume()
    ids = [run.id for run in runs]
    wait_for(partial(_all_ended, stage, ids), "all workflows", patience_s=300, every_s=0.02)
    return _rate(stage, nodes, f"workflow_id >= {ids[0]} and place > 0")


def _meanwhile(stage: Stage, task: str, jobs: int) -> float:
    """Enqueue plain jobs while others run; return jobs per second, from the first claim to the last end."""
    batches = [stage.task(task).enqueue_many([{} for _ in range(NODES)]) for _ in range(jobs // NODES)]
    for batch in batches:
        wait_for(partial(_all_ended, stage, [job.id for job in batch]), "plain jobs", patience_s=300, every_s=0.02)
    # A client reserves ids ahead: nodes that ran before may have ids in between.
    return _rate(stage, jobs, f"workflow_id is null and id between {batches[0][0].id} and {batches[-1][-1].id}")


def _all_ended(stage: Stage, ids: list[int]) -> bool:
    return len(stage.ledger.jobs.outcomes(ids)) == len(ids)


def _rate(stage: Stage, wanted: int, which: str) -> float:
    span = "max(finished_at) - min(claimed_at)"
    if isinstance(stage.database, Postgres):
        span = f"extract(epoch from {span})"
    [(count, failed, span_s)] = stage.database.query(
        stage.url,
        f"select count(*), sum(case state when 'succeeded' then 0 else 1 end), {span} from {{jobs}} where {which}",
    )
    if failed or count != wanted:
        raise RuntimeError(f"{count} of {wanted} are there, {failed} ended badly; the figures would be worthless")
    return wanted / float(span_s)


def _start(stage: Stage, name: str) -> WorkflowRun:
    task = stage.task(name)
    flow = stage.app.workflow("bench")
    first = flow.add(task)
    many = [flow.add(task).after(first) for _ in range(NODES - 2)]
    flow.add(task).after(*many)
    return flow.start()
