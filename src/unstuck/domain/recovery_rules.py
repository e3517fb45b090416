"""The recovery settings that hold for one worker, as they are stored with it.

Whoever judges a worker may run with other settings than the worker's app: `unstuck reaper` from cron, `unstuck serve`,
a command on an operator's machine. So each worker stores its rules when it registers, and they are read there.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache

import msgspec

from unstuck.domain.policy import Policy
from unstuck.domain.states import JobState

EVIDENCE = ("neighbours", "session")
DAY_S = 86400.0


class Kept(msgspec.Struct, frozen=True):
    """How long finished things are kept, in seconds."""

    jobs_s: float = 7 * DAY_S
    events_s: float = 7 * DAY_S
    workers_s: float = DAY_S
    audit_s: float = 90 * DAY_S


class RecoveryRules(msgspec.Struct, frozen=True):
    """What a worker stores of its recovery settings. The defaults are for rows that lack a field."""

    auto_requeue_stale_claimed: bool = True
    auto_fail_stale_running: bool = True
    auto_disable_unhealthy: bool = True
    evidence: tuple[str, ...] = EVIDENCE
    session_grace_s: float = 2.0
    check_interval_s: float = 1.0
    kept: Kept = Kept()


def is_recovered(state: JobState, policy: Policy, rules: RecoveryRules) -> bool:
    """Return whether a job is taken from a silent worker without an operator: both its own rules and those of its
    worker must allow it."""
    if state is JobState.CLAIMED:
        return rules.auto_requeue_stale_claimed and policy.auto_requeue_stale_claimed
    return rules.auto_fail_stale_running and policy.auto_fail_stale_running


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RecoveryRules)


def encode_rules(rules: RecoveryRules | None) -> str | None:
    return None if rules is None else _encoder.encode(rules).decode()


@lru_cache(maxsize=1024)
def read_rules(stored: str | None) -> RecoveryRules | None:
    """Return the stored rules; None if a worker of an older version stored none, or they cannot be read."""
    try:
        return None if stored is None else _decoder.decode(stored)
    except msgspec.MsgspecError:
        return None


def read_all(stored: Iterable[str | None]) -> list[RecoveryRules]:
    """Return those of the stored rules that can be read."""
    return [rules for rules in map(read_rules, stored) if rules is not None]


def rules_of_ledger(stored: Collection[RecoveryRules], own: RecoveryRules) -> RecoveryRules:
    """Return the rules for what belongs to no single worker: retention, whether to look at health.

    If workers stored different ones, the most careful hold: nothing is removed that one of them keeps. `own` counts
    only if no worker stored any."""
    if not stored:
        return own
    allowed = any(one.auto_disable_unhealthy for one in stored)
    return msgspec.structs.replace(
        own,
        auto_disable_unhealthy=allowed,
        check_interval_s=max(own.check_interval_s, *(one.check_interval_s for one in stored)),
        kept=Kept(
            jobs_s=max(one.kept.jobs_s for one in stored),
            events_s=max(one.kept.events_s for one in stored),
            workers_s=max(one.kept.workers_s for one in stored),
            audit_s=max(one.kept.audit_s for one in stored),
        ),
    )
