"""Measure the web door on both databases in one run, beside a bare route and the bare ledger: `make bench-web`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from tests.support import run_guard

from bench import http_heartbeats, remote_workers, stale_check
from bench.databases import Database, open_databases
from bench.report import Table, as_json, headline, progress

BATCH = 200
"""Jobs in one request of a remote worker."""

Part = Callable[[list[Database], argparse.Namespace], Table]

PARTS: dict[str, Part] = {
    "beats": lambda databases, asked: http_heartbeats.run(
        databases, asked.workers, 10.0 if asked.quick else asked.seconds
    ),
    "remote": lambda databases, asked: remote_workers.run(databases, 3.0 if asked.quick else 15.0, BATCH),
    "stale": lambda databases, asked: stale_check.run(
        databases, 10_000, 100_000 if asked.quick else 1_000_000, 5 if asked.quick else 20
    ),
}


def main() -> int:
    options = _options()
    run_guard.start()
    tables: list[Table] = []
    with open_databases(options.databases) as databases:
        print(headline("web", databases) + "\n", flush=True)
        for part in options.only:
            progress(f"… {part}")
            tables.append(PARTS[part](databases, options))
            print(tables[-1].text() + "\n", flush=True)
        if options.json is not None:
            options.json.write_text(as_json(tables, databases))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.http", description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), metavar="A,B")
    parser.add_argument(
        "--databases", type=lambda text: text.split(","), default=["postgresql", "sqlite"], metavar="A,B"
    )
    parser.add_argument("--workers", type=int, default=1_000, metavar="N", help="foreign workers that beat")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long they are watched")
    parser.add_argument("--quick", action="store_true", help="short runs: for a first look, not for figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
