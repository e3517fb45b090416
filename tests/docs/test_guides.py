"""The curl lines of the documentation work as they stand, with a real server and a real worker."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mdp.guide import play
from tests.support.fleet import ROOT, Fleet
from tests.support.http_server import serve, serving

PAGE = ROOT / "docs" / "http-api.md"
RUN = re.compile(r"^```sh run\n(.*?)^```", re.MULTILINE | re.DOTALL)
WRITTEN = "http://127.0.0.1:8642"
PATIENCE_S = 120


@pytest.fixture
def said(tmp_path: Path) -> list[str]:
    """What each block printed, one after the other, as a reader would try them."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    fleet = Fleet(url, tmp_path)
    said = []
    try:
        fleet.start("--concurrency", "1")
        with serving(url) as client:
            for block in RUN.findall(PAGE.read_text()):
                assert WRITTEN in block
                script = block.replace(WRITTEN, str(client.base_url).rstrip("/"))
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", script],
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                    check=False,
                )
                assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
                said.append(done.stdout)
    finally:
        fleet.close()
    return said


def test_the_lines_work_and_say_what_they_promise(said: list[str]) -> None:
    wait, twice, follow, operate = said
    assert '"state":"succeeded","result":3,"error":null' in wait
    first, second = re.findall(r'"id":(\d+)', twice)
    assert first == second
    assert '"answer":"cancelled"' in follow
    assert '"answer":"queued"' in follow
    assert "It is scheduled for" in follow
    assert '"paused":["default"]' in operate
    assert '"resumed":["default"]' in operate


GUIDE = ROOT / "docs/foreign-workers.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_life_of_a_worker_by_hand(tmp_path: Path) -> None:
    missing = [program for program in ("bash", "curl", "jq") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    [lines] = BLOCK.findall(GUIDE.read_text())
    command = tmp_path / "unstuck"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m unstuck.cli.main "$@"\n')
    command.chmod(0o755)
    url = f"sqlite:///{tmp_path}/jobs.db"
    with serve(url) as served:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", lines],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SERVER": served.url, "UNSTUCK_URL": url},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.sub(r"\s", "", '{"args": ["cat.png"], "kwargs": {"width": 300}}') in re.sub(r"\s", "", done.stdout)
    assert done.stdout.split()[-3:] == ["succeeded", "already", "stopped"]


@pytest.mark.parametrize("mark", ["client", "async client"])
def test_the_examples_of_client_and_worker_work_together(mark: str, tmp_path: Path) -> None:
    play(mark, tmp_path)


def test_without_zeromq_the_cure_is_named(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError(\"No module named 'zmq'\", name='zmq')")
    code = "import unstuck.mdp as mdp\nimport unstuck.mdp.protocol\nmdp.Client"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install 'unstuck[mdp]'" in done.stderr
    assert done.returncode == 1
