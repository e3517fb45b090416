"""The broker's batch of writes and the reply addresses of its clients, on PostgreSQL."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unstuck import failpoints
from unstuck.errors import UncertainCommit
from unstuck.ledger.contract.jobs import Enqueued
from unstuck.ledger.contract.workers import Exchange, ExchangeAnswer, HeartbeatAnswer, OnceJob, ReplyAddress, Turn
from unstuck.ledger.gaps import Gaps
from unstuck.ledger.postgres import arrays
from unstuck.ledger.postgres.connection import Row, Statement
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.enqueue import (
    LOCK_TIMEOUT,
    JobIds,
    answer_of,
    columns,
    in_batches,
    optional,
    repeat_uncertain,
)
from unstuck.ledger.postgres.heartbeats import beat_answers, beat_values
from unstuck.ledger.postgres.turn import parameters_of, read_answer


def reply_address_columns(reply_addresses: Sequence[ReplyAddress | None]) -> dict[str, Any]:
    """Give the letters of a batch of jobs by column; those without one have no client."""
    return {
        "clients": arrays.byteas([None if one is None else one.client for one in reply_addresses]),
        "services": arrays.texts([None if one is None else one.service for one in reply_addresses]),
        "request_ids": arrays.texts([None if one is None else one.request_id for one in reply_addresses]),
        "letter_places": arrays.int4s([0 if one is None else one.place for one in reply_addresses]),
        "letters": arrays.int4s([1 if one is None else one.places for one in reply_addresses]),
        "correlations": optional(arrays.byteas, [None if one is None else one.correlation for one in reply_addresses]),
        "own_ids": optional(arrays.texts, [None if one is None else one.own_id for one in reply_addresses]),
        "notifies": arrays.bools([one is not None and one.notify for one in reply_addresses]),
    }


def reply_address_values(reply_address: ReplyAddress) -> dict[str, Any]:
    """Give the parameters of one letter."""
    return {
        "client": reply_address.client,
        "service": reply_address.service,
        "request_id": reply_address.request_id,
        "place": reply_address.place,
        "places": reply_address.places,
        "correlation": reply_address.correlation,
        "own_id": reply_address.own_id,
        "notify": reply_address.notify,
    }


def run_exchange(db: Database, job_ids: JobIds, gaps: Gaps, exchange: Exchange) -> ExchangeAnswer:
    """Write all of it in one commit and one round trip."""
    intake = Intake(db.sql, exchange, _ids(db, job_ids, len(exchange.jobs) + len(exchange.once)))
    turns: list[Statement] = [(db.sql["turn"], parameters_of(gaps, turn)) for turn in exchange.turns]
    first, last = _around(db, exchange)
    if failpoints.active:
        failpoints.reached("exchange.before_commit")
    try:
        rows = iter(db.turn_connection.write_all([*first, *intake.statements, *turns, *last])[len(first) :])
    except UncertainCommit:
        if not intake.statements:
            raise
        # What was taken in is the same when it is done twice, and whoever sent it needs its ids. Turns are not.
        rows = iter(repeat_uncertain(lambda: db.turn_connection.write_all(intake.statements)))
        enqueued, once, beats = intake.read(rows)
        return ExchangeAnswer(enqueued, once, None if turns else (), beats)
    if failpoints.active:
        failpoints.reached("exchange.after_commit")
    enqueued, once, beats = intake.read(rows)
    # Behind the answers to the turns may be what their end has to say.
    answers = tuple(read_answer(db, gaps, turn, next(rows)) for turn in exchange.turns)
    for [(queues,)] in rows:
        db.notify(f"queue:{queue}" for queue in queues)
    return ExchangeAnswer(enqueued, once, answers, beats)


def _around(db: Database, exchange: Exchange) -> tuple[list[Statement], list[Statement]]:
    """Give what takes all locks of several turns before them, and lines after them; one alone does so itself."""
    ends = [job_id for turn in exchange.turns for job_id in _ends(turn)]
    if not ends or (len(exchange.turns) == 1 and not exchange.jobs and not exchange.once):
        return [], []
    workers = arrays.texts(tuple({turn.worker_id for turn in exchange.turns}))
    begin = (db.sql["begin_exchange"], {"worker_ids": workers, "ids": arrays.int8s(ends)})
    return [begin], [(db.sql["end_exchange"], {})]


def _ids(db: Database, job_ids: JobIds, count: int) -> list[int]:
    if count == 0:
        return []
    with db.client_connection.hold():
        return job_ids.take(count)


class Intake:
    """All of an exchange but its turns, under ids that were drawn before: it may be repeated as it is."""

    def __init__(self, sql: Mapping[str, bytes], exchange: Exchange, ids: list[int]) -> None:
        self._exchange = exchange
        self._ids, self._once_ids = ids[: len(exchange.jobs)], ids[len(exchange.jobs) :]
        self._batches = in_batches(self._ids, exchange.jobs, lock_timeout=LOCK_TIMEOUT) if exchange.jobs else []
        # In the order of keys, as everybody goes: two exchanges cannot wait for each other.
        self._once_places = sorted(range(len(exchange.once)), key=lambda place: exchange.once[place].request.key)
        self.statements = list(self._all(sql))

    def read(
        self, rows: Iterator[list[Row]]
    ) -> tuple[tuple[Enqueued, ...], tuple[Enqueued | None, ...], tuple[HeartbeatAnswer, ...]]:
        """Take the answers to our statements, and leave the rest."""
        if self._exchange.answered:
            next(rows)
        known: dict[int, int] = {}
        for batch in self._batches:
            known |= {batch["places"][place - 1]: job_id for place, job_id in next(rows)}
        once: dict[int, Enqueued | None] = {}
        for place in self._once_places:
            once[place] = _once_answer(self._exchange.once[place], self._once_ids[place], next(rows)[0])
            if self._exchange.once[place].reply_address is not None:
                next(rows)
        beats = tuple(beat_answers(next(rows))) if self._exchange.heartbeats else ()
        return tuple(answer_of(self._ids, known)), tuple(once[place] for place in sorted(once)), beats

    def _all(self, sql: Mapping[str, bytes]) -> Iterator[Statement]:
        exchange = self._exchange
        if exchange.answered:
            # Before the letters that may come for the same jobs.
            yield sql["answer_letters"], {"ids": arrays.int8s(exchange.answered)}
        for batch in self._batches:
            reply_addresses = (
                [exchange.reply_addresses[place] for place in batch["places"]] if exchange.reply_addresses else []
            )
            if any(reply_address is not None for reply_address in reply_addresses):
                yield sql["post"], {**batch, **reply_address_columns(reply_addresses)}
            else:
                yield sql["enqueue"], batch
        for place in self._once_places:
            one = exchange.once[place]
            keyed = {"key": one.request.key, "fingerprint": one.request.fingerprint}
            values = columns((0,), [self._once_ids[place]], [one.job])
            yield sql["enqueue_once"], {**values, **keyed, "keep_s": one.request.keep_s}
            if one.reply_address is not None:
                yield sql["store_letter"], {**keyed, **reply_address_values(one.reply_address)}
        if exchange.heartbeats:
            # Before the turns: who changes an identity row must not hold it more weakly already.
            yield sql["beat_foreign_along"], beat_values(exchange.heartbeats)


def writes(turn: Turn) -> bool:
    """Return whether a turn does more than ask for jobs."""
    return bool(turn.done or turn.start or turn.endings or turn.release or turn.entries)


def _ends(turn: Turn) -> list[int]:
    done, ended, back = turn.done, turn.endings, turn.release
    return [*(one.job_id for one in done), *(one.job_id for one in ended), *(one.job_id for one in back)]


def _once_answer(once: OnceJob, own_id: int, row: Row) -> Enqueued | None:
    _, fingerprint, [job_id], [fresh] = row
    if fingerprint != once.request.fingerprint:
        return None
    # Where our own id is there it was us, now or in a try whose answer was lost.
    return Enqueued(job_id, fresh and job_id == own_id)
