"""Look at workers and ask them to go: `workers`, `workers drain`, `workers stop`."""

import time
from typing import Annotated

import typer

from unstuck.cli.common import Common, command
from unstuck.cli.show import Cell, Column, Show, ago, coarse, count, state_cell
from unstuck.client import views
from unstuck.client.views import health_of
from unstuck.domain.health import BAD_LUCK
from unstuck.domain.states import LIVING, Door, WorkerState
from unstuck.store.records import WorkerRecord

LATELY_S = 3600.0

Who = Annotated[str, typer.Argument(metavar="ID|NAME", help="Its id, the beginning of its id, or its name.")]


@command()
def workers(
    common: Common,
    ctx: typer.Context,
    all: Annotated[bool, typer.Option("--all", help="Also those that died or stopped more than an hour ago.")] = False,
) -> None:
    """List workers: the living, and those that died or stopped within the last hour."""
    if ctx.invoked_subcommand is not None:
        return
    with common.reading() as operator:
        every = operator.workers()
    now_s = time.time()
    shown = [worker for worker in every if all or worker.state in LIVING or now_s - _end(worker) < LATELY_S]
    shown.sort(key=lambda worker: (_ORDER.index(worker.state), worker.name, worker.id))
    if common.as_json:
        common.show.json([views.worker_view(worker) for worker in shown])
        return
    if not shown:
        common.show.empty("No workers. Start one with `unstuck worker module:app`.")
    else:
        _list(common.show, shown, now_s)
    if len(shown) < len(every) and (common.show.pretty or not shown):
        common.show.note(f"{count(len(every) - len(shown), 'worker')} gone for longer; --all shows them.")


@command()
def drain(common: Common, worker: Who) -> None:
    """Ask a worker to finish what it runs, take nothing more, and exit."""
    _ask(common, worker, "drain", "finishes what it runs and exits")


@command()
def stop(common: Common, worker: Who) -> None:
    """Ask a worker to exit within its grace; what does not end by then is killed and settled."""
    _ask(common, worker, "stop", "exits within its grace")


def _ask(common: Common, who: str, what: str, promise: str) -> None:
    with common.reading() as operator:
        worker = operator.ask_worker(who, what)
    if common.as_json:
        common.show.json({"id": worker.id, "name": worker.name, "request": what})
    else:
        common.show.say(
            f"Worker {worker.name} ({worker.id}) on {worker.host} was asked to {what}: it {promise}.", "green"
        )


_ORDER = [WorkerState.ACTIVE, WorkerState.DRAINING, WorkerState.SUSPECT, WorkerState.DEAD, WorkerState.STOPPED]


def _end(worker: WorkerRecord) -> float:
    return max(worker.last_seen_at, worker.stopped_at or 0.0)


def _list(show: Show, shown: list[WorkerRecord], now_s: float) -> None:
    columns = [
        Column("name"),
        Column("id"),
        Column("state"),
        Column("queues", spare=True),
        Column("busy", right=True),
        Column("seen"),
        Column("host", spare=True),
        Column("pid", right=True, spare=True),
        Column("done", right=True, spare=True),
        Column("age", right=True, spare=True),
        Column("note", wide=True),
    ]
    show.table(
        columns,
        [
            [
                Cell(worker.name, "bold"),
                worker.id,
                state_cell(worker.state, mark=show.pretty),
                ",".join(worker.queues),
                # What the dead held is in other hands, or soon will be.
                f"{worker.busy}/{worker.concurrency}" if worker.state in LIVING else "",
                Cell(ago(worker.last_seen_at, now_s), "bright_black"),
                worker.host,
                str(worker.pid) if worker.door is Door.PYTHON else worker.door.value,
                f"{worker.processed:,}" if show.pretty else str(worker.processed),
                coarse(max(0.0, (now_s if worker.state in LIVING else _end(worker)) - worker.created_at)),
                _remark(worker),
            ]
            for worker in shown
        ],
    )


def _remark(worker: WorkerRecord) -> Cell:
    if worker.verdict is not None and worker.state in (WorkerState.DEAD, WorkerState.SUSPECT):
        held = f"; holds {count(worker.held, 'job')}" if worker.held else ""
        style = "red" if worker.state is WorkerState.DEAD else "yellow"
        return Cell(f"{worker.verdict.detector}: {worker.verdict.evidence}{held}", style)
    if worker.state not in LIVING:
        return Cell(f"holds {count(worker.held, 'job')}" if worker.held else "", "red")
    if worker.request and worker.state is not WorkerState.DRAINING:
        return Cell(f"asked to {worker.request}", "yellow")
    if worker.disabled is not None:
        whose = "its host is disabled" if worker.disabled.of_host else "disabled"
        return Cell(f"{whose} by {worker.disabled.by}: {worker.disabled.reason}", "red")
    health = health_of(worker)
    if health.weight > BAD_LUCK:
        deaths = f"{count(health.jobs, 'job')} died in its runners lately"
        return Cell(f"unhealthy (score {health.score:.2f}): {deaths}", "yellow")
    if worker.silent_s > 2 * worker.heartbeat_interval_s:
        return Cell(f"silent for {coarse(worker.silent_s)}", "yellow")
    return Cell("")
