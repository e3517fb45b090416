"""Run the examples of the page on ZeroMQ as they stand there, with another port."""

import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.mdp.broker import BrokerHarness
from tests.support.fleet import ROOT, wait_for
from tests.support.sqlite import ready_sqlite

GUIDE = ROOT / "docs/zeromq.md"
WRITTEN = "tcp://127.0.0.1:5555"
PATIENT_S = 60


def play(mark: str, tmp_path: Path) -> None:
    """Run the client of the page with its worker."""
    with closing(BrokerHarness(ready_sqlite(tmp_path), tmp_path)) as scene:
        (tmp_path / "worker.py").write_text(example("worker", scene.endpoint))
        (tmp_path / "client.py").write_text(example(mark, scene.endpoint))
        worker = subprocess.Popen([sys.executable, "-W", "error", tmp_path / "worker.py"])
        try:
            wait_for(lambda: scene.living("echo"), "the worker")
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
