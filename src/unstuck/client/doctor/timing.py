"""Find settings that will take healthy workers for dead, or that differ within one fleet."""

from collections.abc import Iterator
from typing import Any

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, named, warning
from unstuck.client.doctor.intervals import check_intervals, pairs_of
from unstuck.client.doctor.metadata import own
from unstuck.client.explaining import is_well
from unstuck.domain.durations import brief
from unstuck.domain.states import Door
from unstuck.store.diagnosis import Diagnosis
from unstuck.store.records import WorkerRecord

DELAYS_ALLOWED = 4.0
BEATS_ALLOWED = 2.0
MAX_VALUES = 5


def check_timing(facts: Facts, diagnosis: Diagnosis, _limits: Limits) -> Iterator[Finding]:
    recovery = facts.settings.recovery
    yield from check_intervals(facts)
    tight = [worker for worker in facts.living if is_well(worker) and _is_tight(worker, diagnosis)]
    if tight:
        yield _too_tight(tight, diagnosis)
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


def delay_s(worker: WorkerRecord, diagnosis: Diagnosis) -> float:
    """Give the longest that a beat of this worker is seen to need."""
    return max(diagnosis.round_trip_s, worker.silent_s - worker.heartbeat_interval_s)


def _is_tight(worker: WorkerRecord, diagnosis: Diagnosis) -> bool:
    needed_s = BEATS_ALLOWED * worker.heartbeat_interval_s + DELAYS_ALLOWED * delay_s(worker, diagnosis)
    # An interval that is too long for its timeout is a finding of its own.
    return worker.suspect_after_s < needed_s and not any(pair.is_risky for pair in pairs_of(worker))


def _too_tight(tight: list[WorkerRecord], diagnosis: Diagnosis) -> Finding:
    worst = max(tight, key=lambda worker: delay_s(worker, diagnosis) / worker.suspect_after_s)
    late_s = delay_s(worst, diagnosis)
    return warning(
        Code.TIMEOUT_TOO_TIGHT,
        f"The heartbeat timeout of {named([worker.name for worker in tight])} is tight",
        f"{worst.name} beats every {brief(worst.heartbeat_interval_s)}, a beat is seen to need "
        f"{'less than 1ms' if late_s < 0.001 else brief(late_s)}, and it is suspect after "
        f"{brief(worst.suspect_after_s)}: one slow moment of the host or the database, and a healthy worker loses its "
        "jobs.",
        "Raise heartbeat_timeout, or lower heartbeat_interval: leave room for two beats and four such delays.",
        workers=[worker.id for worker in tight],
        delay_s=round(late_s, 4),
        round_trip_s=round(diagnosis.round_trip_s, 4),
        suspect_after_s=worst.suspect_after_s,
        heartbeat_interval_s=worst.heartbeat_interval_s,
    )


def _told_timings(facts: Facts) -> Iterator[tuple[str, float, float]]:
    for worker in facts.living:
        settings = _settings(worker)
        check_s, timeout_s = settings.get("check_interval_s"), settings.get("heartbeat_timeout_s")
        if isinstance(check_s, int | float) and isinstance(timeout_s, int | float):
            yield f"worker {worker.name}", float(check_s), float(timeout_s)


def _check_same(facts: Facts) -> Iterator[Finding]:
    differing: dict[str, dict[str, list[str]]] = {}
    # Whoever comes over a network lives by its own timeouts and version, and sweeps nobody.
    ours = [worker for worker in facts.living if worker.door is Door.PYTHON]
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
