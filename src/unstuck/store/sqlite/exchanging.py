"""Do in one commit what happened at a broker between two looks at its sockets."""

import apsw

from unstuck import failpoints
from unstuck.store.checks import check_exchange
from unstuck.store.records import (
    BeatAnswer,
    Enqueued,
    Exchange,
    ExchangeAnswer,
    ForeignPulse,
    OnceJob,
    Turn,
    TurnAnswer,
)
from unstuck.store.sqlite.client import SLOWEST_INSERT_S, insert_jobs
from unstuck.store.sqlite.foreign import ForeignVerbs, beat_one
from unstuck.store.sqlite.letters import answer_letters, store_letters
from unstuck.store.sqlite.looking import Look
from unstuck.store.sqlite.requests import insert_once
from unstuck.store.sqlite.silence import read_clock
from unstuck.store.sqlite.turn import answer_if_nothing, only_wishes, write_turn

Looks = list[tuple[Turn, Look | None]]


class ExchangeVerbs(ForeignVerbs):
    def exchange(self, exchange: Exchange) -> ExchangeAnswer:
        check_exchange(exchange)
        looks = [(turn, None if turn.wish is None else self._look(turn.wish)) for turn in exchange.turns]
        turns = None
        if not (exchange.jobs or exchange.once or exchange.answered):
            # Who only wishes in vain must not stand in the line of those who write, nor wait for the disk.
            turns = self._answers_if_nothing(looks)
        if turns is None:
            answer = self._write(exchange, looks)
        elif exchange.pulses:
            answer = ExchangeAnswer(turns=turns, beats=tuple(self.beat_foreign(exchange.pulses)))
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
                answer_letters(cursor, exchange.answered)
            enqueued = _enqueue(cursor, exchange)
            once = tuple(_enqueue_once(cursor, one) for one in exchange.once)
            beats = _beat(cursor, exchange.pulses)
            turns = tuple(write_turn(cursor, turn, look, woken) for turn, look in looks)
            if failpoints.active:
                failpoints.reached("exchange.before_commit")
        if failpoints.active:
            failpoints.reached("exchange.after_commit")
        self.ring_queues(woken)
        return ExchangeAnswer(enqueued, once, turns, beats)


def _enqueue(cursor: apsw.Cursor, exchange: Exchange) -> tuple[Enqueued, ...]:
    if not exchange.jobs:
        return ()
    enqueued = insert_jobs(cursor, exchange.jobs)
    if exchange.letters:
        pairs = zip(enqueued, exchange.letters, strict=True)
        store_letters(cursor, [(one.job_id, letter) for one, letter in pairs if letter is not None])
    return tuple(enqueued)


def _enqueue_once(cursor: apsw.Cursor, once: OnceJob) -> Enqueued | None:
    answer = insert_once(cursor, once.request, [once.job])
    if not answer.stored:
        return None
    [stored] = answer.stored
    if once.letter is not None:
        store_letters(cursor, [(stored.job_id, once.letter)])
    return Enqueued(stored.job_id, stored.fresh and not answer.repeated)


def _beat(cursor: apsw.Cursor, pulses: tuple[ForeignPulse, ...]) -> tuple[BeatAnswer, ...]:
    clock = read_clock()
    return tuple(beat_one(cursor, pulse, clock) for pulse in pulses)
