"""Run the demo from the first worker to the last job, and clean up behind it whatever happens."""

import signal
import time
from pathlib import Path
from typing import Protocol, Self, TextIO

from unstuck.demo.fleet import DemoDashboard, Fleet, Member
from unstuck.demo.killer import Death, Killer
from unstuck.demo.score import Score, SnapshotReader, audit
from unstuck.demo.tasks import QUEUE, JobStream, app
from unstuck.demo.view import Stage
from unstuck.errors import LedgerUnavailable, UnstuckError

TICK_S = 0.03
LOOK_S = 0.2
START_S = 60.0
"""How long the fleet may take to report for duty."""
CALM_S = 90.0
"""How long the last jobs may take to end: longer than a lease, the slowest way to see a death."""


class View(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def started(self, member: Member) -> None: ...
    def died(self, death: Death) -> None: ...
    def phase(self, sentence: str) -> None: ...
    def draw(self) -> None: ...


class DemoFailed(UnstuckError):
    """The fleet could not be brought up."""


def run_demo(
    folder: Path, out: TextIO, *, ledger: str, seconds: float, workers: int, kill_every_s: float, dashboard: bool
) -> Score:
    """Play the whole of it on the ledger that the app names, and give the summary."""
    stream = JobStream(workers)
    fleet = Fleet(workers, folder)
    lookout = SnapshotReader(app.ledger, fleet, stream.ids)
    door = DemoDashboard(folder, wanted=dashboard)
    stage = Stage(seconds, workers, kill_every_s, ledger, fleet, lookout, door)
    ended = False
    try:
        with door, _view(stage, out) as view:
            stage.killer = killer = Killer(fleet, app.ledger, kill_every_s, view.died)
            try:
                _Phases(stage, view, stream, killer).run()
                ended = True
            finally:
                _go_home(fleet, stream, killer, hurry=not ended)
        return Score(
            seconds,
            workers,
            ledger,
            audit(app.ledger, stream.ids, folder / "record"),
            killer.deaths,
            fleet.unexpected,
            stream.trouble,
        )
    finally:
        app.close()


def _view(stage: Stage, out: TextIO) -> View:
    if out.isatty():
        from unstuck.demo.view import LiveView

        live = LiveView(stage, out)
        if live.possible:
            return live
    from unstuck.demo.view import PlainView

    return PlainView(stage, out)


class _Phases:
    """The acts: the fleet comes up, the storm, the calm after it."""

    def __init__(self, stage: Stage, view: View, stream: JobStream, killer: Killer) -> None:
        self._fleet = stage
        self._view = view
        self._stream = stream
        self._killer = killer
        self._looked_s = 0.0

    def run(self) -> None:
        self._come_up()
        self._storm()
        self._calm()

    def _come_up(self) -> None:
        stage = self._fleet
        self._view.phase("The fleet is coming up.")
        stage.fleet.launch()
        for member in stage.fleet.members:
            self._view.started(member)
        give_up_s = time.monotonic() + START_S
        while len(stage.fleet.ready_members()) < stage.workers:
            if time.monotonic() > give_up_s or stage.fleet.unexpected:
                words = stage.fleet.unexpected or [f"not all of them were ready after {START_S:.0f} s"]
                raise DemoFailed(
                    f"The demo's workers did not come up: {words[0]}. Try --workers 1, or run "
                    "`unstuck worker unstuck.demo.tasks:app` to see why."
                )
            self._tick()

    def _storm(self) -> None:
        stage = self._fleet
        self._view.phase("Jobs stream in; somebody is killed every now and then. Ctrl-C ends it.")
        shown = ""
        stage.began_s = time.monotonic()
        self._stream.start()
        self._killer.start()
        while stage.storming:
            self._tick()
            if stage.door.url != shown:
                shown = stage.door.url
                self._view.phase(f"Jobs stream in; somebody is killed every now and then. Watch it at {shown} too.")

    def _calm(self) -> None:
        stage = self._fleet
        self._killer.ask_to_stop()
        self._stream.stop()
        self._view.phase("No more jobs, no more kills: waiting until everything has ended.")
        give_up_s = time.monotonic() + CALM_S
        while True:
            self._tick(look=True)
            if not stage.lookout.unfinished and not self._killer.measuring:
                self._view.phase("Everything has ended; the fleet goes home.")
                return
            if time.monotonic() > give_up_s:
                left = stage.lookout.unfinished_ids
                named = ", ".join(map(str, left[:10]))
                self._view.phase(f"After {CALM_S:.0f} s {len(left)} jobs had not ended: {named}. They count as lost.")
                return

    def _tick(self, look: bool = False) -> None:
        for member in self._fleet.fleet.tend():
            self._view.started(member)
        now_s = time.monotonic()
        if look or now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            try:
                self._fleet.lookout.look()
            except LedgerUnavailable:
                # A ledger that is busy or restarting: the picture stands still for a moment.
                pass
        self._view.draw()
        time.sleep(TICK_S)


def _go_home(fleet: Fleet, stream: JobStream, killer: Killer, *, hurry: bool) -> None:
    """Leave nothing behind: no thread, no process, no shared memory, and on a borrowed ledger no waiting job."""
    interrupts = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A second Ctrl-C must not leave half of the fleet behind.
    before = [signal.signal(number, signal.SIG_IGN) for number in interrupts]
    try:
        killer.ask_to_stop()
        stream.stop()
        fleet.send_home(hurry)
        killer.stop(1.0)
        if hurry:
            app.ledger.queues.purge(QUEUE, by="demo")
        fleet.forget(app.ledger)
    finally:
        for number, handler in zip(interrupts, before, strict=True):
            signal.signal(number, handler)
