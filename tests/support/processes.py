"""Start processes of ours without paying for the start of an interpreter each time: one process forks for all.

    process = processes.start("unstuck.cli.main", "worker", "shop:app", env={...}, stdout=subprocess.PIPE)

It stands for `subprocess.Popen([sys.executable, "-m", "unstuck.cli.main", "worker", "shop:app"], ...)`, with what most
of the suite needs of that. Half of what a worker costs in a test is the import of modules, and a suite starts two
thousand workers, brokers, servers and commands. A test of the start itself uses `subprocess`.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any, Self

from tests.support import process_logs
from tests.support.fork_server import END, MAX_ASK_BYTES, ROOM, ROOM_BYTES
from tests.support.hosts import HERE, Host
from tests.support.run_guard import note_memory_of

ROOT = Path(__file__).resolve().parents[2]
FIXED = ("PYTHON", "LD_", "COVERAGE", "OTEL_")
"""Words of the environment with these beginnings are heard only by an interpreter that starts."""
LOOK_S = 0.01


class Forked:
    """A process that was forked for us, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, args: list[str], pid: int, pidfd: int, exits: int, stdout: Any, stderr: Any) -> None:
        self.args = args
        self.pid = pid
        self._pidfd = pidfd
        self.stdin = None
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._exits = exits
        self._reading = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def __del__(self) -> None:
        with suppress(OSError):
            self._forget()

    def poll(self) -> int | None:
        """Give the exit code, or None while it lives."""
        with self._reading:
            if self.returncode is None:
                self._hear()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            if number == signal.SIGKILL:
                note_memory_of(self.pid)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Read both streams to their ends, and wait."""
        said: dict[int, Any] = {}
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None and not stream.closed]
        readers = [
            threading.Thread(target=lambda s=stream: said.update({id(s): s.read()}), daemon=True) for stream in streams
        ]
        deadline_s = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        for stream in streams:
            stream.close()
        self.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        return said.get(id(self.stdout)), said.get(id(self.stderr))

    def _hear(self) -> None:
        try:
            said = os.read(self._exits, 64)
        except BlockingIOError:
            return
        self._forget()
        assert said, "the process that forks is gone"
        self.returncode = int(said)

    def _forget(self) -> None:
        if self._exits >= 0:
            os.close(self._exits)
            os.close(self._pidfd)
            self._exits = -1


class _Server:
    """The process that forks, started when it is needed first."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_ASK_BYTES)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(its.fileno())],
                cwd=ROOT,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, ROOM: " " * ROOM_BYTES},
            )

    def fork(self, ask: dict[str, Any], fds: list[int]) -> tuple[int, int]:
        """Return the number of the new process, and its pidfd."""
        with self._one_at_a_time:
            socket.send_fds(self._socket, [json.dumps(ask).encode()], fds)
            said, [pidfd], _, _ = socket.recv_fds(self._socket, 64, 1)
        assert said, f"the process that forks ended with {self._process.wait()}"
        return int(said), pidfd

    def close(self) -> None:
        self._socket.send(END)
        self._socket.close()
        self._process.wait(30)


_server: _Server | None = None
_starting = threading.Lock()


def start(
    module: str,
    *words: str,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
    place: Host = HERE,
    prepare_fork_server: bool = False,
    function: str = "",
) -> Any:
    """Run `python -m module words...` in a process of its own, on a host of its own if a place is given.

    If `function` names a function of the module, it is called with the words, and the process ends with the number that
    it returns, without `atexit`. With `prepare_fork_server` it is a worker whose first fork server is forked as well.
    What it writes to a file is shown if the test fails."""
    command = [sys.executable, "-m", module, *words]
    surroundings = dict(os.environ if env is None else env)
    if _fixed(surroundings) != _fixed(dict(os.environ)):
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=text, preexec_fn=place.enter
        )
        return _followed(process, stdout, stderr)
    ask = {
        "module": module,
        "words": words,
        "cwd": str(cwd or Path.cwd()),
        "env": surroundings,
        "place": place,
        "prepare_fork_server": prepare_fork_server,
        "function": function,
    }
    ours: list[int] = []
    try:
        own_stdout, its_stdout = _stream(stdout, 1, text, ours)
        own_stderr, its_stderr = (None, its_stdout) if stderr == subprocess.STDOUT else _stream(stderr, 2, text, ours)
        its_stdin = _stream(stdin, 0, text, ours)[1]
        exits, its_exits = os.pipe()
        ours.append(its_exits)
        os.set_blocking(exits, False)
        pid, pidfd = _the_server().fork(ask, [its_stdin, its_stdout, its_stderr, its_exits])
    finally:
        for fd in ours:
            os.close(fd)
    return _followed(Forked(command, pid, pidfd, exits, own_stdout, own_stderr), stdout, stderr)


def _followed(process: Any, *streams: Any) -> Any:
    found = weakref.ref(process)
    for stream in streams:
        if isinstance(name := getattr(stream, "name", None), str):
            process_logs.follow(Path(name), lambda: (kept := found()) is not None and kept.poll() is None)
    return process


def run(
    module: str,
    *words: str,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 60.0,
    function: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, and return what it printed; see `start`."""
    process = start(
        module,
        *words,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        function=function,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def _fixed(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(FIXED)}


def _stream(wanted: Any, number: int, text: bool, ours: list[int]) -> tuple[Any, int]:
    """Give our end, where there is one, and its end; what must be closed here is added to `ours`."""
    if wanted is None:
        return None, number
    if wanted == subprocess.DEVNULL:
        ours.append(os.open(os.devnull, os.O_RDWR))
        return None, ours[-1]
    if wanted == subprocess.PIPE:
        assert number > 0, "nobody is spoken to yet"
        read, write = os.pipe()
        ours.append(write)
        stream = BufferedReader(os.fdopen(read, "rb", buffering=0))
        return (TextIOWrapper(stream) if text else stream), write
    return None, wanted if isinstance(wanted, int) else wanted.fileno()


def start_server() -> None:
    """Start the process that forks, if it does not run yet: what it forks is where it is."""
    _the_server()


def _the_server() -> _Server:
    global _server
    with _starting:
        if _server is None:
            _server = _Server()
            atexit.register(_server.close)
        return _server
