"""Keep the figures of several rounds, store them as JSON, and compare two files of them.

    python -m bench --rounds 5 --json before.json
    python -m bench --rounds 5 --json after.json
    python -m bench --compare before.json after.json

A line differs if the medians of both files are further apart than the rounds of either file, that is the largest minus
the smallest figure. A file of one round has no spread, so it says nothing about a difference.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Figure, Table, aligned

FORMAT = 1


@dataclass
class Rounds:
    """One part, measured once or several times: the table of each round."""

    key: str
    title: str
    columns: tuple[str, ...]
    notes: list[str]
    rows: dict[str, list[tuple[Figure, ...]]] = field(default_factory=dict)
    """For each label the figures of each round."""

    @classmethod
    def of(cls, tables: list[Table]) -> "Rounds":
        rounds = cls(tables[-1].key, tables[-1].title, tables[-1].columns, tables[-1].notes)
        for table in tables:
            for label, figures in table.rows.items():
                rounds.rows.setdefault(label, []).append(figures)
        return rounds

    def text(self) -> str:
        """Return a table of the medians."""
        count = max(map(len, self.rows.values()), default=0)
        notes = [*self.notes, f"the median of {count} rounds"] if count > 1 else self.notes
        rows = {label: tuple(map(_median, zip(*rounds, strict=True))) for label, rounds in self.rows.items()}
        return Table(self.key, self.title, self.columns, rows, notes).text()

    def numbers(self, label: str, column: str) -> list[float]:
        """Return the figure of each round; nothing if the line is unknown or its figures are not numbers."""
        if column not in self.columns:
            return []
        at = self.columns.index(column)
        figures = [figures[at] for figures in self.rows.get(label, [])]
        return [float(figure) for figure in figures if isinstance(figure, int | float)]


@dataclass
class Results:
    """What one run measured, and on what."""

    at: str
    commit: str
    machine: str
    databases: list[str]
    size: str
    parts: list[Rounds] = field(default_factory=list)

    def headline(self) -> str:
        """Return what is measured, when, on which machine, and what a commit survives on each database."""
        return "\n".join([f"Unstuck benchmark · {self.at} · {self.commit} · {self.machine}", *self.databases])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read a file of `save`. Raise ValueError if it is another one."""
        data: Any = json.loads(path.read_text())
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a file that this version of `python -m bench --json` wrote")
        parts = [
            Rounds(
                one["key"],
                one["title"],
                tuple(one["columns"]),
                one["notes"],
                {label: [tuple(figures) for figures in rounds] for label, rounds in one["rows"].items()},
            )
            for one in data.pop("parts")
        ]
        return cls(**data, parts=parts)


class Verdict(StrEnum):
    DIFFERS = "differs"
    WITHIN_SPREAD = "within the spread"
    ONE_ROUND = "one round: says nothing"


@dataclass(frozen=True)
class Comparison:
    """One line that is in both files: the medians, and what they say."""

    part: str
    label: str
    column: str
    before: float
    after: float
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before else None


def judge(before: list[float], after: list[float]) -> Verdict:
    """Return whether the medians are further apart than the rounds on either side are."""
    if min(len(before), len(after)) < 2:
        return Verdict.ONE_ROUND
    spread = max(max(rounds) - min(rounds) for rounds in (before, after))
    return Verdict.DIFFERS if abs(median(after) - median(before)) > spread else Verdict.WITHIN_SPREAD


def compare(before: Results, after: Results) -> Iterator[Comparison]:
    """Yield every line that has figures in both."""
    earlier = {one.key: one for one in before.parts}
    for part in after.parts:
        if (other := earlier.get(part.key)) is None:
            continue
        for label in part.rows:
            for column in part.columns:
                old, new = other.numbers(label, column), part.numbers(label, column)
                if old and new:
                    yield Comparison(part.key, label, column, median(old), median(new), judge(old, new))


def comparison_text(before: Results, after: Results) -> str:
    """Return the comparison as tables, one for each part."""
    lines = [f"Before: {before.headline()}", f"After:  {after.headline()}"]
    lines += [f"Not the same {one}: do not compare these figures." for one in _different(before, after)]
    found = list(compare(before, after))
    if not found:
        return "\n".join([*lines, "", "No line is in both files."])
    for part in after.parts:
        rows: dict[str, tuple[Figure, ...]] = {
            f"{one.label}: {one.column}": (one.before, one.after, one.ratio, str(one.verdict))
            for one in found
            if one.part == part.key
        }
        if rows:
            lines += ["", *aligned(part.title, ("before", "after", "ratio", "verdict"), rows)]
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    return "\n".join(
        [
            *lines,
            "",
            f"{len(found)} lines: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count),
            "A line differs if its medians are further apart than the largest and the smallest round of either file.",
            "Two files show what changed between two moments, the machine included: look at its own lines first.",
        ]
    )


def _different(before: Results, after: Results) -> Iterator[str]:
    if before.machine != after.machine:
        yield "machine"
    if before.size != after.size:
        yield "size of the run"
    # Each text begins with the name of the database.
    earlier = {text.split()[0]: text for text in before.databases}
    for text in after.databases:
        name = text.split()[0]
        if earlier.get(name, text) != text:
            yield name


def _median(figures: tuple[Figure, ...]) -> Figure:
    numbers = [figure for figure in figures if isinstance(figure, int | float)]
    if numbers:
        return median(numbers)
    return ", ".join(dict.fromkeys(str(figure) for figure in figures if figure is not None)) or None
