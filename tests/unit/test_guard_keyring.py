"""The keyring: few questions to the ledger however many come, and nobody let in by what it does not know."""

import asyncio
import threading

import pytest

from unstuck.domain.api_tokens import Scope, hash_of, mint, proof_of
from unstuck.domain.errors import LedgerUnavailable
from unstuck.http.guard.keyring import GIVEN_ID, STALE_S, Keyring
from unstuck.store.records import ApiTokenRecord

TOKEN_ID = "aaaaaaaa"
TOKEN = f"ust_{TOKEN_ID}_{'Q' * 43}"
GIVEN = "given-by-a-variable-0123456789abcdef"


def record(*, valid: bool = True) -> ApiTokenRecord:
    hashed = hash_of(proof_of(TOKEN))
    return ApiTokenRecord(TOKEN_ID, "ci", hashed, b"seal", ("read", "fly"), 0.0, "ada", None, None, valid)


class Book:
    """Stands in for the ledger's list of tokens, and counts who looks."""

    def __init__(self, *records: ApiTokenRecord) -> None:
        self.records = list(records)
        self.looks = 0
        self.away = False
        self.now_s = 0.0

    def load(self) -> list[ApiTokenRecord]:
        self.looks += 1
        if self.away:
            raise LedgerUnavailable("PostgreSQL at db.internal is away")
        return self.records

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def book() -> Book:
    return Book(record())


def ring(book: Book, given: str | None = None) -> Keyring:
    return Keyring(book.load, given, book.clock)


def test_a_token_is_known_by_its_hash_with_the_scopes_that_exist(book: Book) -> None:
    key = asyncio.run(ring(book).find(TOKEN))
    assert key is not None
    assert (key.id, key.scopes) == (TOKEN_ID, {Scope.READ})


def test_a_token_with_the_right_id_and_another_secret_is_not(book: Book) -> None:
    assert asyncio.run(ring(book).find(TOKEN[:-4] + "AAAA")) is None


@pytest.mark.parametrize("text", ["", "x", TOKEN + "x", TOKEN.upper(), "ä", "a" * 10_000, f"ust_{GIVEN_ID}_x"])
def test_nonsense_is_not_looked_up(book: Book, text: str) -> None:
    assert asyncio.run(ring(book).find(text)) is None
    assert book.looks == 0


def test_many_who_come_at_once_ask_once(book: Book) -> None:
    async def come() -> list[object]:
        keys = ring(book)
        return await asyncio.gather(*(keys.find(TOKEN) for _ in range(500)))

    assert all(asyncio.run(come()))
    assert book.looks == 1


def test_a_thousand_guesses_cost_the_ledger_a_few_looks(book: Book) -> None:
    async def guess() -> None:
        keys = ring(book)
        await asyncio.gather(*(keys.find(mint()[1]) for _ in range(1000)))

    asyncio.run(guess())
    assert book.looks <= 3


def test_what_is_older_than_a_second_is_never_believed(book: Book) -> None:
    async def come() -> None:
        keys = ring(book)
        assert await keys.find(TOKEN) is not None
        book.records = [record(valid=False)]
        book.now_s += STALE_S + 0.01
        assert await keys.find(TOKEN) is None
        assert (await keys.keys()).any_ever

    assert STALE_S < 1
    asyncio.run(come())


def test_when_the_ledger_is_away_nobody_comes_in(book: Book) -> None:
    async def come() -> None:
        keys = ring(book)
        assert await keys.find(TOKEN) is not None
        book.away = True
        book.now_s += STALE_S + 0.01
        with pytest.raises(LedgerUnavailable):
            await keys.find(TOKEN)
        with pytest.raises(LedgerUnavailable):
            await keys.keys()
        book.away = False
        assert await keys.find(TOKEN) is not None

    asyncio.run(come())


def test_a_given_token_has_every_scope_and_locks_the_door() -> None:
    keys = ring(Book(), GIVEN)
    key = asyncio.run(keys.find(GIVEN))
    assert key is not None
    assert (key.id, key.scopes) == (GIVEN_ID, frozenset(Scope))
    assert asyncio.run(ring(Book(), GIVEN).keys()).any_ever
    assert not asyncio.run(ring(Book()).keys()).any_ever
    assert asyncio.run(ring(Book()).by_id(GIVEN_ID)) is None


def test_a_token_that_was_made_while_all_were_read_is_found(book: Book) -> None:
    """The read that is under way when it comes began before it was made."""
    begun, go_on = threading.Event(), threading.Event()

    def load() -> list[ApiTokenRecord]:
        found = list(book.records)
        begun.set()
        go_on.wait(60)
        return found

    async def come() -> None:
        book.records = []
        keys = Keyring(load, None, book.clock)
        under_way = asyncio.create_task(keys.keys())
        assert await asyncio.to_thread(begun.wait, 60)
        book.records, book.now_s = [record()], 0.05
        coming = asyncio.create_task(keys.find(TOKEN))
        await asyncio.sleep(0)
        go_on.set()
        assert not (await under_way).valid
        assert await coming is not None

    asyncio.run(come())
