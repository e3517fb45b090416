"""What each token may do with jobs: what its scopes say, and whatever it enqueued itself."""

from collections.abc import Iterator

import pytest
from tests.acceptance import foreign_kit
from tests.acceptance.shop import Shop
from tests.guarded import Guarded, guarded_door, make_token

from unstuck.domain.api_tokens import Scope

API = "/api/v1"
OF_ONE = ("", "/result", "/why", "/doctor", "/attempts", "/logs", "/events")


@pytest.fixture(scope="module", params=foreign_kit.DATABASES)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with foreign_kit.empty_database(request) as url:
        yield from serve(Shop(url, tmp_path_factory.mktemp("guarded")))


def serve(shop: Shop) -> Iterator[Guarded]:
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


def keyed(door: Guarded, token: str, key: str, path: str = "jobs", **more: object) -> tuple[int, int]:
    """Enqueue under a unique key; give the status and the job."""
    what = {"task": "add", "args": [1, 2]} if path == "jobs" else {"name": "sums", "nodes": [{"name": "a", **ADD}]}
    answer = door.ask("POST", f"{API}/{path}", token, json={**what, "unique_key": key, **more})
    assert answer.status_code < 300, answer.text
    return answer.status_code, int(answer.json()["id"])


ADD = {"task": "add", "args": [1, 2]}
WAYS_OF_A_DUPLICATE = ("replace", "refuse", "return")


def test_a_unique_key_of_one_token_says_and_does_nothing_to_jobs_of_others(guarded: Guarded) -> None:
    mine, theirs = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    for number, way in enumerate(WAYS_OF_A_DUPLICATE):
        key = f"nightly-{number}"
        for other in (theirs, guarded.all):
            keyed(guarded, other, key)
        status, job_id = keyed(guarded, mine, key, on_duplicate=way)
        assert status == 201
        for other in (theirs, guarded.all):
            status, found = keyed(guarded, other, key)
            assert (status, found != job_id) == (200, True)
            shown = guarded.ask("GET", f"{API}/jobs/{found}", guarded.all).json()
            assert shown["state"] == "pending"


def test_a_unique_key_still_finds_the_jobs_of_its_own_token(guarded: Guarded) -> None:
    mine = make_token(guarded.ledger_url, Scope.ENQUEUE)[1]
    _, first = keyed(guarded, mine, "own")
    assert keyed(guarded, mine, "own") == (200, first)
    refused = guarded.ask("POST", f"{API}/jobs", mine, json={**ADD, "unique_key": "own", "on_duplicate": "refuse"})
    assert (refused.status_code, refused.json()["job_id"]) == (409, first)
    status, second = keyed(guarded, mine, "own", on_duplicate="replace")
    assert (status, second != first) == (201, True)
    assert guarded.ask("GET", f"{API}/jobs/{first}", mine).json()["state"] == "cancelled"


def test_the_unique_key_of_a_workflow_is_its_tokens_own(guarded: Guarded) -> None:
    mine, theirs = (make_token(guarded.ledger_url, Scope.ENQUEUE)[1] for _ in range(2))
    _, first = keyed(guarded, theirs, "flow", "workflows")
    status, second = keyed(guarded, mine, "flow", "workflows")
    assert (status, second != first) == (201, True)
    assert keyed(guarded, mine, "flow", "workflows") == (200, second)


def test_tokens_that_operate_share_the_keys_of_everybody(guarded: Guarded) -> None:
    one, two = (make_token(guarded.ledger_url, Scope.ENQUEUE, Scope.OPERATE)[1] for _ in range(2))
    _, first = keyed(guarded, one, "shared")
    assert keyed(guarded, two, "shared") == (200, first)
