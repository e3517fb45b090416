"""Run a worker: bring up the bench, join the ledger, work, and leave in order.

A worker that was declared dead comes back under a new id; only a shutdown ends the process.
"""

import os
import time
from contextlib import suppress

from unstuck import config, host
from unstuck.config import DEFAULT_QUEUE, Settings
from unstuck.domain.text import did_you_mean
from unstuck.errors import LedgerError, LedgerUnavailable, UnknownQueue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import Heartbeat, NewWorker
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.ledger.open import EXPECTED_LEDGER, open_ledger, ready_ledger
from unstuck.logs import logger
from unstuck.mailbox import Mailbox
from unstuck.maintenance.loop import Loop
from unstuck.maintenance.scheduler import Scheduler
from unstuck.metrics.counters import Counters
from unstuck.recovery.death_watch import PeerWatch
from unstuck.recovery.reap import Reaper
from unstuck.runner.last_output import LastOutputFile, last_output_path, read_last_output
from unstuck.runner.status_page import StatusPage, status_page_path
from unstuck.runner.tasks import Manifest
from unstuck.worker.fork_client import ForkServerClient
from unstuck.worker.health import MemoryReport, WorkerHealth, own_memory_bytes
from unstuck.worker.heartbeat import HeartbeatThread
from unstuck.worker.ledger_thread import LedgerThread
from unstuck.worker.loop import WorkerLoop
from unstuck.worker.registration import (
    heartbeat_interval_s,
    new_worker_id,
    registration_of,
    self_description,
    with_clock,
)
from unstuck.worker.sd_notify import SdNotifier, take_sd_notifier
from unstuck.worker.signals import StopSignals
from unstuck.worker.slots import status_page_slots
from unstuck.worker.watchdog import Watchdog, Watched

JOIN_S = 5.0
REBIRTH_PAUSE_S = 0.5
CLOCK_TRUST_S = 0.5

log = logger("unstuck.worker")


def run_worker(
    target: str,
    *,
    queues: tuple[str, ...] | None = None,
    concurrency: int | None = None,
    name: str | None = None,
    reaper: bool = True,
    url: str | None = None,
) -> int:
    """Work until told to stop; give the exit code."""
    # First of all: what we start must not speak to systemd in our name.
    sd_notifier = take_sd_notifier()
    expected = os.environ.pop(EXPECTED_LEDGER, None)
    signals = StopSignals()
    fork_server = ForkServerClient(target, url=url)
    try:
        manifest = fork_server.start()
        settings = config.restore(manifest.settings)
        served = _served(queues, manifest)
        # The tables are looked at over a connection of its own: a worker keeps two, and this is neither.
        first = ready_ledger(settings, expected)
        ledger = open_ledger(settings)
        ledger_id = first.ledger_id()
        ledger.expect(ledger_id)
        first.close()
        try:
            worker = Worker(
                fork_server,
                manifest,
                settings,
                ledger,
                ledger_id,
                served,
                concurrency,
                name,
                reaper,
                sd_notifier,
            )
            while not worker.live(signals):
                # What the old id held is killed with its bench; the new one starts with a clean table.
                fork_server.close()
                fork_server.start()
            return 0
        finally:
            ledger.close()
    finally:
        fork_server.close()


def _served(asked: tuple[str, ...] | None, manifest: Manifest) -> tuple[str, ...]:
    known = {task.queue for task in manifest.tasks} | set(manifest.queues) | {DEFAULT_QUEUE}
    for queue in asked or ():
        if queue not in known:
            raise UnknownQueue(
                f"No task of this app uses the queue {queue!r}.{did_you_mean(queue, known)} "
                f"Known: {', '.join(sorted(known))}. Declare others with App(…, queues=[…])."
            )
    return tuple(dict.fromkeys(asked)) if asked else tuple(sorted(known))


