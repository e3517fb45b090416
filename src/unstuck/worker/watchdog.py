"""End a worker whose loops stand still, judged by the progress that each loop shows."""

import faulthandler
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from typing import NoReturn

import msgspec

from unstuck import failpoints, host
from unstuck.config import Settings
from unstuck.domain.autopsy import MAX_STACK_CHARS, Autopsy, DeathKind
from unstuck.domain.endings import storable_text
from unstuck.domain.liveness import Detector
from unstuck.domain.states import WorkerState
from unstuck.domain.units import brief
from unstuck.errors import UnstuckError
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import WorkerVerdict
from unstuck.ledger.open import open_ledger
from unstuck.logs import logger
from unstuck.worker.exit_status import WATCHDOG_EXIT
from unstuck.worker.sd_notify import SdNotifier


class ProgressClock:
    """One loop. Plain attributes: a glance that is a moment old is good enough."""

    def __init__(self) -> None:
        self.rounds = 0
        """Goes up with each round, and with each try to reach the ledger."""
        self.busy = False
        """It is at work. Of a loop that speaks to the ledger: it waits for the ledger."""
        self.leaving = False
        """It takes nothing new any more."""

    def moved(self, point: str = "") -> None:
        """Note a round; `point` is the failpoint at which a test may hang it."""
        self.rounds += 1
        if point and failpoints.active:
            failpoints.reached(point)


LOOK_EVERY_S = 0.5
LATE_S = 2.0
"""Who looks so late was frozen, asleep or starved, and the others with him."""
TIMEOUTS = 2.0
"""A loop may stand still for so many heartbeat timeouts."""
LEAST_LIMIT_S = 6.0
CALL_LIMITS = 10.0
"""A single call to the ledger is given this many limits. Each call has a shorter bound of its own, and ends by it."""
LAST_WORDS_S = 5.0
IDLE = "alive but doing nothing"

log = logger("unstuck.worker")


class Watched(msgspec.Struct, frozen=True):
    """The loops of one worker; each shows how often it went round."""

    worker_loop: ProgressClock
    ledger_thread: ProgressClock
    heartbeat: ProgressClock
    wants_a_turn: Callable[[], bool]
    busy_elsewhere: Callable[[], bool]
    """The floor waits for something that has a limit of its own: the import of the app."""


class Stillness:
    """For how long a number has not moved although it should: counted look by look."""

    def __init__(self) -> None:
        self.still_s = 0.0
        self._seen = -1

    def look(self, rounds: int, *, expected: bool, elapsed_s: float) -> float:
        if rounds != self._seen or not expected:
            self._seen, self.still_s = rounds, 0.0
        else:
            self.still_s += elapsed_s
        return self.still_s

    def forgive(self) -> None:
        self.still_s = 0.0


class Jury:
    """Decides from the signs alone; it has no clock and does nothing."""

    def __init__(self, limit_s: float, poll_s: float) -> None:
        self.limit_s = limit_s
        self._poll_s = poll_s
        self.worker_loop, self._ledger_thread, self._turn, self._beat = (
            Stillness(),
            Stillness(),
            Stillness(),
            Stillness(),
        )

    def look(self, watched: Watched, elapsed_s: float) -> str | None:
        """Take one look; return the evidence if something stood still for too long."""
        if elapsed_s > LATE_S:
            for stillness in (self.worker_loop, self._ledger_thread, self._turn, self._beat):
                stillness.forgive()
            return None
        worker_loop, ledger_thread, heartbeat = watched.worker_loop, watched.ledger_thread, watched.heartbeat
        floor_s = self.worker_loop.look(worker_loop.rounds, expected=not watched.busy_elsewhere(), elapsed_s=elapsed_s)
        wanted = watched.wants_a_turn() and not ledger_thread.busy
        wheel_s = self._ledger_thread.look(ledger_thread.rounds, expected=wanted, elapsed_s=elapsed_s)
        turn_s = self._turn.look(ledger_thread.rounds, expected=ledger_thread.busy, elapsed_s=elapsed_s)
        beat_s = self._beat.look(heartbeat.rounds, expected=heartbeat.busy, elapsed_s=elapsed_s)
        if floor_s >= self.limit_s:
            return f"{IDLE}: its floor has not gone round for {brief(floor_s)}"
        if wheel_s >= self.limit_s + 2 * self._poll_s:
            return f"{IDLE}: its wheel was wanted and has not turned for {brief(wheel_s)}"
        for call_s, what in ((turn_s, "turn"), (beat_s, "heartbeat")):
            if call_s >= self.limit_s * CALL_LIMITS:
                return f"{IDLE}: its {what} hangs in the ledger for {brief(call_s)}"
        return None


class Watchdog:
    """A thread per life of a worker. It gives the sign of life to systemd or the supervisor too."""

    def __init__(self, worker_id: str, settings: Settings, watched: Watched, sd_notifier: SdNotifier) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._watched = watched
        self._sd_notifier = sd_notifier
        self._jury = Jury(limit_s(settings), settings.poll_interval_s)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        looked_s = host.boottime_s()
        while not self._stopping.wait(LOOK_EVERY_S):
            now_s = host.boottime_s()
            if self._watched.worker_loop.leaving:
                self._sd_notifier.stopping("draining: takes nothing new")
            evidence = self._jury.look(self._watched, now_s - looked_s)
            looked_s = now_s
            if evidence is not None and not self._stopping.is_set():
                self._end(evidence)
            if self._jury.worker_loop.still_s < LATE_S:
                # Only while the floor goes round: whoever listens may have a limit of his own.
                self._sd_notifier.alive()

    def _end(self, evidence: str) -> NoReturn:
        """Say why, within a limit, and go: whatever hangs might hold the log or the ledger too."""
        words = threading.Thread(target=self._last_words, args=(evidence,), name="unstuck-last-words", daemon=True)
        words.start()
        words.join(LAST_WORDS_S)
        # No clean-up: it could hang where the worker hangs. What is left behind is settled as after any death.
        os._exit(WATCHDOG_EXIT)

    def _last_words(self, evidence: str) -> None:
        self._sd_notifier.status(evidence)
        faulthandler.dump_traceback(all_threads=True)
        log.error("This worker is ended by its own watchdog", worker_id=self._worker_id, evidence=evidence)
        death = Autopsy(DeathKind.WATCHDOG, evidence, Detector.WATCHDOG, pid=os.getpid(), stack=own_stacks())
        verdict = WorkerVerdict(WorkerState.DEAD, Detector.WATCHDOG, evidence, 0.0, self._worker_id, death)
        try:
            # A ledger of our own: the connections of this worker may be what it hangs in.
            with closing(open_ledger(self._settings)) as ledger:
                ledger.recovery.declare_dead(self._worker_id, verdict, GuardNone())
                ledger.notify({"workers"})
        except UnstuckError as error:
            log.error("The watchdog's verdict could not be written down; whoever finds us will", error=str(error))


def own_stacks() -> str:
    """Give the stacks of all threads of this process, bounded."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return storable_text(file.read().decode("utf-8", "backslashreplace"), MAX_STACK_CHARS)


def limit_s(settings: Settings) -> float:
    """Give how long a loop may stand still: far longer than any round of it takes."""
    return max(TIMEOUTS * settings.recovery.heartbeat_timeout_s, LEAST_LIMIT_S)
