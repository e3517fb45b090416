"""Run many seeds on all processors, and put together what they found."""

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation import clock
from tests.simulation.mutants import MUTANTS
from tests.simulation.run import run_seed
from tests.simulation.scenario import FAULTS

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
    clock.install()
    # What is loaded by now stays for good: not to be looked through again for garbage with every few runs.
    gc.freeze()
    gc.set_threshold(GARBAGE)
    if mutant is not None:
        MUTANTS[mutant]()


def _run_chunk(chunk: tuple[range, str]) -> Report:
    return run_seeds(*chunk)


def processors() -> int:
    return len(os.sched_getaffinity(0))
