"""Measure the core on both databases in one run, beside what the bare machine does: `make bench-core`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import run_guard

from bench import (
    detection,
    enqueue,
    idle_workers,
    latency,
    machine,
    retention,
    table_size,
    throughput,
    watch_cost,
    workflows,
)
from bench.databases import Database, open_databases
from bench.idle_replay import WORKERS_PER_HOST
from bench.report import Table, as_json, headline, progress

Part = Callable[[list[Database], bool], Table]

IDLE_WORKERS = [100]
"""A thousand need 10 GB of memory and a machine with nothing else to do: ask for them with `--idle-workers`."""

PARTS: dict[str, Part] = {
    "references": lambda databases, quick: machine.run(databases, 0.5 if quick else 2.0),
    "enqueue": lambda databases, quick: enqueue.run(databases, 0.5 if quick else 2.0),
    "latency": lambda databases, quick: latency.run(databases, 40 if quick else 200),
    "drain": lambda databases, quick: throughput.run(databases, 0.7 if quick else 3.0),
    "detection": lambda databases, quick: detection.run(databases, 3 if quick else 7),
    "watching": lambda databases, quick: watch_cost.run(databases, 3.0 if quick else 12.0, 6 if quick else 20),
    "workflows": lambda databases, quick: workflows.run(databases, 1.0 if quick else 3.0, 2 if quick else 5),
    "decay": lambda databases, quick: table_size.run(databases, 100_000 if quick else 1_000_000, 10_000),
    "retention": lambda databases, quick: retention.run(databases, 50_000 if quick else 200_000, 0.7 if quick else 3.0),
    "idle": lambda databases, quick: idle_workers.run(
        databases, [60] if quick else IDLE_WORKERS, 10.0 if quick else 60.0
    ),
}


def main() -> int:
    options = _options()
    run_guard.start()
    IDLE_WORKERS[:] = options.idle_workers
    tables: list[Table] = []
    with open_databases(options.databases) as databases:
        print(headline("core", databases) + "\n", flush=True)
        for part in options.only:
            progress(f"… {part}")
            tables.append(PARTS[part](databases, options.quick))
            print(tables[-1].text() + "\n", flush=True)
        if options.json is not None:
            options.json.write_text(as_json(tables, databases))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.__main__", description=__doc__)
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="A,B", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--databases", type=_databases, default=["postgresql", "sqlite"], metavar="A,B")
    parser.add_argument("--quick", action="store_true", help="short runs: for a first look, not for figures")
    parser.add_argument(
        "--idle-workers", type=_sizes, default=list(IDLE_WORKERS), metavar="N,M", help="multiples of 20"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    return _known(text, list(PARTS))


def _databases(text: str) -> list[str]:
    return _known(text, ["postgresql", "sqlite"])


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if not sizes or any(size <= 0 or size % WORKERS_PER_HOST for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must be multiples of {WORKERS_PER_HOST}")
    return sizes


def _known(text: str, known: list[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
