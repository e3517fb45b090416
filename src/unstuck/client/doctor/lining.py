"""Find lines whose places are held by jobs that nobody can take."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, capital, count, warning
from unstuck.client.explaining import Reason, find_obstacle, is_well
from unstuck.domain.states import JobState
from unstuck.store.diagnosis import Diagnosis
from unstuck.store.records import LineRecord


def check_lines(facts: Facts, diagnosis: Diagnosis, _limits: Limits) -> Iterator[Finding]:
    paused = {queue.name for queue in diagnosis.queues if queue.paused}
    for line in facts.lines:
        if line.blocked == 0 or not line.holders:
            continue
        reasons = [_obstacle(facts, one.queue, one.queue in paused) for one in line.holders if _waits(one.state)]
        stuck = [reason for reason in reasons if reason is not None]
        if len(stuck) == len(line.holders):
            yield _stuck(line, stuck[0])


def _waits(state: str) -> bool:
    return state == JobState.PENDING


def _obstacle(facts: Facts, queue: str, paused: bool) -> Reason | None:
    # Whichever task it is: one that some worker of the queue knows.
    known = [task for worker in facts.workers if is_well(worker) and queue in worker.queues for task in worker.tasks]
    return find_obstacle(queue, known[0] if known else "", paused, facts.workers)


def _stuck(line: LineRecord, reason: Reason) -> Finding:
    first = line.holders[0]
    return warning(
        Code.LINE_STUCK,
        f"{count(line.blocked, 'job')} of key {line.key!r} {'waits' if line.blocked == 1 else 'wait'} behind job "
        f"{first.job_id}, which nobody can take",
        f"It has a place of the line and waits in queue {first.queue!r}: {reason.why[0].lower()}{reason.why[1:]}.",
        f"{capital(reason.cure)}; or `unstuck cancel {first.job_id}` gives its place to the next.",
        line=line.key,
        blocked=line.blocked,
        example=first.job_id,
        queue=first.queue,
    )
