"""Run the examples of the page on ZeroMQ as they stand there, with another port."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.mdp.broker import foreign_broker
from tests.support.fleet import ROOT

GUIDE = ROOT / "docs/zeromq.md"
WRITTEN = "tcp://127.0.0.1:5555"
PATIENT_S = 60


def play(mark: str, tmp_path: Path) -> None:
    """Run the client of the page with its worker, at a broker of somebody else."""
    with foreign_broker() as endpoint:
        (tmp_path / "worker.py").write_text(example("worker", endpoint))
        (tmp_path / "client.py").write_text(example(mark, endpoint))
        worker = subprocess.Popen([sys.executable, "-W", "error", tmp_path / "worker.py"])
        try:
            done = subprocess.run(
                [sys.executable, "-W", "error", tmp_path / "client.py"],
                capture_output=True,
                text=True,
                timeout=2 * PATIENT_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert "[b'hello']" in done.stdout
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENT_S) == 0
        finally:
            worker.kill()
            worker.wait()


def example(mark: str, endpoint: str) -> str:
    [code] = re.findall(rf"^```python {mark}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert WRITTEN in code
    # Machines that run tests are slower than those that people work at.
    return code.replace(f'"{WRITTEN}"', f'"{endpoint}", timeout={PATIENT_S}' if "lient" in mark else f'"{endpoint}"')
