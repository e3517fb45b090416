"""The OpenAPI document is complete and true: every answer to whatever is sent fits it, and none is a 5xx."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.http_server import API, ApiClient

from unstuck import host

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
TRIES = {"main": 1, "all": 3}
"""Number of requests of each kind for each route, by the option --databases: `make test-long` tries more."""
LONGEST_WAIT_S = 0.05
ANSWER_WITHIN_S = 60.0
KNOWN: dict[str, list[Any]] = {
    "job_id": [1, 2, 3, 4],
    "ids": [[1, 2], [3]],
    "worker": ["w1"],
    "task": ["add", "crawl"],
    "queue": ["default", None],
    "name": ["default", "scrapes"],
    "host": [host.hostname()],
}
"""What is there: random names would never meet it."""


@pytest.fixture
def document(door: ApiClient) -> dict[str, Any]:
    document: dict[str, Any] = door.client.get(f"{API}/openapi.json").json()
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def never_ends(operation: dict[str, Any]) -> bool:
    return any("text/event-stream" in answer.get("content", {}) for answer in operation["responses"].values())


def can_be_wrong(operation: dict[str, Any]) -> bool:
    """Of what takes nothing, or any text, nothing wrong can be asked."""
    wanted = operation.get("parameters", [])
    return "requestBody" in operation or any(
        item["in"] != "path" or item["schema"].get("type") != "string" for item in wanted
    )


def test_every_route_says_what_it_takes_and_gives(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        where = f"{method} {path}"
        assert operation.get("summary"), where
        good = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        assert good, where
        for answer in good:
            for content in answer.get("content", {}).values():
                assert content.get("schema") or "text/event-stream" in answer["content"], f"{where} has no model"
        if path.startswith(API):
            assert {"401", "403", "422", "429", "503"} <= operation["responses"].keys(), where
    assert "HTTPValidationError" not in str(document)


def test_whatever_is_sent_the_answer_fits_the_document(
    door: ApiClient, document: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    tries = TRIES.get(pytestconfig.option.databases, 1)
    for _ in range(4):
        door.enqueue()
    door.shop.claim(limit=2, start=True)
    foreign = door.post("/workers", {"name": "foreign", "queues": ["default"], "tasks": ["add"]}, 201)
    there = {**KNOWN, "worker_id": [foreign["id"]]}
    session = requests.Session()
    session.trust_env = False
    tried = 0
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        described = document["paths"][operation.path][operation.method]
        if never_ends(described):
            continue
        if "doctor" in operation.path:
            # It looks twice at workers that take nothing, as ours do: they have a reason now.
            door.post("/queues/pause")
        for mode in GenerationMode if can_be_wrong(described) else [GenerationMode.POSITIVE]:
            tried += _try(operation, mode, there, str(door.client.base_url), session, tries)
    print(f"{tried} requests")
    assert tried > 100


def _try(
    operation: Any, mode: Any, there: dict[str, list[Any]], url: str, session: requests.Session, tries: int
) -> int:
    count = 0

    @settings(
        max_examples=tries,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.data(), real=st.booleans())
    def ask(case: Any, known: Any, real: bool) -> None:
        nonlocal count
        for place in _places(case) if real else ():
            for name in sorted(there.keys() & place.keys()):
                place[name] = known.draw(st.sampled_from(there[name]))
        for place in (case.query, case.body):
            if isinstance(place, dict) and isinstance(place.get("wait"), int | float):
                place["wait"] = min(place["wait"], LONGEST_WAIT_S)
        response = case.call(base_url=url, session=session, timeout=ANSWER_WITHIN_S)
        case.validate_response(response, checks=CHECKS)
        count += 1

    ask()
    return count


def _places(case: Any) -> Iterator[dict[str, Any]]:
    """Give everything in a request that has names."""
    left = [case.path_parameters, case.query, case.body]
    while left:
        place = left.pop()
        if isinstance(place, dict):
            yield place
            left += [below for name, below in place.items() if name in ("jobs", "where")]
        elif isinstance(place, list):
            left += place
