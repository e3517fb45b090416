"""Pack a turn for its one round trip, and read the answer, with as little Python per job as can be."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from unstuck.ledger.checks import check_jobs
from unstuck.ledger.contract.workers import Claimed, Turn
from unstuck.ledger.gaps import Gap
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.connection import Row

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
