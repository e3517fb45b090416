"""Reference tables of the documentation name what the source has: codes, detectors, events, endpoints, imports."""

import ast
import importlib
import re

import pytest
from tests.docs.test_pages import DOCS, FENCE, ROOT, name_of
from tests.support.reference_tables import TABLES, endpoints, written

from unstuck.domain.api_tokens import Scope
from unstuck.domain.conditions import Code
from unstuck.domain.events import EventKind
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.errors import ErrorCode
from unstuck.notify.alerts.conditions import CONDITIONS, AlertKind

FOLLOWED = {"enqueued", "claimed", "running", "succeeded", "progress"}
"""Seen by following one job, and not written down."""
REQUEST = re.compile(r"`((?:GET|POST|PUT|DELETE) /[^`\s]*)")


def section(page: str, heading: str) -> str:
    """Return the part of a page below a heading."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no heading {heading!r}"
    return found[1]


def first_cells(text: str) -> list[str]:
    """Return the names between backticks in the first column of every table."""
    cells = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("page", TABLES)
def test_what_is_made_from_the_source_is_as_the_source(page: str) -> None:
    assert (ROOT / page).read_text() == written(page), "run python -m tests.support.reference_tables"


def test_every_finding_of_the_doctor_is_described_once() -> None:
    described = [name for name in first_cells((ROOT / "docs/doctor.md").read_text()) if name not in ("problem", "info")]
    assert sorted(described) == sorted(code.value for code in Code)


def test_every_event_is_described_once() -> None:
    described = first_cells(section("docs/events.md", "Kinds"))
    conditions = {f"{kind}_{step}" for kind in CONDITIONS for step in ("still", "over")}
    assert sorted(described) == sorted({kind.value for kind in EventKind} - conditions - FOLLOWED)
    one_job = section("docs/events.md", "One job")
    assert [kind for kind in FOLLOWED if f"`{kind}`" not in one_job] == []


def test_every_alert_is_described_once() -> None:
    assert sorted(first_cells(section("docs/alerts.md", "What is told"))) == sorted(kind.value for kind in AlertKind)


@pytest.mark.parametrize("page", ["glossary.md", "runbook.md", "troubleshooting.md", "architecture.md"])
def test_pages_that_list_detectors_list_all(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    # Two of them are about workers alone.
    whole = set(Detector) if page in ("glossary.md", "architecture.md") else set(Detector) - {Detector.RUNNER}
    assert sorted(one.value for one in whole if f"`{one.value}`" not in text) == []


def test_every_error_code_of_a_job_is_described_once() -> None:
    assert sorted(first_cells(section("docs/glossary.md", "Error codes of a job"))) == sorted(
        code.value for code in ErrorCode
    )


def test_every_state_is_described_once() -> None:
    assert first_cells(section("docs/glossary.md", "States of a job")) == [state.value for state in JobState]
    assert first_cells(section("docs/glossary.md", "States of a worker")) == [state.value for state in WorkerState]
    ends = section("docs/glossary.md", "How an attempt can end")
    ended = set(AttemptState) - {AttemptState.CLAIMED, AttemptState.RUNNING}
    assert [state.value for state in ended if f"`{state.value}`" not in ends] == []


def test_every_scope_is_described_once() -> None:
    text = (ROOT / "docs/security.md").read_text()
    scopes = re.search(r"^\| scope \| allows \|\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert scopes is not None
    assert sorted(first_cells(scopes[1])) == sorted(scope.value for scope in Scope)


def test_every_request_shown_exists(subtests: pytest.Subtests) -> None:
    for path in [path for path in DOCS if path.name != "CHANGELOG.md"]:
        with subtests.test(name_of(path)):
            known = {_generic(request.replace(" /api/v1/", " /")) for request, _, _ in endpoints()}
            pages = ("/healthz", "/readyz", "/metrics", "/login", "/verbs")
            for request in REQUEST.findall(path.read_text()):
                method, _, target = request.partition(" ")
                target = target.partition("?")[0].removeprefix("/api/v1").rstrip("/")
                if not target.startswith(pages):
                    assert _generic(f"{method} {target}") in known, f"{request} in {name_of(path)}"


def _generic(request: str) -> str:
    """Return a request with `*` where a name or a number goes."""
    return re.sub(r"/(\{[^}]*\}|[A-Z][A-Z_]*|\d+)(?=/|$)", "/*", request)


def test_every_import_shown_works(subtests: pytest.Subtests) -> None:
    for path in DOCS:
        with subtests.test(name_of(path)):
            for info, body in FENCE.findall(path.read_text()):
                if not info.startswith("python"):
                    continue
                for node in ast.walk(ast.parse(body)):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "unstuck":
                        module = importlib.import_module(node.module or "")
                        for name in node.names:
                            assert hasattr(module, name.name), f"{name_of(path)}: from {node.module} import {name.name}"
