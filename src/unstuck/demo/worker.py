"""Be one worker of the demo: an ordinary `unstuck worker` that leaves when the demo itself is gone."""

import signal
import sys

from unstuck.cli.main import main
from unstuck.runner import linux


def run(demo_pid: int, arguments: list[str]) -> int:
    # Even a demo that is killed with kill -9 leaves no fleet behind.
    if not linux.die_with_parent(signal.SIGTERM, demo_pid):
        return 0
    return main(["worker", "unstuck.demo.tasks:app", *arguments])


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
