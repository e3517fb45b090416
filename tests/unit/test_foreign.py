"""The parts of the web door that foreign workers meet, one by one: whose worker it is, who is woken, who is gone."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract.hands import birth, put

from unstuck.config import Recovery, Settings, Web
from unstuck.domain.errors import LedgerUnavailable, RefusedValue
from unstuck.domain.policy import Policy, decode_policy, encode_policy
from unstuck.domain.states import JobState, WorkerState
from unstuck.http.callers import LOCAL, Caller, Scope
from unstuck.http.foreign.beating import Beats
from unstuck.http.foreign.bodies import RegisterBody, TaskBody
from unstuck.http.foreign.claiming import Gone, Presence, claim
from unstuck.http.foreign.seats import Seat, Seats
from unstuck.http.foreign.turning import Turns
from unstuck.http.foreign.waking import Waiter, Wakeups
from unstuck.http.problems import Problem
from unstuck.store.contract import Ledger
from unstuck.store.opening import ready_ledger
from unstuck.store.records import BeatAnswer, ForeignPulse, TaskRecord

MINE = Caller("mine", frozenset({Scope.WORKER}), "t1")
THEIRS = Caller("theirs", frozenset({Scope.WORKER}), "t2")
OPERATOR = Caller("boss", frozenset({Scope.WORKER, Scope.OPERATE}), "t3")
BODY = RegisterBody(name="node", queues=["default"], tasks=["add"])
KEY = (("default",), ("add",))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(url=f"sqlite:///{tmp_path}/jobs.db")


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    ledger = ready_ledger(settings)
    yield ledger
    ledger.close()


@pytest.fixture
def seats(settings: Settings) -> Seats:
    return Seats(settings, Web())


def registered(seats: Seats, ledger: Ledger, caller: Caller = LOCAL) -> Seat:
    return seats.keep(seats.register(ledger, BODY, caller, "127.0.0.1"))


# By which rules ---------------------------------------------------------------------------------


def test_a_remote_worker_is_judged_by_the_settings_of_the_server_that_registered_it(
    settings: Settings, ledger: Ledger
) -> None:
    careful = replace(settings, recovery=Recovery(auto_fail_stale_running=False))
    seat = registered(Seats(careful, Web()), ledger)
    assert [worker.rules for worker in ledger.workers() if worker.id == seat.id] == [careful.recovery.rules]


def test_a_remote_worker_that_describes_a_task_keeps_the_switches_of_the_app_that_owns_it(
    seats: Seats, ledger: Ledger
) -> None:
    owned = encode_policy(Policy(on_crash="retry", auto_fail_stale_running=False))
    ledger.register(birth("python", tasks=(TaskRecord("resize", "default", owned),)))
    body = RegisterBody(name="node", queues=["default"], tasks=[TaskBody(name="resize", on_crash="retry")])
    # The same rules as those of the app: it names no switches, and is not refused for that.
    seats.register(ledger, body, THEIRS, "127.0.0.1")
    [task] = ledger.tasks()
    assert decode_policy(task.policy) == decode_policy(owned)


# Whose worker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("remembered", [True, False])
def test_only_its_own_token_and_an_operator_speak_for_a_worker(
    settings: Settings, seats: Seats, ledger: Ledger, remembered: bool
) -> None:
    seat = registered(seats, ledger, MINE)
    asked = seats if remembered else Seats(settings, Web())
    assert asked.find(ledger, seat.id, MINE).id == seat.id
    assert asked.find(ledger, seat.id, OPERATOR).id == seat.id
    with pytest.raises(Problem) as refused:
        asked.find(ledger, seat.id, THEIRS)
    assert refused.value.status == 403


def test_nobody_takes_the_place_of_anothers_worker(seats: Seats, ledger: Ledger) -> None:
    seat = registered(seats, ledger, MINE)
    with pytest.raises(Problem) as refused:
        seats.register(ledger, RegisterBody(name="node", replace=True), THEIRS, "127.0.0.1")
    assert refused.value.status == 403
    record = ledger.foreign_worker(seat.id)
    assert record is not None
    assert record.state is WorkerState.ACTIVE


def test_the_same_instance_of_two_tokens_is_two_workers(seats: Seats, ledger: Ledger) -> None:
    mine = seats.register(ledger, RegisterBody(name="a", instance="i"), MINE, "::1")
    theirs = seats.register(ledger, RegisterBody(name="b", instance="i"), THEIRS, "::1")
    assert mine.id != theirs.id
    assert mine.host == "::1"


@pytest.mark.parametrize("worker_id", ["", "nobody", "a\0b", "ä", "x" * 5000, "../.."])
def test_what_is_no_id_is_not_found(seats: Seats, ledger: Ledger, worker_id: str) -> None:
    with pytest.raises(Problem) as refused:
        seats.find(ledger, worker_id, LOCAL)
    assert refused.value.status == 404


def test_metadata_are_written_when_they_change(seats: Seats, ledger: Ledger) -> None:
    seat = registered(seats, ledger)
    assert seats.news(seat, {"n": 1}) == {"n": 1}
    assert seats.news(seat, {"n": 1}) is None
    assert seats.news(seat, {"n": 2}) == {"n": 2}


# Who is woken -----------------------------------------------------------------------------------


def test_one_ring_wakes_one_and_who_leaves_with_a_ring_passes_it_on() -> None:
    async def scene() -> None:
        wakeups = Wakeups(poll_s=60)
        with wakeups.line(KEY, "second") as second, wakeups.line((("other",), ("add",)), "other") as other:
            with wakeups.line(KEY, "first") as first:
                wakeups.heard(frozenset({"queue:default"}))
                assert (second.woken, first.woken, other.woken) == (True, False, False)
                wakeups.heard(frozenset({"queue:default"}))
                assert first.woken
                second.rest()
            assert second.woken
            wakeups.heard(frozenset({"worker:other"}))
            assert (other.woken, other.told, second.told) == (True, True, False)

    asyncio.run(scene())


def test_without_a_bell_one_of_each_line_looks_now_and_then() -> None:
    async def scene() -> None:
        wakeups = Wakeups(poll_s=0.01)
        with wakeups.line(KEY, "a") as waiter:
            await asyncio.wait_for(waiter.wait(), 20)

    asyncio.run(scene())


# Who is gone ------------------------------------------------------------------------------------


async def wanted() -> bool:
    return True


def test_what_was_claimed_for_a_client_that_is_gone_goes_back_at_once(seats: Seats, ledger: Ledger) -> None:
    seat = registered(seats, ledger)
    job_id = put(ledger)

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def scene() -> None:
        presence = Presence(gone)
        await asyncio.sleep(0)
        with pytest.raises(Gone):
            await claim(
                turns.take, ledger, Wakeups(60), Waiter(seat.id), seat, presence, wanted, limit=1, wait_s=0, start=True
            )

    turns = Turns(lambda: ledger)
    asyncio.run(scene())
    turns.close()
    record = ledger.job(job_id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.PENDING, 0)


def test_a_claim_that_is_cut_off_in_the_middle_leaves_nothing_behind(seats: Seats, ledger: Ledger) -> None:
    seat = registered(seats, ledger)
    job_id = put(ledger)

    async def there() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def scene() -> None:
        waiter, presence = Waiter(seat.id), Presence(there)
        claiming = claim(
            turns.take, ledger, Wakeups(60), waiter, seat, presence, wanted, limit=1, wait_s=0, start=False
        )
        task = asyncio.ensure_future(claiming)
        while ledger.job(job_id).state is JobState.PENDING:  # type: ignore[union-attr]
            # The commit is made in another thread; whoever is in the middle of it is cut off.
            await asyncio.sleep(0)
            task.cancel()
            if task.done():
                break
        with pytest.raises(asyncio.CancelledError):
            await task

    turns = Turns(lambda: ledger)
    asyncio.run(scene())
    turns.close()
    assert ledger.held(seat.id) == []


# Beats ------------------------------------------------------------------------------------------


class Book:
    """A ledger that is asked for beats only."""

    def __init__(self) -> None:
        self.batches: list[list[ForeignPulse]] = []

    def launch_beats(self, pulses: list[ForeignPulse]) -> None:
        pass

    def beat_foreign(self, pulses: list[ForeignPulse]) -> list[BeatAnswer]:
        self.batches.append(pulses)
        if any(pulse.worker_id == "away" for pulse in pulses):
            raise LedgerUnavailable("away")
        if any(pulse.metadata == {"bad": 1} for pulse in pulses):
            raise RefusedValue("bad")
        return [BeatAnswer(WorkerState.ACTIVE) for _ in pulses]


def test_beats_that_come_together_are_written_together_and_one_that_is_refused_fails_alone() -> None:
    book: Any = Book()

    async def scene() -> list[Any]:
        beats = Beats(lambda: book)
        beats.note_settled("w1", 2)
        pulses = [ForeignPulse("w0"), ForeignPulse("w1"), ForeignPulse("w2", metadata={"bad": 1}), ForeignPulse("w3")]
        try:
            return await asyncio.gather(*(beats.beat(pulse) for pulse in pulses), return_exceptions=True)
        finally:
            beats.close()

    answers = asyncio.run(scene())
    assert [type(answer) for answer in answers] == [BeatAnswer, BeatAnswer, RefusedValue, BeatAnswer]
    assert len(book.batches[0]) == 4
    assert book.batches[0][1].settled == 2
    assert [pulse.settled for batch in book.batches[1:] for pulse in batch] == [0, 2, 0, 0]


def test_a_ledger_that_is_away_is_told_to_everybody_who_beat() -> None:
    book: Any = Book()

    async def scene() -> list[Any]:
        beats = Beats(lambda: book)
        pulses = [ForeignPulse("away"), ForeignPulse("w1")]
        try:
            return await asyncio.gather(*(beats.beat(pulse) for pulse in pulses), return_exceptions=True)
        finally:
            beats.close()

    assert [type(answer) for answer in asyncio.run(scene())] == [LedgerUnavailable, LedgerUnavailable]
