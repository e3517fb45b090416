"""What remote workers do with attempts: start, progress, settle, release, and how it is counted."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, assert_never

from unstuck.config import Settings
from unstuck.domain import payload
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.endings import (
    MAX_MESSAGE_CHARS,
    Cancelled,
    Died,
    Ending,
    NotStorable,
    Outcome,
    Raised,
    Release,
    Succeeded,
    Suspended,
    conclude,
    storable_text,
)
from unstuck.domain.states import AttemptState, JobState
from unstuck.errors import ConfigError, LedgerBusy, PayloadError, RefusedValue
from unstuck.http.problems import Problem
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Fate, Progress
from unstuck.ledger.contract.workers import Claimed, DeferredOutcome, HeldRecord, Output, Success, Turn, TurnAnswer
from unstuck.metrics.catalogue import JOB_RETRIES, JOB_RUN, JOB_WAIT, SUPERSEDED
from unstuck.metrics.counters import Counters
from unstuck.metrics.endings import count_ended
from unstuck.recovery.decide import attempt_of
from unstuck.remote import journal
from unstuck.remote.explain import superseded
from unstuck.remote.handed_out import HandedJob
from unstuck.remote.messages import ErrorBody, HeldBody, ProgressItem, SettleItem, StepItem
from unstuck.remote.registry import RemoteWorker

Key = tuple[int, int]


def count_claimed(counters: Counters, jobs: Iterable[Claimed]) -> None:
    for job in jobs:
        counters.observe(JOB_WAIT, job.waited_s, (job.queue, job.task))


def count_succeeded(counters: Counters, jobs: Iterable[HandedJob]) -> None:
    """Count plain successes of jobs that were handed out here."""
    now_s = time.monotonic()
    for job in jobs:
        counters.observe(JOB_RUN, now_s - job.since_s, (job.queue, job.task))
        count_ended(counters, job.queue, job.task, JobState.SUCCEEDED)


def count_settled(
    counters: Counters,
    held: Mapping[Key, HeldRecord],
    endings: Mapping[Key, Ending],
    keys: Iterable[Key],
    lost: Collection[Key],
) -> None:
    """Count what was written."""
    for key in keys:
        if key in lost:
            continue
        job, ending = held[key], endings.get(key)
        state = JobState.SUCCEEDED if ending is None else ending.state
        counters.observe(JOB_RUN, job.running_s, (job.queue, job.task))
        if state not in (JobState.PENDING, JobState.WAITING):
            count_ended(counters, job.queue, job.task, state)
        elif ending is not None and ending.error is not None:
            counters.add(JOB_RETRIES, (job.queue, ending.error.code))


class Named(Protocol):
    """Anything that names a job in a worker's hands."""

    job_id: int
    token: int


class PlainSuccess(Protocol):
    """A success that nothing else comes with, as the quick way reads it."""

    job_id: int
    token: int
    outcome: Literal["succeeded"]
    result: Any


Outcomes = SettleItem | PlainSuccess
Result = dict[str, Any]
Ring = Callable[[set[str]], None]

REPEATED_WITHIN_S = 60.0
"""How soon a worker repeats a settlement that a lock held up. Later its jobs count as running again."""
ENDS: dict[str, frozenset[AttemptState]] = {
    "succeeded": frozenset({AttemptState.SUCCEEDED}),
    # Asked to be cancelled, a failure becomes a cancellation; a result that cannot be stored, a failure.
    "failed": frozenset({AttemptState.FAILED, AttemptState.CANCELLED}),
    "cancelled": frozenset({AttemptState.CANCELLED}),
    "interrupted": frozenset({AttemptState.DRAINED, AttemptState.CANCELLED}),
    "suspended": frozenset({AttemptState.SUSPENDED, AttemptState.CANCELLED}),
}
"""How an attempt may stand in the ledger after such an outcome was written."""


