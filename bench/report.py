"""Print figures as tables, and say when, where and on what they were measured."""

import platform
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

Figure = float | int | str | None


@dataclass
class Table:
    """The figures of one part: a title, named columns, labelled rows, and notes on how they were measured."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Figure, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(set(self.columns)) == len(self.columns), self.columns

    def add(self, label: str, *figures: Figure) -> None:
        assert len(figures) == len(self.columns), f"{label}: {len(figures)} figures for {len(self.columns)} columns"
        assert label not in self.rows, f"{self.key} has two rows {label!r}"
        self.rows[label] = figures
        progress(f"{self.key}: {label}: {', '.join(map(shown, figures))}")

    def text(self) -> str:
        return "\n".join([*aligned(self.title, self.columns, self.rows), *(f"  · {note}" for note in self.notes)])


def aligned(title: str, columns: tuple[str, ...], rows: dict[str, tuple[Figure, ...]]) -> list[str]:
    """Return the lines of a table: a title, the names of the columns, one line for each row."""
    width = max([len(label) for label in rows] + [10])
    widths = [max([len(name)] + [len(shown(row[at])) for row in rows.values()]) for at, name in enumerate(columns)]
    head = " " * width + "".join(f"  {name:>{w}}" for name, w in zip(columns, widths, strict=True))
    lines = [title, head.rstrip()]
    for label, row in rows.items():
        cells = "".join(f"  {shown(value):>{w}}" for value, w in zip(row, widths, strict=True))
        lines.append(f"{label:<{width}}{cells}".rstrip())
    return lines


def shown(value: Figure) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    if 0 < abs(value) < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def progress(line: str) -> None:
    """Print a line on stderr: only tables go to stdout."""
    print(line, file=sys.stderr, flush=True)


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def commit_text() -> str:
    """Return the commit that is measured, with `-dirty` if files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def machine_text() -> str:
    """Return the machine in one line: processors, memory, system, Python."""
    cpus = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kb = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    cpu = f"{len(cpus)} × {cpus[0]}" if cpus else platform.processor()
    system = f"{platform.system()} {platform.release()}"
    return f"{cpu}, {int(memory_kb) / 1048576:.0f} GiB, {system}, Python {platform.python_version()}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
