"""Put the whole story of a job together, in order of time."""

from unstuck.client.why.attempts import decided, enqueued, progressed, taken, told, told_unrun, told_workflow
from unstuck.client.why.autopsies import ended
from unstuck.client.why.history import actions_of, begun, happened, headline_of, next_of, wrote
from unstuck.client.why.outlook import headline, what_next, what_to_do
from unstuck.client.why.story import JobFacts, NumberedAttempt, Step, StepKind, Story, number_attempts
from unstuck.ledger.contract.workflows import WorkflowRecord

FIRST_TRIES = 5
LAST_TRIES = 20
"""Of a job with more tries than both together, those in between are only counted."""


def tell(evidence: JobFacts) -> Story:
    """Give the story; pure, so that the same records always give the same words."""
    if evidence.around.whole_flow is not None:
        return _tell_workflow(evidence, evidence.around.whole_flow)
    tries = number_attempts(evidence)
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


def _tell_workflow(evidence: JobFacts, flow: WorkflowRecord) -> Story:
    """Of a job that stands for a workflow nobody makes tries: its nodes are its story."""
    # Of its end the node that failed tells more than the event does.
    events = [step for step in happened(evidence) if step.facts.get("event") != "failed"]
    steps = [*begun(evidence, flow), *events, *told_workflow(evidence)]
    steps.sort(key=lambda step: step.at)
    now_s, next_ = evidence.around.now_s, next_of(evidence, flow)
    return Story(evidence.job, now_s, headline_of(flow), tuple(steps), next_, actions_of(flow))


def _left_out(evidence: JobFacts, one: NumberedAttempt, count: int) -> Step:
    text = f"{count:,} tries are left out here; `unstuck job {evidence.job.id}` lists them all."
    at = one.attempt.started_at or one.attempt.ended_at or one.waited_from
    return Step(at, StepKind.OMITTED, text, {"tries": count})
