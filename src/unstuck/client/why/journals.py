"""Tell what a job wrote down on its way, and which signals it was sent."""

from collections.abc import Sequence

from unstuck.client.views import value_view
from unstuck.client.why.gathering import Evidence
from unstuck.client.why.story import Step, StepKind
from unstuck.domain.durations import in_words
from unstuck.domain.journal import Kind
from unstuck.domain.payload import JSON
from unstuck.store.records import JournalRecord

FIRST_ENTRIES = 20
LAST_ENTRIES = 20
"""Of a job with more, those in between are only counted."""


def wrote(evidence: Evidence) -> list[Step]:
    """Give every step that is done, and when; of many the first and the last."""
    entries = evidence.journal
    left_out = len(entries) - FIRST_ENTRIES - LAST_ENTRIES
    if left_out <= 0:
        return [_step(evidence, entry) for entry in entries]
    first = entries[FIRST_ENTRIES]
    text = f"{left_out:,} entries of its journal are left out here; `unstuck job {evidence.job.id}` lists them all."
    return [
        *(_step(evidence, entry) for entry in entries[:FIRST_ENTRIES]),
        Step(first.at, StepKind.LEFT_OUT, text, {"entries": left_out}),
        *(_step(evidence, entry) for entry in entries[-LAST_ENTRIES:]),
    ]


def _step(evidence: Evidence, entry: JournalRecord) -> Step:
    attempts = {attempt.token: number for number, attempt in enumerate(evidence.attempts, 1)}
    facts = {"seq": entry.seq, "entry": entry.kind, "name": entry.name, "try": attempts.get(entry.token)}
    return Step(entry.at, StepKind.STEP, f"{_told(entry)}.", facts)


def _told(entry: JournalRecord) -> str:
    match entry.kind:
        case Kind.CHECKPOINT:
            return "Its last checkpoint was written"
        case Kind.SLEEP:
            asked_s = value_view(entry.value, JSON)
            return f"Began to sleep for {in_words(asked_s)}" if isinstance(asked_s, int | float) else "Began to sleep"
        case Kind.WAIT:
            return f"Began to wait for signal {entry.name!r}"
        case Kind.SIGNAL:
            return f"Took signal {entry.name!r}"
        case Kind.TIMEOUT:
            return f"Signal {entry.name!r} did not come in time"
        case _:
            return f"Step {entry.seq}, {entry.name!r}, is done and will not run again"


def done_steps(journal: Sequence[JournalRecord]) -> str:
    """Say how far it is by its journal; empty where it wrote nothing down."""
    names = [entry.name for entry in journal if entry.kind == Kind.STEP]
    if not names:
        return ""
    shown = ", ".join(names[-5:])
    more = "…, " if len(names) > 5 else ""
    count = "1 step of it is" if len(names) == 1 else f"{len(names):,} steps of it are"
    return f"{count} done ({more}{shown})."
