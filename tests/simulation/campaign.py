"""Keep the scenarios that once failed: as data, so that they mean the same however scenarios are drawn later."""

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from tests.simulation import scheduler
from tests.simulation.known_bugs import MUTANTS
from tests.simulation.scenario import FAULTS, Scenario
from tests.simulation.world import run_seed

FOLDER = Path(__file__).parent / "regressions"


class Kept(msgspec.Struct, frozen=True):
    found: str
    """What went wrong when it was found."""
    scenario: Scenario


def keep(scenario: Scenario, found: str, ledger: str) -> Path:
    """Write a scenario where `kept` finds it."""
    path = FOLDER / f"{ledger}-{scenario.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(Kept(found, scenario)), indent=2) + b"\n")
    return path


def kept(ledger: str) -> dict[str, Kept]:
    """Return all that were found on this ledger, by the names of their files."""
    paths = sorted(FOLDER.glob(f"{ledger}-*.json"))
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=Kept) for path in paths}


MAX_TRIES = 300

T = TypeVar("T")

Fails = Callable[[Scenario], bool]


def minimise(scenario: Scenario, fails: Fails) -> Scenario:
    """Return the smallest scenario that was found: fewer faults, jobs and workers, plainer settings."""
    tries = 0
    again = True
    while again and tries < MAX_TRIES:
        again = False
        for smaller in _smaller(scenario):
            tries += 1
            if fails(smaller):
                scenario, again = smaller, True
                break
            if tries >= MAX_TRIES:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for number in range(len(scenario.faults)):
        yield _with(scenario, faults=_without(scenario.faults, number))
    for number in range(len(scenario.jobs)):
        yield _with(scenario, jobs=_without(scenario.jobs, number))
    if len(scenario.workers) > 1:
        for number in range(len(scenario.workers)):
            yield _with(scenario, workers=_without(scenario.workers, number))
    plain: dict[str, object] = {
        "schedule_every_s": None,
        "claimed_stale_after_s": None,
        "running_stale_after_s": None,
        "containers": False,
        "pooled": False,
        "late_share": 0.0,
        "auto_requeue": True,
        "auto_fail": True,
        "reapers": 0,
        "evidence": (),
    }
    for name, value in plain.items():
        if getattr(scenario, name) != value:
            yield _with(scenario, **{name: value})


def _with(scenario: Scenario, **changes: object) -> Scenario:
    return msgspec.structs.replace(scenario, **changes)


def _without(items: tuple[T, ...], number: int) -> tuple[T, ...]:
    return items[:number] + items[number + 1 :]


CHUNK = 20
GARBAGE = 50_000
"""How many objects are made before garbage is looked for: a run makes some ten thousand."""
MOST_TOLD = 30
"""How many failing seeds are printed at once; more of them have one cause."""


@dataclass
class Report:
    """What came of many seeds."""

    ledger: str
    seeds: int = 0
    events: int = 0
    cpu_s: float = 0.0
    took_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)
    """By seed, the violations."""

    def add(self, other: "Report") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.cpu_s += other.cpu_s
        self.faults += other.faults
        self.shapes += other.shapes
        self.verdicts += other.verdicts
        self.failed |= other.failed

    def lines(self) -> list[str]:
        """Return it for people."""
        width = max(map(len, FAULTS))
        lines = [f"fault{'':{width - 5}}  drawn"]
        lines += [f"{kind:{width}}  {self.faults[kind]:5}" for kind in FAULTS]
        verdicts = ", ".join(f"{count} by {detector}" for detector, count in self.verdicts.most_common()) or "none"
        shapes = ", ".join(f"{count} as a {shape}" for shape, count in sorted(self.shapes.items()))
        lines += ["", f"Workers declared dead: {verdicts}.", f"Ledgers: {shapes}."]
        if self.failed:
            lines.append(f"Replay one: python -m tests.simulation --ledger {self.ledger} --seed {min(self.failed)} -v")
        each_ms = 1000 * self.cpu_s / max(self.seeds, 1)
        lines.append(
            f"{self.seeds} seeds on {self.ledger} in {self.took_s / 60:.1f} minutes ({each_ms:.0f} ms of processor "
            f"time each, {self.events} events). Seeds with violations: {len(self.failed)}."
        )
        return lines


def run_seeds(seeds: Iterable[int], ledger: str) -> Report:
    """Run these one after the other, in this process."""
    report = Report(ledger)
    begun_s = time.process_time()
    for seed in seeds:
        result = run_seed(seed, ledger)
        report.seeds += 1
        report.events += result.events
        report.faults.update(fault.kind for fault in result.scenario.faults)
        report.shapes[result.scenario.shape] += 1
        report.verdicts += result.verdicts
        if result.violations:
            report.failed[seed] = [str(violation) for violation in result.violations]
    report.cpu_s = time.process_time() - begun_s
    return report


def run_campaign(
    first: int, count: int, ledger: str, processes: int, mutant: str | None, *, until_failure: bool
) -> Report:
    """Run `count` seeds from `first` on; with `until_failure` only until one of them fails."""
    report = Report(ledger)
    begun_s = time.perf_counter()
    chunks = [(range(at, min(at + CHUNK, first + count)), ledger) for at in range(first, first + count, CHUNK)]
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, prepare, (mutant,)) as pool:
        for part in pool.imap(_run_chunk, chunks):
            report.add(part)
            for seed, what in part.failed.items():
                if len(report.failed) <= MOST_TOLD:
                    print(f"Seed {seed} failed: {what[0].strip()}", flush=True)
            if until_failure and report.failed:
                pool.terminate()
                break
    report.took_s = time.perf_counter() - begun_s
    return report


def prepare(mutant: str | None) -> None:
    """Make this Python process one that only simulates."""
    scheduler.install()
    # What is loaded by now stays for good: not to be looked through again for garbage with every few runs.
    gc.freeze()
    gc.set_threshold(GARBAGE)
    if mutant is not None:
        MUTANTS[mutant]()


def _run_chunk(chunk: tuple[range, str]) -> Report:
    return run_seeds(*chunk)


def processors() -> int:
    return len(os.sched_getaffinity(0))
