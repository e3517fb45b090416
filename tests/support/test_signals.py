"""Signals reach processes of this run alone, and no test sends one to a mere number."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.signals import OwnProcess, descendants, send_signal, signal_group

ROOT = Path(__file__).resolve().parents[2]
BY_NUMBER = {
    ("os", "kill"),
    ("os", "killpg"),
    ("psutil", "Process"),
    ("psutil", "Popen"),
    ("psutil", "process_iter"),
}
"""What signals, or could signal, whichever process has a number now; `tests.support.signals` has safe ways."""
BY_NAME = ("pkill", "killall")


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def sources() -> list[Path]:
    return [
        path
        for folder in ("tests", "bench")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".sh") and path != Path(__file__).resolve()
    ]


def by_number(tree: ast.AST) -> Iterator[tuple[int, str]]:
    own = ast.dump(ast.parse("os.getpid()", mode="eval").body)
    allowed = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and ast.dump(node.args[0]) == own
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and id(node) not in allowed:
            if (node.value.id, node.attr) in BY_NUMBER:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                if (node.module, name.name) in BY_NUMBER:
                    yield node.lineno, f"{node.module}.{name.name}"


def test_no_source_of_the_suite_signals_a_process_by_its_number_or_name() -> None:
    found = []
    for path in sources():
        text = path.read_text()
        where = path.relative_to(ROOT)
        found += [f"{where}: {word}" for word in BY_NAME if word in text]
        if path.suffix == ".py" and path.name != "signals.py":
            found += [f"{where}:{line}: {what}" for line, what in by_number(ast.parse(text))]
    assert not found, f"use tests.support.signals: {found}"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("os.kill(pid, 9)", 1),
        ("os.kill(os.getpid(), 9)", 0),
        ("os.killpg(process.pid, 9)", 1),
        ("psutil.Process(pid).kill()", 1),
        ("from os import kill", 1),
        ("process.kill()", 0),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str, count: int) -> None:
    assert len(list(by_number(ast.parse(source)))) == count


def test_a_process_of_this_run_is_signalled(sleeper: "subprocess.Popen[bytes]") -> None:
    send_signal(sleeper.pid, signal.SIGTERM)
    assert sleeper.wait(10) == -signal.SIGTERM


def test_a_process_of_others_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(psutil.NoSuchProcess, match="no process of this run"):
        send_signal(1, signal.SIGCONT)
    with pytest.raises(psutil.NoSuchProcess, match="no process of this run"):
        OwnProcess(os.getppid())


def test_a_signal_to_one_that_has_ended_reaches_no_later_process_of_its_number(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    held = OwnProcess(sleeper.pid)
    assert not held.ended
    sleeper.kill()
    sleeper.wait()
    assert held.ended
    with pytest.raises(psutil.NoSuchProcess):
        held.kill()
    with pytest.raises(psutil.NoSuchProcess):
        OwnProcess(sleeper.pid)


def test_descendants_are_found_parents_first() -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = [OwnProcess(parent.pid), *descendants(parent.pid)]
        assert [process.pid for process in found] == [parent.pid, child]
        for process in reversed(found):
            process.kill()


def test_a_group_is_signalled_though_its_leader_has_ended() -> None:
    code = "sleep 600 & echo $!"
    with subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        member = OwnProcess(int(leader.stdout.readline()))
        leader.wait()
        signal_group(leader.pid, signal.SIGKILL)
        member.wait(10)
