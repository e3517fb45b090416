"""Say in one line how a job stands, what happens next, and what an operator can do about it."""

import shlex

from unstuck.client.reasons import describe, explain_isolation, find_reason
from unstuck.client.why.autopsies import brief_cause, sentence
from unstuck.client.why.history import as_node, done_steps
from unstuck.client.why.story import Action, JobFacts, NumberedAttempt, far
from unstuck.domain.autopsy import DeathKind
from unstuck.domain.conditions import Code
from unstuck.domain.states import HELD_STATES, AttemptState, JobState, Transport
from unstuck.domain.units import in_words
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.jobs import AttemptRecord

_LIMITS = {
    DeathKind.MEMORY_LIMIT: "memory_limit",
    DeathKind.DEADLINE: "timeout",
    DeathKind.STALL: "stall_timeout",
    DeathKind.INTERPRETER: "interpreter_timeout",
}


def headline(job_facts: JobFacts, tries: list[NumberedAttempt]) -> str:
    """Say how it stands: the answer for somebody who reads one line only."""
    job = job_facts.job
    match job.state:
        case JobState.SUCCEEDED:
            ran_s = None
            if job.started_at is not None and job.finished_at is not None:
                ran_s = max(0.0, job.finished_at - job.started_at)
            took = "" if ran_s is None else f", after {in_words(ran_s)}"
            bad = len(_bad(tries))
            if bad <= 0:
                # Where it slept or waited on its way, it has several, and none of them was in vain.
                return f"It succeeded on its first try{took}." if len(tries) <= 1 else f"It succeeded{took}."
            noun = "the one before it" if bad == 1 else f"the {bad} before it"
            return f"It succeeded on try {len(tries)}{took}; {noun} ended badly."
        case JobState.QUARANTINED:
            return (
                f"It is quarantined and will not run again by itself: its process died {_times(job.crash_count)}. "
                f"The last cause: {_last_cause(tries)}"
            )
        case JobState.FAILED:
            return f"It failed ({_code(job_facts)}): {_last_cause(tries)}"
        case JobState.CANCELLED:
            if job.error is not None and job.error.code == ErrorCode.EXPIRED and job.finished_at is not None:
                return f"It expired after waiting {in_words(max(0.0, job.finished_at - job.run_at))}: it never began."
            cause = job.error.cause or job.error.shown if job.error is not None else "nobody wrote down why"
            return f"It was cancelled: {sentence(cause)}"
        case JobState.RUNNING if job_facts.context.deferred is not None and not job_facts.context.deferred.is_return:
            return (
                f"Its code has ended, try {len(tries) or 1}; its outcome waits for a lock that another session holds."
            )
        case JobState.RUNNING:
            return f"It is running, try {len(tries) or 1}{_after_trouble(tries)}."
        case JobState.WAITING if job.awaits_signal is not None:
            return f"It waits for signal {job.awaits_signal!r}."
        case JobState.WAITING:
            return "It sleeps."
        case JobState.CLAIMED:
            return f"It is in the hands of a worker and about to start{_after_trouble(tries)}."
        case _:
            return f"It waits{_after_trouble(tries)}." if tries else "It waits for its first try."


def what_next(job_facts: JobFacts) -> str:
    """Say what happens by itself from here on."""
    return f"{_own_next(job_facts)} {as_node(job_facts)}".rstrip()


def _own_next(job_facts: JobFacts) -> str:
    job = job_facts.job
    match job.state:
        case JobState.SUCCEEDED:
            return "Nothing: it is done."
        case JobState.QUARANTINED:
            return "Nothing by itself: it waits for an operator to retry it."
        case JobState.FAILED | JobState.CANCELLED:
            return "Nothing by itself: it has ended, and runs again only if somebody retries it."
        case _:
            said = [describe(job, job_facts.context), *_signs(job_facts)]
            if done := done_steps(job_facts.journal):
                said.append(done)
            if alone := explain_isolation(job):
                said.append(alone)
            if job.cancel_requested:
                said.append("Somebody asked to cancel it: it is not tried again.")
            return " ".join(said)


def _signs(job_facts: JobFacts) -> list[str]:
    progress, now_s = job_facts.progress, job_facts.context.now_s
    if job_facts.job.state is not JobState.RUNNING or progress is None or progress.token != job_facts.job.token:
        return []
    how_far = far(progress)
    ago = in_words(max(0.0, now_s - progress.at))
    said = [f"It has come to {how_far}, {ago} ago." if how_far else f"Its last sign of life was {ago} ago."]
    if progress.busy_since is not None:
        said.append(
            f"No Python code has run in its process for {in_words(max(0.0, now_s - progress.busy_since))}: "
            "it is busy in C code, or stuck there."
        )
    return said


