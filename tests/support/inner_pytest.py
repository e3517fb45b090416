"""Run pytest on tests that a test wrote, as a user of the suite does."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

TIMEOUT_S = 300


def run_pytest(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder; the modules of the suite can be imported and given as plugins."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
