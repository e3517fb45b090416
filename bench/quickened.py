"""Run a worker whose watching goes round many times as often as in life, so that its cost stands out from the noise.

`python -m bench.quickened worker …` is `unstuck worker …` with every period of watching divided by BENCH_QUICKENED:
beats, pulses, looks at runners, weighing, the fork server's rounds. Nothing else differs.
"""

import os
import sys

from unstuck.cli.main import main
from unstuck.config import Recovery
from unstuck.worker import limits, loop, pool, slots, watchdog

VARIABLE = "BENCH_QUICKENED"


def environment(times: int) -> dict[str, str]:
    """Give what such a worker finds in its environment."""
    usual = Recovery()
    return {
        VARIABLE: str(times),
        "UNSTUCK_HEARTBEAT_INTERVAL": f"{usual.heartbeat_interval_s / times}s",
        "UNSTUCK_RUNNER_HEARTBEAT_INTERVAL": f"{usual.runner_heartbeat_interval_s / times}s",
    }


def quicken_worker(times: int) -> None:
    pool.LOOK_S /= times
    slots.FIRST_LOOK_S /= times
    loop.BUSY_TICK_S /= times
    limits.MEASURE_S /= times
    limits.MEASURE_LIMITED_S /= times
    limits.MEASURE_NEAR_S /= times
    watchdog.LOOK_EVERY_S /= times


def quicken_fork_server() -> None:
    """Do the same in the fork server: it runs as the main module of its process, and imports the app."""
    fork_server = sys.modules["__main__"]
    if getattr(fork_server, "Fork server", None) is not None:
        fork_server.TICK_S /= int(os.environ[VARIABLE])  # type: ignore[attr-defined]


if __name__ == "__main__":
    quicken_worker(int(os.environ[VARIABLE]))
    sys.exit(main())
