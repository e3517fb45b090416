"""Say how one try ended: the success, the exception, the death with all that its autopsy knows."""

from unstuck.client import views
from unstuck.client.why.story import JobFacts, NumberedAttempt, Quote, Step, StepKind, far, worker_of
from unstuck.domain.autopsy import Autopsy, DeathKind, last_lines
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState
from unstuck.domain.units import brief_size, in_words

BESIDE_NAMED = 3
MAX_SENTENCE_CHARS = 600
"""Messages of exceptions may be pages long; `facts` has all of them."""

_SEEN_BY = {
    Detector.RUNNER: "by the kernel's word to its worker",
    Detector.PEER: "by a neighbour on the same host that watches its worker's process",
    Detector.SUPERVISOR: "by the supervisor of its worker",
    Detector.WATCHDOG: "by its worker's own watchdog",
    Detector.SESSION: "by the loss of its worker's database session",
    Detector.LEASE: "by the silence of its worker's heartbeat",
    Detector.BOOT: "by the boot id of its machine",
    Detector.CONNECTION: "by the end of its worker's connection to the broker",
    Detector.OPERATOR: "by an operator's word",
}

_ENDED_BY_US = frozenset(
    {
        DeathKind.MEMORY_LIMIT,
        DeathKind.PROCESS_LIMIT,
        DeathKind.DEADLINE,
        DeathKind.STALL,
        DeathKind.INTERPRETER,
        DeathKind.LEASE,
        DeathKind.OPERATOR,
        DeathKind.SHARED,
        DeathKind.BLOCKED_LOOP,
        DeathKind.DRAIN,
    }
)

_GIVEN_UP = frozenset({DeathKind.LOST_HEARTBEAT, DeathKind.LOST_SESSION})
"""Nobody saw it die: it may be frozen or cut off, and is fenced off."""

_KINDS = {
    AttemptState.SUCCEEDED: StepKind.SUCCEEDED,
    AttemptState.FAILED: StepKind.FAILED,
    AttemptState.CRASHED: StepKind.DIED,
    AttemptState.DRAINED: StepKind.DRAINED,
    AttemptState.CANCELLED: StepKind.CANCELLED,
    AttemptState.SUSPENDED: StepKind.SUSPENDED,
}


def ended(job_facts: JobFacts, one: NumberedAttempt) -> list[Step]:
    """Tell how a try ended; nothing for one that still runs."""
    attempt = one.attempt
    kind = _KINDS.get(attempt.state)
    if kind is None or attempt.ended_at is None:
        return []
    autopsy = attempt.autopsy
    ours = autopsy is not None and autopsy.kind in _ENDED_BY_US
    if kind in (StepKind.DIED, StepKind.FAILED) and ours:
        kind = StepKind.ENDED
    ran_s = None if attempt.started_at is None else max(0.0, attempt.ended_at - attempt.started_at)
    _, facts = worker_of(job_facts, one)
    facts |= {"try": one.number, "token": attempt.token, "code": attempt.code, "cause": attempt.cause}
    if ran_s is not None:
        facts["ran_s"] = round(ran_s, 3)
    if autopsy is None:
        text = _without_autopsy(job_facts, one, kind, ran_s)
    else:
        text = " ".join([_cause(one, autopsy, kind), *sentences(autopsy, ran_s), *_of_worker(job_facts, one, autopsy)])
        facts["autopsy"] = views.autopsy_view(autopsy)
    quotes = _quotes(job_facts, one) if kind not in (StepKind.SUCCEEDED, StepKind.SUSPENDED) else []
    facts |= {quote.title: quote.text for quote in quotes if autopsy is None or not getattr(autopsy, quote.title, "")}
    return [Step(attempt.ended_at, kind, text, facts, tuple(quotes))]


