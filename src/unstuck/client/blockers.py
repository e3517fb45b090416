"""Name the transaction that holds a lock of the ledger, in the words that every door uses."""

from collections.abc import Sequence

from unstuck.domain.units import brief
from unstuck.ledger.contract.diagnosis import Blocker


def name_blocker(blocker: Blocker) -> str:
    """Return who it is: a session with its user and application, a prepared transaction, or a process."""
    if blocker.kind == "process":
        command = f" ({blocker.query})" if blocker.query else ""
        return f"process {blocker.name}{command}" if blocker.name else f"another process{command}"
    if blocker.kind == "prepared":
        return f"the prepared transaction {blocker.name!r}" if blocker.name else "a prepared transaction"
    parts = [
        f"user {blocker.user}" if blocker.user else "",
        f"application {blocker.application!r}" if blocker.application else "",
        blocker.state,
    ]
    note = ", ".join(part for part in parts if part)
    return f"session {blocker.name}" + (f" ({note})" if note else "")


def end_blocker(blocker: Blocker) -> str:
    """Return how to end it by force; empty if we cannot know."""
    if not blocker.name:
        return ""
    match blocker.kind:
        case "process":
            return f"kill {blocker.name}"
        case "prepared":
            return f"rollback prepared '{blocker.name}'"
        case _:
            return f"select pg_terminate_backend({blocker.name})"


def blocker_of(job_id: int, blockers: Sequence[Blocker]) -> Blocker | None:
    """Return the one that most likely keeps the outcome of a job from the ledger.

    Whoever has locked its row does. A held unique key cannot be seen: then it is whoever others wait for, or else the
    oldest.
    """
    others = [blocker for blocker in blockers if not blocker.is_ours]
    ranked = sorted(others, key=lambda one: (job_id not in one.jobs, not one.waiting, -(one.age_s or 0.0)))
    return ranked[0] if ranked else None


def tell_blocker(blocker: Blocker) -> str:
    """Say who it is, how long its transaction has been open, and what its last statement was."""
    age = "" if blocker.age_s is None else f", in a transaction for {brief(blocker.age_s)}"
    query = f"; its last statement: {blocker.query}" if blocker.query and blocker.kind != "process" else ""
    return f"{name_blocker(blocker)}{age}{query}"
