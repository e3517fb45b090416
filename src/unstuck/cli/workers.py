"""Commands for workers: list, drain, stop, disable and enable them, and check that one is alive."""

import time
from collections.abc import Collection
from contextlib import closing
from typing import Annotated, Literal, NoReturn

import typer

from unstuck import host
from unstuck.cli import context
from unstuck.cli.context import Context, UsageError, command
from unstuck.cli.output import Cell, Column, Output, ago, coarse, count, state_cell
from unstuck.client import views
from unstuck.client.views import health_of
from unstuck.config import ledger_name
from unstuck.domain.states import LIVE_STATES, Transport, WorkerState
from unstuck.domain.worker_health import BAD_LUCK
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.recovery.evidence import Observer, patience_s

LATELY_S = 3600.0

WorkerName = Annotated[str, typer.Argument(metavar="ID|NAME", help="Its id, the beginning of its id, or its name.")]


@command()
def workers(
    common: Context,
    ctx: typer.Context,
    all: Annotated[bool, typer.Option("--all", help="Also those that died or stopped more than an hour ago.")] = False,
) -> None:
    """List workers: the living, and those that died or stopped within the last hour."""
    if ctx.invoked_subcommand is not None:
        return
    with common.operator() as operator:
        every = operator.ledger.workers.list()
    now_s = time.time()
    shown = [worker for worker in every if all or worker.state in LIVE_STATES or now_s - _end(worker) < LATELY_S]
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
def drain(common: Context, worker: WorkerName) -> None:
    """Ask a worker to finish what it runs, take nothing more, and exit."""
    _ask(common, worker, "drain", "finishes what it runs and exits")


@command()
def stop(common: Context, worker: WorkerName) -> None:
    """Ask a worker to exit within its grace; what does not end by then is killed and settled."""
    _ask(common, worker, "stop", "exits within its grace")


def _ask(common: Context, who: str, what: Literal["drain", "stop"], promise: str) -> None:
    with common.operator() as operator:
        worker = operator.workers.stop(who) if what == "stop" else operator.workers.drain(who)
    if common.as_json:
        common.show.json({"id": worker.id, "name": worker.name, "request": what})
    else:
        common.show.say(
            f"Worker {worker.name} ({worker.id}) on {worker.host} was asked to {what}: it {promise}.", "green"
        )


_ORDER = [WorkerState.ACTIVE, WorkerState.DRAINING, WorkerState.SUSPECT, WorkerState.DEAD, WorkerState.STOPPED]


def _end(worker: WorkerRecord) -> float:
    return max(worker.last_seen_at, worker.stopped_at or 0.0)


def _list(show: Output, shown: list[WorkerRecord], now_s: float) -> None:
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
                f"{worker.busy}/{worker.concurrency}" if worker.state in LIVE_STATES else "",
                Cell(ago(worker.last_seen_at, now_s), "bright_black"),
                worker.host,
                str(worker.pid) if worker.transport is Transport.PYTHON else worker.transport.value,
                f"{worker.processed:,}" if show.pretty else str(worker.processed),
                coarse(max(0.0, (now_s if worker.state in LIVE_STATES else _end(worker)) - worker.created_at)),
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
    if worker.state not in LIVE_STATES:
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


SwitchedWorker = Annotated[
    str | None, typer.Argument(metavar="ID|NAME", help="A worker: its id, the beginning of its id, or its name.")
]
Host = Annotated[str | None, typer.Option("--host", metavar="HOST", help="Every worker of this host, also new ones.")]


@command()
def disable(
    common: Context,
    worker: SwitchedWorker = None,
    host: Host = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Shown wherever the worker is shown.")
    ] = "an operator switched it off",
) -> None:
    """Have a worker, or all of a host, take no more jobs: it finishes what it runs, lives on, and can be enabled."""
    _one_of(worker, host)
    with common.operator() as operator:
        if host is not None:
            here, unserved = operator.workers.disable_host(host, reason)
            said = f"Host {host} is disabled; {count(len(here), 'worker')} there take nothing more."
        else:
            assert worker is not None
            record, unserved = operator.workers.disable(worker, reason)
            here, said = [record], f"Worker {record.name} ({record.id}) on {record.host} is disabled."
    if common.as_json:
        ids = [record.id for record in here]
        common.show.json({"workers": ids, "host": host, "disabled": True, "unserved": sorted(unserved)})
        return
    common.show.say(said, "green")
    _warn_of_unserved(common, unserved)


