"""Heartbeats of remote workers, many in one statement, on PostgreSQL."""

from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.states import WorkerState
from unstuck.ledger.contract.workers import HeartbeatAnswer, RemoteHeartbeat
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.async_beats import Texts
from unstuck.ledger.postgres.connection import Row

AS_IT_WAS = -1


def beat_values(heartbeats: Sequence[RemoteHeartbeat]) -> dict[str, Any]:
    """Give the parameters of a beat for many."""
    try:
        metadata = [None if one.metadata is None else msgspec.json.encode(one.metadata).decode() for one in heartbeats]
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None
    return {
        "worker_ids": arrays.texts([one.worker_id for one in heartbeats]),
        "running": arrays.int8s([AS_IT_WAS if one.running is None else one.running for one in heartbeats]),
        "settled": arrays.int8s([one.settled for one in heartbeats]),
        "metadata": arrays.texts(metadata),
    }


def answers_read(rows: list[Texts]) -> list[HeartbeatAnswer]:
    return beat_answers(
        [
            (n, _text(state), suspect == b"t", _text(request), _numbers(ids), _numbers(tokens), off == b"t")
            for n, state, suspect, request, ids, tokens, off in rows
        ]
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _numbers(value: bytes | None) -> list[int]:
    """Read an array of numbers as the server writes it: {1,2}."""
    inside = (value or b"{}")[1:-1]
    return [int(one) for one in inside.split(b",")] if inside else []


def beat_answers(rows: list[Row]) -> list[HeartbeatAnswer]:
    """Read what they are told, in their order."""
    return [
        HeartbeatAnswer(WorkerState(state), was_suspect, request, tuple(zip(ids or (), tokens or (), strict=True)), off)
        for _, state, was_suspect, request, ids, tokens, off in rows
    ]
