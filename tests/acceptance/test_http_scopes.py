"""What each token may do with jobs: what its scopes say, and whatever it enqueued itself."""

from collections.abc import Iterator

import pytest
from tests.acceptance.shop import Shop
from tests.guarded import Guarded, guarded_door, make_token

from unstuck.domain.api_tokens import Scope

API = "/api/v1"
OF_ONE = ("", "/result", "/why", "/doctor", "/attempts", "/logs", "/events")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    shop = Shop(f"sqlite:///{folder}/jobs.db", folder)
    shop.worker()
    with guarded_door(shop.url) as door:
        yield door


def enqueue(door: Guarded, token: str, key: str = "") -> int:
    headers = {"Idempotency-Key": key} if key else {}
    answer = door.ask("POST", f"{API}/jobs", token, json={"task": "add", "args": [1, 2]}, headers=headers)
    assert answer.status_code == (201 if answer.json()["fresh"] else 200), answer.text
    return int(answer.json()["id"])


def test_a_token_that_enqueues_may_follow_and_end_its_own_jobs(guarded: Guarded) -> None:
    mine = make_token(guarded.ledger_url, Scope.ENQUEUE)[1]
    job_id = enqueue(guarded, mine)
    shown = guarded.ask("GET", f"{API}/jobs/{job_id}", mine)
    assert shown.status_code == 200
    assert shown.json()["enqueued_by"].startswith("test (token ")
    assert mine not in shown.text
    for verb in ("cancel", "retry", "cancel"):
        assert guarded.ask("POST", f"{API}/jobs/{job_id}/{verb}", mine).status_code == 200
    for path in OF_ONE:
        assert guarded.ask("GET", f"{API}/jobs/{job_id}{path}", mine).status_code == 200, path


def test_it_may_not_touch_those_of_others_nor_learn_which_there_are(guarded: Guarded) -> None:
    mine, theirs = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    job_id = enqueue(guarded, theirs)
    for number in (job_id, 999_999_999):
        for path in OF_ONE:
            assert guarded.ask("GET", f"{API}/jobs/{number}{path}", mine).status_code == 403, path
        for verb in ("cancel", "retry"):
            assert guarded.ask("POST", f"{API}/jobs/{number}/{verb}", mine).status_code == 403, verb
    assert guarded.ask("GET", f"{API}/jobs", mine).status_code == 403
    assert guarded.ask("GET", f"{API}/jobs/{job_id}", theirs).json()["state"] == "pending"


def test_who_reads_may_not_change_and_who_operates_may_not_enqueue(guarded: Guarded) -> None:
    job_id = enqueue(guarded, guarded.all)
    reader, operator = guarded.token(Scope.READ), guarded.token(Scope.OPERATE)
    assert guarded.ask("GET", f"{API}/jobs/{job_id}/result", reader).status_code == 202
    assert guarded.ask("POST", f"{API}/jobs/{job_id}/cancel", reader).status_code == 403
    assert guarded.ask("POST", f"{API}/queues/pause", reader).status_code == 403
    assert guarded.ask("POST", f"{API}/jobs", operator, json={"task": "add"}).status_code == 403
    assert guarded.ask("POST", f"{API}/jobs/{job_id}/cancel", operator).status_code == 200


def test_two_tokens_with_the_same_key_do_not_meet(guarded: Guarded) -> None:
    one, two = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    first, other = enqueue(guarded, one, "the-key"), enqueue(guarded, two, "the-key")
    assert first != other
    again = guarded.ask(
        "POST", f"{API}/jobs", one, json={"task": "add", "args": [1, 2]}, headers={"Idempotency-Key": "the-key"}
    )
    assert (again.status_code, again.json()["id"]) == (200, first)
