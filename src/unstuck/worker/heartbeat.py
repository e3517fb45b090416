"""Prove that this worker lives, and listen for the bell, in a thread that user code cannot block."""

import threading
from collections import deque
from collections.abc import Callable

from unstuck import host
from unstuck.domain.events import EventKind
from unstuck.domain.states import WorkerState
from unstuck.errors import LedgerBusy, LedgerError, NoLedger, RefusedValue, SchemaMismatch
from unstuck.ledger.contract import Ledger, Listener
from unstuck.ledger.contract.jobs import Progress
from unstuck.ledger.contract.workers import DeferredOutcome, Heartbeat
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.logs import logger
from unstuck.mailbox import Mailbox
from unstuck.metrics.catalogue import BEAT_DELAY
from unstuck.worker.messages import HeartbeatConfirmed, SchemaOutdated, WakeUp
from unstuck.worker.stacks import read_stack_topic
from unstuck.worker.watchdog import ProgressClock

FIRST_PAUSE_S = 0.1
FIRST_PAUSE_SHARE = 0.05
LONGEST_PAUSE_S = 1.0
LONGEST_PAUSE_SHARE = 0.25
"""Of the heartbeat interval, where that is shorter: a worker with a short lease must be back in time."""
PROMOTE_BATCH = 1_000
DEFERRED_BATCH = 10_000
MAX_NEWS = 1_000
"""Events that wait for the ledger; beyond that the oldest are dropped."""
FIRST_LOCKED_S = 0.02
LONGEST_LOCKED_S = 0.5
"""Longest pause before due jobs are looked at again that an open transaction has locked."""

log = logger("unstuck.worker")


