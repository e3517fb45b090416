"""Checks of workers: silent, late, idle, disabled, dead with jobs; no reaper, recovery off, weak containment."""

from collections.abc import Iterator

from unstuck.client.doctor.facts import Facts, IdleLook, Thresholds, has_room, note_of, own, setting_of, sits_on_jobs
from unstuck.client.doctor.findings import Finding, capital, count, info, named, problem, warning
from unstuck.domain.conditions import NO_REAPER, NO_REAPER_CURE, Code, reaper_is_missing, why_reaper_is_missing
from unstuck.domain.states import LIVE_STATES, Transport, WorkerState
from unstuck.domain.units import brief
from unstuck.domain.worker_health import IN_A_ROW, read_health
from unstuck.ledger.contract.diagnosis import Diagnosis
from unstuck.ledger.contract.workers import WorkerRecord

LATE_INTERVALS = 2.0


def check_fleet(facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    late_s = facts.settings.alerts.heartbeat_late_s
    for worker in facts.workers:
        if worker.state not in LIVE_STATES:
            if worker.held and _gone_s(worker, diagnosis) >= limits.settling_s:
                yield _holds_jobs(worker, diagnosis)
        elif worker.state is WorkerState.SUSPECT or worker.silent_s >= (late_s or worker.suspect_after_s):
            yield _silent(worker)
        elif worker.silent_s > LATE_INTERVALS * worker.heartbeat_interval_s + diagnosis.round_trip_s:
            yield _late(worker)
    yield from (_disabled(worker) for worker in facts.living if worker.disabled is not None)
    yield from (_kills_all(worker) for worker in facts.living if worker.disabled is None and _in_a_row(worker))
    yield from (_idle(standstill) for standstill in facts.standstills if is_idle(standstill))


def is_idle(seen: IdleLook) -> bool:
    """Two looks apart: nothing taken, nothing ended; and those first in line, or in its hands, are still there."""
    before, after = seen.before, seen.after
    if (before.processed, before.held) != (after.processed, after.held):
        return False
    if _in_a_row(after):
        # It takes one job at a time, with pauses, since all of them die.
        return False
    waited_for = has_room(after) and bool(seen.ready_ids) and seen.left_ids == seen.ready_ids
    # What runs is told with the beat, and what is held is not: only a beat later both are about the same jobs.
    same = after.last_seen_at > before.last_seen_at and before.running == after.running
    return waited_for or (same and sits_on_jobs(before) and sits_on_jobs(after))


def _in_a_row(worker: WorkerRecord) -> int:
    """Return how many different jobs died on a worker in a row if that is too many to be chance, else 0."""
    health = read_health(own(worker).get("health"))
    # Several that died in one moment may have one cause.
    return health.in_a_row if health.in_a_row >= IN_A_ROW and health.deaths != 1 else 0


def _kills_all(worker: WorkerRecord) -> Finding:
    return problem(
        Code.EVERYTHING_DIES,
        f"Every job dies on worker {worker.name} ({worker.id}) on {worker.host}: {_in_a_row(worker)} different ones",
        "None ended otherwise since. Their crashes count as the worker's: it tries one job at a time, and those that "
        "died wait, for up to an hour.",
        f"Look at {process(worker)}: its memory, its disk, its libraries. `unstuck jobs --error WORKER_CRASHED` lists "
        "the jobs, `unstuck why ID` tells how each died. The next job that ends well puts it right.",
        worker=worker.id,
        jobs=_in_a_row(worker),
    )


def who(worker: WorkerRecord) -> str:
    return f"Worker {worker.name} ({worker.id}) on {worker.host}"


def process(worker: WorkerRecord) -> str:
    """Name what to look at: a foreign worker's process is known to itself alone."""
    if worker.transport is Transport.PYTHON:
        return f"process {worker.pid} on {worker.host}"
    return f"the worker {worker.name!r} (over {worker.transport}) on {worker.host}"


def _gone_s(worker: WorkerRecord, diagnosis: Diagnosis) -> float:
    return diagnosis.now_at - (worker.stopped_at if worker.stopped_at is not None else diagnosis.now_at)


def _holds_jobs(worker: WorkerRecord, diagnosis: Diagnosis) -> Finding:
    verdict = f" ({worker.verdict.detector}: {worker.verdict.evidence})" if worker.verdict is not None else ""
    return problem(
        Code.DEAD_WORKER_HOLDS_JOBS,
        f"{who(worker)} is {worker.state} and still holds {count(worker.held, 'job')}",
        f"It has been {worker.state} for {brief(_gone_s(worker, diagnosis))}{verdict}, and nobody settled what it "
        "held: no reaper runs, or automatic recovery is switched off.",
        "Start a worker or `unstuck reaper`; by hand: `unstuck stale --requeue` and `unstuck stale --fail`.",
        worker=worker.id,
        held=worker.held,
        state=worker.state.value,
    )


def _silent(worker: WorkerRecord) -> Finding:
    holds = f" and holds {count(worker.held, 'job')}" if worker.held else ""
    say = problem if worker.held else warning
    return say(
        Code.SILENT_WORKER,
        f"{who(worker)} has been silent for {brief(worker.silent_s)}{holds}",
        f"It beats every {brief(worker.heartbeat_interval_s)} and is suspect after {brief(worker.suspect_after_s)}: "
        "it is dead, frozen, or cut off from the database.",
        f"Look at {process(worker)}. If it is gone the reaper settles its jobs; `unstuck stale` shows when.",
        worker=worker.id,
        held=worker.held,
        silent_s=round(worker.silent_s, 3),
    )


def _late(worker: WorkerRecord) -> Finding:
    return warning(
        Code.LATE_BEATS,
        f"The beat of worker {worker.name} ({worker.id}) on {worker.host} is late",
        f"It was last heard {brief(worker.silent_s)} ago and beats every {brief(worker.heartbeat_interval_s)}: "
        "it has just died, its host is overloaded, or the way to the database is slow.",
        f"See whether {process(worker)} lives; look at the load of the host and of the database, "
        "or raise heartbeat_timeout.",
        worker=worker.id,
        silent_s=round(worker.silent_s, 3),
        heartbeat_interval_s=worker.heartbeat_interval_s,
    )


def _disabled(worker: WorkerRecord) -> Finding:
    off = worker.disabled
    assert off is not None
    # What an operator did is known to somebody; what the system did by itself may be news.
    say = warning if off.auto else info
    return say(
        Code.WORKER_DISABLED,
        f"{who(worker)} is disabled and takes no jobs",
        f"By {off.by}: {off.reason.rstrip('.')}.",
        f"Mend the cause, then `unstuck workers enable {f'--host {worker.host}' if off.of_host else worker.id}`.",
        worker=worker.id,
        host=worker.host,
        by=off.by,
        reason=off.reason,
        auto=off.auto,
        of_host=off.of_host,
    )


def _idle(seen: IdleLook) -> Finding:
    worker = seen.after
    free = worker.concurrency - min(worker.running, worker.concurrency)
    if sits_on_jobs(worker):
        held = count(worker.held, "job")
        waits = f"it holds {held} and runs {worker.running or 'none'} of them"
    else:
        waits = f"jobs that it knows are ready in {named(seen.queues)} (the first is job {seen.ready_ids[0]})"
    return problem(
        Code.IDLE_WORKER,
        f"{who(worker)} is alive but does nothing",
        f"It beats and has {count(free, 'free slot')}, and {waits}; for {brief(seen.apart_s)} it took none and ended "
        "none.",
        f"Restart it: `unstuck workers stop {worker.id}`, or end {process(worker)}. "
        "Its log may say why its wheel stands still.",
        worker=worker.id,
        queues=list(seen.queues),
        ready=list(seen.ready_ids),
        held=worker.held,
        processed=worker.processed,
        free=free,
    )


def check_recovery(facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    yield from check_reaper(facts, diagnosis, limits)
    yield from _check_switch(
        facts,
        "auto_requeue_stale_claimed",
        Code.REQUEUE_SWITCHED_OFF,
        "what a silent worker has only claimed waits for an operator",
        "`unstuck stale --requeue` settles it by hand; set auto_requeue_stale_claimed = true to have it done.",
    )
    yield from _check_switch(
        facts,
        "auto_fail_stale_running",
        Code.FAIL_SWITCHED_OFF,
        "what a silent worker is running waits for an operator",
        "`unstuck stale --fail` settles it by hand; set auto_fail_stale_running = true to have it done.",
    )


def check_reaper(facts: Facts, diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    living = facts.living
    if not living and not any(worker.held for worker in facts.workers):
        # Nobody to watch over. Jobs that wait for a worker are found as such.
        return
    intervals = [setting_of(worker, "check_interval_s", float) for worker in living]
    interval_s = max([facts.settings.recovery.check_interval_s, *(value for value in intervals if value is not None)])
    if not reaper_is_missing(
        diagnosis.unswept_s, interval_s, [diagnosis.now_at - worker.created_at for worker in living]
    ):
        return
    yield problem(
        Code.NO_REAPER,
        NO_REAPER,
        why_reaper_is_missing(diagnosis.unswept_s, interval_s),
        NO_REAPER_CURE,
        unswept_s=diagnosis.unswept_s,
        check_interval_s=interval_s,
    )


def _check_switch(facts: Facts, switch: str, code: Code, what: str, cure: str) -> Iterator[Finding]:
    off = [worker.name for worker in facts.living if worker.rules is not None and not getattr(worker.rules, switch)]
    # Workers that stored their rules are judged by those alone.
    here = not getattr(facts.settings.recovery, switch) and any(worker.rules is None for worker in facts.living)
    if not off and not here:
        return
    where = [f"in {named(off)}"] if off else []
    where += ["in the settings that this command reads"] if here else []
    yield warning(
        code,
        f"Automatic recovery is partly switched off: {what}",
        f"{switch} is false {' and '.join(where)}.",
        cure,
        switch=switch,
        workers=off,
        here=here,
    )


def check_containment(facts: Facts, _diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    """Tell what the living workers found on their hosts."""
    rooms: dict[str, set[str]] = {}
    grouped: set[str] = set()
    for worker in facts.living:
        sentence = note_of(worker, "containment", str)
        if sentence:
            rooms.setdefault(sentence, set()).add(worker.host)
        if note_of(worker, "oom_group", bool):
            grouped.add(worker.host)
    for sentence, hosts in rooms.items():
        names = named(sorted(hosts))
        strong = sentence.startswith("cgroup")
        yield info(
            Code.CONTAINMENT,
            f"Containment on {names}: {sentence.partition(':')[0]}",
            f"{capital(sentence.partition(': ')[2] or sentence)}.",
            "" if strong else "To be sure, delegate a cgroup v2 to the worker (systemd: Delegate=yes).",
            hosts=sorted(hosts),
            containment=sentence,
        )
    if grouped:
        yield warning(
            Code.OOM_GROUP,
            f"On {named(sorted(grouped))} the kernel kills a whole worker when one job takes too much memory",
            "memory.oom.group is 1 in the worker's cgroup: out of memory, nobody in it is spared, and every job of the "
            "worker dies with the culprit.",
            "systemd: OOMPolicy=continue. Kubernetes: singleProcessOOMKill: true in the kubelet's configuration.",
            hosts=sorted(grouped),
        )
