"""Simulate a fleet under faults, from seeds.

python -m tests.simulation --seeds 100000            many seeds, on all processors
python -m tests.simulation --seed 266 -v             one seed, with its story
python -m tests.simulation --seed 266 --keep         make it smaller, and keep it for ever
python -m tests.simulation --kept                    all that were kept
python -m tests.simulation --mutants --seeds 1000    show that old mistakes are found
"""

import argparse
import os
import sys

from tests.simulation.campaign import keep, kept, minimise, prepare, processors, run_campaign
from tests.simulation.database import hosting
from tests.simulation.known_bugs import MUTANTS
from tests.simulation.scenario import Scenario
from tests.simulation.world import LEDGERS, Result, draw_for, run_scenario
from tests.support import run_guard

SEEDS = 100_000


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is drawn by Python itself, once for each process.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *arguments])
    run_guard.start()
    with hosting(options.ledger):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.seed is not None:
        return _replay(options)
    if options.kept:
        return _run_kept(options)
    if options.mutants:
        return _hunt_mutants(options)
    report = run_campaign(
        options.first, options.seeds, options.ledger, options.jobs, options.mutant, until_failure=False
    )
    print(*report.lines(), sep="\n")
    return 1 if report.failed else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--ledger", choices=LEDGERS, default="sqlite")
    parser.add_argument("--jobs", type=int, default=processors(), help="how many processes")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="bring an old mistake back")
    parser.add_argument("--mutants", action="store_true", help="show that each old mistake is found")
    parser.add_argument("--kept", action="store_true", help="run what was kept")
    parser.add_argument("--keep", action="store_true", help="with --seed: make it smaller, and keep it")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: print its story")
    return parser.parse_args(arguments)


def _replay(options: argparse.Namespace) -> int:
    prepare(options.mutant)
    result = run_scenario(draw_for(options.seed, options.ledger), options.ledger)
    if options.verbose:
        _print_story(result)
    print(*result.violations, sep="\n")
    if not result.violations:
        print(f"Seed {options.seed} holds.")
        return 0
    smallest = _smallest(result, options.ledger)
    print("\nThe smallest scenario that fails in the same way:")
    print(*smallest.faults, sep="\n")
    if options.keep:
        print(f"Kept in {keep(smallest, str(result.violations[0]), options.ledger)}")
    return 1


def _print_story(result: Result) -> None:
    for name in result.scenario.__struct_fields__:
        value = getattr(result.scenario, name)
        print(f"{name}:", *([f"\n    {one}" for one in value] if name in ("jobs", "faults", "workers") else [value]))
    print(*result.story, sep="\n")


def _smallest(result: Result, ledger: str) -> Scenario:
    wanted = result.violations[0].invariant

    def fails(scenario: Scenario) -> bool:
        return any(violation.invariant == wanted for violation in run_scenario(scenario, ledger).violations)

    return minimise(result.scenario, fails)


def _run_kept(options: argparse.Namespace) -> int:
    prepare(options.mutant)
    failed = 0
    for name, one in kept(options.ledger).items():
        violations = run_scenario(one.scenario, options.ledger).violations
        failed += bool(violations)
        print(f"{name}: {violations[0] if violations else 'holds'}")
    return 1 if failed else 0


def _hunt_mutants(options: argparse.Namespace) -> int:
    escaped = 0
    for name, mutant in MUTANTS.items():
        report = run_campaign(options.first, options.seeds, options.ledger, options.jobs, name, until_failure=True)
        seed = min(report.failed, default=None)
        escaped += seed is None
        found = f"not found by {report.seeds} seeds" if seed is None else f"found by seed {seed}"
        print(f"{name} ({mutant.__doc__}): {found}", flush=True)
    return 1 if escaped else 0


sys.exit(main(sys.argv[1:]))
