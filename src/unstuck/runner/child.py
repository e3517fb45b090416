"""Become a runner: leave the nursery behind, settle in, and serve jobs of one kind until told to end.

Forked from the nursery where that is safe, else a fresh interpreter: `python -m unstuck.runner.child`.
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
from unstuck.runner import containment, context, linux, output, stacks, stop_signal, sync_loop
from unstuck.runner.async_loop import AsyncLoop
from unstuck.runner.call import Caller
from unstuck.runner.cgroups import RunnerCgroup
from unstuck.runner.journal import Journals
from unstuck.runner.loader import load_registry
from unstuck.runner.messages import Kind, Limits
from unstuck.runner.monitor import JobSignals, JournalChannel, start_pulse
from unstuck.runner.status_page import StatusPage
from unstuck.runner.sync_loop import SyncLoop
from unstuck.runner.tasks import Registry

EXIT_BROKEN = 70
EXIT_NO_APP = 78


class RunnerConfig(msgspec.Struct):
    """Where a runner sits: its slot, its descriptors, its parent."""

    slot: int
    kind: Kind
    nursery_pid: int
    worker_id: str
    limits: Limits
    trace: str
    room: RunnerCgroup
    """The cgroups to move into."""
    stream: int
    permits: int
    stdout: int
    stderr: int
    stack: int
    signs: int
    line: int


class SpawnRequest(msgspec.Struct):
    target: str
    seat: RunnerConfig
    url: str | None = None


def isolate(seat: RunnerConfig) -> None:
    """Tie our life to the nursery's and be ready to adopt; first of all, before any user code."""
    if not linux.die_with_parent(signal.SIGKILL, seat.nursery_pid):
        os._exit(0)
    try:
        os.setsid()
    except PermissionError:
        pass  # spawned runners lead their session already
    linux.adopt_orphans()
    linux.name_process(f"unstuck-{seat.kind}{seat.slot}")
    containment.enter_runner_cgroup(seat.room)
    linux.prefer_as_oom_victim()
    sync_loop.bound(seat.limits.max_open_files)


def serve(seat: RunnerConfig, registry: Registry, trace: StatusPage) -> NoReturn:
    """Serve jobs, then end. Exit handlers are not run: a runner may be killed at any moment anyway."""
    code = EXIT_BROKEN
    try:
        _settle_in(seat)
        trace.enter(seat.slot, 0)
        stream = socket.socket(fileno=seat.stream)
        signs = JobSignals(socket.socket(fileno=seat.signs))
        line = JournalChannel(socket.socket(fileno=seat.line))
        notebooks = Journals(line, seat.limits.max_payload_bytes, registry.pack_follow_up)
        context.connect(signs, notebooks)
        caller = Caller(registry, seat.kind, seat.worker_id, seat.limits.max_payload_bytes, notebooks)
        loop: SyncLoop | AsyncLoop
        if seat.kind == "sync":
            permits = socket.socket(fileno=seat.permits)
            loop = SyncLoop(stream, permits, (seat.stdout, seat.stderr), caller, trace, seat.slot, signs)
        else:
            loop = AsyncLoop(stream, seat.stack, caller, seat.limits.max_output_bytes, signs)
        look = loop.watch.look if isinstance(loop, AsyncLoop) else None
        start_pulse(
            trace, seat.slot, seat.limits.pulse_interval_s, stream.fileno(), seat.stack, signs, look, notebooks.flush
        )
        loop.run()
        code = 0
        tracing.flush()
    except BaseException:  # noqa: BLE001 - whatever it was, it must be read in the output and end this process
        traceback.print_exc()
    finally:
        output.flush_standard_streams()
        os._exit(code)


def _settle_in(seat: RunnerConfig) -> None:
    _reset_signals()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output.flush_standard_streams()
    # Ours stay open beside 1 and 2: user code may close or redirect those, and ranges are still measured.
    os.dup2(seat.stdout, 1)
    os.dup2(seat.stderr, 2)
    for stream in (sys.stdout, sys.stderr):
        try:
            cast(TextIO, stream).reconfigure(  # type: ignore[attr-defined]
                encoding="utf-8", errors="backslashreplace", line_buffering=True
            )
        except Exception:  # noqa: BLE001 - the app replaced it: then it is the app's
            pass
    linux.line_buffer_c_stdout()
    stacks.watch(seat.stack)
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
    seat = order.seat
    isolate(seat)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (seat.stream, seat.permits, seat.stdout, seat.stderr, seat.stack, seat.signs, seat.line):
        os.set_inheritable(fd, False)
    output.install_routers()
    try:
        trace = StatusPage.open(Path(seat.trace), live_by_it=True)
        registry = load_registry(order.target, order.url)
        registry.ledger_note()  # the worker has said it
    except (ConfigError, OSError, ValueError) as error:
        os.write(seat.stderr, f"{error}\n".encode(errors="backslashreplace"))
        os._exit(EXIT_NO_APP)
    serve(seat, registry, trace)


if __name__ == "__main__":
    main(sys.argv[1])
