"""Secrets among the arguments of a job are seen at no door, by whichever way they were passed."""

import pytest
from tests.acceptance.shop import Shop
from tests.web import serving

APP = """
from unstuck import App, Context
app = App()

@app.task
def login(user, password, ctx: Context, *api_keys, iban=""):
    return user
"""
SECRETS = ("hunter2", "key-1", "key-2", "DE02")


@pytest.fixture
def job(shop: Shop) -> str:
    (shop.folder / "app.py").write_text(APP)
    (shop.folder / "unstuck.toml").write_text('[web]\nredact = ["iban"]\n')
    call = ('"ann"', '"hunter2"', '"key-1"', '"key-2"', "--kwargs", '{"iban": "DE02"}')
    said = shop.run("enqueue", "login", *call, "--app", "app:app")
    assert said.code == 0, said
    return said.out.strip()


def test_no_door_shows_them(shop: Shop, job: str) -> None:
    told = shop.run("job", job, "--json").json
    assert told["args"] == ["ann", "•••", "•••", "•••"]
    assert told["kwargs"] == {"iban": "•••"}
    told_by = {" ".join(command): shop.run(*command).out for command in (["job", job], ["why", job], ["jobs"])}
    with serving(shop.url, env={"UNSTUCK_WEB_REDACT": "iban"}) as client:
        for path in (f"/api/v1/jobs/{job}", f"/api/v1/jobs/{job}/why", "/api/v1/jobs", f"/jobs/{job}", "/jobs", "/"):
            answer = client.get(path)
            assert answer.status_code == 200, path
            told_by[path] = answer.text
        assert "ann" in told_by[f"/jobs/{job}"]
        assert client.get(f"/api/v1/jobs/{job}").json()["policy"]["hidden_args"] == [1]
    for door, text in told_by.items():
        assert not [secret for secret in SECRETS if secret in text], door


def test_a_worker_over_http_gets_them_whole_and_says_which_of_its_own_are_secret(shop: Shop) -> None:
    with serving(shop.url) as client:
        task = {"name": "mail", "hidden_args": [0]}
        worker = client.post("/api/v1/workers", json={"tasks": [task]}).json()["id"]
        job = client.post("/api/v1/jobs", json={"task": "mail", "args": ["hunter2", 1]}).json()["id"]
        assert client.get(f"/api/v1/jobs/{job}").json()["args"] == ["•••", 1]
        [held] = client.post(f"/api/v1/workers/{worker}/claim", json={}).json()["jobs"]
        assert held["payload"]["args"] == ["hunter2", 1]
