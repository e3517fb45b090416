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


def tell(job_facts: JobFacts) -> Story:
    """Give the story; pure, so that the same records always give the same words."""
    if job_facts.context.own_workflow is not None:
        return _tell_workflow(job_facts, job_facts.context.own_workflow)
    tries = number_attempts(job_facts)
    steps = [enqueued(job_facts)]
    for one in tries:
        if FIRST_TRIES < one.number <= len(tries) - LAST_TRIES:
            if one.number == FIRST_TRIES + 1:
                steps.append(_left_out(job_facts, one, len(tries) - LAST_TRIES - FIRST_TRIES))
            continue
        steps += taken(job_facts, one)
        steps += progressed(job_facts, one)
        steps += ended(job_facts, one)
        steps += decided(job_facts, one)
        steps += told(job_facts, one)
    steps += wrote(job_facts)
    steps += happened(job_facts)
    steps += told_unrun(job_facts, tries)
    # Stable: what stands at the same instant keeps the order of cause and effect.
    steps.sort(key=lambda step: step.at)
    return Story(
        job_facts.job,
        job_facts.context.now_s,
        headline(job_facts, tries),
        tuple(steps),
        what_next(job_facts),
        what_to_do(job_facts),
    )


def _tell_workflow(job_facts: JobFacts, flow: WorkflowRecord) -> Story:
    """Of a job that stands for a workflow nobody makes tries: its nodes are its story."""
    # Of its end the node that failed tells more than the event does.
    events = [step for step in happened(job_facts) if step.facts.get("event") != "failed"]
    steps = [*begun(job_facts, flow), *events, *told_workflow(job_facts)]
    steps.sort(key=lambda step: step.at)
    now_s, next_ = job_facts.context.now_s, next_of(job_facts, flow)
    return Story(job_facts.job, now_s, headline_of(flow), tuple(steps), next_, actions_of(flow))


def _left_out(job_facts: JobFacts, one: NumberedAttempt, count: int) -> Step:
    text = f"{count:,} tries are left out here; `unstuck job {job_facts.job.id}` lists them all."
    at = one.attempt.started_at or one.attempt.ended_at or one.waited_from
    return Step(at, StepKind.OMITTED, text, {"tries": count})