class Worker:
    """One process, one bench; a new id each time the ledger took the last one for dead."""

    def __init__(
        self,
        fork_server: ForkServerClient,
        manifest: Manifest,
        settings: Settings,
        ledger: Ledger,
        ledger_id: str,
        queues: tuple[str, ...],
        concurrency: int | None,
        name: str | None,
        reaper: bool,
        sd_notifier: SdNotifier,
    ) -> None:
        self._fork_server = fork_server
        self._manifest = manifest
        self._settings = settings
        self._ledger = ledger
        self._ledger_id = ledger_id
        self._queues = queues
        self._slots = concurrency or settings.slots
        self._name = name
        self._with_reaper = reaper
        self._sd_notifier = sd_notifier
        self._reborn = False
        self._health = WorkerHealth(memory_report=MemoryReport())
        self._metrics_writer = MetricsWriter(ledger, Counters(), settings.recovery.heartbeat_interval_s)

    def live(self, signals: StopSignals) -> bool:
        """Live one life; False when it ended because the ledger declared it dead."""
        worker_id = new_worker_id()
        status_page = StatusPage.create(status_page_path(worker_id), status_page_slots(self._slots), self._ledger_id)
        # After the page, and removed before it: whoever removes the page of a dead worker knows of both.
        words = LastOutputFile.create(last_output_path(status_page.path), self._slots)
        mailbox = Mailbox()
        try:
            self._fork_server.configure(status_page, worker_id)
            born_s = self._register(worker_id, signals)
            self._reborn = True
            ended_well = self._work(worker_id, status_page, words, mailbox, born_s, signals)
            if not ended_well and words is not None:
                # Whoever declared us dead may have been on another host, and could not read this.
                with suppress(LedgerError):
                    self._ledger.recovery.add_last_words(list((read_last_output(words.path) or {}).values()))
            return ended_well
        finally:
            signals.wake(-1)
            mailbox.close()
            if words is not None:
                words.unlink()
            status_page.unlink()

    def _join(self, born: NewWorker, signals: StopSignals) -> float:
        """Write the birth down; a worker that comes back waits out an outage. Gives when it was sent."""
        repeated = False
        while True:
            sent_s = host.boottime_s()
            try:
                told = with_clock(born)
                disabled = self._ledger.workers.register(told)
                if repeated:
                    # An earlier try may have written the birth, and only its answer was lost: then this one wrote
                    # nothing, and the lease counts from back then. A heartbeat counts from now.
                    sent_s = host.boottime_s()
                    self._ledger.workers.beat(Heartbeat(born.id, 0, 0))
                self._ledger.queues.declare_limits(self._manifest.limits)
                if not self._reborn:
                    # Not when it comes back: newer code may have been written down meanwhile.
                    self._ledger.schedules.know(self._manifest.schedules, "app")
                self._health.born(told.metadata, disabled=disabled)
                self._ledger.notify({"workers"})
                break
            except LedgerUnavailable as error:
                if not self._reborn or signals():
                    raise
                log.warning("Cannot come back yet", error=str(error))
            repeated = True
            self._sd_notifier.alive()
            time.sleep(REBIRTH_PAUSE_S)
        if host.boottime_s() - sent_s > CLOCK_TRUST_S:
            # The ledger's time of birth came so late that our clock would look as if it were behind: take it back.
            self._health.born(born.metadata, disabled=disabled)
            with suppress(LedgerError):
                self._ledger.workers.beat(Heartbeat(born.id, 0, 0, born.metadata))
        return sent_s

    def _register(self, worker_id: str, signals: StopSignals) -> float:
        metadata = {
            "hostname": host.hostname(),
            "pid": os.getpid(),
            "memory_bytes": own_memory_bytes(),
            "fork": self._manifest.fork,
            "why_spawn": self._manifest.why_spawn,
            **self_description(self._settings, self._manifest, reaper=self._with_reaper),
        }
        born = registration_of(
            worker_id,
            name=self._name,
            settings=self._settings,
            manifest=self._manifest,
            queues=self._queues,
            concurrency=self._slots,
            metadata={key: value for key, value in metadata.items() if value != ""},
        )
        sent_s = self._join(born, signals)
        log.info(
            "Worker started",
            worker_id=worker_id,
            worker_name=born.name,
            queues=",".join(self._queues),
            concurrency=self._slots,
            tasks=len(self._manifest.tasks),
            ledger=config.ledger_name(self._settings),
        )
        if self._manifest.note:
            log.warning(self._manifest.note)
        if not self._manifest.tasks:
            log.warning(
                f"The app {self._fork_server.target} has no tasks, so this worker can run no job. Import the modules "
                "that define them where the app is made, or name another app."
            )
        if not self._manifest.fork:
            log.warning("Runners are spawned, not forked", why=self._manifest.why_spawn)
        return sent_s

    def _work(
        self,
        worker_id: str,
        status_page: StatusPage,
        words: LastOutputFile | None,
        mailbox: Mailbox,
        born_s: float,
        signals: StopSignals,
    ) -> bool:
        ledger, recovery = self._ledger, self._settings.recovery
        counters = self._metrics_writer.counters
        watch = Reaper(ledger, recovery, by=worker_id, counters=counters)
        peers = PeerWatch(watch, worker_id) if self._with_reaper else None
        reaper_loop = Loop(watch) if self._with_reaper else None
        scheduler = Scheduler(ledger, self._manifest.schedules, counters)
        ledger_thread = LedgerThread(ledger, worker_id, mailbox)
        worker_loop = WorkerLoop(
            worker_id=worker_id,
            fork_server=self._fork_server,
            status_page=status_page,
            words=words,
            manifest=self._manifest,
            settings=self._settings,
            queues=self._queues,
            slots=self._slots,
            mailbox=mailbox,
            ledger_thread=ledger_thread,
            born_s=born_s,
            health=self._health,
            counters=counters,
        )
        heartbeat = HeartbeatThread(
            ledger,
            worker_id,
            mailbox,
            interval_s=heartbeat_interval_s(self._settings, self._manifest),
            queues=frozenset(self._queues),
            report=worker_loop.pulse,
            on_workers=peers.refresh if peers is not None else lambda: None,
            on_schedules=scheduler.kick,
            metrics_writer=self._metrics_writer,
        )
        worker_loop.attach(heartbeat)
        watched = Watched(
            worker_loop.movement,
            ledger_thread.movement,
            heartbeat.movement,
            worker_loop.wants_a_turn,
            lambda: self._fork_server.importing,
        )
        watchdog = Watchdog(worker_id, self._settings, watched, self._sd_notifier)
        parts = [
            part for part in (ledger_thread, heartbeat, reaper_loop, scheduler, peers, watchdog) if part is not None
        ]
        for part in parts:
            part.start()
        signals.wake(mailbox.wakeup_fd)
        line = f"worker {worker_id} serves {', '.join(self._queues)} with {self._slots} slots"
        self._sd_notifier.ready(line)
        self._sd_notifier.status(line)
        try:
            drained = worker_loop.run(signals)
            # From here on the floor stands still because it is done, and the last words may wait for the ledger.
            watchdog.stop()
            if drained:
                self._sd_notifier.stopping("draining: takes nothing new")
                self._retire(worker_loop.pulse())
            if worker_loop.outdated is not None:
                # Not code 0: a supervisor must fill the place, perhaps with a version that was installed meanwhile.
                raise worker_loop.outdated
            return drained
        finally:
            watchdog.stop()
            ledger_thread.stop(JOIN_S)
            for caretaker in (peers, reaper_loop, scheduler):
                if caretaker is not None:
                    caretaker.stop()
            # The beat stops last: a worker that is shutting down is still alive.
            heartbeat.stop(JOIN_S)
            self._metrics_writer.flush()

    def _retire(self, last: Heartbeat) -> None:
        try:
            # One more beat: what was done since the one before would else never be counted.
            self._ledger.workers.beat(last)
            self._ledger.workers.stop(last.worker_id)
            self._ledger.notify({"workers"})
            log.info("Worker stopped", worker_id=last.worker_id)
        except LedgerUnavailable as error:
            log.error("Could not tell the ledger that this worker stopped; the reaper will", error=str(error))
        except LedgerError as error:
            log.error("The ledger refused the end of this worker", error=str(error))
