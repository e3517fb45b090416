"""Do one turn of the wheel inside one write transaction."""

import heapq
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import apsw
import msgspec

from unstuck import host
from unstuck.domain.states import LIVE_STATES, AttemptState
from unstuck.ledger.contract.workers import CLAIM_BYTES, Claimed, ClaimRequest, Turn, TurnAnswer
from unstuck.ledger.sqlite.advance import inputs_of
from unstuck.ledger.sqlite.claim import Look, QueueLimits, was_long
from unstuck.ledger.sqlite.database import SQL, fetch
from unstuck.ledger.sqlite.endings import Ended, after_end, end_attempts, expire, linked_among, write_releases
from unstuck.ledger.sqlite.journal import follow_up, journals, write_entries

_LIVING = frozenset(state.value for state in LIVE_STATES)
_UNKNOWN = (None, False)


def only_wishes(turn: Turn) -> bool:
    """Say whether there is nothing to write unless something is claimed."""
    return not (turn.done or turn.endings or turn.start or turn.release or turn.outputs or turn.entries)


def answer_if_nothing(cursor: apsw.Cursor, worker_id: str, look: Look) -> TurnAnswer | None:
    """Answer a turn that only wishes, if there is nothing to be had; None where it must be written after all."""
    state, disabled = cursor.execute(SQL["worker_standing"], (worker_id,)).get or _UNKNOWN
    if state not in _LIVING:
        return TurnAnswer(alive=False)
    if disabled:
        return TurnAnswer(alive=True)
    gates = QueueLimits(cursor, look.claim_request.queues)
    held_back: list[str] = []
    if look.claim_request.limit > 0:
        begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
        for queue in gates.open:
            if look.any(cursor.connection, queue):
                if gates.room(queue) > 0 or gates.filled_in_future(queue):
                    return None
                held_back.append(queue)
        if was_long(time.thread_time() - begun_cpu_s, 0):
            look.find_gaps(cursor, gates.open, {}, drained=True, begun_s=begun_s)
    return TurnAnswer(True, next_due_in_s=_next_due_in_s(cursor, gates, held_back))


def write_turn(cursor: apsw.Cursor, turn: Turn, look: Look | None, woken: set[str]) -> TurnAnswer:
    """Write all of it; `look` is the turn's wish, and knows afterwards which gaps it came upon. `woken` gets the queues
    in which others became ready by it."""
    state, disabled = cursor.execute(SQL["worker_standing"], (turn.worker_id,)).get or _UNKNOWN
    # A verdict is written under the same lock: what is alive here stays so until the commit.
    if state not in _LIVING:
        return TurnAnswer(alive=False)
    # Before what ended: the last entry of an attempt may come with its end.
    superseded = write_entries(cursor, turn.worker_id, turn.entries) if turn.entries else set()
    tied: list[Ended] = []
    if turn.done:
        superseded |= _finish(cursor, turn, tied)
    if turn.endings:
        written = end_attempts(cursor, turn.worker_id, turn.endings, tied)
        superseded |= {(one.job_id, one.token) for one in turn.endings} - written
    if turn.start:
        superseded |= _start(cursor, turn)
    if turn.release:
        written = write_releases(cursor, turn.worker_id, turn.release, tied)
        superseded |= {(one.job_id, one.token) for one in turn.release} - written
    # Once for all that ended in this turn: whoever else is concerned is told in the same commit.
    woken |= after_end(cursor, tied)
    if turn.follow:
        ended = {one.token for one in turn.done} | {one.token for one in turn.endings}
        ended -= {token for _, token in superseded}
        woken |= follow_up(cursor, turn.follow, ended)
    for output in turn.outputs:
        if (output.job_id, output.token) not in superseded:
            cursor.execute(
                SQL["store_output"], (output.job_id, output.token, turn.worker_id, output.stdout, output.stderr)
            )
    claimed: tuple[Claimed, ...] = ()
    more = False
    next_due_in_s = None
    if look is not None and look.claim_request.limit > 0 and not disabled:
        gates = QueueLimits(cursor, look.claim_request.queues)
        gates.reset_future()
        claimed, more = _claim(cursor, turn.worker_id, gates, look, woken)
        if len(claimed) < look.claim_request.limit and not more:
            next_due_in_s = _next_due_in_s(cursor, gates, gates.open)
    return TurnAnswer(True, claimed, frozenset(superseded), next_due_in_s, more)


def _finish(cursor: apsw.Cursor, turn: Turn, tied: list[Ended]) -> set[tuple[int, int]]:
    now, worker_id = time.time(), turn.worker_id
    rows = [(one.job_id, one.token, worker_id, one.result, now) for one in turn.done]
    lost: set[tuple[int, int]] = set()
    if not _all_written(cursor, "finish_job", rows):
        mine = fetch(cursor, "finished_just_now", (_ids(rows), worker_id, now))
        lost = {(one.job_id, one.token) for one in turn.done} - set(mine)
    # By token: a worker may hand in an attempt that it lost together with the one that it has of the same job.
    ended = {one.job_id for one in turn.done if (one.job_id, one.token) not in lost}
    tied += [(job_id, AttemptState.SUCCEEDED) for job_id in linked_among(cursor, sorted(ended))]
    return lost


def _start(cursor: apsw.Cursor, turn: Turn) -> set[tuple[int, int]]:
    now, boot_s, worker_id = time.time(), host.boottime_s(), turn.worker_id
    rows = [(one.job_id, one.token, worker_id, now, boot_s) for one in turn.start]
    if _all_written(cursor, "start_job", rows):
        return set()
    mine = fetch(cursor, "started_just_now", (_ids(rows), worker_id, now, boot_s))
    return {(one.job_id, one.token) for one in turn.start} - set(mine)


