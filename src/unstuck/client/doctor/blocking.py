"""Find transactions of others that hold locks of the ledger, and say what waits for them."""

from collections.abc import Iterator
from typing import Any

from unstuck.client.blockers import end_blocker, name_blocker
from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, capital, count, info, named, problem, warning
from unstuck.domain.durations import brief
from unstuck.store.diagnosis import Blocker, Diagnosis

_SOON = "Commit soon after an enqueue, and do slow work outside of that transaction."


def check_blocking(facts: Facts, _diagnosis: Diagnosis | None, limits: Limits) -> Iterator[Finding]:
    stuck = facts.trouble is not None
    for blocker in facts.blockers:
        if blocker.kind == "process":
            yield _writes(blocker)
        elif blocker.age_s is None or blocker.age_s >= limits.blocking_s:
            yield _blocks(blocker, stuck)


def _writes(blocker: Blocker) -> Finding:
    since = brief(blocker.age_s or 0.0)
    end = f"End its transaction. If no one can, end it: `{end_blocker(blocker)}`." if blocker.name else "End it."
    return problem(
        Code.BLOCKING_TRANSACTION,
        f"{capital(name_blocker(blocker))} keeps the write lock of the ledger's file",
        f"It has kept it for at least {since}, and no one else can write meanwhile: enqueues, heartbeats and outcomes "
        "wait. This time counts against no worker.",
        f"{end} Look for a database browser, a backup or a script that left a transaction open.",
        **_facts(blocker),
    )


def _blocks(blocker: Blocker, stuck: bool) -> Finding:
    age = "a time that this role may not see" if blocker.age_s is None else brief(blocker.age_s)
    tables = f" It has locked rows or tables in {named(blocker.tables)}." if blocker.tables else ""
    query = f" Its last statement: {blocker.query}" if blocker.query else ""
    if blocker.waiting or blocker.jobs or stuck:
        say = problem
    elif blocker.age_s is None:
        say = info
    else:
        say = warning
    return say(
        Code.BLOCKING_TRANSACTION,
        f"{capital(name_blocker(blocker))} has had a transaction open for {age}",
        f"No one can change what it has locked or written in the ledger until it ends.{tables} {_waits(blocker)}"
        f"{_jobs(blocker)}{query and query.rstrip('.') + '.'}",
        _cure(blocker),
        **_facts(blocker),
    )


def _jobs(blocker: Blocker) -> str:
    if not blocker.jobs:
        return ""
    ids = named([str(job_id) for job_id in blocker.jobs])
    noun = "job" if len(blocker.jobs) == 1 else "jobs"
    return f" It has locked {noun} {ids}, which a worker has in hand: the outcome cannot be recorded."


def _waits(blocker: Blocker) -> str:
    if not blocker.waiting:
        return "Nothing was seen to wait for it just now."
    names = named([f"{waiter.application or 'a session'} ({waiter.pid})" for waiter in blocker.waiting])
    verb = "waits" if len(blocker.waiting) == 1 else "wait"
    return f"{count(len(blocker.waiting), 'session')} {verb} for it: {names}."


def _cure(blocker: Blocker) -> str:
    if blocker.kind == "prepared":
        return f"COMMIT PREPARED or ROLLBACK PREPARED '{blocker.name}'." if blocker.name else "See pg_prepared_xacts."
    hidden = (
        " To see its age and its statement, `grant pg_read_all_stats` to this role." if blocker.age_s is None else ""
    )
    return f"{_SOON} If no one can end it: `{end_blocker(blocker)}`.{hidden}"


def _facts(blocker: Blocker) -> dict[str, Any]:
    return {
        "kind": blocker.kind,
        "pid": int(blocker.name) if blocker.kind != "prepared" and blocker.name else None,
        "name": blocker.name,
        "user": blocker.user,
        "application": blocker.application,
        "state": blocker.state,
        "age_s": None if blocker.age_s is None else round(blocker.age_s, 3),
        "query": blocker.query,
        "tables": list(blocker.tables),
        "jobs": list(blocker.jobs),
        "waiting": [{"pid": waiter.pid, "application": waiter.application} for waiter in blocker.waiting],
    }
