"""One thing that the doctor found: what it is, why it is so, and what to do."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from unstuck.domain.conditions import Code, Severity

MAX_ALIKE = 20
MAX_NAMED = 5


class Finding(msgspec.Struct, frozen=True):
    code: Code
    severity: Severity
    what: str
    why: str
    cure: str
    facts: dict[str, Any] = {}


def problem(code: Code, what: str, why: str, cure: str, **facts: Any) -> Finding:
    return Finding(code, Severity.PROBLEM, what, why, cure, facts)


def warning(code: Code, what: str, why: str, cure: str, **facts: Any) -> Finding:
    return Finding(code, Severity.WARNING, what, why, cure, facts)


def info(code: Code, what: str, why: str, cure: str = "", **facts: Any) -> Finding:
    return Finding(code, Severity.INFO, what, why, cure, facts)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Give the worst first; of many that are alike, the first few and how many more there are."""
    kept: list[Finding] = []
    alike: dict[tuple[Code, Severity], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.code, finding.severity), []).append(finding)
    for (code, severity), group in alike.items():
        kept += group[:MAX_ALIKE]
        more = len(group) - MAX_ALIKE
        if more > 0:
            kept.append(Finding(code, severity, f"{more:,} more like these", group[-1].why, group[-1].cure))
    return sorted(kept, key=lambda finding: list(Severity).index(finding.severity))


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def named(names: Sequence[str]) -> str:
    """Write a few names, and how many more there are."""
    listed = ", ".join(names[:MAX_NAMED])
    return listed if len(names) <= MAX_NAMED else f"{listed} and {len(names) - MAX_NAMED} more"


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
