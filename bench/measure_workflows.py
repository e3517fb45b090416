"""Measure what it costs that jobs depend on each other: nodes of workflows beside plain jobs, in turns in one worker.

A workflow here has a hundred nodes: one, ninety-eight that wait for it, and one that waits for all those. The jobs of
plain ones are all there before the clock starts; those of nodes are enqueued as the workflows move on, which counts.
"""

from statistics import median

from bench.databases import Database, Postgres
from bench.measure_drain import WARM_UP_JOBS, drain_staged, jobs_for
from bench.processes import wait_for
from bench.report import Table
from bench.stage import Stage, stage_on
from unstuck import WorkflowRun

NODES = 100
SHAPES = (("noop_async_retry", 200), ("noop_retry", 8))


def run(databases: list[Database], seconds: float, turns: int) -> Table:
    table = Table(
        "workflows", "Workflows: nodes beside plain jobs", ("jobs/s", "nodes/s", "ratio", "least ratio", "greatest")
    )
    for database in databases:
        for task, concurrency in SHAPES:
            plain, nodes = _in_turns(database, task, concurrency, seconds, turns)
            ratios = [own / other for own, other in zip(nodes, plain, strict=True)]
            label = f"{database.name}, {task} × {concurrency}"
            table.add(label, median(plain), median(nodes), median(ratios), min(ratios), max(ratios))
    table.notes += [
        f"a workflow has {NODES} nodes: one, then {NODES - 2} at once, then one that waits for them",
        "the median of turns; plain jobs were enqueued before the clock started, nodes while it ran",
    ]
    return table


def _in_turns(
    database: Database, task: str, concurrency: int, seconds: float, turns: int
) -> tuple[list[float], list[float]]:
    plain, nodes = [], []
    with stage_on(database) as stage:
        stage.workers.start(1, "--concurrency", str(concurrency))
        drain_staged(stage, task, WARM_UP_JOBS)
        jobs = jobs_for(drain_staged(stage, task, WARM_UP_JOBS).per_s, seconds) // NODES * NODES
        _flow(stage, task, NODES)
        for _ in range(turns):
            plain.append(drain_staged(stage, task, jobs).per_s)
            nodes.append(_flow(stage, task, jobs))
    return plain, nodes


def _flow(stage: Stage, task: str, nodes: int) -> float:
    """Let workflows with so many nodes together run; give nodes per second, from the first claim to the last end."""
    stage.pause()
    runs = [_start(stage, task) for _ in range(nodes // NODES)]
    stage.resume()
    ids = [run.id for run in runs]
    wait_for(lambda: len(stage.ledger.outcomes(ids)) == len(ids), "all workflows", patience_s=300, every_s=0.02)
    span = "max(finished_at) - min(claimed_at)"
    if isinstance(stage.database, Postgres):
        span = f"extract(epoch from {span})"
    [(count, failed, span_s)] = stage.database.query(
        stage.url,
        f"select count(*), sum(case state when 'succeeded' then 0 else 1 end), {span} from {{jobs}}"
        f" where workflow_id >= {ids[0]} and place > 0",
    )
    if failed or count != nodes:
        raise RuntimeError(f"{count} nodes ended, {failed} of them badly; the figures would be worthless")
    return nodes / float(span_s)


def _start(stage: Stage, name: str) -> WorkflowRun:
    task = stage.task(name)
    flow = stage.app.workflow("bench")
    first = flow.add(task)
    many = [flow.add(task).after(first) for _ in range(NODES - 2)]
    flow.add(task).after(*many)
    return flow.start()
