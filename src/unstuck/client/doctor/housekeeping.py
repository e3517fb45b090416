"""Find what makes the database slow in the long run: old rows, dead rows, old snapshots, a WAL that stays full."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, count, warning
from unstuck.domain.durations import brief
from unstuck.store.diagnosis import Diagnosis, Overkept, Snapshot, TableLook

MIB = 1024 * 1024
DEAD_SHARE = 0.2
BEATS_SHARE = 0.1
"""Beats are few rows that are always rewritten: far fewer dead ones are far too many."""
_KEEPS = "Vacuum must keep every row version since then, so the tables of the ledger grow and claims get slower."


def check_housekeeping(_facts: Facts, diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
    yield from (_behind(one) for one in diagnosis.overkept if one.past_s > limits.overkept_s)
    for table in diagnosis.tables:
        yield from _check_table(table, limits)
    yield from (_old(snapshot) for snapshot in diagnosis.snapshots if _is_old(snapshot, limits))
    yield from _check_file(diagnosis, limits)


def _behind(overkept: Overkept) -> Finding:
    what = {"jobs": "finished job", "events": "event", "keys": "expired unique key"}[overkept.kind]
    return warning(
        Code.RETENTION_BEHIND,
        f"Retention is behind: about {count(overkept.count, what)} should have been removed",
        f"The oldest is {brief(overkept.past_s)} past its time. No reaper runs, its batches fail or have to wait, or "
        "more comes in than it can remove. The tables grow meanwhile.",
        "See that workers run with their reaper, or start `unstuck reaper`. `unstuck prune` removes finished jobs now.",
        kind=overkept.kind,
        count=overkept.count,
        past_s=overkept.past_s,
    )


def _check_table(table: TableLook, limits: Limits) -> Iterator[Finding]:
    if not table.autovacuum:
        yield warning(
            Code.AUTOVACUUM_OFF,
            f"Autovacuum is switched off for table {table.name}",
            "Every claim and every end of a job leaves a dead row; only vacuum removes those.",
            "Set autovacuum = on in the server, and reset autovacuum_enabled on the table.",
            table=table.name,
        )
    allowed = limits.dead_rows * (BEATS_SHARE if table.name == "beats" else 1)
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


def _is_old(snapshot: Snapshot, limits: Limits) -> bool:
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


def _check_file(diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
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