class RemoteAttempts:
    """One foreign worker's hands, for one call."""

    def __init__(
        self, ledger: Ledger, settings: Settings, ring: Ring, worker: RemoteWorker, caller: Caller, counters: Counters
    ) -> None:
        self._ledger = ledger
        self._settings = settings
        self._wakeups = ring
        self._worker = worker
        self._caller = caller
        self._counters = counters

    def started(self, keys: Sequence[Key], answer: TurnAnswer) -> list[Result]:
        """Say of each job whether it runs now, ran already or is another worker's, as the ledger answered."""
        lost = answer.superseded if answer.alive else set(keys)
        running = {key for key, job in self._held().items() if job.state is JobState.RUNNING} if lost else set()
        results = {key: _done(key, "already" if key in lost else "running") for key in keys}
        results |= self._lost([key for key in keys if key in lost and key not in running])
        return [results[key] for key in keys]

    def progress(self, jobs: Sequence[ProgressItem]) -> list[Result]:
        held = self._held()
        at = time.time()
        notes: dict[Key, Progress] = {}
        keys = keys_of(jobs)
        results = self._lost([key for key in keys if key not in held])
        for item in jobs:
            key = (item.job_id, item.token)
            if key not in held:
                continue
            if held[key].state is not JobState.RUNNING:
                results[key] = _refused(key, "not_started", NOT_STARTED)
            else:
                message = storable_text(item.message, MAX_MESSAGE_CHARS)
                notes[key] = Progress(*key, at, item.done, item.total, message)
                results[key] = _done(key, "noted")
        if notes:
            self._ledger.workers.note_progress(self._worker.id, list(notes.values()))
        return [results[key] for key in keys]

    def steps(self, jobs: Sequence[StepItem]) -> list[Result]:
        """Write down what jobs did, job by job and one after the other: the later may stand on the earlier."""
        held = self._held()
        lost = self._lost([key for key in keys_of(jobs) if key not in held])
        places: dict[int, list[int]] = {}
        for place, item in enumerate(jobs):
            places.setdefault(item.job_id, []).append(place)
        results: dict[int, Result] = {}
        for job_id, own in places.items():
            # Of one job at a time: its journal may have megabytes.
            known = journal.JobJournal(self._ledger, job_id)
            for place in own:
                item = jobs[place]
                results[place] = lost.get((job_id, item.token)) or self._step(item, held, known)
        return [results[place] for place in range(len(jobs))]

    def _step(self, item: StepItem, held: dict[Key, HeldRecord], known: journal.JobJournal) -> Result:
        key = (item.job_id, item.token)
        if held[key].state is not JobState.RUNNING:
            return _refused(key, "not_started", NOT_STARTED)
        try:
            entry = journal.entry_of(known, item, self._settings.max_payload_bytes)
        except journal.Refused as refused:
            return _refused(key, refused.status, str(refused))
        if entry is None:
            return _done(key, "already")
        answer = self._turn(entries=(entry,))
        if not answer.alive or key in answer.superseded:
            return self._lost([key])[key]
        known.note(entry)
        return _done(key, "written")

    def release(self, jobs: Sequence[HeldBody]) -> list[Result]:
        """Give back what was never begun. That it is not held any more is what was wanted.

        What was started may have had effects, whatever the worker says: there `on_crash` decides, as after a death."""
        keys = keys_of(jobs)
        held = {key: job for key, job in self._held().items() if key in keys}
        begun = {key for key, job in held.items() if job.state is JobState.RUNNING}
        free = [key for key in held if key not in begun]
        gone = set(keys) - held.keys()
        if free:
            answer = self._turn(release=tuple(Release(*key) for key in free))
            gone |= answer.superseded if answer.alive else set(free)
            self._wakeups({f"queue:{held[key].queue}" for key in free})
        return [
            _refused(key, "started", STARTED) if key in begun else _done(key, "already" if key in gone else "released")
            for key in keys
        ]

    def release_claimed(self) -> tuple[int, int]:
        """Give back all that was only claimed; give how many went back and how many still run."""
        held = self._held()
        claimed = [HeldBody(job_id=key[0], token=key[1]) for key, job in held.items() if job.state is JobState.CLAIMED]
        if claimed:
            self.release(claimed)
        return len(claimed), len(held) - len(claimed)

    def settle(self, jobs: Sequence[SettleItem]) -> list[Result]:
        items = {(item.job_id, item.token): item for item in jobs}
        held = self._held()
        results = self._already({key: item for key, item in items.items() if key not in held})
        outcomes: dict[Key, Outcome] = {}
        for key, item in items.items():
            job = held.get(key)
            if job is None:
                continue
            if job.state is not JobState.RUNNING:
                results[key] = _refused(key, "not_started", NOT_STARTED)
            elif item.outcome == "cancelled" and not job.cancel_requested:
                results[key] = _refused(
                    key, "not_asked", "Nobody asked to cancel it. Settle it as failed or succeeded."
                )
            elif item.outcome == "suspended" and _wrong_pause(item):
                results[key] = _refused(key, "not_valid", _wrong_pause(item))
            else:
                outcomes[key] = self._outcome(item)
        results |= self._write(items, held, outcomes)
        return [results[key] for key in items]

    # ------------------------------------------------------------------------------------------

    def _write(
        self, items: dict[Key, SettleItem], held: dict[Key, HeldRecord], outcomes: dict[Key, Outcome]
    ) -> dict[Key, Result]:
        if not outcomes:
            return {}
        done = [Success(*key, outcome.result) for key, outcome in outcomes.items() if isinstance(outcome, Succeeded)]
        endings = {
            key: conclude(attempt_of(held[key]), outcome)
            for key, outcome in outcomes.items()
            if not isinstance(outcome, Succeeded)
        }
        pauses = [items[key] for key, outcome in outcomes.items() if isinstance(outcome, Suspended)]
        try:
            answer = self._turn(
                entries=tuple(journal.pause_of(item, item.pause)[1] for item in pauses if item.pause is not None),
                done=tuple(done),
                endings=tuple(endings.values()),
                outputs=tuple(output for key in outcomes if (output := self._output(items[key])) is not None),
            )
        except RefusedValue as error:
            return self._write_apart(items, held, outcomes, error)
        except LedgerBusy as error:
            # The worker is told to settle them again: until then they are not late, though their deadline passes.
            waiting = [DeferredOutcome(*key, str(error)) for key in outcomes]
            self._ledger.workers.note_deferred(self._worker.id, waiting, REPEATED_WITHIN_S)
            raise
        lost = answer.superseded if answer.alive else set(outcomes)
        count_settled(self._counters, held, endings, outcomes, lost)
        self._wakeups(
            {
                f"queue:{held[key].queue}"
                for key, ending in endings.items()
                if ending.state is JobState.PENDING and key not in lost
            }
        )
        written = {key: _settled(key, endings.get(key)) for key in outcomes if key not in lost}
        return written | self._already({key: items[key] for key in outcomes if key in lost})

    def _write_apart(
        self,
        items: dict[Key, SettleItem],
        held: dict[Key, HeldRecord],
        outcomes: dict[Key, Outcome],
        error: RefusedValue,
    ) -> dict[Key, Result]:
        """Find the one that cannot be stored: it fails alone, as everywhere."""
        if len(outcomes) > 1:
            results: dict[Key, Result] = {}
            for key, outcome in outcomes.items():
                results |= self._write(items, held, {key: outcome})
            return results
        [(key, outcome)] = outcomes.items()
        if isinstance(outcome, NotStorable):
            raise error
        plain = SettleItem(job_id=key[0], token=key[1], outcome=items[key].outcome)
        return self._write({key: plain}, held, {key: NotStorable(str(error))})

    def _outcome(self, item: SettleItem) -> Outcome:
        error = item.error or ErrorBody()
        match item.outcome:
            case "succeeded":
                try:
                    limit_bytes = self._settings.max_payload_bytes
                    return Succeeded(payload.encode(item.result, f"The result of job {item.job_id}", limit_bytes))
                except PayloadError as refused:
                    return NotStorable(str(refused))
            case "failed":
                return Raised(error.type, error.message, error.traceback)
            case "cancelled":
                return Cancelled("cancelled by request while it ran")
            case "interrupted":
                why = error.message or "it had to go before this job was done"
                return Died(f"worker {self._worker.name}: {why}", counts=False, drained=True)
            case "suspended":
                assert item.pause is not None
                return journal.pause_of(item, item.pause)[0]
            case _:
                assert_never(item.outcome)

    def _output(self, item: SettleItem) -> Output | None:
        if not item.stdout and not item.stderr:
            return None
        return Output(item.job_id, item.token, self._bounded(item.stdout), self._bounded(item.stderr))

    def _bounded(self, text: str) -> bytes:
        data = text.encode("utf-8", "backslashreplace")
        limit_bytes = self._settings.max_output_bytes
        if len(data) <= limit_bytes:
            return data
        half = limit_bytes // 2
        return data[:half] + f"\n… {len(data) - 2 * half} bytes left out …\n".encode() + data[len(data) - half :]

    def _already(self, items: Mapping[Key, SettleItem]) -> dict[Key, Result]:
        """Answer settlements that found nothing in hand: done before by this very token, or superseded."""
        results: dict[Key, Result] = {}
        lost: list[Fate] = []
        for fate in self._ledger.jobs.fates(list(items)) if items else ():
            key = (fate.job_id, fate.token)
            if fate.worker_id == self._worker.id and _ended_so(fate, items[key].outcome):
                results[key] = _done(key, "already")
            else:
                lost.append(fate)
        return results | self._tell_lost(lost)

    def _lost(self, keys: Sequence[Key]) -> dict[Key, Result]:
        """Answer writes that are refused, whichever they were: each of them is a zombie's."""
        return self._tell_lost(self._ledger.jobs.fates(keys)) if keys else {}

    def _tell_lost(self, fates: Sequence[Fate]) -> dict[Key, Result]:
        if not fates:
            return {}
        self._counters.add(SUPERSEDED, by=len(fates))
        worker = self._ledger.workers.remote(self._worker.id)
        told = {}
        for fate in fates:
            facts = superseded(fate, worker, may_look=may_look(fate, self._worker, self._caller))
            told[fate.job_id, fate.token] = {"ok": False, "status": "superseded", **facts}
        return told

    def _held(self) -> dict[Key, HeldRecord]:
        return {(job.job_id, job.token): job for job in self._ledger.workers.held(self._worker.id)}

    def _turn(self, **parts: Any) -> TurnAnswer:
        return self._ledger.workers.turn(Turn(self._worker.id, **parts))


