"""Everything that an operator does is written down, through whichever door, with who, what and how it ended."""

import pytest
from tests.support.cli import Cli
from tests.support.http_server import guarded_door, serving

from unstuck import App
from unstuck.client.operator import Operator
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract import Ledger

Noted = list[tuple[str, str, str, str | None]]


def notes(shop: Cli) -> Noted:
    """Give door, verb, target and outcome, oldest first."""
    found = shop.run("audit", "--json").json
    return [(note["door"], note["verb"], note["target"], note["outcome"]) for note in reversed(found)]


def test_every_verb_of_the_command_line_leaves_a_note(either_shop: Cli) -> None:
    shop = either_shop
    worker = shop.worker()
    job = shop.jobs()[0]
    for command in (
        ["pause", "default"],
        ["resume", "--all"],
        ["cancel", str(job), "999"],
        ["retry", str(job)],
        ["purge", "default", "--yes"],
        ["stale", "--requeue", "--older-than", "1h"],
        ["stale", "--fail"],
        ["prune", "--older-than", "1h", "--state", "failed"],
        ["workers", "disable", worker],
        ["workers", "enable", worker],
        ["workers", "drain", worker],
        ["workers", "stop", worker],
        ["tokens", "create", "ci", "--scope", "read"],
        ["tokens", "revoke", "ci"],
        ["migrate", "--after-restore"],
    ):
        shop.run(*command)
    found = notes(shop)
    assert {door for door, *_ in found} == {"cli"}
    token = found[12][2].split()[1]
    named = f"worker ada ({worker})"
    assert [note[1:] for note in found] == [
        ("pause", "queue default", "1 paused"),
        ("resume", "every queue", "1 resumed"),
        ("cancel", f"jobs {job}, 999", "1 cancelled, 1 missing"),
        ("retry", f"job {job}", "1 queued"),
        ("purge", "queue default", "1 cancelled"),
        ("requeue_stale", "jobs silent for 1h", "nothing to do"),
        ("fail_stale", "jobs past their own timeout", "nothing to do"),
        ("prune", "failed jobs older than 1h", "0 removed"),
        ("disable", named, "done"),
        ("enable", named, "done"),
        ("drain", named, "done"),
        ("stop", named, "done"),
        ("create_token", f"token {token} (ci): read", "done"),
        ("revoke_token", f"token {token} (ci)", "done"),
        ("void_tokens", "every living worker", "1 workers"),
    ]


def test_each_door_says_which_it_is(shop: Cli) -> None:
    job = shop.jobs()[0]
    with guarded_door(shop.url) as door:
        assert door.ask("POST", f"/api/v1/jobs/{job}/cancel", door.all).status_code == 200
        browser = door.log_in()
        form = {"job": str(job), "confirmed": "yes"}
        assert browser.post("/verbs/retry", form).status_code == 303
        page = browser.get("/audit").text
        listed = door.ask("GET", "/api/v1/audit?limit=2", door.all).json()
    app = App(shop.url)
    app.job(job).cancel()
    app.close()
    assert [note[:2] for note in notes(shop)][-3:] == [("http", "cancel"), ("page", "retry"), ("python", "cancel")]
    assert [(note["by"], note["door"]) for note in listed] == [("test", "page"), ("test", "http")]
    assert f"job {job}" in page


def test_what_came_in_is_escaped_on_the_page(shop: Cli) -> None:
    shop.run("tokens", "create", "<script>alert(1)</script>", "--scope", "read")
    with guarded_door(shop.url) as door:
        page = door.ask("GET", "/audit", door.all).text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_what_failed_says_so_and_what_never_ended_stays_open(shop: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with shop.ledger() as ledger:
        operator = Operator(ledger, shop.settings, by="ada" + "x" * 1000)

        def fail(*_: object) -> int:
            raise LedgerUnavailable("the disk is full")

        monkeypatch.setattr(ledger.maintenance, "prune", fail)
        with pytest.raises(LedgerUnavailable):
            operator.jobs.prune(3600.0)
        monkeypatch.setattr(ledger.admin, "end_audit", fail)
        assert operator.queues.pause(None) == []
        first, second = ledger.admin.audit()[::-1]
    assert first.outcome == "failed: the disk is full"
    assert len(first.by) == 300
    assert second.outcome is None
    assert "unknown: it never said" in shop.run("audit").out


def test_nothing_is_done_that_cannot_be_written_down(shop: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.jobs()[0]
    with shop.ledger() as ledger:
        monkeypatch.setattr(ledger.admin, "begin_audit", _refuse)
        with pytest.raises(LedgerUnavailable):
            Operator(ledger, shop.settings).jobs.cancel([job])
        assert _state(ledger, job) == "pending"


def test_a_thousand_jobs_make_one_short_note(shop: Cli) -> None:
    with shop.ledger() as ledger:
        Operator(ledger, shop.settings).jobs.cancel(range(1, 2001))
        note = ledger.admin.audit()[0]
    assert note.target == "jobs 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 1990 more"
    assert note.outcome == "2000 missing"


def _refuse(*_: object) -> int:
    raise LedgerUnavailable("the disk is full")


def _state(ledger: Ledger, job_id: int) -> str:
    record = ledger.jobs.get(job_id)
    assert record is not None
    return record.state.value


APP = """
from unstuck import App, Context
app = App()

@app.task
def login(user, password, ctx: Context, *api_keys, iban=""):
    return user
"""
SECRETS = ("hunter2", "key-1", "key-2", "DE02")


@pytest.fixture
def job(shop: Cli) -> str:
    (shop.folder / "app.py").write_text(APP)
    (shop.folder / "unstuck.toml").write_text('[http]\nredact = ["iban"]\n')
    call = ('"ann"', '"hunter2"', '"key-1"', '"key-2"', "--kwargs", '{"iban": "DE02"}')
    said = shop.run("enqueue", "login", *call, "--app", "app:app")
    assert said.code == 0, said
    return said.out.strip()


def test_no_door_shows_them(shop: Cli, job: str) -> None:
    told = shop.run("job", job, "--json").json
    assert told["args"] == ["ann", "•••", "•••", "•••"]
    assert told["kwargs"] == {"iban": "•••"}
    told_by = {" ".join(command): shop.run(*command).out for command in (["job", job], ["why", job], ["jobs"])}
    with serving(shop.url, env={"UNSTUCK_HTTP_REDACT": "iban"}) as client:
        for path in (f"/api/v1/jobs/{job}", f"/api/v1/jobs/{job}/why", "/api/v1/jobs", f"/jobs/{job}", "/jobs", "/"):
            answer = client.get(path)
            assert answer.status_code == 200, path
            told_by[path] = answer.text
        assert "ann" in told_by[f"/jobs/{job}"]
        assert client.get(f"/api/v1/jobs/{job}").json()["policy"]["hidden_args"] == [1]
    for door, text in told_by.items():
        assert not [secret for secret in SECRETS if secret in text], door


def test_a_worker_over_http_gets_them_whole_and_says_which_of_its_own_are_secret(shop: Cli) -> None:
    with serving(shop.url) as client:
        task = {"name": "mail", "hidden_args": [0]}
        worker = client.post("/api/v1/workers", json={"tasks": [task]}).json()["id"]
        job = client.post("/api/v1/jobs", json={"task": "mail", "args": ["hunter2", 1]}).json()["id"]
        assert client.get(f"/api/v1/jobs/{job}").json()["args"] == ["•••", 1]
        [held] = client.post(f"/api/v1/workers/{worker}/claim", json={}).json()["jobs"]
        assert held["payload"]["args"] == ["hunter2", 1]
