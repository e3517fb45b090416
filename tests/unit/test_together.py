"""Tests that share something of their file stay together; one that ends its process costs one test, and no wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.together import LONG, scope_of, turn_of

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = """
import os, pytest

@pytest.fixture(scope="module")
def shared(): pass

def test_before(shared): pass
def test_that_ends_its_process(shared): os._exit(3)
def test_behind(shared): pass
"""


def test_a_process_that_dies_costs_one_test(tmp_path: Path) -> None:
    (tmp_path / "test_deadly.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.together", "-n", "2", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_deadly.py::test_that_ends_its_process'" in done.stdout


def test_a_file_that_shares_has_one_turn_on_each_database_and_short_tests_come_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    shared = [f"tests/http/test_openapi.py::test_{name}" for name in ("a[sqlite]", "b[sqlite]", "a[postgres]")]
    assert scope_of(shared[0]) == scope_of(shared[1]) != scope_of(shared[2])
    assert turn_of(shared[0]) == turn_of(shared[1]) < 0.5
    alone = [f"tests/crash/test_frozen_workers.py::test_{number}" for number in range(50)]
    assert len({scope_of(nodeid) for nodeid in alone}) == len({turn_of(nodeid) for nodeid in alone}) == 50
    assert max(map(turn_of, alone)) < 1 <= turn_of("tests/unit/test_limits.py::test_a")


def test_the_longest_tests_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for word in LONG:
        path, _, name = word.partition("::")
        found = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("test_*.py"))
        assert any(name in one.read_text() for one in found), f"{word} names no test"
    long = [f"tests/simulation/test_simulation.py::test_{number}" for number in range(50)]
    assert max(map(turn_of, long)) < 0.5
