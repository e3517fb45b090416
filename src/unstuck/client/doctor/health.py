"""Health for monitors that ask often: rules, codes and cures of the doctor and of alerts, in a few bounded looks."""

import shlex
from collections.abc import Iterator

import msgspec

from unstuck.client.doctor.facts import Thresholds
from unstuck.client.doctor.failures import failing
from unstuck.client.doctor.findings import capital
from unstuck.config import Settings
from unstuck.domain.conditions import NO_REAPER_CURE, Code, cure_unserved
from unstuck.domain.recovery_rules import rules_of_ledger
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import Fleet
from unstuck.notify.alerts.conditions import AlertKind, Condition, find_conditions
from unstuck.notify.failures import look_at_failures


class HealthTrouble(msgspec.Struct, frozen=True):
    code: Code
    message: str
    cure: str


class Health(msgspec.Struct, frozen=True):
    fleet: Fleet
    unserved: tuple[str, ...]
    """Queues whose ready jobs no living worker serves."""
    troubles: tuple[HealthTrouble, ...]

    @property
    def status(self) -> str:
        return "degraded" if self.troubles else "ok"


def quick_health(ledger: Ledger, settings: Settings) -> Health:
    """Look at workers, queues, the reaper, failing tasks and failing schedules.

    A backlog is no trouble here: how old one may be is a setting of alerts."""
    rules = rules_of_ledger(ledger.recovery_rules(), settings.recovery.rules)
    look = ledger.look_for_conditions(settings.alerts.heartbeat_late_s)
    conditions = find_conditions(look, settings.alerts, rules.check_interval_s)
    limits = Thresholds()
    failures = look_at_failures(ledger, limits.failing_share)
    findings = failing(failures, limits)
    return Health(
        fleet=ledger.fleet(),
        unserved=tuple(one.about for one in conditions if one.kind is AlertKind.NO_WORKERS),
        troubles=(
            *(trouble for one in conditions for trouble in _troubles(one)),
            *(HealthTrouble(one.code, f"{one.what}. {one.why}", one.cure) for one in findings),
        ),
    )


def _troubles(condition: Condition) -> Iterator[HealthTrouble]:
    match condition.kind:
        case AlertKind.NO_REAPER:
            yield HealthTrouble(Code.NO_REAPER, condition.message, NO_REAPER_CURE)
        case AlertKind.NO_WORKERS:
            cure = capital(cure_unserved(shlex.quote(condition.about)))
            yield HealthTrouble(Code.NO_WORKER_FOR_QUEUE, f"{condition.message}.", f"{cure}.")
        case AlertKind.HEARTBEAT_LATE:
            cure = f"`unstuck doctor` says where to look; if worker {condition.about} is dead, its jobs are recovered."
            yield HealthTrouble(Code.SILENT_WORKER, f"{condition.message}.", cure)
        case AlertKind.BACKLOG_OLD:
            return
        case _:
            raise AssertionError(f"no look finds {condition.kind}")
