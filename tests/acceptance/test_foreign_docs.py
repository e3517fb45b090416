"""The lines of the guide for workers in any language are run as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fleet import ROOT
from tests.web import opened

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
    with opened(url) as served:
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
