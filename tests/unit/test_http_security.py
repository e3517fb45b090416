"""The rules of the HTTP server's guard, each by itself: names, origins, depth, rates, logins, where to go next."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstuck.config import HttpSettings
from unstuck.domain.api_tokens import Scope, hash_of, id_of, mint, proof_of, read_scopes
from unstuck.errors import ConfigError, LedgerUnavailable
from unstuck.http.auth import sessions
from unstuck.http.auth.limits import ConcurrencyLimit, RateLimiter
from unstuck.http.auth.origins import Host, Hosts, is_loopback, judge, listening, mounted, read_host
from unstuck.http.auth.tokens import GIVEN_ID, STALE_S, ApiToken, TokenCache
from unstuck.http.dashboard.login import safe_next
from unstuck.ledger.contract.admin import ApiTokenRecord


class TestHosts:
    @pytest.mark.parametrize(
        ("text", "host"),
        [
            ("localhost", Host("localhost", None)),
            ("LOCALHOST.:8642", Host("localhost", 8642)),
            ("example.com:443", Host("example.com", None)),
            ("example.com:80", Host("example.com", None)),
            ("[::1]:8642", Host("::1", 8642)),
            ("[0:0:0:0:0:0:0:1]", Host("::1", None)),
            ("[::ffff:127.0.0.1]:9", Host("127.0.0.1", 9)),
            ("127.0.0.1:8642", Host("127.0.0.1", 8642)),
        ],
    )
    def test_hosts_have_one_spelling(self, text: str, host: Host) -> None:
        assert read_host(text) == host

    @pytest.mark.parametrize(
        "text",
        [
            *("", " ", ":80", "a:b", "a:99999", "a b", "a/b", "user@localhost", "localhost:80:80", "[::1", "[evil]"),
            *("localhost\n", "localhost,evil.example", "localhost#", "a" * 300, "ä.example", "::1", "[::1]x"),
        ],
    )
    def test_what_is_no_host_is_none(self, text: str) -> None:
        assert read_host(text) is None

    @pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "jobs.localhost"])
    def test_loopback(self, name: str) -> None:
        assert is_loopback(name)

    @pytest.mark.parametrize("name", ["0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "evillocalhost", "127.1"])
    def test_not_loopback(self, name: str) -> None:
        assert not is_loopback(name)

    def test_a_door_on_loopback_answers_to_no_other_name(self) -> None:
        hosts = Hosts.of([], "127.0.0.1")
        assert hosts.allows("localhost")
        assert not hosts.allows("evil.example")
        assert not hosts.allows("192.168.0.7")

    def test_a_door_on_every_address_answers_to_addresses_and_to_names_that_were_allowed(self) -> None:
        hosts = Hosts.of(["Jobs.Example.com", "*.internal", "other:8642"], "0.0.0.0")
        allowed = ["192.168.0.7", "fe80::1", "jobs.example.com", "a.internal", "other"]
        assert [name for name in allowed if not hosts.allows(name)] == []
        refused = ["internal", "evil.example", "jobs.example.com.evil.example", "evilinternal"]
        assert [name for name in refused if hosts.allows(name)] == []


class TestPlaces:
    @pytest.mark.parametrize(
        ("address", "allowed", "open"),
        [
            ("127.0.0.1", (), True),
            ("::1", ("localhost",), True),
            ("127.0.0.1", ("jobs.example.com",), False),
            ("0.0.0.0", (), False),
            ("::", (), False),
            ("10.0.0.1", (), False),
        ],
    )
    def test_only_what_is_for_this_machine_alone_may_be_open(
        self, address: str, allowed: tuple[str, ...], open: bool
    ) -> None:
        assert listening(HttpSettings(allowed_hosts=allowed), address).may_be_open is open

    def test_a_mounted_door_is_closed_unless_it_is_said(self) -> None:
        assert not mounted(HttpSettings()).may_be_open
        assert mounted(HttpSettings(), open=True).may_be_open


def fetched(mode: str, dest: str) -> dict[str, str]:
    """What a browser says of a request that another website made."""
    return {"sec-fetch-site": "cross-site", "sec-fetch-mode": mode, "sec-fetch-dest": dest}


class TestOrigins:
    OURS = Host("localhost", 8642)

    @pytest.mark.parametrize(
        ("method", "headers", "foreign", "proven"),
        [
            ("POST", {}, False, False),
            ("POST", {"origin": "http://localhost:8642"}, False, True),
            ("POST", {"origin": "https://localhost:8642"}, False, True),
            ("POST", {"origin": "http://localhost:8642", "sec-fetch-site": "same-origin"}, False, True),
            ("POST", {"origin": "http://localhost:8642", "sec-fetch-site": "cross-site"}, True, False),
            ("POST", {"origin": "http://localhost:3000"}, True, False),
            ("POST", {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, True, False),
            ("POST", {"origin": "http://evil.example"}, True, False),
            ("POST", {"origin": "null"}, True, False),
            ("POST", {"origin": ""}, True, False),
            ("POST", {"origin": "http://localhost:8642@evil.example"}, True, False),
            ("POST", {"origin": "http://["}, True, False),
            ("POST", {"sec-fetch-site": "none"}, True, False),
            ("POST", {"sec-fetch-site": "same-origin"}, False, True),
            ("POST", {"referer": "http://localhost:8642/jobs?x=1"}, False, False),
            ("POST", {"referer": "http://evil.example/http://localhost:8642/"}, True, False),
            (
                "POST",
                fetched("navigate", "document"),
                True,
                False,
            ),
            ("GET", {}, False, False),
            ("GET", {"sec-fetch-site": "none"}, False, False),
            ("GET", {"referer": "http://evil.example/"}, False, False),
            (
                "GET",
                fetched("navigate", "document"),
                False,
                False,
            ),
            (
                "GET",
                fetched("navigate", "iframe"),
                True,
                False,
            ),
            (
                "GET",
                fetched("no-cors", "image"),
                True,
                False,
            ),
            ("GET", {"origin": "http://evil.example"}, True, False),
        ],
    )
    def test_where_a_request_comes_from(
        self, method: str, headers: dict[str, str], foreign: bool, proven: bool
    ) -> None:
        judged = judge(headers, self.OURS, method)
        assert (judged.foreign, judged.proven) == (foreign, proven)

    def test_ports_that_go_without_saying_are_equal(self) -> None:
        assert judge({"origin": "https://jobs.example.com"}, Host("jobs.example.com", None), "POST").proven
        assert judge({"origin": "https://jobs.example.com:443"}, Host("jobs.example.com", None), "POST").proven


class TestRates:
    def test_a_burst_is_let_through_and_then_one_by_one(self) -> None:
        now = [100.0]
        rates = RateLimiter(2.0, 3.0, lambda: now[0])
        assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
        assert rates.take("b") == 0.0
        now[0] += 0.5
        assert rates.take("a") == 0.0
        assert rates.take("a") > 0

    def test_asking_how_long_to_wait_counts_nothing(self) -> None:
        rates = RateLimiter(1.0, 1.0, lambda: 0.0)
        assert [rates.wait_s("a") for _ in range(5)] == [0.0] * 5

    def test_no_rate_is_no_limit(self) -> None:
        rates = RateLimiter(0, 0, lambda: 0.0)
        assert not any(rates.take("a") for _ in range(1000))

    def test_a_thousand_workers_behind_one_token_are_not_slowed_by_the_defaults(self) -> None:
        now = [0.0]
        web = HttpSettings()
        rates = RateLimiter(web.requests_per_second, web.requests_per_second * 10, lambda: now[0])
        # They start together: register, beat, claim. Then each beats and asks for a job every 30 seconds.
        assert not any(rates.take("token") for _ in range(3000))
        for _ in range(600):
            now[0] += 30 / 2000
            assert rates.take("token") == 0.0
        assert web.max_open_requests_per_caller >= 1000


def test_a_crowd_is_bounded_for_each_and_for_all() -> None:
    crowd = ConcurrencyLimit(3, 2)
    with crowd.place_for("a"), crowd.place_for("a"):
        assert crowd.is_full("a")
        assert not crowd.is_full("b")
        with crowd.place_for("b"):
            assert crowd.is_full("c")
    assert not crowd.is_full("a")


class TestTokens:
    def test_a_token_names_its_id_and_has_256_random_bits(self) -> None:
        token_id, text = mint()
        assert id_of(text) == token_id
        assert mint()[1] != text
        assert len(text.removeprefix(f"ust_{token_id}_")) == 43

    @pytest.mark.parametrize("text", ["", "ust_", "ust_aaaaaaaa_", "x" * 60, "ust_aaaaaaaa_" + "!" * 43])
    def test_what_is_no_token_has_no_id(self, text: str) -> None:
        assert id_of(text) is None

    def test_scopes_are_explicit(self) -> None:
        assert read_scopes(["read,enqueue", "worker"]) == {Scope.READ, Scope.ENQUEUE, Scope.WORKER}
        assert read_scopes(["operate"]) == {Scope.OPERATE}
        assert read_scopes(["all"]) == frozenset(Scope)

    @pytest.mark.parametrize("words", [[], [""], ["reed"], ["read,admin"]])
    def test_scopes_that_do_not_exist_are_refused(self, words: list[str]) -> None:
        with pytest.raises(ConfigError):
            read_scopes(words)

    def test_a_given_token_must_be_long_and_is_never_repeated(self) -> None:
        with pytest.raises(ConfigError) as refused:
            HttpSettings(token="hunter2")
        assert "hunter2" not in str(refused.value)
        assert "secret" not in repr(HttpSettings(token="secret" * 8))


def key(token: str, seal: bytes = b"seal", id: str = "aaaa") -> ApiToken:
    return ApiToken(id, "ci", frozenset(Scope), hash_of(proof_of(token)), seal)


class TestSessions:
    def test_a_login_stands_until_it_is_over(self) -> None:
        session = sessions.read(sessions.begin(key("t"), proof_of("t"), 1000.0))
        assert session is not None
        assert session.token_id == "aaaa"
        assert sessions.stands(session, key("t"), 1000.0)
        assert sessions.stands(session, key("t"), 999.0 + sessions.LASTS_S)
        assert not sessions.stands(session, key("t"), 1000.0 + sessions.LASTS_S)

    def test_who_reads_the_ledger_cannot_make_one(self) -> None:
        # The hash and the seal are all that is stored.
        forged = sessions.read(sessions.begin(key("t"), key("t").hash, 1000.0))
        assert forged is not None
        assert not sessions.stands(forged, key("t"), 1000.0)

    def test_who_steals_one_cannot_prolong_it(self) -> None:
        cookie = sessions.begin(key("t"), proof_of("t"), 1000.0)
        until = str(1000 + sessions.LASTS_S)
        longer = sessions.read(cookie.replace(until, str(int(until) + 1)))
        assert longer is not None
        assert not sessions.stands(longer, key("t"), 1000.0)

    def test_one_of_another_token_does_not_stand(self) -> None:
        session = sessions.read(sessions.begin(key("t"), proof_of("t"), 1000.0))
        assert session is not None
        assert not sessions.stands(session, key("u"), 1000.0)
        assert not sessions.stands(session, key("t", b"other"), 1000.0)

    @given(st.text(max_size=300))
    def test_nonsense_is_no_login(self, text: str) -> None:
        assert sessions.read(text) is None


@pytest.mark.parametrize("text", ["/jobs", "/jobs?state=failed&queue=a", "/", "/jobs/1#x", "/a//b"])
def test_a_place_of_our_own_is_where_to_go_next(text: str) -> None:
    assert safe_next(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "jobs",
            "//evil.example",
            "///evil.example",
            "/\\evil.example",
            "\\\\evil.example",
            "http://evil.example",
        ),
        *("https:evil.example", "javascript:alert(1)", "/\t/evil.example", "/\n/evil.example", " //evil.example"),
        *("/jobs\r\nSet-Cookie: a=b", "/login", "/logout", "/login?next=/", "/\u2028", "/" + "a" * 5000, "//["),
    ],
)
def test_no_other_place_is(text: str) -> None:
    assert safe_next(text) == "/"


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


def ring(book: Book, given: str | None = None) -> TokenCache:
    return TokenCache(book.load, given, book.clock)


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
        keys = TokenCache(load, None, book.clock)
        under_way = asyncio.create_task(keys.keys())
        assert await asyncio.to_thread(begun.wait, 60)
        book.records, book.now_s = [record()], 0.05
        coming = asyncio.create_task(keys.find(TOKEN))
        await asyncio.sleep(0)
        go_on.set()
        assert not (await under_way).valid
        assert await coming is not None

    asyncio.run(come())
