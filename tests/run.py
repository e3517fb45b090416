"""Run the suite: all of it beside each other, then whatever failed once more and alone.

The tests kill real processes and wait for real deaths, several at a time, on machines that others use too. A test that
fails there and passes alone is named at the end, every time: it is not forgotten, but it does not hide the others. More
than a few failures are no accident, and are not looked at twice.

Tests that draw come after the others, in processes that draw and do nothing else. The slowest are named, so that growth
is seen; one that hangs is ended, with the stacks of its process, and counts as failed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support import run_guard

ROOT = Path(__file__).resolve().parent.parent
MOST_ACCIDENTS = 24
TEST_S = 400
"""So long one test may take: several times what the longest needs on a machine with ten times the load."""
ALL_S = 40 * 60
"""So long all of one part may take."""
EVERY_TEST = (
    # Loading it costs each process seconds, and the one test that uses it needs no fixtures of it.
    "-p", "no:schemathesis",
    "--durations=15",
    "-o", f"faulthandler_timeout={TEST_S}",
    "-o", "faulthandler_exit_on_timeout=true",
)  # fmt: skip
PASSED, FAILED, INTERRUPTED, NOTHING = 0, 1, 2, 5
"""Exit codes of pytest: all passed, some failed, it was ended, there were none; others are trouble of another kind."""
SUITES = (
    # Most tests wait for others most of the time: three for each of two processors keep these busy.
    ("-n", "6", "-p", "tests.together", "-m", "not long", "tests"),
    ("-n", "2", "-m", "not long", "tests/desktop"),
)


def main(arguments: list[str]) -> int:
    run_guard.start()
    compile_tests()
    codes = []
    for suite in SUITES:
        codes.append(_run(*arguments, *suite))
        if codes[-1] not in (PASSED, FAILED, NOTHING):
            return codes[-1]
    return verdict(codes)


def verdict(codes: list[int]) -> int:
    """Say one word for all: what failed outweighs what passed, and what passed those that had nothing to run."""
    if FAILED in codes:
        return FAILED
    return PASSED if PASSED in codes else NOTHING


def compile_tests() -> None:
    """Compile the tests and all that they import, if that was not done: else each process of the suite would do it for
    itself, all at the same time. In a fresh tree that is more than half of what it does before its first test."""
    tests = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "qt")
    new = [path for path in tests if not _compiled(path)]
    look = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *EVERY_TEST]
    # A share for each processor; what breaks here breaks again below, where it is shown.
    running = [
        subprocess.Popen(
            [*look, *map(str, share)], cwd=ROOT, env=_env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for share in (new[::2], new[1::2])
        if share
    ]
    for process in running:
        process.wait(ALL_S)


def _compiled(path: Path) -> bool:
    # The name that pytest gives to what it compiled.
    name = f"{path.stem}.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
    made = path.parent / "__pycache__" / name
    return made.exists() and made.stat().st_mtime >= path.stat().st_mtime


def _run(*arguments: str) -> int:
    # A memory of its own: else failures of other days would be taken for those of this one.
    with tempfile.TemporaryDirectory() as memory:
        code = _pytest("-o", f"cache_dir={memory}", *EVERY_TEST, *arguments)
        failed = _failed(Path(memory))
    if code != FAILED or not 0 < len(failed) <= MOST_ACCIDENTS:
        return code
    _say([f"{len(failed)} failed beside others; now alone:", *failed])
    second = _pytest(*EVERY_TEST, *failed)
    words = (
        "Alone all of them passed. Still, look at them:" if second == PASSED else "Alone some failed again; of these:"
    )
    _say([words, *failed])
    return second


def _pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    try:
        return subprocess.run(command, cwd=ROOT, env=_env(), check=False, timeout=ALL_S).returncode
    except subprocess.TimeoutExpired:
        _say([f"It did not end within {ALL_S // 60} minutes."])
        return INTERRUPTED


def _env() -> dict[str, str]:
    # Thousands of processes are started: each would compile all that it imports.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _failed(memory: Path) -> list[str]:
    try:
        return sorted(json.loads((memory / "v/cache/lastfailed").read_text()))
    except (OSError, ValueError):
        return []


def _say(lines: list[str]) -> None:
    print("\n" + "\n  ".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
