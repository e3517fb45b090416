"""A test that ends its process costs the suite one test, and no wait."""

import os
import subprocess
import sys
from pathlib import Path

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
