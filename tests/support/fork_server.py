"""Load what our processes load, and become one of them by a fork whenever somebody asks: the far side of `forked`.

    python -m tests.support.fork_server FD

Each ask is a message on the socket FD: what to run, with three streams and a pipe for the exit code. Nothing here has a
thread or a connection, so that a fork of it is as good as a new interpreter.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from tests.support import fork_server_ahead
from tests.support.hosts import Host

from unstuck import failpoints
from unstuck.runner import linux

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


def _become(ask: dict[str, object], streams: list[int], server: int) -> None:
    if not linux.die_with_parent(signal.SIGKILL, server):
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    # As an interpreter makes them when it starts: those of the process that forks know another file.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.closerange(FIRST_OTHER_FD, os.sysconf("SC_OPEN_MAX"))
    Host(*ask["place"]).enter()  # type: ignore[misc]
    os.chdir(str(ask["cwd"]))
    os.environ.clear()
    os.environ.update(ask["env"])  # type: ignore[call-overload]
    failpoints.arm(os.environ.get("UNSTUCK_FAILPOINTS", ""))  # all else in the environment is read when it is needed
    sys.path[0] = str(ask["cwd"])
    if ask["prepare_fork_server"]:
        fork_server_ahead.prepare()
    module = str(ask["module"])
    sys.argv = [module, *ask["words"]]  # type: ignore[misc]
    if ask["function"]:
        # The end of an interpreter takes longer than most commands, so it is left out.
        code = getattr(importlib.import_module(module), str(ask["function"]))(sys.argv[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
