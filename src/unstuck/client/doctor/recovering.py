"""Find out whether anybody looks for the dead, and whether they may do something about it."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, named, problem, warning
from unstuck.client.doctor.metadata import told
from unstuck.domain.sweeping import NO_REAPER, NO_REAPER_CURE, is_unswept, why_unswept
from unstuck.store.diagnosis import Diagnosis


def check_recovery(facts: Facts, diagnosis: Diagnosis, _limits: Limits) -> Iterator[Finding]:
    yield from _check_reaper(facts, diagnosis)
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


def _check_reaper(facts: Facts, diagnosis: Diagnosis) -> Iterator[Finding]:
    living = facts.living
    if not living and not any(worker.held for worker in facts.workers):
        # Nobody to watch over. Jobs that wait for a worker are found as such.
        return
    intervals = [told(worker, "check_interval_s", float) for worker in living]
    interval_s = max([facts.settings.recovery.check_interval_s, *(value for value in intervals if value is not None)])
    if not is_unswept(diagnosis.unswept_s, interval_s, [diagnosis.now_at - worker.created_at for worker in living]):
        return
    yield problem(
        Code.NO_REAPER,
        NO_REAPER,
        why_unswept(diagnosis.unswept_s, interval_s),
        NO_REAPER_CURE,
        unswept_s=diagnosis.unswept_s,
        check_interval_s=interval_s,
    )


def _check_switch(facts: Facts, switch: str, code: Code, what: str, cure: str) -> Iterator[Finding]:
    off = [worker.name for worker in facts.living if worker.rules is not None and not getattr(worker.rules, switch)]
    here = not getattr(facts.settings.recovery, switch)
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
