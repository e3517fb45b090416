"""Run the suite. Run tests that failed once more, alone, and name them.

A few tests still depend on how fast the machine is. Until they are rewritten, a test that fails beside others and
passes alone does not fail the run, but it is named at the end. `make test-strict` runs no test twice.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_AGAIN = 24
"""If more tests fail than this, none of them is run again."""
PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit codes of pytest."""
RUNS = (
    ("-n", sys.argv[1], "--dist", "loadgroup", "--no-loadscope-reorder", "-m", "not long", "tests"),
    # Qt has processes of its own, see tests/conftest.py.
    ("-n", "2", "-m", "not long", "tests/desktop"),
)


def main() -> int:
    codes = {_run(run) for run in RUNS}
    return next((code for code in codes if code not in (PASSED, NO_TESTS)), PASSED)


def _run(run: tuple[str, ...]) -> int:
    # A cache of its own: failures of earlier runs are not those of this one.
    with tempfile.TemporaryDirectory() as cache:
        code = _pytest("--durations=15", "-o", f"cache_dir={cache}", *run)
        failed = _failed(Path(cache))
    if code != FAILED or not 0 < len(failed) <= MAX_AGAIN:
        return code
    print(f"\n{len(failed)} failed beside others; now alone:", *failed, sep="\n  ", flush=True)
    code = _pytest(*failed)
    how = "All of them passed alone" if code == PASSED else "Some failed again; of these"
    print(f"\n{how}:", *failed, sep="\n  ", flush=True)
    return code


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode


def _failed(cache: Path) -> list[str]:
    try:
        return sorted(json.loads((cache / "v/cache/lastfailed").read_text()))
    except (OSError, ValueError):
        return []


if __name__ == "__main__":
    sys.exit(main())