def _of_worker(job_facts: JobFacts, one: NumberedAttempt, autopsy: Autopsy) -> list[str]:
    """Add what a supervisor knows of the worker's own end, where a neighbour was faster to see that it was gone."""
    worker = job_facts.worker(one.attempt.worker_id)
    known = worker.verdict.autopsy if worker is not None and worker.verdict is not None else None
    if autopsy.kind is not DeathKind.WORKER_GONE or known is None or known.kind is DeathKind.WORKER_GONE:
        return []
    return [f"How its worker ended: {sentence(known.summary)}"]


def cause_line(autopsy: Autopsy) -> str:
    """Give an autopsy in one line, for tables: cause, memory, and whether there is a stack to read."""
    said = [brief_cause(autopsy)]
    if autopsy.max_memory_bytes is not None:
        said.append(f"{brief_size(autopsy.max_memory_bytes)} of memory at most")
    if autopsy.stack:
        said.append("left a stack")
    return ", ".join(said)


def brief_cause(autopsy: Autopsy) -> str:
    """Give the cause alone, with its doubt: "probably killed by SIGKILL"."""
    return f"{'' if autopsy.sure or 'probably' in autopsy.summary.lower() else 'probably '}{autopsy.summary}"


def sentences(autopsy: Autopsy, ran_s: float | None = None) -> list[str]:
    """Say all that an autopsy knows beside the cause, each fact in a sentence."""
    said = [_seen(autopsy)]
    if not autopsy.sure and autopsy.doubt:
        said.append(f"Not sure: {sentence(autopsy.doubt)}")
    said += _used(autopsy, ran_s)
    if autopsy.signals:
        said.append(f"To end it: {', then '.join(autopsy.signals)}.")
    # With a time of its own it is a step of the story by itself.
    if autopsy.progress is not None and autopsy.progress.at is None and (how_far := far(autopsy.progress)):
        said.append(f"It had come to {how_far}.")
    if autopsy.missing:
        said.append(autopsy.missing)
    if autopsy.beside_count or autopsy.beside:
        # A worker that is lost takes runners of its own with it: those jobs had a worker in common, not a process.
        what = "process" if autopsy.detector is Detector.RUNNER else "worker"
        said.append(f"It shared its {what} with {beside(autopsy)}.")
    return [part for part in said if part]


def beside(autopsy: Autopsy) -> str:
    """Name the other jobs of its process or worker: "job 7, job 8 and 49 others"."""
    named = [f"job {job_id}" for job_id in autopsy.beside[:BESIDE_NAMED]]
    others = max(autopsy.beside_count, len(autopsy.beside)) - len(named)
    if others > 0:
        noun = "other" if named else "other job"
        named.append(f"{others} {noun}{'' if others == 1 else 's'}")
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def _cause(one: NumberedAttempt, autopsy: Autopsy, kind: StepKind) -> str:
    verb = {
        StepKind.ENDED: "was ended",
        StepKind.DRAINED: "was ended by a shutdown",
        StepKind.CANCELLED: "was cancelled",
        StepKind.FAILED: "failed",
    }.get(kind, "was given up" if autopsy.kind in _GIVEN_UP else "died")
    return f"Try {one.number} {verb}: {sentence(brief_cause(autopsy))}"


def _seen(autopsy: Autopsy) -> str:
    # The worker that ends a runner itself need not detect anything.
    if autopsy.kind in _ENDED_BY_US and autopsy.seen_after_s is None:
        return ""
    after = "" if autopsy.seen_after_s is None else f"after {in_words(autopsy.seen_after_s)} "
    return f"Seen {after}{_SEEN_BY[autopsy.detector]}."


