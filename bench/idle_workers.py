"""Be the idle workers of one host in one process: everything of a worker but its nursery and runners.

Each has a ledger with connections of its own and the real threads: floor, wheel, heartbeat, watchman, neighbours.
Run by `bench.measure_idle`; it prints a line when all are registered, and ends when it is killed.
"""

import os
import random
import sys
import threading
import time
from typing import cast

from unstuck import config, host, logs
from unstuck.config import DEFAULT_QUEUE, Settings
from unstuck.domain.policy import Policy
from unstuck.runner.tasks import Manifest, TaskEntry
from unstuck.runner.trace import Trace
from unstuck.store.opening import open_ledger
from unstuck.worker.bench import Bench
from unstuck.worker.herald import Herald
from unstuck.worker.main import Incarnations
from unstuck.worker.signals import StopSignals

STACK_BYTES = 256 * 1024


class EmptyBench:
    """A bench at which nobody ever works."""

    def __init__(self) -> None:
        self._ear, self._mouth = os.pipe()

    def fileno(self) -> int:
        return self._ear

    def read(self) -> list[object]:
        return []

    def equip(self, trace: Trace, worker_id: str) -> None: ...

    @property
    def importing(self) -> bool:
        return False


class NoSignals:
    def __call__(self) -> int:
        return 0

    def wake(self, fd: int) -> None: ...


def live(settings: Settings) -> None:
    manifest = Manifest((TaskEntry("noop", DEFAULT_QUEUE, False, Policy()),), config.dump(settings), fork=True)
    ledger = open_ledger(settings)
    # Born in silence: a thousand births that each wake all before them are a load of their own.
    ledger.ring = lambda words: None  # type: ignore[method-assign]
    bench = cast(Bench, EmptyBench())
    worker = Incarnations(bench, manifest, settings, ledger, (DEFAULT_QUEUE,), 2, None, True, Herald())
    worker.live(cast(StopSignals, NoSignals()))


def main() -> None:
    count, url, name, spread_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    host.hostname = lambda: name
    settings = config.load({"url": url})
    threading.stack_size(STACK_BYTES)
    logs.setup("warning")
    # The hosts do not begin at the same moment either.
    time.sleep(random.uniform(0.0, spread_s))
    for _ in range(count):
        threading.Thread(target=live, args=(settings,), daemon=True).start()
        time.sleep(spread_s)
    print("born", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
