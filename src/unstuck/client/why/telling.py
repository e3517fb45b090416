"""Put the whole story of a job together, in order of time."""

from unstuck.client.why.beginnings import enqueued, progressed, taken
from unstuck.client.why.decisions import decided, told, told_unrun
from unstuck.client.why.endings import ended
from unstuck.client.why.gathering import Evidence, Try, tries_of
from unstuck.client.why.happenings import happened
from unstuck.client.why.journals import wrote
from unstuck.client.why.prospects import headline, what_next, what_to_do
from unstuck.client.why.story import Step, StepKind, Story

FIRST_TRIES = 5
LAST_TRIES = 20
"""Of a job with more tries than both together, those in between are only counted."""


def tell(evidence: Evidence) -> Story:
    """Give the story; pure, so that the same records always give the same words."""
    tries = tries_of(evidence)
    steps = [enqueued(evidence)]
    for one in tries:
        if FIRST_TRIES < one.number <= len(tries) - LAST_TRIES:
            if one.number == FIRST_TRIES + 1:
                steps.append(_left_out(evidence, one, len(tries) - LAST_TRIES - FIRST_TRIES))
            continue
        steps += taken(evidence, one)
        steps += progressed(evidence, one)
        steps += ended(evidence, one)
        steps += decided(evidence, one)
        steps += told(evidence, one)
    steps += wrote(evidence)
    steps += happened(evidence)
    steps += told_unrun(evidence, tries)
    # Stable: what stands at the same instant keeps the order of cause and effect.
    steps.sort(key=lambda step: step.at)
    return Story(
        evidence.job,
        evidence.around.now_s,
        headline(evidence, tries),
        tuple(steps),
        what_next(evidence),
        what_to_do(evidence),
    )


def _left_out(evidence: Evidence, one: Try, count: int) -> Step:
    text = f"{count:,} tries are left out here; `unstuck job {evidence.job.id}` lists them all."
    at = one.attempt.started_at or one.attempt.ended_at or one.waited_from
    return Step(at, StepKind.LEFT_OUT, text, {"tries": count})
