"""Fork the fork server of a worker ahead of time, from a process that has its modules loaded.

A worker starts `python -m unstuck.runner.fork_server`, and nine tenths of what that costs are the start of an
interpreter and the import of modules, the same every time. A worker of a test is itself a fork of a process that has
them, see `fork_server`. So it forks once more before it becomes the worker, and its child becomes the fork server
as soon as the worker asks for one: as its child, in a session of its own, with the environment, descriptors and streams
that it was asked to have. Workers that are started by `subprocess`, and every later fork server of a worker, start the
plain way.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unstuck import failpoints
from unstuck.runner import linux
from unstuck.worker import fork_client

NURSERY = "unstuck.runner.fork_server"
MAX_ASK_BYTES = 1 << 18
_ENV_START, _ENV_END = 47, 48
"""Fields of `/proc/PID/stat`, counted from the one after the name."""
ROOM = "ROOM_FOR_THE_ENVIRONMENT"
"""A variable that the process which forks is started with, so that any environment finds room where its own was."""
ROOM_BYTES = 1 << 16


class _Ahead:
    """The end of the worker: hands over what the first fork server shall be."""

    def __init__(self, pid: int, asks: socket.socket) -> None:
        self._pid = pid
        self._asks = asks
        self._used = False

    def popen(self, args: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Stand for `subprocess.Popen` as a worker calls it."""
        if self._used or args[1:3] != ["-m", NURSERY]:
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


def prepare() -> None:
    """Fork the fork server of the worker that this process is about to become."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_ASK_BYTES)
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _await(its, worker)
    its.close()
    ahead = _Ahead(pid, ours)
    fork_client.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ahead.popen})  # type: ignore[assignment]


def _await(asks: socket.socket, worker: int) -> None:
    if not linux.die_with_parent(signal.SIGKILL, worker):
        os._exit(1)
    data, fds, _, _ = socket.recv_fds(asks, MAX_ASK_BYTES, 3)
    if not data:
        os._exit(0)  # the worker ended before it came to this
    asks.close()
    _become(json.loads(data), fds)


def _become(ask: dict[str, Any], fds: list[int]) -> None:
    """Be what `subprocess` would have started."""
    os.setsid()
    # The numbers may overlap: above all of them first.
    above = [os.dup(fd) for fd in fds]
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, fd in ((0, nothing), (1, above[1]), (2, above[2]), (ask["control_fd"], above[0])):
        os.dup2(fd, number)
    for fd in {*fds, *above, nothing} - {0, 1, 2, ask["control_fd"]}:
        os.close(fd)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(ask["cwd"])
    os.environ.clear()
    os.environ.update(ask["env"])
    _show_environment(ask["env"])
    failpoints.arm(os.environ.get("UNSTUCK_FAILPOINTS", ""))
    sys.path[0] = ask["cwd"]
    sys.argv = [NURSERY, *ask["words"]]
    sys.modules.pop(NURSERY, None)
    runpy.run_module(NURSERY, run_name="__main__", alter_sys=True)


def _show_environment(env: dict[str, str]) -> None:
    """Have `/proc/PID/environ` say what the environment is: the mark in it finds what a dead worker left behind.

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
