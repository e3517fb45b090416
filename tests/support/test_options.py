"""The options of the suite: which databases a test runs on, the seed of a failure, a process that dies."""

from pathlib import Path

import pytest
from tests.support.inner_pytest import run_pytest

CONTRACT = """
import pytest

@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_contract(dialect): pass
"""
HTTP = """
import os, pytest

both = pytest.mark.parametrize("dialect", ["sqlite", "postgres"])

@both
def test_plain(dialect): pass

@both
@pytest.mark.both_databases
def test_both(dialect): pass

@both
@pytest.mark.on_postgresql
def test_postgresql(dialect): pass

@pytest.mark.parametrize("dialect", ["postgres"])
def test_only(dialect): pass

def test_fails(seed): assert not os.environ.get("FAIL")

@both
def test_ends_its_process(dialect):
    if os.environ.get("DIE"):
        os._exit(3)
"""


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    for name, text in (("contract", CONTRACT), ("http", HTTP)):
        (folder / "tests" / name).mkdir(parents=True, exist_ok=True)
        (folder / "tests" / name / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    both_databases\n    on_postgresql\n")
    done = run_pytest(folder, "-p", "tests.conftest", "-p", "no:schemathesis", *arguments, **environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("databases", "left_out"),
    [
        ("main", {"plain[postgres]", "postgresql[sqlite]", "ends_its_process[postgres]"}),
        (
            "sqlite",
            {"contract[postgresql]", *(f"{name}[postgres]" for name in ("plain", "both", "postgresql", "only"))}
            | {"ends_its_process[postgres]"},
        ),
    ],
)
def test_a_test_runs_on_the_databases_that_the_option_and_its_marks_choose(
    tmp_path: Path, databases: str, left_out: set[str]
) -> None:
    every = {"contract[sqlite]", "contract[postgresql]", "only[postgres]", "fails"}
    every |= {f"{name}[{one}]" for name in ("plain", "both", "postgresql") for one in ("sqlite", "postgres")}
    every |= {f"ends_its_process[{one}]" for one in ("sqlite", "postgres")}
    _, said = run(tmp_path, "--collect-only", "--databases", databases)
    assert {line.partition("::test_")[2] for line in said.splitlines() if "::" in line} == every - left_out


def test_a_failure_prints_its_seed(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-k", "fails", "--seed", "7", FAIL="1")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "--seed 7" in said


def test_a_process_that_dies_ends_the_run(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-n", "2", "--dist", "loadgroup", "--max-worker-restart=0", DIE="1")
    assert code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "crashed while running 'tests/http/test_http.py::test_ends_its_process[sqlite]'" in said
