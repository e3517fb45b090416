"""The handle: every command by its name, and one way out for every kind of trouble."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import unstuck
from unstuck.cli import admin, enqueue, explain, jobs, queues, recovery, run, schedules, workers, workflows
from unstuck.cli.context import Context, UsageError, command
from unstuck.cli.lazy_commands import LazyCommands
from unstuck.cli.output import complain
from unstuck.errors import UnstuckError

RUN = "Run"
LOOK = "Look"
ACT = "Act"
CARE = "Care"

USAGE = 2
INTERRUPTED = 130
MAX_COMPLAINT_CHARS = 2_000
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a write to a full, limited or vanished output fails with."""


class _Root(TyperGroup):
    """Loads the demo only when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "demo"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name != "demo":
            return super().get_command(ctx, cmd_name)
        from unstuck.cli.run import demo

        holder = typer.Typer(add_completion=False)
        holder.command("demo", rich_help_panel=RUN)(demo)
        return typer.main.get_command(holder)


@command()
def root(
    common: Context,
    ctx: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False,
) -> None:
    """Durable background jobs for Python that survive the death of their workers."""
    if show_version:
        common.show.line(f"unstuck {unstuck.__version__}")
    elif ctx.invoked_subcommand is None:
        ctx.get_help()


def _root() -> typer.Typer:
    return typer.Typer(cls=_Root, callback=root, invoke_without_command=True, add_completion=False)


app = _root()

NEGATIVE: dict[Any, Any] = {"ignore_unknown_options": True}
"""Numbers below zero are arguments of the task, not options."""

for panel, commands in {
    RUN: (run.worker, run.up, run.reaper, run.serve, run.broker),
    LOOK: (
        explain.why,
        explain.doctor,
        jobs.jobs,
        jobs.job,
        jobs.logs,
        workflows.workflow,
        jobs.stack,
        workers.alive,
        admin.audit,
        run.popups,
    ),
    ACT: (
        enqueue.enqueue,
        recovery.retry,
        recovery.cancel,
        jobs.signal,
        recovery.stale,
        queues.pause,
        queues.resume,
        queues.purge,
    ),
    CARE: (admin.migrate, recovery.prune, admin.keygen),
}.items():
    for function in commands:
        context = NEGATIVE if function is enqueue.enqueue else None
        app.command(function.__name__, rich_help_panel=panel, context_settings=context)(function)

_workers = typer.Typer(invoke_without_command=True)
_workers.callback()(workers.workers)
_workers.command("drain")(workers.drain)
_workers.command("stop")(workers.stop)
_workers.command("disable")(workers.disable)
_workers.command("enable")(workers.enable)
app.add_typer(_workers, name="workers", rich_help_panel=LOOK)

_queues = typer.Typer(invoke_without_command=True)
_queues.callback()(queues.queues)
_queues.command("limit")(queues.limit_queue)
app.add_typer(_queues, name="queues", rich_help_panel=LOOK)

_concurrency = typer.Typer(invoke_without_command=True)
_concurrency.callback()(queues.lines)
_concurrency.command("limit")(queues.limit_key)
app.add_typer(_concurrency, name="lines", rich_help_panel=LOOK)

_workflows = typer.Typer(invoke_without_command=True)
_workflows.callback()(workflows.workflows)
_workflows.command("list")(workflows.list_workflows)
_workflows.command("show")(workflows.workflow)
_workflows.command("retry")(workflows.retry)
_workflows.command("resume")(workflows.resume)
_workflows.command("cancel")(workflows.cancel)
app.add_typer(_workflows, name="workflows", rich_help_panel=LOOK)

_quarantine = typer.Typer(invoke_without_command=True)
_quarantine.callback()(recovery.quarantine)
_quarantine.command("list")(recovery.list_quarantined)
app.add_typer(_quarantine, name="quarantine", rich_help_panel=ACT)

_schedules = typer.Typer(invoke_without_command=True)
_schedules.callback()(schedules.schedules)
_schedules.command("list")(schedules.list_schedules)
_schedules.command("add", context_settings=NEGATIVE)(schedules.add)
_schedules.command("pause")(schedules.pause)
_schedules.command("resume")(schedules.resume)
_schedules.command("run")(schedules.run)
_schedules.command("remove")(schedules.remove)
app.add_typer(_schedules, name="schedules", rich_help_panel=LOOK)

_alerts = typer.Typer(invoke_without_command=True)
_alerts.callback()(admin.alerts)
_alerts.command("list")(admin.list_targets)
_alerts.command("test")(admin.send_test_alerts)
_alerts.command("run")(admin.run_alerts)
app.add_typer(_alerts, name="alerts", rich_help_panel=CARE)


_tokens = typer.Typer(invoke_without_command=True)
_tokens.callback()(admin.tokens)
_tokens.command("create")(admin.create_token)
_tokens.command("list")(admin.list_tokens)
_tokens.command("revoke")(admin.revoke_token)
app.add_typer(_tokens, name="tokens", rich_help_panel=CARE)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says and give the exit code."""
    _prepare_streams()
    try:
        code = _command_line().main(
            list(sys.argv[1:] if argv is None else argv), prog_name="unstuck", standalone_mode=False
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UnstuckError as error:
        return _complain(str(error) or type(error).__name__, 1)
    except UsageError as error:
        return _complain(str(error), USAGE)
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        _drop_output()
        return _complain(f"The output cannot be written: {error.strerror}.", 1)
    except Exception as error:
        sentence = getattr(error, "format_message", None)
        if sentence is None:
            raise
        return _complain(_usage(error, sentence()), USAGE)


def _command_line() -> Any:
    made: Any = typer.main.get_command(_root())
    made.commands = LazyCommands(app)
    return made


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Started with the stream closed: a worker has work to do all the same.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lasts as long as the process
        # What a job printed may not be writable in the terminal's encoding; that is no reason to fail.
        getattr(sys, name).reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    # What is still buffered would be tried again, and fail again, when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Exception, sentence: str) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "unstuck")
    stop = "" if sentence.rstrip().endswith((".", "?")) else "."
    return f"{sentence.rstrip()}{stop} See `{path} --help`."


def _complain(sentence: str, code: int) -> int:
    # An argument of a megabyte must not bury what is said of it: that stands at both ends.
    if len(sentence) > MAX_COMPLAINT_CHARS:
        half = MAX_COMPLAINT_CHARS // 2
        sentence = f"{sentence[:half]} … {sentence[-half:]}"
    complain(f"unstuck: {sentence}")
    return code


def run_and_exit() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    run_and_exit()