@command()
def enable(common: Context, worker: SwitchedWorker = None, host: Host = None) -> None:
    """Let a disabled worker or host take jobs again, with a clean record."""
    _one_of(worker, host)
    with common.operator() as operator:
        if host is not None:
            here, changed = operator.workers.enable_host(host)
            what = f"Host {host}"
        else:
            assert worker is not None
            record, changed = operator.workers.enable(worker)
            here, what = [record], f"Worker {record.name} ({record.id}) on {record.host}"
    if common.as_json:
        still = views.disabled_view(here[0].disabled) if host is None else None
        common.show.json({"workers": [one.id for one in here], "host": host, "changed": changed, "disabled": still})
        return
    common.show.say(f"{what} is enabled." if changed else f"{what} was not disabled.", "green" if changed else "yellow")
    if host is None and (left := here[0].disabled) is not None and left.of_host:
        common.show.say(f"Its host is disabled: `unstuck workers enable --host {here[0].host}`.", "yellow")


def _one_of(worker: str | None, host: str | None) -> None:
    if (worker is None) == (host is None):
        raise UsageError("Name one worker, or one host with --host.")


def _warn_of_unserved(common: Context, unserved: Collection[str]) -> None:
    if unserved:
        common.show.say(f"Nobody serves {', '.join(sorted(unserved))} now: its jobs wait.", "yellow")


HEALTHY = 0
UNHEALTHY = 1


@command()
def alive(
    common: Context,
    workers: Annotated[int, typer.Option("--workers", "-n", metavar="N", min=1, help="At least so many.")] = 1,
    forgive_outage: Annotated[
        bool, typer.Option("--forgive-outage", help="Exit 0 where the ledger cannot be reached: for liveness probes.")
    ] = False,
) -> None:
    """Exit 0 if a worker of this host (and container) beats within its timeout, else 1 with a sentence: for probes."""
    try:
        settings = common.settings()
        ledger = context.open_existing(settings)
        with closing(ledger):
            watched = ledger.recovery.watch(host.hostname())
    except LedgerUnavailable as error:
        if not forgive_outage:
            raise
        # To restart a worker does not bring its database back; it only kills what still runs.
        _answer(common.show, HEALTHY, f"The ledger cannot be reached, which is no reason to restart: {error}", [])
    observer = Observer(single_host=ledger.single_host)
    here = [worker for worker in watched if worker.state in LIVE_STATES and observer.on_this_host(worker)]
    beating = [worker for worker in here if worker.silent_s < patience_s(worker)]
    sentence = _sentence(here, beating, workers)
    if not here:
        sentence += f" Ledger: {ledger_name(settings)}"
    _answer(common.show, HEALTHY if len(beating) >= workers else UNHEALTHY, sentence, beating)


def _sentence(here: list[WorkerWatch], beating: list[WorkerWatch], wanted: int) -> str:
    place = f"on {host.hostname()}"
    if len(beating) >= wanted:
        last_s = min(worker.silent_s for worker in beating)
        return f"{count(len(beating), 'worker')} alive {place}; last beat {coarse(last_s)} ago."
    if not here:
        return f"No worker {place} (in this pid namespace) is registered in the ledger."
    silent = [f"{worker.id} is silent for {coarse(worker.silent_s)}" for worker in here if worker not in beating]
    return f"Only {len(beating)} of {count(wanted, 'worker')} beat {place}. {'; '.join(silent)}".rstrip(". ") + "."


def _answer(show: Output, code: int, sentence: str, beating: list[WorkerWatch]) -> NoReturn:
    if show.as_json:
        show.json({"alive": code == HEALTHY, "workers": [worker.id for worker in beating], "message": sentence})
    else:
        show.say(sentence, "green" if code == HEALTHY else "red")
    raise typer.Exit(code)
