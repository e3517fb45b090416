"""Name the outcomes that a worker leaves behind when it has to go, and say why they could not be recorded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unstuck.domain.states import JobState
from unstuck.ledger.contract.workers import Turn
from unstuck.logs import logger
from unstuck.worker.outbox import Outbox

MAX_NAMED = 100
UNREACHABLE = "the ledger could not be reached"
LOCKED = "another session of the database holds a lock that it needs"

log = logger("unstuck.worker")


@dataclass(frozen=True)
class UnrecordedOutcome:
    job_id: int
    outcome: JobState
    reason: str


def unrecorded_outcomes(outbox: Outbox, turns: Iterable[Turn | None], otherwise: str) -> list[UnrecordedOutcome]:
    """Return the outcomes that are not written: in the outbox, deferred, or in turns of which no answer came.

    `otherwise` is why those could not be written that no lock was in the way of."""
    locked = {one.token: one.reason or LOCKED for one in outbox.waiting()}
    found: dict[int, UnrecordedOutcome] = {}
    for turn in (*outbox.deferred_turns(), *(turn for turn in turns if turn is not None)):
        found.update(_of(turn, locked, otherwise))
    found.update(_of(Turn("", done=tuple(outbox.done), endings=tuple(outbox.endings)), locked, otherwise))
    return list(found.values())


def _of(turn: Turn, locked: dict[int, str], otherwise: str) -> dict[int, UnrecordedOutcome]:
    ended = [(one.token, one.job_id, JobState.SUCCEEDED) for one in turn.done]
    ended += [(one.token, one.job_id, one.state) for one in turn.endings]
    return {token: UnrecordedOutcome(job_id, state, locked.get(token, otherwise)) for token, job_id, state in ended}


def report_unrecorded(left: Sequence[UnrecordedOutcome]) -> None:
    """Write them to the log, each with its job and the reason: the reaper settles those jobs by their `on_crash`."""
    for one in left[:MAX_NAMED]:
        log.error(
            "The outcome of a job could not be recorded", job_id=one.job_id, outcome=one.outcome, reason=one.reason
        )
    if len(left) > MAX_NAMED:
        log.error("The outcomes of more jobs could not be recorded", jobs=len(left) - MAX_NAMED)


def report_running(job_ids: Sequence[int]) -> None:
    """Write to the log which jobs did not even end when their runners were killed."""
    if job_ids:
        log.error("Leaving jobs to the reaper that could not be stopped in time", jobs=list(job_ids[:MAX_NAMED]))
