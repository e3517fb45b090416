"""Store a job from the command line, with an app or by the names that workers wrote down."""

import json
import time
from typing import Annotated, Any

import typer

from unstuck.cli.context import Context, UsageError, command, duration_s
from unstuck.cli.output import Cell, Output
from unstuck.client.enqueue import UNFINISHED, EnqueueOptions, build_job, check_queue, find_task, load_tasks
from unstuck.client.no_workers import NoWorkerCheck
from unstuck.client.operator import Operator
from unstuck.client.views import value_view
from unstuck.config import Settings, ledger_name
from unstuck.domain.bounds import TOO_MUCH
from unstuck.domain.payload import JSON
from unstuck.domain.policy import Policy, decode_policy
from unstuck.domain.states import JobState
from unstuck.domain.text import did_you_mean
from unstuck.domain.units import brief
from unstuck.errors import ConfigError, NoWorkers, ResultTimeout, UnknownTask, exception_for
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Enqueued, NewJob, Outcome
from unstuck.runner.tasks import AppDefinition

FIRST_LOOK_S = 0.01
SLOWEST_LOOK_S = 0.2
FIRST_WORRY_S = 1.0


@command()
def enqueue(
    common: Context,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's name.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments as JSON: 1 '\"text\"' '[1, 2]'.")
    ] = None,
    kwargs: Annotated[
        str | None, typer.Option("--kwargs", metavar="JSON", help="Named arguments: a JSON object.")
    ] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="Instead of the task's own.")] = None,
    priority: Annotated[int, typer.Option("--priority", metavar="N", help="-1000 to 1000; higher goes first.")] = 0,
    delay: Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Run it so much later, e.g. 5m.")] = None,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", metavar="KEY", help="At most one unfinished job has it.")
    ] = None,
    unique: Annotated[
        str, typer.Option("--unique", metavar="WHILE", help="What the key is good for: pending, unfinished, or 10m.")
    ] = UNFINISHED,
    on_duplicate: Annotated[
        str, typer.Option("--on-duplicate", metavar="WAY", help="Of a second: return, replace or refuse.")
    ] = "return",
    concurrency_key: Annotated[
        str | None, typer.Option("--concurrency-key", metavar="KEY", help="So many of one key are at work at once.")
    ] = None,
    concurrency_limit: Annotated[
        int | None, typer.Option("--concurrency-limit", metavar="N", help="How many; 1 where nobody said more.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="Cancel it where it has not begun by then.")
    ] = None,
    keep: Annotated[str | None, typer.Option("--keep", metavar="TIME", help="Keep it so long after its end.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and print the result.")] = False,
    timeout: Annotated[str | None, typer.Option("--timeout", metavar="TIME", help="How long --wait waits.")] = None,
    migrate: Annotated[bool, typer.Option("--migrate/--no-migrate", help="Make or update the tables.")] = True,
) -> None:
    """Store a job; prints its id, or with --wait its result."""
    positional, named = arguments(args or [], kwargs)
    patience_s = duration_s(timeout, "--timeout")
    order = {
        "unique": unique,
        "on_duplicate": on_duplicate,
        "concurrency_key": concurrency_key,
        "concurrency_limit": concurrency_limit,
        "expires": expires,
        "keep": keep,
    }
    options = _options({"queue": queue, "priority": priority, "delay": delay, "unique_key": unique_key, **order})
    app = common.app_definition()
    with common.ledger(migrate) as (ledger, settings):
        operator = Operator(ledger, settings, via="cli")
        own_queue, policy = _known_task(app, ledger, task)
        if queue is not None:
            _check_queue(app, ledger, queue, own_queue)
        job = build_job(
            task=task,
            queue=own_queue,
            policy=policy,
            options=options,
            args=positional,
            kwargs=named,
            limit_bytes=settings.max_payload_bytes,
            known_queues=None,
        )
        stored = ledger.jobs.enqueue([job])[0]
        if options.delay is None:
            ledger.notify([f"queue:{job.queue}"])
        if wait:
            _wait(common, ledger, operator, stored.job_id, patience_s)
        else:
            _tell(common.show, operator, task, stored)
            if not common.show.pretty:
                _warn(ledger, settings, job, stored)


def _warn(ledger: Ledger, settings: Settings, job: NewJob, stored: Enqueued) -> None:
    """Do what `no_workers` says if no living worker would take the job: log it, or fail although it is stored."""
    if settings.no_workers == "ignore" or job.delay_s:
        return
    [warning] = NoWorkerCheck(ledger, ledger_name(settings)).warnings([job])
    if warning is not None and settings.no_workers == "error":
        raise NoWorkers(f"{warning}.", job_ids=[stored.job_id])


