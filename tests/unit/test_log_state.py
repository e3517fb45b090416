"""A test that runs commands in its own process leaves no trace in how that process logs."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from tests.support.fleet import ROOT
from tests.support.log_state import LogState

from unstuck import logs

CHANGES: dict[str, Callable[[], object]] = {
    "setup": lambda: logs.setup("debug", "json", io.StringIO()),
    "root level": lambda: logging.root.setLevel(logging.ERROR),
    "level": lambda: logging.getLogger("unstuck").setLevel(logging.ERROR),
    "level of a new logger": lambda: logging.getLogger("unstuck.test.new").setLevel(logging.ERROR),
    "propagate": lambda: setattr(logging.getLogger("unstuck.test"), "propagate", False),
    "disabled": lambda: setattr(logging.getLogger("unstuck.test"), "disabled", True),
    "disable": lambda: logging.disable(logging.CRITICAL),
    "handler": lambda: logging.root.addHandler(logging.NullHandler()),
    "warnings": lambda: logging.captureWarnings(True),
    "errors of handlers": lambda: setattr(logging, "raiseExceptions", False),
    "structlog": lambda: structlog.configure(cache_logger_on_first_use=True),
}


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen_and_taken_back(change: Callable[[], object]) -> None:
    before = LogState.now()
    change()
    assert LogState.now() != before
    before.restore()
    assert LogState.now() == before


@pytest.mark.usefixtures("restored_logging")
def test_a_configuration_is_put_back_over_another() -> None:
    logs.setup("info", "console", io.StringIO())
    before = LogState.now()
    logs.setup("debug", "json", io.StringIO())
    structlog.configure(cache_logger_on_first_use=False)
    before.restore()
    assert LogState.now() == before


def test_lines_reach_the_test_again(caplog: pytest.LogCaptureFixture) -> None:
    before = LogState.now()
    logs.setup("error", "console", io.StringIO())
    before.restore()
    # Handlers of pytest that a command removed return with the next phase of the test, not with this.
    logging.root.addHandler(caplog.handler)
    logging.getLogger("unstuck.test").warning("heard")
    assert "heard" in caplog.text


def run(script: str, path: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FIRST_LINES = """
import sys
from unstuck import logs
known = set(sys.modules)
log = logs.logger("unstuck.test")
log.warning("The ledger cannot be reached", worker="w1")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("It failed")
print(sorted(set(sys.modules) - known))
"""


def test_a_line_imports_nothing_for_it_may_be_written_when_no_file_can_be_opened() -> None:
    assert run(FIRST_LINES) == "[]\n"


HALF_LOADED = """
import threading, time
loading.set()
time.sleep(0.3)
is_configured = lambda: True
get_config = lambda: {"loaded": True}
"""
LOOK_MEANWHILE = """
import builtins, threading
from tests.support.log_state import LogState
builtins.loading = threading.Event()
thread = threading.Thread(target=lambda: __import__("structlog"))
thread.start()
loading.wait()
print(LogState.now().structlog)
thread.join()
"""


def test_a_look_waits_for_a_thread_that_is_loading_structlog(tmp_path: Path) -> None:
    (tmp_path / "structlog.py").write_text(HALF_LOADED)
    assert run(LOOK_MEANWHILE, tmp_path) == "{'loaded': True}\n"


def test_a_line_names_the_place_that_wrote_it_and_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    logs.logger("unstuck.test").warning("100 %s", name="ada", worker="w1")
    [record] = caplog.records
    assert (record.getMessage(), record.pathname) == ("100 %s", __file__)
    assert (record.name, record.__dict__["name_"], record.__dict__["worker"]) == ("unstuck.test", "ada", "w1")


@pytest.mark.usefixtures("restored_logging")
def test_lines_of_our_processes_carry_what_is_bound_to_the_context() -> None:
    stream = io.StringIO()
    logs.setup("info", "json", stream)
    with structlog.contextvars.bound_contextvars(request="r1"):
        logs.logger("unstuck.test").warning("ours")
        structlog.get_logger("shop").warning("theirs")
    ours, theirs = stream.getvalue().splitlines()
    assert '"request": "r1"' in ours
    assert '"request": "r1"' in theirs