class HeartbeatThread:
    """One loop: wait for the bell until the next beat is due, then beat."""

    def __init__(
        self,
        ledger: Ledger,
        worker_id: str,
        mailbox: Mailbox,
        *,
        interval_s: float,
        queues: frozenset[str],
        report: Callable[[], Heartbeat],
        on_workers: Callable[[], None],
        on_schedules: Callable[[], None] = lambda: None,
        metrics_writer: MetricsWriter,
    ) -> None:
        self._ledger = ledger
        self._worker_id = worker_id
        self._mailbox = mailbox
        self._interval_s = interval_s
        self._words = frozenset(f"queue:{name}" for name in queues)
        self._report = report
        self._on_workers = on_workers
        self._on_schedules = on_schedules
        self._metrics_writer = metrics_writer
        self._wakeup_listener: Listener | None = None
        self._bell_lock = threading.Lock()
        self._promote_at_s: float | None = None
        self._promote_from_s = 0.0
        """No sooner: what is due is locked."""
        self._locked_pause_s = 0.0
        self._handed_over_lock = threading.Lock()
        """Guards the next four: other threads add to them while this one takes from them."""
        self._to_ring: set[str] = set()
        self._notes: dict[int, Progress] = {}
        """By token: the newest of each is enough."""
        self._news: deque[tuple[EventKind, int, str]] = deque(maxlen=MAX_NEWS)
        self._dropped_news = 0
        self._deferred: deque[DeferredOutcome] = deque()
        """Outcomes that wait for a lock, and of which the ledger does not know that yet."""
        self._drain = False
        self._promises_at_s = 0.0
        """When to try again what a lock held up."""
        self._beat_wanted = False
        self._stopping = threading.Event()
        self.movement = ProgressClock()
        self._thread = mailbox.thread("heartbeat", self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self._interrupt()
        self._thread.join(timeout_s)

    def announce_drain(self) -> None:
        """Have the ledger show this worker as draining; the beat goes on."""
        self._drain = True
        self._interrupt()

    def shorten_interval(self, interval_s: float) -> None:
        """Beat at least so often from now on: newer code may ask more of a job than our own app does."""
        if interval_s < self._interval_s:
            self._interval_s = interval_s
            self._beat_wanted = True
            self._interrupt()

    def beat_soon(self) -> None:
        """Beat before the next heartbeat is due: there is news that others should act on."""
        self._beat_wanted = True
        self._interrupt()

    def wake_queues(self, queues: set[str]) -> None:
        """Tell other workers that jobs of these queues went back."""
        with self._handed_over_lock:
            self._to_ring |= {f"queue:{name}" for name in queues}
        self._interrupt()

    def report_progress(self, notes: list[Progress]) -> None:
        """Tell the ledger how far running jobs are."""
        with self._handed_over_lock:
            self._notes.update((note.token, note) for note in notes)
        self._interrupt()

    def note_deferred_soon(self, outcomes: list[DeferredOutcome]) -> None:
        """Tell the ledger that these attempts are over, and only a lock keeps their outcomes from being written."""
        self._deferred.extend(outcomes)
        self._interrupt()

    def report_events(self, news: list[tuple[EventKind, int, str]]) -> None:
        """Write down what people should hear of running jobs: where they stand, who blocks a loop."""
        with self._handed_over_lock:
            self._dropped_news += max(0, len(self._news) + len(news) - MAX_NEWS)
            self._news.extend(news)
        self._interrupt()

    def promote_in(self, wait_s: float) -> None:
        """See to it that what is scheduled becomes ready when it is due, and not a poll later."""
        at_s = max(host.boottime_s() + wait_s, self._promote_from_s)
        known_s = self._promote_at_s  # Read once: the other thread may keep the promise meanwhile.
        if known_s is None or at_s < known_s:
            self._promote_at_s = at_s
            self._interrupt()

    def _interrupt(self) -> None:
        # Never a bell that is being closed: its descriptor's number may already be another file's.
        with self._bell_lock:
            if self._wakeup_listener is not None:
                self._wakeup_listener.interrupt()

    def _run(self) -> None:
        # The birth was the first beat.
        due_s = next_beat_s = host.boottime_s() + self._interval_s
        pause_s = 0.0
        self.movement.busy = True
        while not self._stopping.is_set():
            self.movement.moved("heartbeat.step")
            try:
                bell = self._listen()
                if self._stopping.is_set():
                    # Told to stop before there was a bell to interrupt.
                    break
                words = bell.wait(max(0.0, min(next_beat_s, self._chore_s(next_beat_s)) - host.boottime_s()))
                if self._stopping.is_set():
                    break
                if self._hear(words) or self._beat_wanted or host.boottime_s() >= next_beat_s:
                    self._beat_wanted = False
                    sent_s = host.boottime_s()
                    self._beat(sent_s)
                    self._metrics_writer.counters.observe(BEAT_DELAY, host.boottime_s() - min(due_s, sent_s))
                    due_s = next_beat_s = sent_s + self._interval_s
                self._try_promises()
                self._metrics_writer.tend()
                if pause_s:
                    log.info("The ledger is back")
                pause_s = 0.0
            except LedgerBusy as error:
                # The ledger answered, and its connection is well: only this heartbeat must be repeated.
                if not pause_s:
                    log.warning("A lock holds up the heartbeat; trying again", error=str(error))
                pause_s = self._next_pause_s(pause_s)
                next_beat_s = host.boottime_s() + pause_s
            except LedgerError as error:
                if not pause_s:
                    log.warning("Cannot reach the ledger; trying on", error=str(error))
                    if isinstance(error, SchemaMismatch) and not isinstance(error, NoLedger):
                        self._mailbox.post(SchemaOutdated(error))
                pause_s = self._next_pause_s(pause_s)
                next_beat_s = host.boottime_s()
                self._close_bell()
                self._stopping.wait(pause_s)
        self.movement.busy = False
        self._close_bell()

    def _next_pause_s(self, pause_s: float) -> float:
        first_s = min(FIRST_PAUSE_S, FIRST_PAUSE_SHARE * self._interval_s)
        return min(max(first_s, pause_s * 2), LONGEST_PAUSE_S, LONGEST_PAUSE_SHARE * self._interval_s)

    def _listen(self) -> Listener:
        if self._wakeup_listener is None:
            self._wakeup_listener = self._ledger.workers.listen(self._worker_id)
            # Whatever was rung while nobody listened is lost: look.
            self._mailbox.post(WakeUp())
        return self._wakeup_listener

    def _close_bell(self) -> None:
        with self._bell_lock:
            bell, self._wakeup_listener = self._wakeup_listener, None
        if bell is not None:
            bell.close()

    def _hear(self, words: frozenset[str]) -> bool:
        """Pass on what was rung; True when somebody wants this worker's ear."""
        if words & self._words:
            self._mailbox.post(WakeUp())
        for word in words:
            if asked := read_stack_topic(word, self._worker_id):
                self._mailbox.post(asked)
        if "workers" in words:
            self._on_workers()
        if "schedules" in words:
            self._on_schedules()
        return f"worker:{self._worker_id}" in words

    def _beat(self, sent_s: float) -> None:
        answer = self._ledger.workers.beat(self._report())
        self._mailbox.post(HeartbeatConfirmed(sent_s, answer))
        if answer.state in (WorkerState.DEAD, WorkerState.STOPPED):
            self._stopping.set()

    def _try_promises(self) -> None:
        """Keep promises, unless a lock is in the way: then they wait a little, and heartbeats do not wait for them."""
        if host.boottime_s() < self._promises_at_s:
            return
        try:
            self._do_chores()
        except LedgerBusy as error:
            if not self._promises_at_s:
                log.warning("A lock holds up what the heartbeat does beside; trying again", error=str(error))
            self._promises_at_s = self._promote_at_s = host.boottime_s() + self._interval_s / 2
        else:
            self._promises_at_s = 0.0

    def _wait_for_locked(self, *, is_locked: bool) -> None:
        """Choose a growing pause if jobs are due and none could be made ready: another session has them in hand."""
        self._locked_pause_s = (
            min(max(FIRST_LOCKED_S, self._locked_pause_s * 2), LONGEST_LOCKED_S) if is_locked else 0.0
        )
        self._promote_from_s = host.boottime_s() + self._locked_pause_s

    def _chore_s(self, otherwise_s: float) -> float:
        """Return when there is something to do beside heartbeats."""
        promote_s = self._promote_at_s
        return otherwise_s if promote_s is None else max(promote_s, self._promises_at_s)

    def _do_chores(self) -> None:
        if self._drain:
            self._ledger.workers.drain(self._worker_id)
            self._drain = False
        self._write_notes()
        if self._deferred:
            outcomes = list(self._deferred)[:DEFERRED_BATCH]
            self._ledger.workers.note_deferred(self._worker_id, outcomes)
            # Only now: a note that could not be written is written later.
            for _ in outcomes:
                self._deferred.popleft()
        self._write_news()
        with self._handed_over_lock:
            words, self._to_ring = self._to_ring, set()
        if words:
            self._ledger.notify(words)
        if self._promote_at_s is not None and host.boottime_s() >= self._promote_at_s:
            self._promote_at_s = None
            promoted = self._ledger.maintenance.promote_due(PROMOTE_BATCH)
            if promoted.queues:
                self._ledger.notify({f"queue:{name}" for name in promoted.queues})
            if promoted.count or promoted.next_due_in_s != 0.0:
                # Where nothing was due it may have been the rate of a queue, which allows the next job now.
                self._mailbox.post(WakeUp())
            if promoted.next_due_in_s is not None:
                self._wait_for_locked(is_locked=not promoted.queues and promoted.next_due_in_s == 0.0)
                self.promote_in(promoted.next_due_in_s)

    def _write_notes(self) -> None:
        with self._handed_over_lock:
            notes, self._notes = self._notes, {}
        if not notes:
            return
        try:
            self._ledger.workers.note_progress(self._worker_id, list(notes.values()))
        except RefusedValue as error:
            # It would be refused again, and hold up all that comes behind it.
            log.error("The ledger refused the progress of jobs", error=str(error))
        except LedgerError:
            with self._handed_over_lock:
                self._notes = notes | self._notes
            raise

    def _write_news(self) -> None:
        while self._news:
            event = self._news[0]
            kind, job_id, text = event
            try:
                self._ledger.events.write(kind, text, job_id=job_id, worker_id=self._worker_id)
            except RefusedValue as error:
                log.error("The ledger refused an event", job_id=job_id, kind=kind, error=str(error))
            with self._handed_over_lock:
                # While it was written, others may have taken its place.
                if self._news and self._news[0] is event:
                    self._news.popleft()
        with self._handed_over_lock:
            dropped, self._dropped_news = self._dropped_news, 0
        if dropped:
            log.error("Events were dropped, since the ledger was away for too long", count=dropped)
