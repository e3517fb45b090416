"""Find the words: a title with counts, a short text for people, the facts for machines."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from unstuck.domain.autopsy import DeathKind
from unstuck.domain.conditions import NO_REAPER_CURE, cure_unserved
from unstuck.domain.liveness import Detector
from unstuck.ledger.contract.events import AlertEvent
from unstuck.ledger.contract.workers import WorkerVerdict
from unstuck.notify.alerts.conditions import IN_ORDER, TOPICS, AlertKind, Phase, Topic

MAX_NAMED = 5
MAX_CAUSES = 4
MAX_LISTED = 100
"""So many alerts of one message have their facts listed for machines."""
MAX_NAME_CHARS = 80
MAX_LINE_CHARS = 400
MAX_TEXT_CHARS = 3_000
"""What most services take in one piece."""

REPEATED = "(This may be a repetition: the sender died while it told you before.)"


class Message(msgspec.Struct, frozen=True):
    title: str
    text: str
    facts: dict[str, Any]
    """The body of a webhook, without what belongs to the delivery."""


def compose(events: Sequence[AlertEvent], *, repeated: bool = False) -> Message:
    """Make one message of these events, however many they are."""
    groups = [(topic, chosen) for topic in IN_ORDER if (chosen := [e for e in events if TOPICS[e.kind] == topic])]
    heads = [_head(topic, len(chosen)) for topic, chosen in groups]
    title = f"Unstuck: {', '.join(heads)}"
    lines = [line for (topic, chosen), head in zip(groups, heads, strict=True) for line in _lines(topic, head, chosen)]
    if repeated:
        lines.append(REPEATED)
    text = "\n".join(lines)
    facts = {
        "title": title,
        "text": text,
        "repeated": repeated,
        "count": len(events),
        "counts": dict(Counter(_key(TOPICS[event.kind]) for event in events)),
        "causes": {
            _key(topic): dict(Counter(map(cause_of, chosen)).most_common(MAX_CAUSES)) for topic, chosen in groups
        },
        "alerts": [_facts(event) for event in events[:MAX_LISTED]],
        "left_out": max(0, len(events) - MAX_LISTED),
    }
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}…"
    return Message(_cut(title), text, facts)


def test_message() -> Message:
    """What `unstuck alerts test` sends."""
    title = "Unstuck: this is a trial"
    text = "Alerts of Unstuck will arrive here. Nothing is wrong."
    facts = {"title": title, "text": text, "repeated": False, "trial": True, "count": 0}
    return Message(title, text, {**facts, "counts": {}, "causes": {}, "alerts": [], "left_out": 0})


def cause_of(event: AlertEvent) -> str:
    """Say what caused it in words that many share: figures of a single case are in its own message."""
    match TOPICS[event.kind].kind:
        case AlertKind.WORKER_DIED:
            return _cause_of_death(event.verdict)
        case AlertKind.QUARANTINED | AlertKind.WORKFLOW_PAUSED:
            return _line(event.message.partition(": ")[2] or event.message)
        case AlertKind.CRASH_LOOP:
            return "crash loop"
        case kind:
            return kind.value.replace("_", " ")


_SEEN = {
    Detector.LEASE: "no heartbeat for the whole timeout",
    Detector.SESSION: "its database session was lost",
    Detector.BOOT: "its machine was restarted",
    Detector.CONNECTION: "its connection to the broker ended",
    Detector.WATCHDOG: "it was alive and did nothing",
    Detector.OPERATOR: "an operator's word",
}
_GONE = "its process no longer exists"


def _cause_of_death(verdict: WorkerVerdict | None) -> str:
    if verdict is None:
        return "unknown"
    death = verdict.autopsy
    match death.kind if death is not None else None:
        case DeathKind.SIGNAL if death is not None and death.signal:
            return f"killed by {death.signal}"
        case DeathKind.EXIT if death is not None and death.exit_code is not None:
            return f"exited with code {death.exit_code}"
        case DeathKind.OUT_OF_MEMORY if death is not None:
            return "out of memory" if death.sure else "out of memory (probably)"
    return _SEEN.get(verdict.detector, _GONE)


def _head(topic: Topic, count: int) -> str:
    one, many = _HEADS[topic.kind]
    noun = one if count == 1 else many
    match topic.phase:
        case Phase.OVER:
            return f"over: {noun}" if topic.kind is AlertKind.NO_REAPER else f"over: {count:,} {noun}"
        case Phase.STILL:
            return f"still {noun}" if topic.kind is AlertKind.NO_REAPER else f"still {count:,} {noun}"
        case _:
            return noun if topic.kind is AlertKind.NO_REAPER else f"{count:,} {noun}"


_HEADS = {
    AlertKind.WORKER_DIED: ("worker died", "workers died"),
    AlertKind.NO_WORKERS: ("queue without workers", "queues without workers"),
    AlertKind.QUARANTINED: ("job quarantined", "jobs quarantined"),
    AlertKind.CRASH_LOOP: ("crash loop", "crash loops"),
    AlertKind.WORKFLOW_PAUSED: ("workflow waits for an operator", "workflows wait for an operator"),
    AlertKind.BACKLOG_OLD: ("queue with an old backlog", "queues with an old backlog"),
    AlertKind.HEARTBEAT_LATE: ("worker with a late heartbeat", "workers with a late heartbeat"),
    AlertKind.NO_REAPER: ("no reaper is running", "no reaper is running"),
    AlertKind.TASK_FAILING: ("task is failing", "tasks are failing"),
    AlertKind.SCHEDULE_FAILING: ("schedule is failing", "schedules are failing"),
}


_WITH_CAUSES = (AlertKind.WORKER_DIED, AlertKind.QUARANTINED, AlertKind.WORKFLOW_PAUSED)


def _lines(topic: Topic, head: str, events: Sequence[AlertEvent]) -> Iterator[str]:
    first = events[0]
    yield f"{head[:1].upper()}{head[1:]}:"
    causes = Counter(map(cause_of, events))
    if len(events) > 1 and topic.kind in _WITH_CAUSES:
        said = [f"{count:,} {cause}" for cause, count in causes.most_common(MAX_CAUSES)]
        others = causes.total() - sum(count for _, count in causes.most_common(MAX_CAUSES))
        yield f"  Causes: {'; '.join([*said, f'{others:,} others'] if others else said)}"
    if len(events) > 1:
        names = list(dict.fromkeys(_name(event) for event in events))
        more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
        yield f"  First: {', '.join(names[:MAX_NAMED])}{more}"
    yield f"  {'For example: ' if len(events) > 1 else ''}{_sentence(first)}"
    if topic.phase is not Phase.OVER:
        yield f"  Next: {next_step(first)}"


def _sentence(event: AlertEvent) -> str:
    said = _line(event.message).rstrip(".")
    if event.verdict is not None and event.kind == "worker_dead":
        # More may be known by now than when the event was written.
        said = f"{_name(event)}: {_line(event.verdict.evidence)} (seen by {event.verdict.detector})"
    elif event.job_id is not None:
        said = f"{_name(event)}: {said}"
    return f"{said}."


def next_step(event: AlertEvent) -> str:
    """Say what to do about it."""
    match TOPICS[event.kind].kind:
        case AlertKind.WORKER_DIED:
            return "`unstuck workers` shows each verdict, `unstuck jobs` what became of their jobs."
        case AlertKind.NO_WORKERS:
            cure = cure_unserved(_name(event))
            return f"{cure[:1].upper()}{cure[1:]}."
        case AlertKind.QUARANTINED:
            return f"`unstuck why {event.job_id}`; mend the cause, then `unstuck retry {event.job_id}`."
        case AlertKind.WORKFLOW_PAUSED:
            verbs = f"`unstuck workflows retry {event.job_id}` or `unstuck workflows resume {event.job_id}`"
            return f"`unstuck workflow {event.job_id}` shows it; then {verbs}."
        case AlertKind.CRASH_LOOP:
            return "Look at its log and its host; `unstuck workers` says what is switched off and how to enable it."
        case AlertKind.BACKLOG_OLD:
            return "Start more workers for it, or ask `unstuck doctor` what they wait for."
        case AlertKind.HEARTBEAT_LATE:
            return "Look at its host and at the database; `unstuck doctor` says if the timeouts are too tight."
        case AlertKind.NO_REAPER:
            return NO_REAPER_CURE
        case AlertKind.TASK_FAILING:
            return (
                f"`unstuck jobs --state failed --task {_name(event)}` lists them, `unstuck why ID` tells what happened."
            )
        case AlertKind.SCHEDULE_FAILING:
            return "`unstuck schedules` shows its last job, `unstuck why ID` tells what happened."


def _name(event: AlertEvent) -> str:
    if event.job_id is not None:
        return f"job {event.job_id}" + (f" ({_short(event.task)})" if event.task else "")
    if event.worker_id is not None:
        name = _short(event.worker_name or event.worker_id)
        return f"{name} on {_short(event.host)}" if event.host else name
    return _short(event.about or "ledger")


def _facts(event: AlertEvent) -> dict[str, Any]:
    topic = TOPICS[event.kind]
    queue = event.queue
    if queue is None and topic.kind in (AlertKind.NO_WORKERS, AlertKind.BACKLOG_OLD):
        queue = event.about
    return {
        "event": event.id,
        "at": event.at,
        "kind": topic.kind.value,
        "phase": topic.phase.value,
        "job": event.job_id,
        "task": event.task or (event.about if topic.kind is AlertKind.TASK_FAILING else None),
        "queue": queue,
        "worker": event.worker_id,
        "worker_name": event.worker_name,
        "host": event.host or (event.about if topic.kind is AlertKind.CRASH_LOOP else None),
        "cause": cause_of(event),
        "message": _sentence(event),
        "next": None if topic.phase is Phase.OVER else next_step(event),
    }


def _key(topic: Topic) -> str:
    return topic.kind.value if topic.phase is Phase.BEGUN else f"{topic.kind}_{topic.phase}"


def _short(text: str | None) -> str:
    return _plain(text or "")[:MAX_NAME_CHARS]


def _line(text: str) -> str:
    return _plain(text)[:MAX_LINE_CHARS]


def _plain(text: str) -> str:
    """Names come from jobs and workers: what would break a line or hide something is shown, not done."""
    return "".join(char if char.isprintable() else " " for char in text)


def _cut(title: str) -> str:
    return title if len(title) <= MAX_LINE_CHARS else f"{title[: MAX_LINE_CHARS - 1]}…"
