"""A test that runs commands in its own process leaves no trace in how that process logs."""

import io
import logging
from collections.abc import Callable

import pytest
import structlog
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
