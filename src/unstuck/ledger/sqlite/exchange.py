"""The broker's batch of writes and the reply addresses of its clients, on SQLite."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import apsw
import msgspec

from unstuck import failpoints
from unstuck.ledger.checks import check_exchange, check_ids
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
from unstuck.ledger.sqlite.database import SQL, Verbs
from unstuck.ledger.sqlite.enqueue import SLOWEST_INSERT_S, insert_jobs, insert_once
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.turn import answer_if_nothing, only_wishes, write_turn
from unstuck.ledger.sqlite.workers import ForeignVerbs, beat_one


class LetterVerbs(Verbs):
    def reply_addresses(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[ReplyAddress]:
        check_ids((after_job_id,))
        with self.db.read() as cursor:
            return [_reply_address(row) for row in cursor.execute(SQL["letters"], (client, after_job_id, limit))]

    def reply_address(self, job_id: int) -> ReplyAddress | None:
        check_ids((job_id,))
        with self.db.read() as cursor:
            row = cursor.execute(SQL["letter"], (job_id,)).fetchone()
        return None if row is None else _reply_address(row)


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


def _reply_address(row: tuple[Any, ...]) -> ReplyAddress:
    return ReplyAddress(*(*row[:7], bool(row[7]), *row[8:]))


Looks = list[tuple[Turn, Look | None]]


class ExchangeVerbs(ForeignVerbs):
    def exchange(self, exchange: Exchange) -> ExchangeAnswer:
        check_exchange(exchange)
        looks = [
            (turn, None if turn.claim_request is None else self._look(turn.claim_request)) for turn in exchange.turns
        ]
        turns = None
        if not (exchange.jobs or exchange.once or exchange.answered):
            # Who only wishes in vain must not stand in the line of those who write, nor wait for the disk.
            turns = self._answers_if_nothing(looks)
        if turns is None:
            answer = self._write(exchange, looks)
        elif exchange.heartbeats:
            answer = ExchangeAnswer(turns=turns, heartbeats=tuple(self.record_heartbeats(exchange.heartbeats)))
        else:
            answer = ExchangeAnswer(turns=turns)
        for _, look in looks:
            if look is not None:
                self._note_gaps(look)
        return answer

    def _answers_if_nothing(self, looks: Looks) -> tuple[TurnAnswer, ...] | None:
        if not looks:
            return ()
        answers = []
        with self.db.read() as cursor:
            for turn, look in looks:
                if look is None or not only_wishes(turn):
                    return None
                nothing = answer_if_nothing(cursor, turn.worker_id, look)
                if nothing is None:
                    return None
                answers.append(nothing)
        return tuple(answers)

    def _write(self, exchange: Exchange, looks: Looks) -> ExchangeAnswer:
        count = len(exchange.jobs) + len(exchange.once)
        woken: set[str] = set()
        with self.db.write(limit_s=count * SLOWEST_INSERT_S) as cursor:
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
        self.notify_queues(woken)
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
