"""Measure Unstuck on durable databases, beside the bare machine, and compare two runs.

python -m bench --quick
python -m bench --parts http,throughput --databases sqlite --rounds 5 --json after.json --compare before.json
python -m bench --compare before.json after.json
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.support import run_guard

from bench.databases import NAMES, NotDurable, open_databases
from bench.parts import FULL, GROUPS, PARTS, QUICK, named
from bench.report import Table, commit_text, machine_text, progress, today
from bench.results import Results, Rounds, comparison_text

T = TypeVar("T")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        before = [Results.load(path) for path in options.compare]
    except (OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if len(before) == 2:
        print(comparison_text(*before))
        return 0
    try:
        results = _measure(options)
    except NotDurable as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        results.save(options.json)
    if before:
        print(comparison_text(before[0], results))
    return 0


def _measure(options: argparse.Namespace) -> Results:
    run_guard.start()
    size = QUICK if options.quick else FULL
    with open_databases(options.databases) as databases:
        durable = [database.durability() for database in databases]
        results = Results(today(), commit_text(), machine_text(), durable, "quick" if options.quick else "full")
        print(results.headline() + "\n", flush=True)
        tables: dict[str, list[Table]] = {name: [] for name in options.parts}
        # Round by round, so that the rounds of a part are as far apart as they can be.
        for number in range(1, options.rounds + 1):
            for name in options.parts:
                progress(f"… {name}, round {number} of {options.rounds}")
                tables[name].append(PARTS[name](databases, size))
                if number == options.rounds:
                    results.parts.append(Rounds.of(tables[name]))
                    print(results.parts[-1].text() + "\n", flush=True)
    return results


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        *("--parts", "--only"),
        type=_checked(named),
        default=list(PARTS),
        metavar="A,B",
        help=f"what to measure: {', '.join(PARTS)}; or {', '.join(GROUPS)} for several of them (default: all)",
    )
    parser.add_argument(
        "--databases",
        type=_checked(_databases),
        default=list(NAMES),
        metavar="A,B",
        help=f"default: {','.join(NAMES)}",
    )
    parser.add_argument("--quick", action="store_true", help="short runs: for a first look, not for figures")
    parser.add_argument(
        "--rounds", type=_checked(_positive), default=1, metavar="N", help="measure everything N times (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the figures of every round in this file")
    parser.add_argument(
        "--compare",
        nargs="+",
        action=_OneOrTwo,
        type=Path,
        default=[],
        metavar="FILE",
        help="one file: compare it with this run; two files: compare them, and measure nothing",
    )
    return parser


class _OneOrTwo(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if len(values) > 2:
            parser.error("--compare takes one or two files")
        setattr(namespace, self.dest, values)


def _checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """Show the text of a ValueError, which argparse would hide."""

    def check(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check


def _databases(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(f"{text!r} is not a list of {', '.join(NAMES)}")
    return names


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ValueError(f"{text!r} is not a number of at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