def what_to_do(job_facts: JobFacts) -> tuple[Action, ...]:
    """Give what can be done now, the likeliest first, as commands to copy."""
    job = job_facts.job
    actions: list[Action] = []
    match job.state:
        case JobState.QUARANTINED:
            why = "queues it again with fresh counters, once the cause is mended; it runs alone in its process"
            actions.append(Action(f"unstuck retry {job.id}", f"{why}{_same_limit(job_facts)}"))
        case JobState.FAILED | JobState.CANCELLED:
            cut_off = any(_was_cut_off(attempt) for attempt in job_facts.attempts[-1:])
            safe = "; its effects may have happened already, so be sure that twice is safe" if cut_off else ""
            why = f"queues it again with fresh counters{_with_flow(job_facts)}{safe}{_same_limit(job_facts)}"
            actions.append(Action(f"unstuck retry {job.id}", why))
        case JobState.SUCCEEDED:
            if job.error is None:
                actions.append(Action(f"unstuck job {job.id}", "shows what it returned"))
        case _:
            actions += _while_it_lives(job_facts)
    if job_facts.context.flow is not None and job_facts.context.place:
        flow = job_facts.context.flow
        actions.append(Action(f"unstuck workflow {flow.id}", f"draws the workflow {flow.name!r} that it is a node of"))
    if any(output.stdout or output.stderr for output in job_facts.outputs):
        actions.append(Action(f"unstuck logs {job.id}", "shows all that it printed"))
    return tuple(actions)


def _with_flow(job_facts: JobFacts) -> str:
    flow = job_facts.context.flow
    taken_up = flow is not None and bool(job_facts.context.place) and flow.finished_at is not None
    return ", and takes its workflow up again" if taken_up else ""


def _was_cut_off(attempt: AttemptRecord) -> bool:
    """Say whether something else than its own code ended a try: half of the work may have been done."""
    return attempt.started_at is not None and (attempt.state is AttemptState.CRASHED or attempt.autopsy is not None)


def _same_limit(job_facts: JobFacts) -> str:
    """Warn that a limit is stored with the job: a deploy that raises it does not help this one."""
    autopsy = job_facts.attempts[-1].autopsy if job_facts.attempts else None
    setting = _LIMITS.get(autopsy.kind) if autopsy is not None else None
    return f"; it keeps its {setting}: to give it another, change the task and enqueue it anew" if setting else ""


def _while_it_lives(job_facts: JobFacts) -> list[Action]:
    job, queue = job_facts.job, job_facts.context.queue
    actions = []
    if queue is not None and queue.paused:
        actions.append(Action(f"unstuck resume {job.queue}", "lets its queue go on"))
    reason = find_reason(job, job_facts.context)
    if job.awaits_signal is not None:
        actions.append(Action(f"unstuck signal {job.id} {shlex.quote(job.awaits_signal)}", "sends what it waits for"))
    elif reason is not None and reason.command:
        actions.append(Action(reason.command, "lets a worker that could run it take jobs again"))
    if reason is not None and reason.code is Code.BLOCKING_TRANSACTION:
        # Its code is over: there is nothing to stop, and whoever settled it by hand would lose its outcome.
        return [Action("unstuck doctor", "shows which transactions hold locks of the ledger, and how to end them")]
    if job.state in HELD_STATES and reason is not None:
        verb = "--fail" if job.state is JobState.RUNNING else "--requeue"
        actions.append(Action(f"unstuck stale {verb}", "settles by hand what silent workers hold"))
    if job.state is JobState.PENDING or actions:
        actions.append(Action(f"unstuck doctor {job.id}", "looks for what keeps it from moving"))
    if not job.cancel_requested:
        worker = job_facts.worker(job.worker_id)
        if (
            job.state is JobState.RUNNING
            and reason is None
            and worker is not None
            and worker.transport is Transport.PYTHON
        ):
            actions.append(Action(f"unstuck stack {job.id}", "shows where it stands; it goes on undisturbed"))
        ends = "ends it now" if job.state is JobState.RUNNING else "gives it up"
        actions.append(Action(f"unstuck cancel {job.id}", ends))
    return actions


def _after_trouble(tries: list[NumberedAttempt]) -> str:
    ended = [one for one in _bad(tries) if one.attempt.ended_at is not None]
    if not ended:
        return ""
    return f"; try {ended[-1].number} ended badly: {_last_cause(ended).rstrip('.')}"


def _bad(tries: list[NumberedAttempt]) -> list[NumberedAttempt]:
    return [one for one in tries if one.attempt.state not in (AttemptState.SUCCEEDED, AttemptState.SUSPENDED)]


def _last_cause(tries: list[NumberedAttempt]) -> str:
    attempt = next((one.attempt for one in reversed(tries) if one.attempt.ended_at is not None), None)
    if attempt is None:
        return "no try is left in the ledger."
    if attempt.autopsy is not None:
        return sentence(brief_cause(attempt.autopsy))
    return sentence(attempt.cause or "no cause was written down")


def _code(job_facts: JobFacts) -> str:
    return job_facts.job.error.code if job_facts.job.error is not None else "no code"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
