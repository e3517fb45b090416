"""Wait for the ends of jobs: one thread asks the ledger for everyone in this process at once."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from unstuck.errors import LedgerUnavailable, UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Outcome
from unstuck.logs import logger

FIRST_LOOK_S = 0.001
GROWTH = 1.3
SLOWEST_LOOK_S = 0.2
MISSING_LOOK_S = 1.0
OUTAGE_LOOK_S = 0.5
FIRST_WORRY_S = 5.0
IDLE_S = 5.0

log = logger("unstuck.client")

Answer = Outcome | UnstuckError
Explain = Callable[[int], str | None]


@dataclass(eq=False)
class ResultWait:
    """Somebody who waits. `tell` is called once, from the watching thread."""

    job_id: int
    tell: Callable[[Answer], None]
    began_s: float
    step_s: float = FIRST_LOOK_S
    look_at_s: float = 0.0
    missing_at_s: float = 0.0
    worry_at_s: float = field(default=0.0)


class ResultWatcher:
    """The one who asks. Starts with the first waiter and ends when nobody waits any more."""

    def __init__(self, ledger: Callable[[], Ledger], explain: Explain, missing: Callable[[int], UnstuckError]) -> None:
        self._ledger = ledger
        self._explain = explain
        self._missing_error = missing
        self._condition = threading.Condition()
        self._waiters: list[ResultWait] = []
        self._thread: threading.Thread | None = None

    def wait(self, job_id: int, tell: Callable[[Answer], None]) -> ResultWait:
        now_s = time.monotonic()
        waiter = ResultWait(
            job_id,
            tell,
            now_s,
            look_at_s=now_s,
            missing_at_s=now_s + MISSING_LOOK_S,
            worry_at_s=now_s + FIRST_WORRY_S,
        )
        with self._condition:
            self._waiters.append(waiter)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unstuck-results", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        return waiter

    def remove(self, waiter: ResultWait) -> None:
        with self._condition:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def due_in_s(self) -> float | None:
        """Return how long it is until someone is due, or None if no one waits."""
        with self._condition:
            if not self._waiters:
                return None
            return max(0.0, min(waiter.look_at_s for waiter in self._waiters) - time.monotonic())

    def step(self) -> None:
        """Ask the ledger for all who are due, and tell those whose jobs ended."""
        with self._condition:
            # All who are due within the same moment share the question.
            soon_s = time.monotonic() + FIRST_LOOK_S
            due = [waiter for waiter in self._waiters if waiter.look_at_s <= soon_s]
        if due:
            self._look(due)

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._waiters and not self._condition.wait(IDLE_S) and not self._waiters:
                    self._thread = None
                    return
                if wait_s := self.due_in_s():
                    self._condition.wait(wait_s)
            self.step()

    def _look(self, due: list[ResultWait]) -> None:
        try:
            answers: dict[int, Answer] = {
                outcome.job_id: outcome for outcome in self._ledger().jobs.outcomes({waiter.job_id for waiter in due})
            }
            now_s = time.monotonic()
            doubtful = {w.job_id for w in due if w.job_id not in answers and w.missing_at_s <= now_s}
            if doubtful:
                gone = self._ledger().jobs.missing(doubtful)
                answers.update({job_id: self._missing_error(job_id) for job_id in gone})
        except LedgerUnavailable as error:
            self._later(due, OUTAGE_LOOK_S, str(error))
            return
        except UnstuckError as error:
            answers = {waiter.job_id: error for waiter in due}
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it: this thread is all they have
            answers = {waiter.job_id: UnstuckError(f"Waiting failed: {error!r}") for waiter in due}
        self._tell(due, answers)

    def _tell(self, due: list[ResultWait], answers: dict[int, Answer]) -> None:
        with self._condition:
            told = [waiter for waiter in due if waiter.job_id in answers and waiter in self._waiters]
            for waiter in told:
                self._waiters.remove(waiter)
        for waiter in told:
            try:
                waiter.tell(answers[waiter.job_id])
            except RuntimeError:
                pass  # Its event loop was closed: nobody is there to be told, and the others still wait.
        self._later([waiter for waiter in due if waiter.job_id not in answers], None, None)

    def _later(self, waiters: list[ResultWait], wait_s: float | None, trouble: str | None) -> None:
        now_s = time.monotonic()
        for waiter in waiters:
            waiter.step_s = min(waiter.step_s * GROWTH, SLOWEST_LOOK_S)
            waiter.look_at_s = now_s + (waiter.step_s if wait_s is None else wait_s)
            if waiter.missing_at_s <= now_s:
                waiter.missing_at_s = now_s + MISSING_LOOK_S
            if waiter.worry_at_s <= now_s:
                # Never wait in the dark: say why, at growing intervals.
                waited_s = now_s - waiter.began_s
                waiter.worry_at_s = now_s + waited_s
                self._log_slow_wait(waiter.job_id, waited_s, trouble)

    def _log_slow_wait(self, job_id: int, waited_s: float, trouble: str | None) -> None:
        reason = trouble
        if reason is None:
            try:
                reason = self._explain(job_id)
            except Exception as error:  # noqa: BLE001 - as above: an explanation is not worth the thread
                reason = str(error)
        if reason is not None:
            log.warning(f"Still waiting for job {job_id}: {reason}", job_id=job_id, waited_s=round(waited_s, 1))
