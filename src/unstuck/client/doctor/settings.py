"""Checks of settings: tight timeouts, long intervals, settings, versions and clocks that differ between workers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unstuck.client.doctor.facts import Facts, Thresholds, note_of, own, setting_of
from unstuck.client.doctor.findings import Finding, named, warning
from unstuck.config import Recovery
from unstuck.domain.conditions import Code
from unstuck.domain.policy import decode_policy
from unstuck.domain.states import Transport
from unstuck.domain.units import brief
from unstuck.ledger.contract.diagnosis import Diagnosis
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import WorkerRecord

BEATS_PER_TIMEOUT = 3.0
HERE = "the settings that this command reads"
MAX_TASKS = 5
"""How many tasks are told of for one interval and timeout."""


@dataclass(frozen=True)
class Pair:
    """A heartbeat interval and a timeout that applies to it."""

    interval_s: float
    timeout_s: float
    timeout: str
    """The setting that it comes from."""
    task: str | None = None

    @property
    def is_risky(self) -> bool:
        # A little more is the noise of numbers that were divided.
        return self.interval_s * BEATS_PER_TIMEOUT > self.timeout_s * 1.001


@dataclass
class _Whose:
    workers: list[WorkerRecord] = field(default_factory=list)
    here: bool = False


def check_intervals(facts: Facts) -> Iterator[Finding]:
    """Compare the intervals of living workers, and of the settings here, with every timeout that applies to them."""
    timeouts_s = dict(_task_timeouts_s(facts.tasks))
    risky: dict[Pair, _Whose] = {}
    for worker in facts.living:
        for pair in {*pairs_of(worker), *_task_pairs(worker, timeouts_s)}:
            if pair.is_risky:
                risky.setdefault(pair, _Whose()).workers.append(worker)
    for pair in {*_pairs_here(facts.settings.recovery)}:
        if pair.is_risky:
            risky.setdefault(pair, _Whose()).here = True
    for pair in sorted(risky, key=lambda pair: (pair.task or "", pair.timeout_s)):
        yield _risky(pair, risky[pair])


def pairs_of(worker: WorkerRecord) -> Iterator[Pair]:
    """Return the timeouts of a worker itself; others decide by them whether it is dead."""
    interval_s = worker.heartbeat_interval_s
    usual_s = setting_of(worker, "heartbeat_timeout_s", float)
    running_s = setting_of(worker, "running_stale_after_s", float)
    own = usual_s is not None and worker.suspect_after_s != usual_s
    yield Pair(interval_s, worker.suspect_after_s, "claimed_stale_after" if own else "heartbeat_timeout")
    if running_s is not None and running_s != worker.suspect_after_s:
        yield Pair(interval_s, running_s, "heartbeat_timeout" if running_s == usual_s else "running_stale_after")


def _pairs_here(recovery: Recovery) -> Iterator[Pair]:
    interval_s = recovery.heartbeat_interval_s
    yield Pair(interval_s, recovery.heartbeat_timeout_s, "heartbeat_timeout")
    if recovery.claimed_stale_after is not None:
        yield Pair(interval_s, recovery.claimed_stale_after_s, "claimed_stale_after")
    if recovery.running_stale_after is not None:
        yield Pair(interval_s, recovery.running_stale_after_s, "running_stale_after")


def _task_timeouts_s(tasks: tuple[TaskRecord, ...]) -> Iterator[tuple[str, float]]:
    for task in tasks:
        policy = decode_policy(task.policy)
        if policy.heartbeat and policy.heartbeat_timeout_s is not None:
            yield task.name, policy.heartbeat_timeout_s


def _task_pairs(worker: WorkerRecord, timeouts_s: dict[str, float]) -> list[Pair]:
    found = [
        Pair(worker.heartbeat_interval_s, timeouts_s[task], "heartbeat_timeout", task)
        for task in worker.tasks
        if task in timeouts_s
    ]
    return sorted((pair for pair in found if pair.is_risky), key=lambda pair: pair.timeout_s)[:MAX_TASKS]


def _risky(pair: Pair, whose: _Whose) -> Finding:
    names = named([worker.name for worker in whose.workers])
    who = " and ".join(part for part in (names, HERE if whose.here else "") if part)
    of_task = "" if pair.task is None else f" of task {pair.task!r}"
    return warning(
        Code.TIMEOUT_TOO_TIGHT,
        f"The heartbeat interval of {who} ({brief(pair.interval_s)}) is more than a third of {pair.timeout} "
        f"({brief(pair.timeout_s)}){of_task}",
        "One heartbeat that comes late, because the host, the network or the database is slow for a moment, and a "
        "healthy worker may lose its jobs.",
        f"Set heartbeat_interval to {brief(pair.timeout_s / BEATS_PER_TIMEOUT)} or less, or {pair.timeout}{of_task} to "
        f"{brief(pair.interval_s * BEATS_PER_TIMEOUT)} or more.",
        workers=[worker.id for worker in whose.workers],
        here=whose.here,
        task=pair.task,
        timeout=pair.timeout,
        timeout_s=pair.timeout_s,
        heartbeat_interval_s=pair.interval_s,
    )


MAX_VALUES = 5


def check_timing(facts: Facts, _diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    recovery = facts.settings.recovery
    yield from check_intervals(facts)
    shortest_s = min(recovery.claimed_stale_after_s, recovery.running_stale_after_s)
    for name, check_s, timeout_s in [
        ("the settings that this command reads", recovery.check_interval_s, shortest_s),
        *_told_timings(facts),
    ]:
        if check_s > timeout_s:
            yield warning(
                Code.CHECK_INTERVAL_TOO_LONG,
                f"Deaths are looked for every {brief(check_s)}, and the timeout is {brief(timeout_s)}",
                f"So it is in {name}. A death is found up to {brief(check_s)} later than the timeout promises.",
                "Set check_interval well below heartbeat_timeout; 1s is the default.",
                check_interval_s=check_s,
                timeout_s=timeout_s,
            )
            break
    yield from _check_same(facts)


def _told_timings(facts: Facts) -> Iterator[tuple[str, float, float]]:
    for worker in facts.living:
        settings = _settings(worker)
        check_s, timeout_s = settings.get("check_interval_s"), settings.get("heartbeat_timeout_s")
        if isinstance(check_s, int | float) and isinstance(timeout_s, int | float):
            yield f"worker {worker.name}", float(check_s), float(timeout_s)


def _check_same(facts: Facts) -> Iterator[Finding]:
    differing: dict[str, dict[str, list[str]]] = {}
    # Whoever comes over a network lives by its own timeouts and version, and sweeps nobody.
    ours = [worker for worker in facts.living if worker.transport is Transport.PYTHON]
    for worker in ours:
        for setting, value in {**_settings(worker), "suspect_after_s": worker.suspect_after_s}.items():
            differing.setdefault(setting, {}).setdefault(str(value), []).append(worker.name)
    differing = {setting: values for setting, values in differing.items() if len(values) > 1}
    if differing:
        said = [f"{setting} is {_spread(values)}" for setting, values in differing.items()]
        yield warning(
            Code.SETTINGS_DIFFER,
            f"Workers of this ledger live by different settings: {named(list(differing))}",
            f"{'; '.join(said[:MAX_VALUES])}. Each brings its own timeouts, and whoever sweeps applies its "
            "own switches: what becomes of a job depends on chance.",
            "Give all workers of one ledger the same settings, and restart those that have old ones.",
            settings=differing,
        )
    versions: dict[str, list[str]] = {}
    for worker in ours:
        versions.setdefault(worker.version, []).append(worker.name)
    if len(versions) > 1:
        yield warning(
            Code.VERSIONS_DIFFER,
            f"Workers of this ledger run different versions of Unstuck: {named(sorted(versions))}",
            f"{_spread(versions)}. Two releases that follow one another work side by side, for the time of a deploy.",
            "Finish the deploy: restart the workers that run the older one.",
            versions=versions,
        )


def _settings(worker: WorkerRecord) -> dict[str, Any]:
    settings = own(worker).get("settings")
    return settings if isinstance(settings, dict) else {}


def _spread(values: dict[str, list[str]]) -> str:
    parts = [f"{value} in {named(names)}" for value, names in list(values.items())[:MAX_VALUES]]
    return " and ".join(parts)


_HURT = (
    "Leases and deadlines go by the database's clock and are safe; times that programs on this host give (run_at) and "
    "times in its logs are off by as much."
)
_CURE = "Have the clock set by NTP (chrony, systemd-timesyncd) on {}."


def check_clocks(facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    if diagnosis.clock_off_s is None:
        # One host, one clock.
        return
    if abs(diagnosis.clock_off_s) > limits.clock_s:
        yield _differs(facts.host, "", diagnosis.clock_off_s, "measured now")
    worst: dict[str, tuple[float, list[str]]] = {}
    for worker in facts.living:
        clock_at = note_of(worker, "clock_at", float)
        if clock_at is None or worker.host == facts.host:
            continue
        off_s = clock_at - worker.created_at
        if abs(off_s) > limits.clock_s:
            before_s, names = worst.get(worker.host, (0.0, []))
            worst[worker.host] = (max(before_s, off_s, key=abs), [*names, worker.name])
    for host, (off_s, names) in worst.items():
        yield _differs(host, f" of {named(names)}", off_s, "measured when its workers registered")


def _differs(host: str, whose: str, off_s: float, how: str) -> Finding:
    side = "ahead of" if off_s > 0 else "behind"
    return warning(
        Code.CLOCK_DIFFERS,
        f"The clock of host {host} is {brief(abs(off_s))} {side} the database's",
        f"It was {how}{whose}. {_HURT}",
        _CURE.format(host),
        host=host,
        off_s=round(off_s, 3),
    )
