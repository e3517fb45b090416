"""Become a runner: leave the fork server behind, settle in, and serve jobs of one kind until told to end.

Forked from the fork server where that is safe, else a fresh interpreter: `python -m unstuck.runner.child`.
"""

import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn, TextIO, cast

import msgspec

from unstuck import tracing
from unstuck.errors import ConfigError
from unstuck.runner import containment, context, linux, output, stacks, stop_signal
from unstuck.runner.async_loop import AsyncLoop
from unstuck.runner.call import Caller
from unstuck.runner.cgroups import RunnerCgroup
from unstuck.runner.journal import Journals
from unstuck.runner.loader import load_app
from unstuck.runner.messages import Kind, Limits
from unstuck.runner.monitor import JobSignals, JournalChannel, start_pulse
from unstuck.runner.status_page import StatusPage
from unstuck.runner.sync_loop import SyncLoop
from unstuck.runner.tasks import AppDefinition

EXIT_BROKEN = 70
EXIT_NO_APP = 78


class RunnerConfig(
    msgspec.Struct,
    # The fork server of an older release may start this one: names on the wire stay.
    rename={
        "fork_server_pid": "nursery_pid",
        "status_page": "trace",
        "cgroup": "room",
        "signals": "signs",
        "journal": "line",
    },
):
    """Where a runner sits: its slot, its descriptors, its parent."""

    slot: int
    kind: Kind
    fork_server_pid: int
    worker_id: str
    limits: Limits
    status_page: str
    cgroup: RunnerCgroup
    """The cgroups to move into."""
    stream: int
    permits: int
    stdout: int
    stderr: int
    stack: int
    signals: int
    journal: int


class SpawnRequest(msgspec.Struct, rename={"config": "seat"}):
    target: str
    config: RunnerConfig
    url: str | None = None


def isolate(config: RunnerConfig) -> None:
    """Tie our life to the fork server's and be ready to adopt; first of all, before any user code."""
    if not linux.die_with_parent(signal.SIGKILL, config.fork_server_pid):
        os._exit(0)
    try:
        os.setsid()
    except PermissionError:
        pass  # spawned runners lead their session already
    linux.adopt_orphans()
    linux.name_process(f"unstuck-{config.kind}{config.slot}")
    containment.enter_runner_cgroup(config.cgroup)
    linux.prefer_as_oom_victim()


def serve(config: RunnerConfig, app: AppDefinition, status_page: StatusPage) -> NoReturn:
    """Serve jobs, then end. Exit handlers are not run: a runner may be killed at any moment anyway."""
    code = EXIT_BROKEN
    try:
        _settle_in(config)
        status_page.enter(config.slot, 0)
        stream = socket.socket(fileno=config.stream)
        signals = JobSignals(socket.socket(fileno=config.signals))
        channel = JournalChannel(socket.socket(fileno=config.journal))
        journals = Journals(channel, config.limits.max_payload_bytes, app.pack_follow_up)
        context.connect(signals, journals)
        caller = Caller(app.tasks, config.kind, config.worker_id, config.limits.max_payload_bytes, journals)
        loop: SyncLoop | AsyncLoop
        if config.kind == "sync":
            permits = socket.socket(fileno=config.permits)
            loop = SyncLoop(stream, permits, (config.stdout, config.stderr), caller, status_page, config.slot, signals)
        else:
            loop = AsyncLoop(stream, config.stack, caller, config.limits.max_output_bytes, signals)
        look = loop.watch.look if isinstance(loop, AsyncLoop) else None
        start_pulse(
            status_page,
            config.slot,
            config.limits.pulse_interval_s,
            stream.fileno(),
            config.stack,
            signals,
            look,
            journals.flush,
        )
        loop.run()
        code = 0
        tracing.flush()
    except BaseException:  # noqa: BLE001 - whatever it was, it must be read in the output and end this process
        traceback.print_exc()
    finally:
        output.flush_standard_streams()
        os._exit(code)


def _settle_in(config: RunnerConfig) -> None:
    _reset_signals()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output.flush_standard_streams()
    # Ours stay open beside 1 and 2: user code may close or redirect those, and ranges are still measured.
    os.dup2(config.stdout, 1)
    os.dup2(config.stderr, 2)
    for stream in (sys.stdout, sys.stderr):
        try:
            cast(TextIO, stream).reconfigure(  # type: ignore[attr-defined]
                encoding="utf-8", errors="backslashreplace", line_buffering=True
            )
        except Exception:  # noqa: BLE001 - the app replaced it: then it is the app's
            pass
    linux.line_buffer_c_stdout()
    stacks.watch(config.stack)
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        try:
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    # Ctrl-C is for the worker, which then decides what becomes of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_signal.listen_all()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def main(order_text: str) -> NoReturn:
    order = msgspec.json.decode(order_text, type=SpawnRequest)
    config = order.config
    isolate(config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (
        config.stream,
        config.permits,
        config.stdout,
        config.stderr,
        config.stack,
        config.signals,
        config.journal,
    ):
        os.set_inheritable(fd, False)
    output.install_routers()
    try:
        status_page = StatusPage.open(Path(config.status_page), live_by_it=True)
        app = load_app(order.target, order.url)
    except (ConfigError, OSError, ValueError) as error:
        os.write(config.stderr, f"{error}\n".encode(errors="backslashreplace"))
        os._exit(EXIT_NO_APP)
    serve(config, app, status_page)


if __name__ == "__main__":
    main(sys.argv[1])
