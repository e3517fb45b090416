"""Tokens of the web door and the audit log: written down, ended, swept, the same on both databases."""

from unstuck.store.contract import Ledger
from unstuck.store.records import NewApiToken

HOUR_S = 3600.0


def token(id: str = "aaaa", *, name: str = "ci", expires_in_s: float | None = None) -> NewApiToken:
    return NewApiToken(id, name, id.encode() * 8, b"seal", ("read", "enqueue"), "ada", expires_in_s)


def test_a_token_is_found_with_all_that_was_written_down(ledger: Ledger) -> None:
    ledger.add_api_token(token())
    found = ledger.api_tokens()[0]
    assert (found.id, found.name, found.hash, found.seal) == ("aaaa", "ci", b"aaaa" * 8, b"seal")
    assert found.scopes == ("read", "enqueue")
    assert (found.created_by, found.expires_at, found.revoked_at, found.valid) == ("ada", None, None, True)


def test_a_revoked_token_stays_in_the_list_and_is_valid_no_more(ledger: Ledger) -> None:
    ledger.add_api_token(token())
    assert ledger.revoke_api_token("aaaa")
    assert not ledger.revoke_api_token("aaaa")
    assert not ledger.revoke_api_token("bbbb")
    assert [(found.valid, found.revoked_at is not None) for found in ledger.api_tokens()] == [(False, True)]


def test_an_expired_token_is_valid_no_more(ledger: Ledger) -> None:
    ledger.add_api_token(token("aaaa", expires_in_s=0.0))
    ledger.add_api_token(token("bbbb", expires_in_s=HOUR_S))
    assert {found.id: found.valid for found in ledger.api_tokens()} == {"aaaa": False, "bbbb": True}


def test_a_note_is_there_before_the_deed_and_says_afterwards_how_it_ended(ledger: Ledger) -> None:
    first = ledger.begin_audit("ada", "cli", "purge", "queue default")
    assert [(note.verb, note.outcome) for note in ledger.audit()] == [("purge", None)]
    second = ledger.begin_audit("bob", "page", "cancel", "job 1")
    ledger.end_audit(first, "3 cancelled")
    assert [(note.id, note.outcome) for note in ledger.audit()] == [(second, None), (first, "3 cancelled")]
    assert [note.id for note in ledger.audit(before_id=second)] == [first]
    assert [note.by for note in ledger.audit(limit=1)] == ["bob"]


def test_old_notes_are_swept_and_young_ones_stay(ledger: Ledger) -> None:
    for number in range(3):
        ledger.begin_audit("ada", "cli", "cancel", f"job {number}")
    assert ledger.sweep_audit(HOUR_S, 2) == 0
    assert ledger.sweep_audit(0.0, 2) == 2
    assert [note.target for note in ledger.audit()] == ["job 2"]
