"""Print what was measured as tables, and keep it for `--json`."""

import json
import platform
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.databases import Database

Figure = float | int | str | None


@dataclass
class Table:
    """One part of the benchmark: a title, named columns, and notes that say how it was measured."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, tuple[Figure, ...]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, label: str, *figures: Figure) -> None:
        assert len(figures) == len(self.columns), f"{label}: {len(figures)} figures for {len(self.columns)} columns"
        self.rows.append((label, figures))
        progress(f"{self.key}: {label}: {', '.join(map(_shown, figures))}")

    def text(self) -> str:
        width = max([len(label) for label, _ in self.rows] + [10])
        widths = [
            max([len(name)] + [len(_shown(figures[at])) for _, figures in self.rows])
            for at, name in enumerate(self.columns)
        ]
        head = " " * width + "".join(f"  {name:>{w}}" for name, w in zip(self.columns, widths, strict=True))
        lines = [self.title, head.rstrip()]
        for label, figures in self.rows:
            cells = "".join(f"  {_shown(value):>{w}}" for value, w in zip(figures, widths, strict=True))
            lines.append(f"{label:<{width}}{cells}".rstrip())
        return "\n".join([*lines, *(f"  · {note}" for note in self.notes)])

    def plain(self) -> dict[str, Any]:
        rows = [{"label": label, **dict(zip(self.columns, figures, strict=True))} for label, figures in self.rows]
        return {"key": self.key, "title": self.title, "rows": rows, "notes": self.notes}


def machine_text() -> str:
    """Say on what this runs, in one line."""
    cpus = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kb = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    cpu = f"{len(cpus)} × {cpus[0]}" if cpus else platform.processor()
    system = f"{platform.system()} {platform.release()}"
    return f"{cpu}, {int(memory_kb) / 1048576:.0f} GiB, {system}, Python {platform.python_version()}"


def headline(name: str, databases: list[Database]) -> str:
    """Return what is measured, when, on which machine, and what a commit survives on each database."""
    return "\n".join(
        [f"Unstuck {name} benchmark · {today()} · {machine_text()}", *(one.durability() for one in databases)]
    )


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def as_json(tables: list[Table], databases: list[Database]) -> str:
    return json.dumps(
        {
            "at": today(),
            "machine": machine_text(),
            "databases": [one.durability() for one in databases],
            "tables": [table.plain() for table in tables],
        },
        indent=2,
    )


def progress(line: str) -> None:
    """Say on stderr how far we are: the tables alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _shown(value: Figure) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    if 0 < abs(value) < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
