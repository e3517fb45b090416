"""The examples of the page on ZeroMQ do what it says; that with a screen is in `tests/qt`."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.mdp.guide import play


@pytest.mark.parametrize("mark", ["client", "async client"])
def test_the_examples_of_client_and_worker_work_together(mark: str, tmp_path: Path) -> None:
    play(mark, tmp_path)


def test_without_zeromq_the_cure_is_named(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError(\"No module named 'zmq'\", name='zmq')")
    code = "import unstuck.mdp as mdp\nimport unstuck.mdp.frames\nmdp.Client"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install 'unstuck[mdp]'" in done.stderr
    assert done.returncode == 1
