"""The examples of the page on workflows run, with a real worker."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.fleet import wait_for
from tests.unit.test_docs import FENCE, ROOT, RUN_TIMEOUT_S, plain_environment, run_python


def test_every_example_of_the_page_on_workflows_runs(tmp_path: Path) -> None:
    blocks = FENCE.findall((ROOT / "docs/workflows.md").read_text())
    [tasks] = [body for info, body in blocks if info.strip() == "python flows"]
    examples = [body for info, body in blocks if info.strip() == "python flow"]
    assert len(examples) >= 6
    (tmp_path / "flows.py").write_text(tasks)
    log = tmp_path / "worker.log"
    command = [sys.executable, "-m", "unstuck.cli.main", "worker", "flows:app", "--concurrency", "2"]
    with log.open("wb") as out:
        worker = subprocess.Popen(command, cwd=tmp_path, env=plain_environment(), stdout=out, stderr=out)
    try:
        wait_for(lambda: worker.poll() is not None or "Worker started" in log.read_text(), "the worker's first words")
        for number, example in enumerate(examples):
            (tmp_path / f"example_{number}.py").write_text(example)
            done = run_python(f"example_{number}.py", cwd=tmp_path)
            assert done.returncode == 0, f"{example}\n{done.stderr}\n{log.read_text()}"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(RUN_TIMEOUT_S) == 0
    finally:
        worker.kill()
        worker.wait()