def _all_written(cursor: apsw.Cursor, query: str, rows: list[tuple[Any, ...]]) -> bool:
    """Write a batch; False where one of them matched no row, which is rare enough to be looked up afterwards."""
    before = cursor.connection.total_changes()
    cursor.executemany(SQL[query], rows)
    return cursor.connection.total_changes() - before == len(rows)


def _ids(rows: list[tuple[Any, ...]]) -> str:
    return msgspec.json.encode([row[0] for row in rows]).decode()


def _claim(
    cursor: apsw.Cursor, worker_id: str, gates: QueueLimits, look: Look, woken: set[str]
) -> tuple[tuple[Claimed, ...], bool]:
    """Return what was claimed, and whether there was more than fits into one answer."""
    claim_request, begun_s, begun_cpu_s = look.claim_request, time.monotonic(), time.thread_time()
    queues = gates.open
    # Each queue gives its jobs in order of rank and id, read only as far as the merge needs them, and its limit allows.
    readers = [look.read(cursor.connection, queue, min(claim_request.limit, gates.room(queue))) for queue in queues]
    chosen, more = _within_bytes(cursor, islice(heapq.merge(*readers), claim_request.limit))
    for reader in readers:
        reader.close()
    look_cpu_s = time.thread_time() - begun_cpu_s
    chosen = _without_expired(cursor, chosen, woken)
    if chosen:
        gates.take([(row[1], row[4]) for row in chosen])
    claimed = _take(cursor, worker_id, claim_request, chosen) if chosen else ()
    if was_long(look_cpu_s, len(chosen)):
        last = {row[4]: (row[0], row[1]) for row in chosen}
        drained = len(chosen) < claim_request.limit and not more
        look.find_gaps(cursor, queues, last, drained=drained, begun_s=begun_s)
    return claimed, more


def _within_bytes(cursor: apsw.Cursor, rows: Iterable[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], bool]:
    """Read jobs until they are too large to be handed out at once; return them, and whether there are more."""
    chosen: list[tuple[Any, ...]] = []
    size_bytes = 0
    for row in rows:
        size_bytes += len(row[5])
        if row[14]:
            size_bytes += cursor.execute(SQL["journal_bytes"], (row[1],)).get
        if chosen and size_bytes > CLAIM_BYTES:
            return chosen, True
        chosen.append(row)
    return chosen, False


def _without_expired(cursor: apsw.Cursor, chosen: list[tuple[Any, ...]], woken: set[str]) -> list[tuple[Any, ...]]:
    """Cancel what was found too late: it is never begun, however late the sweep is."""
    now = time.time()
    too_late = [row[1] for row in chosen if row[16] is not None and row[16] <= now]
    if not too_late:
        return chosen
    woken |= expire(cursor, too_late)
    return [row for row in chosen if row[1] not in too_late]


def _take(
    cursor: apsw.Cursor, worker_id: str, claim_request: ClaimRequest, chosen: list[tuple[Any, ...]]
) -> tuple[Claimed, ...]:
    token = cursor.execute(SQL["reserve_tokens"], (len(chosen),)).get - len(chosen)
    now, boot_s = time.time(), host.boottime_s()
    claimed: list[Claimed] = []
    updates: list[tuple[Any, ...]] = []
    for row in chosen:
        _, job_id, on_crash, task, queue, data, kind, policy, failures, crashes, tried, suspected, alone, due = row[:14]
        token += 1
        running = len(claimed) < claim_request.start or (claim_request.run_ahead and on_crash is not None)
        started = ("running", now, now, boot_s, 1) if running else ("claimed", now, None, None, 0)
        updates.append((job_id, token, worker_id, *started))
        # A clock that was set back must not make it wait for less than no time.
        waited_s = now - due if now > due else 0.0
        held = (job_id, token, task, queue, running, data, kind, policy, failures, crashes, tried + 1)
        claimed.append(Claimed(*held, suspected, alone, waited_s))
    cursor.executemany(SQL["claim_job"], updates)
    if free := [row[1] for row in chosen if row[17] == "pending"]:
        # Their keys were good while they were pending.
        cursor.execute(SQL["free_key"], (msgspec.json.encode(free).decode(),))
    return _with_extras(cursor, chosen, claimed)


def _with_extras(cursor: apsw.Cursor, chosen: list[tuple[Any, ...]], claimed: list[Claimed]) -> tuple[Claimed, ...]:
    """Add what belongs to a job beside its payload, where there is any."""
    with_journal = [row[1] for row in chosen if row[14]]
    with_inputs = [row[1] for row in chosen if row[15] is not None]
    if not with_journal and not with_inputs:
        return tuple(claimed)
    kept, given = journals(cursor, with_journal), inputs_of(cursor, with_inputs)
    return tuple(
        msgspec.structs.replace(job, journal=kept.get(job.job_id, b""), inputs=given.get(job.job_id, b""))
        for job in claimed
    )


def _next_due_in_s(cursor: apsw.Cursor, gates: QueueLimits, held_back: list[str]) -> float | None:
    """Say when there is something: scheduled jobs become due, or the rate of a queue that has some allows the next."""
    now = time.time()
    due = [at - now for queue in gates.open if (at := cursor.execute(SQL["next_due"], (queue,)).get) is not None]
    due += [wait_s for queue in held_back if (wait_s := gates.wait_s(queue)) is not None]
    return max(min(due), 0.0) if due else None
