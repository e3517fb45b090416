"""Measure the stale check, with ten thousand remote workers and a million jobs."""

import time
from collections.abc import Callable

from tests.support.builders import birth

from bench.databases import Database
from bench.fleet import Stage, stage_on
from bench.report import Table
from bench.table_size import copy_rows
from unstuck import host
from unstuck.config import HttpSettings, Recovery
from unstuck.domain.states import Transport
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import ClaimRequest, NewWorker, Success, Turn
from unstuck.recovery.reap import Reaper

GOAL_MS = 100.0


def run(databases: list[Database], workers: int, holding: int, jobs: int, times: int) -> Table:
    """Measure with `workers` of which `holding` hold a job, and `jobs` finished jobs."""
    table = Table(
        "stale-check",
        f"Stale check of {workers:,} remote workers ({holding:,} hold a job), with {jobs:,} finished jobs",
        ("best ms", "median ms", "worst ms"),
        notes=[
            f"The goal is a stale check below {GOAL_MS:g} ms: what the reaper asks once per round. 'judged' is that",
            "with its judgement. 'all of them' carries every worker here. `stale` lists jobs of silent workers.",
            "The bare count reads the rows of all workers and nothing else, in the same process.",
        ],
    )
    for database in databases:
        with stage_on(database) as stage:
            _fill(stage, workers, holding, jobs)
            ledger = stage.ledger
            reaper = Reaper(ledger, Recovery(), by="bench")
            for label, act in _checks(stage, ledger, reaper).items():
                took = sorted(_time_s(act) for _ in range(times))
                table.add(
                    f"{database.name}: {label}", *(1000 * one for one in (took[0], took[len(took) // 2], took[-1]))
                )
    return table


def _checks(stage: Stage, ledger: Ledger, reaper: Reaper) -> dict[str, Callable[[], object]]:
    name = "unstuck.workers" if stage.database.name == "PostgreSQL" else "unstuck_workers"
    return {
        "stale check": ledger.recovery.to_judge,
        "judged": reaper.unwatched,
        "all of them": ledger.recovery.watch,
        "stale": lambda: ledger.recovery.stale(HttpSettings().heartbeat_timeout_s),
        "bare count": lambda: stage.database.query(stage.url, f"select id, name, host, state, metadata from {name}"),
    }


def _fill(stage: Stage, workers: int, holding: int, jobs: int) -> None:
    ledger = stage.ledger
    for number in range(workers):
        ledger.workers.register(_birth(number, ledger.single_host))
    stage.task("noop").enqueue_many([()] * (holding + 1))
    [first] = ledger.workers.turn(
        Turn("bench0", claim_request=ClaimRequest(("default",), ("noop",), 1, start=1))
    ).claimed
    ledger.workers.turn(Turn("bench0", done=(Success(first.job_id, first.token, b"null"),)))
    copy_rows(stage, "succeeded", jobs)
    for number in range(holding):
        ledger.workers.turn(Turn(f"bench{number}", claim_request=ClaimRequest(("default",), ("noop",), 1, start=1)))


def _birth(number: int, one_host: bool) -> NewWorker:
    web = HttpSettings()
    return birth(
        f"bench{number}",
        name=f"bench-{number}",
        host=f"host-{number % 50}",
        pid=0,
        boot_id=host.boot_id() if one_host else "",
        pid_namespace="",
        process_started="",
        queues=("default",),
        tasks=(TaskRecord("noop", "default"),),
        concurrency=1,
        version="1.0.0",
        heartbeat_interval_s=web.heartbeat_interval_s,
        suspect_after_s=web.heartbeat_timeout_s,
        running_stale_after_s=web.heartbeat_timeout_s,
        metadata={"hostname": f"host-{number % 50}", "pid": number},
        transport=Transport.HTTP,
    )


def _time_s(act: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    act()
    return time.perf_counter() - begun_s
