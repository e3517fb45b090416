"""Load the modules of our processes once, and become one of them by a fork on request: the far side of `processes`.

    python -m tests.support.fork_server FD

Each ask is a message on the socket FD: what to run, with three streams and a pipe for the exit code. Nothing here has a
thread or a connection, so that a fork of it is as good as a new interpreter.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.support.hosts import Host

from unstuck import failpoints
from unstuck.runner import linux
from unstuck.worker import fork_client

MAX_ASK_BYTES = 1 << 18
LOADED = (
    "pwd",
    "tomllib",
    "typer._adapters",
    "typer._click.decorators",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    # Every command that logs to a console needs these, and they take most of its start.
    "rich.console",
    "rich.table",
    "rich.traceback",
    "structlog.dev",
    "structlog.stdlib",
    "tests.mdp.plain_peers",
    "unstuck.cli.main",
    "unstuck.http.app",
    "unstuck.http.server",
    "unstuck.mdp.broker.server",
    "unstuck.mdp.worker",
    "unstuck.runner.fork_server",
    "unstuck.ledger.postgres.ledger",
    "unstuck.ledger.postgres.queries",
    "unstuck.ledger.sqlite.ledger",
    "unstuck.tracing",
    "unstuck.worker.main",
)
FIRST_OTHER_FD = 3
END = b"end"
"""In place of an ask: the run is over. If the socket closes without it, the run was killed."""
FORK_SERVER = "unstuck.runner.fork_server"
_ENV_START, _ENV_END = 47, 48
"""Fields of `/proc/PID/stat`, counted from the one after the name."""
ROOM = "ROOM_FOR_THE_ENVIRONMENT"
"""A variable that the process which forks is started with, so that any environment finds room where its own was."""
ROOM_BYTES = 1 << 16
GUARD_S = 20.0
"""How long the guard of a run may take before its processes end without it."""


def main() -> None:
    asks = socket.socket(fileno=int(sys.argv[1]))
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deaths, wake = os.pipe()
    for fd in (deaths, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    exits: dict[int, int] = {}
    server = os.getpid()
    while True:
        ready = select.select([asks, deaths], [], [])[0]
        if deaths in ready:
            os.read(deaths, 4096)
        _bury(exits)
        if asks not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(asks, MAX_ASK_BYTES, 4)
        if data == END:
            return
        if not data:
            _wait_for_end(exits)
        pid = os.fork()
        if pid == 0:
            _become(json.loads(data), fds[:3], server)
        exits[pid] = fds[3]
        for fd in fds[:3]:
            os.close(fd)
        # Taken before it is waited for: this is the process that was forked, and no later one of the same number.
        pidfd = os.pidfd_open(pid)
        socket.send_fds(asks, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _bury(exits: dict[int, int]) -> None:
    while exits:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        fd = exits.pop(pid)
        try:
            os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            pass  # whoever asked is no longer interested
        os.close(fd)


def _wait_for_end(exits: dict[int, int]) -> NoReturn:
    """Leave it to the guard of the run to end the processes that are left, and us: it looks first at what they hold."""
    until_s = time.monotonic() + GUARD_S
    while exits and time.monotonic() < until_s:
        _bury(exits)
        time.sleep(0.1)
    sys.exit()


def _become(ask: dict[str, Any], streams: list[int], server: int) -> None:
    if not linux.die_with_parent(signal.SIGKILL, server):
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(FIRST_OTHER_FD, os.sysconf("SC_OPEN_MAX"))
    Host(*ask["place"]).enter()
    _enter(ask)
    if ask["prepare_fork_server"]:
        prepare_fork_server()
    _run(ask["module"], ask["words"], ask["function"])


def _enter(ask: dict[str, Any]) -> None:
    """Take the streams, the directory and the environment that were asked for."""
    # As an interpreter makes them when it starts: those of the process that forks know another file.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(ask["cwd"])
    os.environ.clear()
    os.environ.update(ask["env"])
    failpoints.arm(os.environ.get("UNSTUCK_FAILPOINTS", ""))  # all else in the environment is read when it is needed
    sys.path[0] = ask["cwd"]


def _run(module: str, words: list[str], function: str = "") -> NoReturn:
    """Run the module, or a function of it, and exit."""
    sys.argv = [module, *words]
    if function:
        # The end of an interpreter takes longer than most commands, so it is left out.
        code = getattr(importlib.import_module(module), function)(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


# The fork server of a worker --------------------------------------------------------------------
#
# A worker starts `python -m unstuck.runner.fork_server`. Nine tenths of what that costs are the start of an interpreter
# and imports. So the process that is about to become a worker forks once more, and its child becomes the fork server as
# soon as the worker asks for one: as its child, in a session of its own, with the environment, descriptors and streams
# that it was asked to have. Workers that are started by `subprocess`, and each later fork server of a worker, start the
# plain way.


class _WaitingFork:
    """The worker's end: tells the process that waits how to become the first fork server."""

    def __init__(self, pid: int, asks: socket.socket) -> None:
        self._pid = pid
        self._asks = asks
        self._used = False

    def popen(self, args: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Stand for `subprocess.Popen` as a worker calls it."""
        if self._used or args[1:3] != ["-m", FORK_SERVER]:
            return subprocess.Popen(args, **options)
        self._used = True
        (control_fd,) = options["pass_fds"]
        ask = {"words": args[3:], "env": options["env"], "cwd": os.getcwd(), "control_fd": control_fd}
        with self._asks:
            socket.send_fds(self._asks, [json.dumps(ask).encode()], [control_fd, 1, 2])
        return _Forked(args, self._pid)


class _Forked(subprocess.Popen[bytes]):
    """A child that exists already; to wait for it and to end it are as ever."""

    def __init__(self, args: list[str], pid: int) -> None:
        self._its_pid = pid
        super().__init__(args)

    def _execute_child(self, *_: object) -> None:
        self.pid = self._its_pid
        self._child_created = True


def prepare_fork_server() -> None:
    """Fork the fork server of the worker that this process is about to become."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_ASK_BYTES)
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _await(its, worker)
    its.close()
    ahead = _WaitingFork(pid, ours)
    fork_client.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ahead.popen})  # type: ignore[assignment]