def _used(autopsy: Autopsy, ran_s: float | None) -> list[str]:
    ran_s = autopsy.ran_s if autopsy.ran_s is not None else ran_s
    parts = []
    if ran_s is not None:
        parts.append(f"had run for {in_words(ran_s)}")
    last, most = autopsy.memory_bytes, autopsy.max_memory_bytes
    if last is not None and most is not None:
        parts.append(f"held {brief_size(last)} of memory ({brief_size(most)} at most)")
    elif last is not None or most is not None:
        parts.append(f"held {brief_size(last or most or 0)} of memory")
    if autopsy.cpu_s is not None:
        parts.append(f"used {in_words(autopsy.cpu_s)} of CPU time")
    if not parts:
        return []
    return [f"It {parts[0]}." if len(parts) == 1 else f"It {', '.join(parts[:-1])} and {parts[-1]}."]


def _without_autopsy(job_facts: JobFacts, one: NumberedAttempt, kind: StepKind, ran_s: float | None) -> str:
    """Tell it by cause and verdict alone: user code ended by itself, or an older version wrote it."""
    attempt = one.attempt
    after = f" after {in_words(ran_s)}" if ran_s is not None else ""
    cause = attempt.cause or "no cause was written down"
    match kind:
        case StepKind.SUCCEEDED:
            return f"Try {one.number} succeeded{after}."
        case StepKind.FAILED:
            return f"Try {one.number} failed{after}: {_what_failed(job_facts, one, cause)}"
        case StepKind.SUSPENDED:
            return f"Try {one.number} gave its slot back{after}{_until(job_facts, one)}."
        case StepKind.CANCELLED:
            return f"Try {one.number} was cancelled{after}: {sentence(cause)}"
        case StepKind.DRAINED:
            return f"Try {one.number} was ended by a shutdown{after}: {sentence(cause)}"
        case _:
            worker = job_facts.worker(attempt.worker_id)
            verdict = worker.verdict if worker is not None else None
            seen = f" Its worker's end was seen {_SEEN_BY[verdict.detector]}: {verdict.evidence}." if verdict else ""
            return f"Try {one.number} died{after}: {sentence(cause)}{seen}"


def _until(job_facts: JobFacts, one: NumberedAttempt) -> str:
    """Say what it waited for: the event is written with the end of the try."""
    ended_at = one.attempt.ended_at or 0.0
    said = [
        event.message for event in job_facts.events if event.kind == "suspended" and abs(event.at - ended_at) <= 1.0
    ]
    return f": it {said[0][:1].lower()}{said[0][1:]}" if said else ""


def _what_failed(job_facts: JobFacts, one: NumberedAttempt, cause: str) -> str:
    error = job_facts.error_of(one.attempt)
    raised = error.details.get("type") if error is not None else None
    if one.attempt.code == "TASK_FAILED":
        if not raised:
            return f"its code raised: {sentence(cause)}"
        # The cause of a try names the exception itself, unless a worker in another language gave it.
        return f"its code raised {sentence(cause if cause.startswith(raised) else f'{raised}: {cause}')}"
    return f"{one.attempt.code or 'no code'}: {sentence(cause)}"


def _quotes(job_facts: JobFacts, one: NumberedAttempt) -> list[Quote]:
    """Give what was left behind: stack or traceback, and the last lines of what it printed."""
    autopsy = one.attempt.autopsy
    found: dict[str, str] = {}
    if autopsy is not None:
        found = {"stack": autopsy.stack, "stdout": autopsy.stdout, "stderr": autopsy.stderr}
    error = job_facts.error_of(one.attempt)
    if error is not None:
        found["traceback"] = str(error.details.get("traceback") or "")
    output = job_facts.output(one.attempt.token)
    if output is not None:
        for name, data in (("stdout", output.stdout), ("stderr", output.stderr)):
            found[name] = found.get(name) or last_lines(data.decode("utf-8", "replace"))
    return [Quote(title, text) for title, text in found.items() if text.strip()]


def sentence(text: str) -> str:
    """End a text as a sentence, whoever wrote it and however much."""
    text = text.strip()
    if len(text) > MAX_SENTENCE_CHARS:
        return f"{text[:MAX_SENTENCE_CHARS]}…"
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
