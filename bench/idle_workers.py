"""Be the idle workers of one host in one thread: ask the ledger all that idle workers ask, when they ask it.

Each has a ledger with connections of its own, a real birth and a bell. The real watchman and neighbours are called lap
by lap, where a worker gives each a thread. Of floor, wheel and heartbeat only the timetable is here (`Replayed`);
`bench.measure_idle` runs this, and compares it with real workers statement by statement.

It prints a line when all are registered. A line on stdin starts the clock anew; the end of stdin ends it all, and the
last line says by how much the worst call was late.
"""

import heapq
import itertools
import os
import random
import select
import sys
from collections.abc import Callable

from bench import tasks
from unstuck import config, host, logs
from unstuck.config import DEFAULT_QUEUE, Settings
from unstuck.domain.states import WorkerState
from unstuck.reaper.ring import Neighbours
from unstuck.reaper.sweep import Reaper
from unstuck.reaper.watchman import Watchman
from unstuck.runner.tasks import Manifest, TaskEntry
from unstuck.store.opening import open_ledger
from unstuck.store.records import Pulse, Turn, Wish
from unstuck.worker.floor import BEATS_PER_COMPARISON
from unstuck.worker.identity import beat_interval_s, birth, new_worker_id, self_description, with_clock

Act = Callable[[], float | None]
"""Do what is due, and give the seconds until it is due again; None: never."""


class Replayed:
    """One worker that never finds a job."""

    def __init__(self, settings: Settings, manifest: Manifest) -> None:
        self.id = new_worker_id()
        self._settings = settings
        self._beat_s = beat_interval_s(settings, manifest)
        self._beats = 0
        self._ledger = open_ledger(settings)
        about = {"hostname": host.hostname(), "pid": os.getpid(), "fork": manifest.fork}
        self._ledger.register(
            with_clock(
                birth(
                    self.id,
                    name=None,
                    settings=settings,
                    manifest=manifest,
                    queues=(DEFAULT_QUEUE,),
                    concurrency=settings.slots,
                    metadata={**about, **self_description(settings, manifest, reaper=True)},
                )
            )
        )
        # Kept, not waited on: nobody rings while everybody is idle. Births are silent too: a thousand that each wake
        # all before them are a load of their own.
        self._bell = self._ledger.listen(self.id)
        names = tuple(task.name for task in manifest.tasks)
        ahead = any(task.policy.on_crash == "retry" for task in manifest.tasks)
        wish = Wish((DEFAULT_QUEUE,), names, settings.slots, run_ahead=ahead, start=settings.slots)
        self._look = Turn(self.id, wish=wish)
        reaper = Reaper(self._ledger, settings.recovery, by=self.id)
        self._watchman = Watchman(reaper)
        self._neighbours = Neighbours(reaper, self.id)

    def acts(self) -> tuple[Act, ...]:
        return self._watchman.step, self._neighbours.step, self.look, self.beat

    def look(self) -> float:
        """Poll: the turn of a worker with all slots free and nothing to hand in (`Floor`)."""
        asked_s = host.boottime_s()
        answer = self._ledger.turn(self._look)
        if not answer.alive or answer.claimed:
            raise RuntimeError(f"idle worker {self.id} was given up for dead, or was given a job")
        return asked_s + self._settings.poll_interval_s - host.boottime_s()

    def beat(self) -> float:
        """Beat (`Heartbeat`), and now and then compare what is held (`Floor`)."""
        sent_s = host.boottime_s()
        answer = self._ledger.beat(Pulse(self.id, 0, 0))
        if answer.state is not WorkerState.ACTIVE or answer.was_suspect:
            raise RuntimeError(f"idle worker {self.id} is {answer.state}, or was suspect")
        self._beats += 1
        if self._beats % BEATS_PER_COMPARISON == 0:
            self._ledger.held(self.id)
        return sent_s + self._beat_s - host.boottime_s()


class Timetable:
    """All acts of all workers of this process, each when it is due."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()
        self.worst_s = 0.0
        """By how much the latest one was late."""

    def add(self, in_s: float, act: Act) -> None:
        heapq.heappush(self._due, (host.boottime_s() + in_s, next(self._numbers), act))

    def run(self) -> None:
        """Go on until stdin ends."""
        while True:
            wait_s = max(0.0, self._due[0][0] - host.boottime_s())
            if select.select([sys.stdin], [], [], wait_s)[0]:
                if not os.read(sys.stdin.fileno(), 4096):
                    return
                self.worst_s = 0.0
            due_s, _, act = self._due[0]
            late_s = host.boottime_s() - due_s
            if late_s >= 0:
                heapq.heappop(self._due)
                self.worst_s = max(self.worst_s, late_s)
                if (again_s := act()) is not None:
                    self.add(again_s, act)


def main() -> None:
    count, url, name, births_per_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    host.hostname = lambda: name
    settings = config.load({"url": url})
    logs.setup("warning")
    found = (TaskEntry(task.name, task.queue, task.is_async, task.policy) for task in tasks.app.definitions.values())
    manifest = Manifest(tuple(found), config.dump(settings), fork=True)
    timetable = Timetable()
    # Kept for its connections and its bell, like the worker that it stands for.
    born: list[Replayed] = []

    def be_born() -> float | None:
        worker = Replayed(settings, manifest)
        born.append(worker)
        *caretakers, look, beat = worker.acts()
        for act in (*caretakers, look):
            timetable.add(0.0, act)
        timetable.add(settings.recovery.heartbeat_interval_s, beat)
        if len(born) < count:
            return random.uniform(0.5, 1.5) / births_per_s
        print("born", flush=True)
        return None

    timetable.add(0.0, be_born)
    timetable.run()
    print(f"{timetable.worst_s:.3f}", flush=True)


if __name__ == "__main__":
    main()