def _await(asks: socket.socket, worker: int) -> None:
    if not linux.die_with_parent(signal.SIGKILL, worker):
        os._exit(1)
    data, fds, _, _ = socket.recv_fds(asks, MAX_ASK_BYTES, 3)
    if not data:
        os._exit(0)  # the worker ended before it came to this
    asks.close()
    _become_fork_server(json.loads(data), fds)


def _become_fork_server(ask: dict[str, Any], fds: list[int]) -> None:
    """Be what `subprocess` would have started."""
    os.setsid()
    # The numbers may overlap: above all of them first.
    above = [os.dup(fd) for fd in fds]
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, fd in ((0, nothing), (1, above[1]), (2, above[2]), (ask["control_fd"], above[0])):
        os.dup2(fd, number)
    for fd in {*fds, *above, nothing} - {0, 1, 2, ask["control_fd"]}:
        os.close(fd)
    _enter(ask)
    _show_environment(ask["env"])
    _run(FORK_SERVER, ask["words"])


def _show_environment(env: dict[str, str]) -> None:
    """Write the environment to where `/proc/PID/environ` shows it: the mark in it finds what a dead worker left behind.

    The kernel reads it from where it put the environment of the interpreter that once started; nothing else uses that
    place after `os.environ.clear()`, which copies nothing back."""
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    start, size = _environment_place()
    assert len(block) <= size, f"the environment needs {len(block)} bytes, {ROOM} leaves {size}"
    ctypes.memmove(start, block.ljust(size, b"\0"), size)


def _environment_place() -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    return start, end - start


if __name__ == "__main__":
    main()