NOT_STARTED = "It was claimed and never started. POST …/start first, or claim with start: true."

STARTED = "It was started, and what was begun cannot be given back. Settle it as interrupted: its on_crash decides."


def may_look(fate: Fate, worker: RemoteWorker, caller: Caller) -> bool:
    """Return whether a caller may be told of the job of an attempt: it was its worker's, or it may read all jobs."""
    return fate.worker_id == worker.id or Scope.READ in caller.scopes


def _ended_so(fate: Fate, outcome: str) -> bool:
    """Return whether an attempt ended as it does after such an outcome."""
    return fate.last_attempt_state in ENDS[outcome] or (
        outcome == "succeeded" and fate.ended_code == "RESULT_NOT_STORABLE"
    )


def settled_plainly(item: Outcomes) -> bool:
    """Return whether an outcome is a success that nothing else comes with."""
    if not isinstance(item, SettleItem):
        return True
    more = item.stdout or item.stderr or item.pause or item.error
    return item.outcome == "succeeded" and not more


def in_full(item: Outcomes) -> SettleItem:
    """Return an outcome with all members that one may have."""
    if isinstance(item, SettleItem):
        return item
    return SettleItem(job_id=item.job_id, token=item.token, outcome=item.outcome, result=item.result)


def _wrong_pause(item: SettleItem) -> str:
    """Say what is wrong with how it wants to wait; empty where nothing is."""
    pause = item.pause
    if pause is None or (pause.sleep is None) == (pause.signal is None):
        return "A suspended job needs `pause` with its `seq`, and either `sleep` or `signal` (and `timeout`)."
    try:
        journal.pause_of(item, pause)
    except ConfigError as error:
        return str(error)
    return ""


