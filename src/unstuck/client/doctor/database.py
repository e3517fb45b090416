"""Checks of the database: wake-ups, blocking transactions, retention, vacuum, servers, outages and clock steps."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec

from unstuck.client.blockers import end_blocker, name_blocker
from unstuck.client.doctor.facts import Facts, Thresholds, setting_of
from unstuck.client.doctor.findings import Finding, capital, count, info, named, problem, warning
from unstuck.domain.conditions import Code
from unstuck.domain.units import brief
from unstuck.domain.watch_clock import Cause
from unstuck.ledger.contract.diagnosis import (
    AddressLook,
    Blocker,
    Diagnosis,
    RetentionLag,
    Snapshot,
    TableLook,
    WatchLook,
)


def check_wakeups(facts: Facts, diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    poll = brief(facts.settings.poll_interval_s)
    price = f"An idle worker then finds a new job only when it looks, every {poll}."
    silenced = [worker.name for worker in facts.living if setting_of(worker, "notify", bool) is False]
    if diagnosis.wakeup_reachable == "off" or silenced:
        where = f"for {named(silenced)}" if silenced else "in the settings"
        yield info(
            Code.NOTIFY_OFF,
            "Wake-ups are switched off",
            f"notify is false {where}. {price}",
            "Set notify = true, unless that is meant.",
            workers=silenced,
        )
    if diagnosis.wakeup_reachable == "pooled":
        yield warning(
            Code.POOLER_WITHOUT_LISTEN_URL,
            "A pooler stands before the database, and there is no listen_url",
            f"Nobody can LISTEN through a pooler in transaction mode. {price}",
            "Set listen_url to the direct address of the server.",
        )
    elif diagnosis.wakeup_reachable == "silent":
        yield warning(
            Code.NOTIFY_SILENT,
            "NOTIFY does not arrive",
            f"The doctor rang and listened, as workers do: {diagnosis.wakeup_note or 'nothing was heard'}. {price}",
            "See that listen_url leads to the same server and database as url, directly and not through a pooler."
            if facts.settings.listen_url
            else "See that nothing between here and the server swallows NOTIFY; else set listen_url.",
            note=diagnosis.wakeup_note,
        )
    if diagnosis.pooler:
        yield info(
            Code.POOLER,
            "A pooler stands between here and the database",
            "Sessions prove nothing behind it: a lost host is noticed by its lease (heartbeat_timeout) and not by "
            "its session.",
            "Nothing; or give workers the direct address as url.",
        )
    deaf = [worker for worker in facts.living if worker.id in diagnosis.deaf]
    if deaf:
        yield warning(
            Code.WAKEUP_UNREACHABLE,
            f"The bell of {named([worker.name for worker in deaf])} cannot be reached from here",
            "Bells are Unix sockets: either the process has just died, or it is in another network namespace "
            f"(container), where none from here are heard. {price}",
            f"See whether process {deaf[0].pid} on {deaf[0].host} lives. If it does, run what enqueues and what works "
            "in one network namespace; or nothing, if the delay does not matter.",
            workers=[worker.id for worker in deaf],
        )


_SOON = "Commit soon after an enqueue, and do slow work outside of that transaction."


def check_blocking(facts: Facts, _diagnosis: Diagnosis | None, limits: Thresholds) -> Iterator[Finding]:
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


MIB = 1024 * 1024
DEAD_SHARE = 0.2
BEATS_SHARE = 0.1
"""Beats are few rows that are always rewritten: far fewer dead ones are far too many."""
_KEEPS = "Vacuum must keep every row version since then, so the tables of the ledger grow and claims get slower."


def check_housekeeping(_facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    yield from (_behind(one) for one in diagnosis.overkept if one.past_s > limits.overkept_s)
    for table in diagnosis.tables:
        yield from _check_table(table, limits)
    yield from (_old(snapshot) for snapshot in diagnosis.snapshots if _is_old(snapshot, limits))
    yield from _check_file(diagnosis, limits)


def _behind(overkept: RetentionLag) -> Finding:
    what = {"jobs": "finished job", "events": "event", "keys": "expired unique key"}[overkept.kind]
    return warning(
        Code.RETENTION_BEHIND,
        f"Retention is behind: the oldest {what} should have been removed {brief(overkept.past_s)} ago",
        "No reaper runs, its batches fail or have to wait, or more comes in than it can remove. The tables grow "
        "meanwhile.",
        "See that workers run with their reaper, or start `unstuck reaper`. `unstuck prune` removes finished jobs now.",
        kind=overkept.kind,
        past_s=overkept.past_s,
    )


def _check_table(table: TableLook, limits: Thresholds) -> Iterator[Finding]:
    if not table.autovacuum:
        yield warning(
            Code.AUTOVACUUM_OFF,
            f"Autovacuum is switched off for table {table.name}",
            "Every claim and every end of a job leaves a dead row; only vacuum removes those.",
            "Set autovacuum = on in the server, and reset autovacuum_enabled on the table.",
            table=table.name,
        )
    allowed = limits.dead_rows * (BEATS_SHARE if table.name == "worker_heartbeats" else 1)
    if table.dead_rows > allowed + DEAD_SHARE * table.live_rows and table.unswept_s > limits.unswept_s:
        yield warning(
            Code.DEAD_ROWS,
            f"Table {table.name} has {count(table.dead_rows, 'dead row')} beside {table.live_rows:,} live ones",
            f"It was last vacuumed {brief(table.unswept_s)} ago and takes {table.size_bytes / MIB:,.0f} MiB; "
            "autovacuum does not keep up, is off, or is held back by an old snapshot.",
            f"VACUUM (VERBOSE) the table {table.name}: it says what holds it back. Then see autovacuum's settings.",
            table=table.name,
            dead_rows=table.dead_rows,
            live_rows=table.live_rows,
            size_bytes=table.size_bytes,
        )


def _is_old(snapshot: Snapshot, limits: Thresholds) -> bool:
    if snapshot.kind == "slot":
        return not snapshot.active or snapshot.behind_xacts > limits.slot_behind_xacts
    return snapshot.age_s is not None and snapshot.age_s > limits.snapshot_s


def _old(snapshot: Snapshot) -> Finding:
    age = "" if snapshot.age_s is None else f" for {brief(snapshot.age_s)}"
    note = f" ({snapshot.note})" if snapshot.note else ""
    match snapshot.kind:
        case "session":
            what = f"Session {snapshot.name}{note} has had a transaction open{age}"
            cure = f"End that transaction; if nobody can, SELECT pg_terminate_backend({snapshot.name})."
        case "prepared":
            what = f"The prepared transaction {snapshot.name!r}{note} has been left open{age}"
            cure = f"COMMIT PREPARED or ROLLBACK PREPARED '{snapshot.name}'."
        case "slot":
            state = "lags behind" if snapshot.active else "is used by nobody"
            what = f"The replication slot {snapshot.name!r}{note} {state}, {snapshot.behind_xacts:,} transactions back"
            cure = f"Bring its reader back, or SELECT pg_drop_replication_slot('{snapshot.name}')."
    return warning(
        Code.OLD_SNAPSHOT,
        what,
        _KEEPS,
        cure,
        kind=snapshot.kind,
        name=snapshot.name,
        age_s=snapshot.age_s,
        behind_xacts=snapshot.behind_xacts,
    )


def _check_file(diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    if diagnosis.wal_stuck_pages >= limits.stuck_pages:
        readers = ", ".join(str(pid) for pid in diagnosis.readers)
        yield warning(
            Code.WAL_READER,
            f"{count(diagnosis.wal_stuck_pages, 'page')} of the WAL cannot be copied back into the file",
            "Somebody has been reading an older state of it all the while, in a transaction that is still open"
            + (f": process {readers}." if readers else "."),
            "End that transaction (a shell, a backup or a script that left one open)"
            + (f"; look at process {readers}." if readers else "."),
            pages=diagnosis.wal_stuck_pages,
            readers=list(diagnosis.readers),
        )
    if diagnosis.wal_bytes > limits.wal_bytes:
        yield warning(
            Code.WAL_LARGE,
            f"The WAL of the ledger's file takes {diagnosis.wal_bytes / MIB:,.0f} MiB",
            "It is emptied when nobody reads an older state of the file; with so much in it every read is slower.",
            "End long transactions on the file. When no process uses it, opening and closing it empties the WAL.",
            wal_bytes=diagnosis.wal_bytes,
        )
    if diagnosis.free_bytes > limits.free_bytes and diagnosis.free_bytes * 2 > diagnosis.size_bytes:
        yield warning(
            Code.FREE_SPACE,
            f"{diagnosis.free_bytes / MIB:,.0f} of {diagnosis.size_bytes / MIB:,.0f} MiB of the file hold nothing",
            "Jobs were removed and left their room behind. It is used again, but never given back by itself.",
            "Stop the workers and run VACUUM on the file; or nothing, if it will fill again.",
            free_bytes=diagnosis.free_bytes,
            size_bytes=diagnosis.size_bytes,
        )


_PRIMARY_ONLY = ("primary", "read-write")


def check_servers(_facts: Facts, diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    for address in diagnosis.several_hosts:
        if address.chosen not in _PRIMARY_ONLY:
            yield _several(address)


def _several(address: AddressLook) -> Finding:
    hosts = ",".join(quote(host, safe=":.-_[]") for host in address.hosts)
    user = f"{quote(address.user)}@" if address.user else ""
    cure = f"Write postgresql://{user}{hosts}/{address.database}?target_session_attrs=primary (with the password)."
    facts = {"setting": address.setting, "hosts": list(address.hosts), "target_session_attrs": address.chosen}
    if address.chosen is None:
        return info(
            Code.SEVERAL_HOSTS,
            f"{address.setting} names {len(address.hosts)} servers without target_session_attrs",
            f"Unstuck finds the primary among {named(address.hosts)} by itself. Other programs with this URL (psql, "
            "pg_dump, your application) take the first server that answers. If that is a standby, they read old data "
            "and cannot write.",
            cure,
            **facts,
        )
    return warning(
        Code.SEVERAL_HOSTS,
        f"{address.setting} names {len(address.hosts)} servers with target_session_attrs={address.chosen}",
        f"That may choose a standby among {named(address.hosts)}. Unstuck refuses a standby and tries again, so it may "
        "not get to the primary at all.",
        cure,
        **facts,
    )


MAX_STEPS = 10
"""How many steps are listed in the facts."""
LONGEST_STILL_S = 60.0
"""Every call to the database has a deadline below this: if more time is missing, the database did not stand still."""

_WHY = {
    Cause.OUTAGE: "The ledger could not be reached",
    Cause.FAILOVER: "The database server was restarted, or another one took over",
    Cause.PAUSE: "The reaper was paused (a frozen process or a sleeping machine), and no other one kept watch",
}
_CURES = {
    Cause.OUTAGE: "If you do not know of it, look at the logs of the database and of the network.",
    Cause.FAILOVER: "If you do not know of it, look at the log of the database server.",
    Cause.PAUSE: "If it happens often, look at the load of the hosts that run workers, or start `unstuck reaper`.",
}


class _Step(msgspec.Struct, frozen=True):
    step_s: float
    """Above zero: forward."""
    ago_s: float


def check_watch(_facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    steps = [
        step
        for period in diagnosis.watch
        for step in _steps(period, diagnosis.now_at)
        if abs(step.step_s) > limits.clock_s and step.ago_s <= limits.recent_s
    ]
    if steps:
        yield _stepped(steps, limits)
    for cause in _WHY:
        breaks = [
            period
            for period in diagnosis.watch
            if period.cause is cause and diagnosis.now_at - period.since_at <= limits.recent_s
        ]
        if breaks:
            yield _unwatched(cause, breaks, diagnosis.now_at)


def _steps(period: WatchLook, now_at: float) -> Iterator[_Step]:
    """Return the steps of the clock in a period, the newest first."""
    if period.set_back_s is not None and period.set_back_at is not None:
        yield _Step(-period.set_back_s, max(0.0, now_at - period.set_back_at))
    if period.cause is Cause.CLOCK and period.gap_s is not None:
        yield _Step(period.gap_s, max(0.0, now_at - period.since_at))


def _stepped(steps: list[_Step], limits: Thresholds) -> Finding:
    worst = max(steps, key=lambda step: abs(step.step_s))
    size = "about " + brief(abs(worst.step_s))
    if worst.step_s < 0:
        moved = f"was set back by {size}"
    elif worst.step_s > LONGEST_STILL_S:
        moved = f"was set forward by {size}"
    else:
        moved = f"was set forward by {size}, or the database stood still"
    more = f" There were {len(steps)} steps in all." if len(steps) > 1 else ""
    say = warning if abs(worst.step_s) > limits.large_step_s else info
    return say(
        Code.CLOCK_STEP,
        f"The ledger's clock {moved}",
        f"That was {brief(worst.ago_s)} ago.{more} No worker loses its lease by it. But `run_at`, `delay`, schedules "
        "and retention go by this clock: after a step forward jobs are early, after a step back they are late.",
        "Let NTP (chrony, systemd-timesyncd) slew the clock of the database's host instead of stepping it. Look at "
        "jobs that were due meanwhile with `unstuck jobs`.",
        step_s=round(worst.step_s, 3),
        ago_s=round(worst.ago_s, 1),
        steps=[
            {"step_s": round(step.step_s, 3), "ago_s": round(step.ago_s, 1)}
            for step in sorted(steps, key=lambda step: step.ago_s)[:MAX_STEPS]
        ],
    )


def _unwatched(cause: Cause, breaks: list[WatchLook], now_at: float) -> Finding:
    gaps_s = [period.gap_s or 0.0 for period in breaks]
    last = breaks[0]
    times = "once" if len(breaks) == 1 else f"{len(breaks):,} times"
    longest = f" The longest was {brief(max(gaps_s))}." if len(breaks) > 1 else ""
    return info(
        Code.LEDGER_OUTAGE,
        f"No one could keep watch over the workers {times} in the last day",
        f"{_WHY[cause]}. The last time ended {brief(max(0.0, now_at - last.since_at))} ago and took "
        f"{brief(max(0.0, gaps_s[0]))}.{longest} This time counts against no worker.",
        _CURES[cause],
        cause=cause.value,
        count=len(breaks),
        last_at=round(last.since_at, 3),
        longest_s=round(max(gaps_s), 3),
        total_s=round(sum(gaps_s), 3),
    )
