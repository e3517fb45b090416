"""Keep what jobs write down on their way, and the signals that they are sent."""

import time
from collections.abc import Sequence

import apsw
import msgspec

from unstuck.domain.journal import (
    CHECKPOINT_SEQ,
    MAX_SIGNAL_BYTES,
    MAX_SIGNALS,
    PendingSignal,
    RecordedEntry,
    pack_journal,
)
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.ledger.checks import check_jobs
from unstuck.ledger.contract.workers import FollowUp, JournalEntry
from unstuck.ledger.sqlite.concurrency import admit
from unstuck.ledger.sqlite.database import SQL, fetch, write_event
from unstuck.ledger.sqlite.enqueue import insert_jobs
from unstuck.ledger.sqlite.errors import refuse_nul


def write_entries(cursor: apsw.Cursor, worker_id: str, entries: Sequence[JournalEntry]) -> set[tuple[int, int]]:
    """Write entries of attempts that this worker still runs; give the (job_id, token) of those that it does not."""
    now = time.time()
    lost: set[tuple[int, int]] = set()
    checked: set[tuple[int, int]] = set()
    for entry in entries:
        refuse_nul(entry.name)
        attempt = (entry.job_id, entry.token)
        if attempt not in checked:
            checked.add(attempt)
            if cursor.execute(SQL["may_write_entry"], (*attempt, worker_id)).fetchone() is None:
                lost.add(attempt)
            else:
                cursor.execute(SQL["mark_journal"], (entry.job_id,))
        if attempt in lost:
            continue
        query = "write_checkpoint" if entry.seq == CHECKPOINT_SEQ else "write_entry"
        row = (entry.job_id, entry.seq, entry.kind, entry.name, entry.value, now, entry.token)
        cursor.execute(SQL[query], row)
        if entry.signal is not None:
            cursor.execute(SQL["take_signal"], (entry.job_id, entry.signal, entry.seq))
    return lost


def journals(cursor: apsw.Cursor, job_ids: Sequence[int]) -> dict[int, bytes]:
    """Give what these jobs wrote down and the signals that are kept for them, packed for a new attempt."""
    if not job_ids:
        return {}
    wanted = msgspec.json.encode(job_ids).decode()
    lines: dict[int, list[RecordedEntry]] = {job_id: [] for job_id in job_ids}
    for job_id, *line in fetch(cursor, "journal_lines", (wanted, time.time())):
        lines[job_id].append(RecordedEntry(*line))
    kept: dict[int, list[PendingSignal]] = {job_id: [] for job_id in job_ids}
    for job_id, *signal in fetch(cursor, "kept_signals", (wanted,)):
        kept[job_id].append(PendingSignal(*signal))
    return {job_id: pack_journal(lines[job_id], kept[job_id]) for job_id in job_ids}


def has_signal(cursor: apsw.Cursor, job_id: int, name: str) -> bool:
    return cursor.execute(SQL["has_signal"], (job_id, name)).fetchone() is not None


def follow_up(cursor: apsw.Cursor, follow: Sequence[FollowUp], ended: set[int]) -> set[str]:
    """Enqueue what ended attempts (by token) asked for; give the queues."""
    jobs = [one.job for one in follow if one.token in ended]
    if not jobs:
        return set()
    check_jobs(jobs)
    insert_jobs(cursor, jobs)
    return {job.queue for job in jobs if job.run_at is None and job.delay_s == 0}


def send_signal(cursor: apsw.Cursor, job_id: int, name: str, value: bytes, by: str) -> tuple[str, set[str]]:
    found = cursor.execute(SQL["job_to_signal"], (job_id,)).fetchone()
    if found is None:
        return "missing", set()
    state, awaits, queue, line, place = found
    if state in FINAL_STATES:
        return "finished", set()
    if place == 0:
        # It stands for a workflow and waits for that alone: nobody would ever take a signal.
        return "workflow", set()
    ((kept, kept_bytes, last),) = fetch(cursor, "count_signals", (job_id,))
    if kept >= MAX_SIGNALS or kept_bytes + len(value) > MAX_SIGNAL_BYTES:
        return "full", set()
    now = time.time()
    cursor.execute(SQL["keep_signal"], (job_id, last + 1, name, value, now, by))
    cursor.execute(SQL["mark_journal"], (job_id,))
    write_event(cursor, "signalled", f"Signal '{name}' was sent by {by}", job_id=job_id)
    if state != JobState.WAITING or awaits != name:
        return "kept", set()
    cursor.execute(SQL["wake_job"], (job_id, now))
    return "woken", {queue} if line is None else admit(cursor, {line})
