"""Run many short commands without paying for the start of an interpreter each time: one process forks for all."""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

_FORKER = """
import contextlib, gc, json, os, signal, sys
import unstuck.ledger.sqlite.ledger
import unstuck.ledger.postgres.ledger
from unstuck.cli.main import main
from unstuck.runner.linux import die_with_parent

# Much is loaded with the first command only.
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
    main(["job", "abc"])
gc.freeze()
server = os.getpid()

for line in sys.stdin:
    ask = json.loads(line)
    pid = os.fork()
    if pid == 0:
        if not die_with_parent(signal.SIGKILL, server):
            os._exit(1)
        os.chdir(ask["folder"])
        os.environ.clear()
        os.environ.update(ask["environment"])
        for fd, path in enumerate((os.devnull, ask["out"], ask["err"])):
            os.dup2(os.open(path, os.O_RDWR), fd)
        code = main(ask["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(code, flush=True)
"""


class Forker:
    """A process that has the command line loaded and becomes each command by a fork."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._one_at_a_time = threading.Lock()
        self._ask, self._answer = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ask.close()
        self._answer.close()
        self._process.wait(30)

    def run(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
        """Give exit code, stdout and stderr of one command."""
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            ask = {
                "arguments": arguments,
                "folder": str(folder),
                "environment": environment,
                "out": out.name,
                "err": err.name,
            }
            with self._one_at_a_time:
                self._ask.write(json.dumps(ask) + "\n")
                self._ask.flush()
                code = int(self._answer.readline())
            return code, out.read().decode(), err.read().decode()
