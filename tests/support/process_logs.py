"""Show beside a test that failed what its processes and its database server logged meanwhile."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MAX_CHARS = 6_000
"""Of each log, from its end."""
PATTERN = "*.log"
"""Files of a test's folder that are logs, whichever way their process was started."""


@dataclass
class _Log:
    alive: Callable[[], bool]
    read_bytes: int
    """How much of it was written before this test."""


_logs: dict[Path, _Log] = {}


def follow(path: Path, alive: Callable[[], bool]) -> None:
    """Show what is written to this file beside each test that fails while its process is alive."""
    _logs[path] = _Log(alive, _logs[path].read_bytes if path in _logs else 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    for path, log in list(_logs.items()):
        if log.alive() and path.exists():
            log.read_bytes = path.stat().st_size
        else:
            del _logs[path]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [
            (f"Logged to {path}", text) for path, start in _starts(item).items() if (text := _read(path, start))
        ]
    return report


def _starts(item: pytest.Item) -> dict[Path, int]:
    """Return the logs of this test, each with where it begins."""
    folder: Any = getattr(item, "funcargs", {}).get("tmp_path")
    own = sorted(folder.rglob(PATTERN)) if isinstance(folder, Path) else []
    return {**dict.fromkeys(own, 0), **{path: log.read_bytes for path, log in _logs.items()}}


def _read(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - 4 * MAX_CHARS))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if len(text) <= MAX_CHARS else f"…{text[-MAX_CHARS:]}"
