"""Pack a turn for its one round trip, and read the answer, with as little Python per job as can be."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from unstuck.domain.journal import PendingSignal, RecordedEntry, pack_journal
from unstuck.errors import LedgerUnavailable, UncertainCommit
from unstuck.ledger.checks import check_jobs
from unstuck.ledger.contract.workers import Claimed, Turn, TurnAnswer
from unstuck.ledger.gaps import Gap, Gaps
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.connection import Row
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.workflows import inputs_of

ALIVE = "alive"
CLAIMED = "claimed"
SUPERSEDED = "superseded"
WOKEN = "woken"
GAP = "gap"
JOURNAL, INPUTS = 1, 2
"""What belongs to a claimed job beside its payload, as bits."""
_encode = msgspec.json.Encoder().encode

_NOTHING: dict[str, Any] = dict.fromkeys(
    (
        *("done_ids", "done_tokens", "done_results", "start_ids", "start_tokens", "endings", "releases"),
        *("output_ids", "output_tokens", "stdouts", "stderrs", "queues", "tasks", "limit", "run_ahead", "start"),
        *("gaps", "entries", "follow"),
    )
)


def turn_values(turn: Turn, around: tuple[Gap, ...] = ()) -> dict[str, Any]:
    """Give the parameters; what is empty stays NULL, and its part of the turn is skipped."""
    values = {**_NOTHING, "worker_id": turn.worker_id}
    if turn.done:
        values["done_ids"] = arrays.int8s([one.job_id for one in turn.done])
        values["done_tokens"] = arrays.int8s([one.token for one in turn.done])
        values["done_results"] = arrays.byteas([one.result for one in turn.done])
    if turn.start:
        values["start_ids"] = arrays.int8s([one.job_id for one in turn.start])
        values["start_tokens"] = arrays.int8s([one.token for one in turn.start])
    if turn.endings:
        values["endings"] = _encode(turn.endings).decode()
    if turn.release:
        values["releases"] = _encode(turn.release).decode()
    if turn.entries:
        values["entries"] = _encode(turn.entries).decode()
    if turn.follow:
        check_jobs(one.job for one in turn.follow)
        values["follow"] = _encode(turn.follow).decode()
    if turn.outputs:
        values["output_ids"] = arrays.int8s([one.job_id for one in turn.outputs])
        values["output_tokens"] = arrays.int8s([one.token for one in turn.outputs])
        values["stdouts"] = arrays.byteas([one.stdout for one in turn.outputs])
        values["stderrs"] = arrays.byteas([one.stderr for one in turn.outputs])
    if turn.claim_request is not None and turn.claim_request.limit > 0:
        values["queues"] = arrays.texts(tuple(dict.fromkeys(turn.claim_request.queues)))
        values["tasks"] = arrays.texts(turn.claim_request.tasks)
        values["limit"] = turn.claim_request.limit
        values["run_ahead"] = turn.claim_request.run_ahead
        values["start"] = turn.claim_request.start
        if around:
            values["gaps"] = _encode(around).decode()
    return values


def take_gaps(rows: list[Row]) -> list[tuple[Gap, float]]:
    """Take the gaps from the end of the rows (without the last), each with what it cost to find, in seconds."""
    found = []
    while rows and rows[-1][14] == GAP:
        row = rows.pop()
        found.append((Gap(row[3], row[8], row[9], row[1]), row[13]))
    return found


def take_woken(rows: list[Row]) -> set[str]:
    """Take the queues in which jobs became ready by what this turn ended."""
    found = set()
    while rows and rows[-1][14] == WOKEN:
        found.add(rows.pop()[3])
    return found


class Extras(NamedTuple):
    """What belongs to claimed jobs beside their payloads, by id."""

    journals: Mapping[int, bytes] = MappingProxyType({})
    inputs: Mapping[int, bytes] = MappingProxyType({})


NO_EXTRAS = Extras()


def claims(rows: list[Row], extras: Extras) -> tuple[tuple[Claimed, ...], frozenset[tuple[int, int]]]:
    """Part the rows (without the last): what was claimed comes first, then what was superseded."""
    superseded = set()
    while rows and rows[-1][14] == SUPERSEDED:
        row = rows.pop()
        superseded.add((row[0], row[1]))
    if extras is NO_EXTRAS:
        return tuple([Claimed(*row[:14]) for row in rows]), frozenset(superseded)
    journals, inputs = extras
    claimed = [Claimed(*(*row[:14], journals.get(row[0], b""), inputs.get(row[0], b""))) for row in rows]
    return tuple(claimed), frozenset(superseded)


def parameters_of(gaps: Gaps, turn: Turn) -> dict[str, Any]:
    """Return the parameters of a turn that goes around the known gaps."""
    around = () if turn.claim_request is None else gaps.of(turn.claim_request, time.monotonic())
    try:
        return turn_values(turn, around)
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None


def read_answer(db: Database, gaps: Gaps, turn: Turn, rows: list[Row]) -> TurnAnswer:
    """Read the answer to a turn, remember the gaps that it found and wake the queues that it filled."""
    last = rows.pop()
    if last[14] != ALIVE:
        return TurnAnswer(alive=False)
    if turn.claim_request is not None:
        for gap, cost_s in take_gaps(rows):
            gaps.note(turn.claim_request.tasks, gap, cost_s, time.monotonic())
    if woken := take_woken(rows):
        db.notify(f"queue:{queue}" for queue in woken)
    if last[4]:
        rows = _with_payloads(db, rows)
    claimed, superseded = claims(rows, _extras(db, rows))
    return TurnAnswer(True, claimed, superseded, last[13], more=bool(last[12]))


def _extras(db: Database, rows: list[Row]) -> Extras:
    """Fetch what belongs to claimed jobs beside their payloads; the commit is behind us here too."""
    asked = [(row[0], row[15]) for row in rows if row[14] == CLAIMED and row[15]]
    if not asked:
        return NO_EXTRAS
    try:
        return Extras(
            _journals(db, [job_id for job_id, which in asked if which & JOURNAL]),
            inputs_of(db, [job_id for job_id, which in asked if which & INPUTS]),
        )
    except LedgerUnavailable as error:
        raise UncertainCommit(str(error)) from error


def _with_payloads(db: Database, rows: list[Row]) -> list[Row]:
    """Fetch what was too large for the answer; the commit is behind us, so nobody waits for a slow reader."""
    left_out = {row[0] for row in rows if row[14] == CLAIMED and row[5] is None}
    try:
        found = db.turn_connection.ask(db.sql["payloads"], {"ids": arrays.int8s(list(left_out))})
    except LedgerUnavailable as error:
        raise UncertainCommit(str(error)) from error
    payloads: dict[int, bytes] = dict(found)
    # One that is not there any more was cancelled and removed meanwhile: it is nobody's.
    return [
        (*row[:5], payloads[row[0]], *row[6:]) if row[0] in left_out else row
        for row in rows
        if row[0] not in left_out or row[0] in payloads
    ]


def _journals(db: Database, job_ids: list[int]) -> dict[int, bytes]:
    """Give what these jobs wrote down and the signals that are kept for them, packed for a new attempt."""
    if not job_ids:
        return {}
    values = {"ids": arrays.int8s(job_ids)}
    lines: dict[int, list[RecordedEntry]] = {job_id: [] for job_id in job_ids}
    for job_id, *line in db.turn_connection.ask(db.sql["journal_lines"], values):
        lines[job_id].append(RecordedEntry(*line))
    kept: dict[int, list[PendingSignal]] = {job_id: [] for job_id in job_ids}
    for job_id, *signal in db.turn_connection.ask(db.sql["kept_signals"], values):
        kept[job_id].append(PendingSignal(*signal))
    return {job_id: pack_journal(lines[job_id], kept[job_id]) for job_id in job_ids}
