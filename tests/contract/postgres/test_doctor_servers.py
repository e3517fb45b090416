"""The doctor looks at which servers the URL names: a standby, and several hosts without a word on which to take."""

from collections.abc import Iterator

import pytest
from tests.support.postgres_cluster import Pair, start_pair

from unstuck import config
from unstuck.client.doctor.diagnose import diagnose
from unstuck.client.doctor.findings import Finding
from unstuck.domain.conditions import Severity
from unstuck.errors import LedgerStandby
from unstuck.ledger.open import open_ledger


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Pair, str]]:
    """A primary with a ledger, and a standby that follows it."""
    with start_pair() as pair:
        url = pair.primary.new_ledger()
        pair.catch_up()
        yield pair, url


@pytest.fixture
def pair(servers: tuple[Pair, str]) -> Pair:
    return servers[0]


@pytest.fixture
def url(servers: tuple[Pair, str]) -> str:
    return servers[1]


def ask(url: str, **settings: str) -> dict[str, Finding]:
    findings = diagnose(config.build({"url": url, **settings}))
    return {one.code.value: one for one in findings}


def test_a_url_that_names_only_a_standby_is_a_finding_of_its_own(pair: Pair, url: str) -> None:
    standby = pair.url_of_standby(url)
    found = ask(standby)
    assert set(found) == {"standby"}
    assert found["standby"].severity is Severity.PROBLEM
    assert "is a standby (in recovery)" in found["standby"].why
    assert "primary" in found["standby"].cure
    assert set(ask(f"{standby}?target_session_attrs=any")) == {"standby"}
    assert set(ask(url)) == set()


def test_a_standby_is_an_error_of_its_own(pair: Pair, url: str) -> None:
    ledger = open_ledger(config.build({"url": pair.url_of_standby(url)}))
    with pytest.raises(LedgerStandby):
        ledger.workers.list()
    ledger.close()


def test_several_hosts_without_a_word_on_which_to_take(pair: Pair, url: str) -> None:
    both = pair.url_of_both(url)
    found = ask(both)["several-hosts"]
    assert found.severity is Severity.INFO
    hosts = f"127.0.0.1:{pair.primary.port},127.0.0.1:{pair.standby.port}"
    assert found.facts["hosts"] == hosts.split(",")
    assert f"postgresql://postgres@{hosts}/{url.rpartition('/')[2]}?target_session_attrs=primary" in found.cure


@pytest.mark.parametrize("chosen", ["primary", "read-write"])
def test_several_hosts_with_the_right_word_are_well(pair: Pair, url: str, chosen: str) -> None:
    assert set(ask(f"{pair.url_of_both(url)}?target_session_attrs={chosen}")) == set()


def test_several_hosts_with_a_word_that_may_choose_the_standby(pair: Pair, url: str) -> None:
    found = ask(f"{pair.url_of_both(url)}?target_session_attrs=any")["several-hosts"]
    assert found.severity is Severity.WARNING
    assert "target_session_attrs=any" in found.what


def test_a_word_in_the_environment_counts(pair: Pair, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "read-write")
    assert "several-hosts" not in ask(pair.url_of_both(url))


def test_the_password_is_not_shown(pair: Pair, url: str) -> None:
    secret = pair.url_of_both(url).replace("postgres@", "postgres:very-secret@")
    assert "very-secret" not in f"{ask(secret)}"


def test_the_url_for_wake_ups_is_looked_at_too(pair: Pair, url: str) -> None:
    found = ask(url, listen_url=pair.url_of_both(url))["several-hosts"]
    assert "listen_url" in found.what


def test_the_primary_is_gone_and_the_standby_waits_to_be_promoted(pair: Pair, url: str) -> None:
    pair.primary.stop()
    try:
        found = ask(pair.url_of_both(url))
    finally:
        pair.primary.start()
    assert "standby" in found, found
    assert "promote" in found["standby"].cure
