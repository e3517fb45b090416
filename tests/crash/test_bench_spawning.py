"""An app that cannot be forked is started anew for each runner, and it is said why."""

import os
import signal
from pathlib import Path

import pytest
from tests.crash.bench_kit import APP, frame, gone_within, house, read_pid

from unstuck.domain.outcomes import Succeeded
from unstuck.worker.bench import NurseryGone


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), name='busy', daemon=True).start()", "the thread 'busy'"),
        ("import socket; kept = socket.socket()", "an open socket"),
    ],
)
def test_an_app_that_cannot_be_forked_is_spawned_and_says_why(tmp_path: Path, line: str, why: str) -> None:
    with house(tmp_path, source=f"{APP}\n{line}\n") as home:
        assert not home.manifest.fork
        assert why in home.manifest.why_spawn
        runner = home.bench.open_runner(0, "sync")
        assert home.run(runner, "add", 1, 2).outcome == Succeeded(b"3")
        assert home.run(runner, "say", "words", "errors").stderr == b"errors"
        loop = home.bench.open_runner(1, "async")
        assert home.run(loop, "asay", "words").stdout == b"words\n"
        runner.send([frame(1, "leave_daemon", str(tmp_path / "daemon"), "7")])
        assert home.exit_of(runner).cause == "exited with code 7"
        assert gone_within(read_pid(tmp_path / "daemon"), 1)
        nursery, _ = home.trace.nursery()
        os.kill(nursery, signal.SIGKILL)
        home.wait_event(NurseryGone)
        assert gone_within(home.born(loop), 1)


def test_a_spawned_runner_that_cannot_import_says_so(tmp_path: Path) -> None:
    source = f"{APP}\nimport socket; kept = socket.socket()\nassert not os.path.exists('broken'), 'broken now'\n"
    with house(tmp_path, source=source) as home:
        (tmp_path / "broken").touch()
        runner = home.bench.open_runner(0, "sync")
        found = home.exit_of(runner)
        assert found.cause == "exited with code 78: it could not import the app"
        assert b"broken now" in runner.last_output()[1]