def conflict_of(worker: RemoteWorker, results: Sequence[Result]) -> Problem | None:
    """Return the conflict that a whole call is if not one of its jobs was the worker's to write."""
    if any(result["ok"] for result in results):
        return None
    first = results[0]
    code = first["status"]
    more = f" ({len(results) - 1} more likewise, see results)" if len(results) > 1 else ""
    return Problem(
        409,
        code,
        f"{first['detail']}{more}",
        cure="Stop working on it: whatever it does now counts for nobody." if code == "superseded" else "",
        id=worker.id,
        results=list(results),
    )


def keys_of(jobs: Iterable[Named]) -> list[Key]:
    """Return each job once, by id and token."""
    return list(dict.fromkeys((job.job_id, job.token) for job in jobs))


def _done(key: Key, status: str) -> Result:
    return {"job_id": key[0], "token": key[1], "ok": True, "status": status}


def _refused(key: Key, status: str, detail: str) -> Result:
    return {"job_id": key[0], "token": key[1], "ok": False, "status": status, "detail": detail}


def _settled(key: Key, ending: Ending | None) -> Result:
    if ending is None:
        return _done(key, JobState.SUCCEEDED.value)
    status = "retrying" if ending.state is JobState.PENDING else ending.state.value
    if ending.state is JobState.WAITING:
        return {**_done(key, status), "detail": ending.message}
    detail = "" if ending.state is not JobState.PENDING else f"next try in {ending.delay_s:.1f}s"
    return {**_done(key, status), "detail": detail}
