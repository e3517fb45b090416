"""Run the suite: all of it beside each other, then whatever failed once more and alone.

The tests kill real processes and wait for real deaths, five at a time, on machines that others use too. A test that
fails there and passes alone is named at the end, every time: it is not forgotten, but it does not hide the others. More
than a few failures are no accident, and are not looked at twice.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_ACCIDENTS = 8
FAILED = 1
"""The exit code of pytest when tests ran and some failed; every other one is trouble of another kind."""


def main(arguments: list[str]) -> int:
    code = _pytest("-n", "5", "-p", "tests.together", "-m", "not long", *arguments, "tests")
    if code != FAILED:
        return code
    failed = _failed()
    if not 0 < len(failed) <= MOST_ACCIDENTS:
        return code
    _say([f"{len(failed)} failed beside others; now alone:", *failed])
    second = _pytest(*failed)
    verdict = "Alone all of them passed. Still, look at them:" if second == 0 else "Alone some failed again; of these:"
    _say([verdict, *failed])
    return second


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode


def _failed() -> list[str]:
    try:
        return sorted(json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text()))
    except (OSError, ValueError):
        return []


def _say(lines: list[str]) -> None:
    print("\n" + "\n  ".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
