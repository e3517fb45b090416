"""Clients work on systems other than Linux; what runs workers says in one sentence that it needs Linux."""

import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = """
import os, select, signal, socket, sys, sysconfig

sysconfig.get_config_vars()  # read from a file that is named after the platform
sys.platform = "darwin"
for module, names in (
    (os, "memfd_create pidfd_open pipe2 posix_fallocate waitid getxattr sched_getaffinity eventfd WNOWAIT WEXITED"),
    (signal, "SIGRTMIN SIGRTMAX pidfd_send_signal sigtimedwait"),
    (socket, "SO_PASSCRED SCM_CREDENTIALS TCP_USER_TIMEOUT"),
    (select, "epoll"),
):
    for name in names.split():
        vars(module).pop(name, None)
"""
CLIENT = """
import sys
from unstuck import App
from unstuck.cli.main import main

app = App(sys.argv[1])

@app.task
def add(a, b): return a + b

job = add.enqueue(1, 2)
assert app.job(job.id).state == "pending"
for command in (["jobs"], ["job", str(job.id)], ["workers"], ["why", str(job.id)], ["reaper", "--once"]):
    assert main(["--url", sys.argv[1], *command]) == 0, command
assert main(["--url", sys.argv[1], "doctor"]) == 1, "it has found that no worker serves the queue"
print("all done")
"""


def elsewhere(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a program as on a system that has nothing of Linux's own."""
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE + program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", [["worker", "app:app"], ["up", "app:app"], ["demo"]])
def test_workers_say_in_one_sentence_that_they_need_linux(command: list[str]) -> None:
    done = elsewhere("from unstuck.cli.main import main\nsys.exit(main(sys.argv[1:]))", *command)
    assert done.returncode == 1, "as for any wrong configuration"
    assert done.stderr == (
        f"unstuck: Workers run on Linux, and this system is darwin: use `unstuck {command[0]}` on a Linux machine. "
        "Clients can enqueue jobs and read results from here.\n"
    )


def test_clients_and_the_commands_that_read_need_nothing_of_linux(tmp_path: Path) -> None:
    done = elsewhere(CLIENT, f"sqlite:///{tmp_path}/jobs.db")
    assert done.stdout.endswith("all done\n"), done.stdout + done.stderr
    assert "Containment" not in done.stdout, "no worker can run here"