def arguments(args: list[str], kwargs: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read the arguments of a task as the command line gives them, each as JSON."""
    positional = tuple(_json(text, f"Argument {at}") for at, text in enumerate(args, 1))
    named = {} if kwargs is None else _json(kwargs, "--kwargs")
    if not isinstance(named, dict):
        raise UsageError("""--kwargs must be a JSON object, like '{"url": "https://…", "depth": 2}'.""")
    return positional, named


def _json(text: str, what: str) -> Any:
    if text.startswith("--"):
        raise UsageError(f"There is no option {text.partition('=')[0]}. `unstuck enqueue --help` lists them.")
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        quoted = f" To pass it as text, write '{json.dumps(text)}'." if what != "--kwargs" and len(text) < 200 else ""
        raise UsageError(f"{what}, {text[:80]!r}, is not JSON: {why}.{quoted}") from error


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _options(values: dict[str, Any]) -> EnqueueOptions:
    try:
        return EnqueueOptions.checked(None, values)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _known_task(app: AppDefinition | None, ledger: Ledger, name: str) -> tuple[str, Policy]:
    """Find the queue and the policy of a task: in the app, else among those that workers wrote down."""
    if app is None:
        try:
            task = find_task(load_tasks(ledger), name)
        except UnknownTask as error:
            raise UnknownTask(f"{error} Or name the app with --app.") from None
        return task.queue, decode_policy(task.policy)
    found = app.tasks.get(name)
    if found is not None:
        return found.queue, found.policy
    known = list(app.tasks)
    listed = f" The app has: {', '.join(sorted(known)[:10])}." if known else ""
    raise UnknownTask(f"There is no task {name!r}.{did_you_mean(name, known)}{listed}")


def _check_queue(app: AppDefinition | None, ledger: Ledger, queue: str, own: str) -> None:
    if queue == own:
        return
    others = app.queues if app is not None else [item.name for item in ledger.queues.list()]
    check_queue(queue, {own, *others})


def _tell(show: Output, operator: Operator, task: str, stored: Enqueued) -> None:
    if show.as_json:
        show.json({"id": stored.job_id, "task": task, "fresh": stored.fresh})
    elif not show.pretty:
        # The id alone, for `id=$(unstuck enqueue …)`.
        show.line(str(stored.job_id))
    else:
        known = "" if stored.fresh else ": it was there already, with this unique key"
        show.rich("Job ", Cell(str(stored.job_id), "bold"), f" ({task}){known or ' is stored.'}")
        reason = operator.explain_wait(stored.job_id)
        if reason is not None:
            show.rich(Cell(reason, "bright_black"), indent=2)


def _wait(common: Context, ledger: Ledger, operator: Operator, job_id: int, patience_s: float | None) -> None:
    outcome = _outcome(common.show, ledger, operator, job_id, patience_s)
    if common.as_json:
        common.show.json(operator.jobs.detail(job_id))
    if outcome.state is JobState.SUCCEEDED and outcome.result is not None:
        if not common.as_json:
            common.show.json_line(_result_text(outcome.result))
        return
    error = outcome.error
    if error is None:
        raise exception_for("", f"Job ended as {outcome.state}", job_id=job_id, cause=None, details={})
    raise exception_for(error.code, error.message, job_id=job_id, cause=error.cause, details=error.details)


def _result_text(result: bytes | None) -> str:
    """Return a result as JSON: laid out for people, or as it is stored if it is very large."""
    value = value_view(result, JSON)
    return result.decode() if result and value == TOO_MUCH else json.dumps(value, ensure_ascii=False)


def _outcome(show: Output, ledger: Ledger, operator: Operator, job_id: int, patience_s: float | None) -> Outcome:
    began_s = time.monotonic()
    look_s, worry_s = FIRST_LOOK_S, FIRST_WORRY_S
    while True:
        found = ledger.jobs.outcomes([job_id])
        if found:
            return found[0]
        waited_s = time.monotonic() - began_s
        if patience_s is not None and waited_s >= patience_s:
            raise ResultTimeout(f"Job {job_id} did not end within {brief(patience_s)}: {operator.doing(job_id)}")
        if waited_s >= worry_s:
            # Never wait in the dark: say why, at growing intervals. This also finds out that the job is gone.
            reason = operator.explain_wait(job_id)
            if reason is not None:
                show.note(f"Job {job_id} waits: {reason}")
            worry_s = waited_s * 3
        time.sleep(look_s if patience_s is None else min(look_s, max(0.0, patience_s - waited_s)))
        look_s = min(look_s * 1.3, SLOWEST_LOOK_S)
