"""The broker's batch of writes and the reply addresses of its clients, on SQLite."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import apsw
import msgspec

from unstuck import failpoints
from unstuck.ledger.contract.jobs import Enqueued
from unstuck.ledger.contract.workers import (
    Exchange,
    ExchangeAnswer,
    HeartbeatAnswer,
    OnceJob,
    RemoteHeartbeat,
    ReplyAddress,
    Turn,
    TurnAnswer,
)
from unstuck.ledger.sqlite.claim import Look
from unstuck.ledger.sqlite.clock import read_clock
from unstuck.ledger.sqlite.database import SQL, Database
from unstuck.ledger.sqlite.enqueue import SLOWEST_INSERT_S, insert_jobs, insert_once
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.heartbeats import beat_one
from unstuck.ledger.sqlite.notifier import Notifier
from unstuck.ledger.sqlite.turn import answer_if_nothing, only_wishes, write_turn


def store_reply_addresses(cursor: apsw.Cursor, reply_addresses: Iterable[tuple[int, ReplyAddress]]) -> None:
    """Write the letters of these jobs, inside a write."""
    rows = []
    for job_id, reply_address in reply_addresses:
        refuse_nul(reply_address.service, reply_address.request_id, reply_address.own_id)
        origin = (
            reply_address.client,
            reply_address.service,
            reply_address.request_id,
            reply_address.place,
            reply_address.places,
        )
        rows.append((job_id, *origin, reply_address.correlation, reply_address.own_id, reply_address.notify))
    cursor.executemany(SQL["store_letter"], rows)


def answer_reply_addresses(cursor: apsw.Cursor, job_ids: Sequence[int]) -> None:
    """Mark them as answered, inside a write."""
    cursor.execute(SQL["answer_letters"], (msgspec.json.encode(job_ids).decode(), time.time()))


def read_reply_address(row: tuple[Any, ...]) -> ReplyAddress:
    return ReplyAddress(*(*row[:7], bool(row[7]), *row[8:]))


Looks = list[tuple[Turn, Look | None]]


def answers_if_nothing(db: Database, looks: Looks) -> tuple[TurnAnswer, ...] | None:
    """Answer turns that only want jobs, if there are none for them; return None if they must be written after all."""
    if not looks:
        return ()
    answers = []
    with db.read() as cursor:
        for turn, look in looks:
            if look is None or not only_wishes(turn):
                return None
            nothing = answer_if_nothing(cursor, turn.worker_id, look)
            if nothing is None:
                return None
            answers.append(nothing)
    return tuple(answers)


def write_exchange(db: Database, wakeups: Notifier, exchange: Exchange, looks: Looks) -> ExchangeAnswer:
    """Write all of it in one commit."""
    count = len(exchange.jobs) + len(exchange.once)
    woken: set[str] = set()
    with db.write(limit_s=count * SLOWEST_INSERT_S) as cursor:
        if exchange.answered:
            answer_reply_addresses(cursor, exchange.answered)
        enqueued = _enqueue(cursor, exchange)
        once = tuple(_enqueue_once(cursor, one) for one in exchange.once)
        beats = _beat(cursor, exchange.heartbeats)
        turns = tuple(write_turn(cursor, turn, look, woken) for turn, look in looks)
        if failpoints.active:
            failpoints.reached("exchange.before_commit")
    if failpoints.active:
        failpoints.reached("exchange.after_commit")
    wakeups.notify_queues(woken)
    return ExchangeAnswer(enqueued, once, turns, beats)


def _enqueue(cursor: apsw.Cursor, exchange: Exchange) -> tuple[Enqueued, ...]:
    if not exchange.jobs:
        return ()
    enqueued = insert_jobs(cursor, exchange.jobs)
    if exchange.reply_addresses:
        pairs = zip(enqueued, exchange.reply_addresses, strict=True)
        store_reply_addresses(
            cursor, [(one.job_id, reply_address) for one, reply_address in pairs if reply_address is not None]
        )
    return tuple(enqueued)


def _enqueue_once(cursor: apsw.Cursor, once: OnceJob) -> Enqueued | None:
    answer = insert_once(cursor, once.request, [once.job])
    if not answer.stored:
        return None
    [stored] = answer.stored
    if once.reply_address is not None:
        store_reply_addresses(cursor, [(stored.job_id, once.reply_address)])
    return Enqueued(stored.job_id, stored.fresh and not answer.repeated)


def _beat(cursor: apsw.Cursor, heartbeats: tuple[RemoteHeartbeat, ...]) -> tuple[HeartbeatAnswer, ...]:
    clock = read_clock()
    return tuple(beat_one(cursor, heartbeat, clock) for heartbeat in heartbeats)
