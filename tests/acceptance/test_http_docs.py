"""The curl lines of the documentation work as they stand, with a real server and a real worker."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.fleet import ROOT, Fleet
from tests.web import serving

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
