"""Tokens and logins: made, used, ended; and the door that will not open to the world without one."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.cli import Cli
from tests.support.fleet import wait_for
from tests.support.http_server import SecuredServer, guarded_door, make_token, serve, serving

from unstuck.domain.api_tokens import Scope

GIVEN = "given-by-a-variable-0123456789abcdef"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder: Path = tmp_path_factory.mktemp("guard")
    with guarded_door(f"sqlite:///{folder}/jobs.db") as door:
        yield door


# The address ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_others_are_not_served_before_there_is_a_token(shop: Cli, host: str) -> None:
    said = shop.refused(1, "serve", "--port", "0", "--host", host)
    assert "there is no valid token" in said
    assert "unstuck tokens create NAME --scope all" in said


def test_a_name_for_others_needs_a_token_also_behind_a_proxy_on_this_machine(shop: Cli) -> None:
    said = shop.refused(1, "serve", "--port", "0", UNSTUCK_HTTP_ALLOWED_HOSTS="jobs.example.com")
    assert "jobs.example.com" in said


def test_a_token_under_a_name_that_nothing_reads_is_refused(shop: Cli) -> None:
    said = shop.refused(1, "serve", "--port", "0", UNSTUCK_WEB_TOKEN=GIVEN)
    assert "There is no setting UNSTUCK_WEB_TOKEN. Did you mean UNSTUCK_HTTP_TOKEN?" in said


def test_a_token_that_is_over_opens_nothing(shop: Cli) -> None:
    token_id, _ = make_token(shop.url, Scope.READ)
    assert shop.run("tokens", "revoke", token_id).code == 0
    make_token(shop.url, Scope.READ, expires_in_s=0.001)
    shop.refused(1, "serve", "--port", "0", "--host", "0.0.0.0")
    # And what was locked once does not fall open by itself.
    with serving(shop.url) as client:
        assert client.get("/api/v1/audit").status_code == 401


def test_with_a_token_others_are_served_and_asked_for_it(shop: Cli) -> None:
    _, token = make_token(shop.url, Scope.READ)
    with serve(shop.url, "--host", "0.0.0.0") as served:
        port = httpx.URL(served.url).port
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.get("/api/v1/audit").status_code == 401
            answer = client.get("/api/v1/audit", headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 200
            # Any address may be this machine's; a name is only one of ours if it was allowed.
            assert client.get("/login", headers={"Host": "192.0.2.7:99"}).status_code == 200
            assert client.get("/login", headers={"Host": "evil.example"}).status_code == 421


def test_a_token_by_a_variable_opens_and_locks_too(shop: Cli) -> None:
    with serve(shop.url, "--host", "0.0.0.0", env={"UNSTUCK_HTTP_TOKEN": GIVEN}) as served:
        url = served.url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(base_url=url, trust_env=False) as client:
            assert client.get("/api/v1/audit").status_code == 401
            assert client.get("/api/v1/audit", headers={"Authorization": f"Bearer {GIVEN}"}).status_code == 200
        door = SecuredServer(shop.url, served, GIVEN)
        assert door.log_in(GIVEN).get("/").status_code == 200
        door.close()
        assert GIVEN not in served.said()


def test_on_this_machine_it_is_open_until_the_first_token_is_made(shop: Cli) -> None:
    with serving(shop.url) as client:
        assert client.get("/api/v1/audit").status_code == 200
        assert client.get("/").status_code == 200
        assert client.get("/login").headers["Location"] == "/"
        # Whoever passes others through to what is for this machine alone gives itself away.
        for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "X-Forwarded-Host"):
            assert client.get("/api/v1/audit", headers={name: "192.0.2.1"}).status_code == 403
        assert shop.run("tokens", "create", "first", "--scope", "read").code == 0
        wait_for(lambda: client.get("/api/v1/audit").status_code == 401, "the door to be locked", 5)


# Tokens -----------------------------------------------------------------------------------------


def test_a_token_is_shown_once_and_stored_nowhere(shop: Cli, tmp_path: Path) -> None:
    said = shop.run("tokens", "create", "ci", "--scope", "read,enqueue", "--expires", "30d")
    assert said.code == 0
    token = said.out.strip()
    secret = token.split("_", 2)[2]
    listed = shop.run("tokens", "list", "--json")
    assert listed.json[0]["scopes"] == ["enqueue", "read"]
    assert listed.json[0]["valid"]
    for text in (listed.out, shop.run("tokens").out, shop.run("audit").out):
        assert secret not in text
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes(), file


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["ci", "--scope", "reed"], "Did you mean"),
        (["", "--scope", "read"], "name"),
        (["a\nb", "--scope", "read"], "name"),
        (["ci", "--scope", "read", "--expires", "0"], "expires"),
    ],
)
def test_nonsense_makes_no_token(shop: Cli, arguments: list[str], what: str) -> None:
    assert what in shop.refused(1, "tokens", "create", *arguments)
    assert shop.run("tokens", "list", "--json").json == []


def test_a_revoked_token_ends_within_a_second_and_its_logins_and_streams_with_it(door: SecuredServer) -> None:
    token_id, token = make_token(door.ledger_url, Scope.READ)
    browser = door.log_in(token)
    assert browser.get("/").status_code == 200
    with browser.client.stream("GET", "/live?room=overview") as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        shop = Cli(door.ledger_url, Path("/"))
        assert shop.run("tokens", "revoke", token_id).code == 0
        wait_for(lambda: door.ask("GET", "/api/v1/audit", token).status_code == 401, "the token to end", 10)
        assert browser.get("/").status_code == 303
        # The stream ends by itself: the server hangs up.
        for _ in lines:
            pass


def test_an_expired_token_ends_by_itself(door: SecuredServer) -> None:
    _, token = make_token(door.ledger_url, Scope.READ, expires_in_s=3.0)
    assert door.ask("GET", "/api/v1/audit", token).status_code == 200
    wait_for(lambda: door.ask("GET", "/api/v1/audit", token).status_code == 401, "the token to end")


def test_two_tokens_at_once_are_none(door: SecuredServer) -> None:
    twice = [("Authorization", f"Bearer {door.all}"), ("Authorization", "Bearer x")]
    assert door.served.client.get("/api/v1/audit", headers=twice).status_code == 400


def test_a_wrong_token_is_not_helped_by_a_login(door: SecuredServer) -> None:
    browser = door.log_in()
    answer = browser.client.get("/api/v1/audit", headers={"Authorization": "Bearer x"})
    assert answer.status_code == 401


# Logins -----------------------------------------------------------------------------------------


def test_the_cookie_of_a_login_is_for_our_own_page_and_for_no_script(door: SecuredServer) -> None:
    answer = door.browser().log_in(door.all)
    cookie = answer.headers["Set-Cookie"]
    flags = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/", "max-age=43200"} <= flags
    assert "secure" not in flags
    assert door.all not in cookie


def test_the_cookie_is_for_https_alone_where_something_in_front_speaks_it(shop: Cli) -> None:
    with guarded_door(shop.url, UNSTUCK_HTTP_SECURE_COOKIES="true") as door:
        answer = door.browser().log_in(door.all)
        assert "secure" in answer.headers["Set-Cookie"].lower()
        assert "max-age" in answer.headers["Strict-Transport-Security"]


def test_a_person_is_sent_to_the_login_and_back(door: SecuredServer) -> None:
    answer = door.ask("GET", "/jobs?state=failed&queue=a")
    assert answer.headers["Location"] == "/login?next=/jobs%3Fstate%3Dfailed%26queue%3Da"
    form = door.ask("GET", answer.headers["Location"]).text
    there = re.search(r'name="next" value="([^"]*)"', form)
    assert there is not None
    assert door.browser().log_in(door.all, there[1].replace("&amp;", "&")).headers["Location"] == (
        "/jobs?state=failed&queue=a"
    )


@pytest.mark.parametrize("there", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_nobody_is_sent_anywhere_else(door: SecuredServer, there: str) -> None:
    assert door.browser().log_in(door.all, there).headers["Location"] == "/"
    form = door.served.client.get("/login", params={"next": there}).text
    assert 'name="next" value="/"' in form


def test_what_the_login_page_repeats_is_escaped(door: SecuredServer) -> None:
    text = door.served.client.get("/login", params={"next": '/"><script>alert(1)</script>'}).text
    assert "<script>alert" not in text


def test_what_a_script_asks_for_is_refused_and_not_sent_to_the_login(door: SecuredServer) -> None:
    fetched = {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "same-origin"}
    assert door.ask("GET", "/live?room=overview", headers=fetched).status_code == 401


def test_logging_out_takes_the_cookie_away(door: SecuredServer) -> None:
    browser = door.log_in()
    answer = browser.post("/logout", {})
    assert answer.headers["Location"] == "/login"
    assert browser.get("/").status_code == 303


def test_a_website_cannot_log_somebody_in_as_somebody_else(door: SecuredServer) -> None:
    for origin in (None, "http://evil.example", "null"):
        answer = door.browser().post("/login", {"token": door.all}, origin)
        assert answer.status_code == 403
        assert "Set-Cookie" not in answer.headers


def test_guessing_is_slowed_down_and_does_not_lock_out_who_is_in(shop: Cli) -> None:
    with guarded_door(shop.url) as door:
        inside = door.log_in()
        browser = door.browser()
        answers = [browser.log_in("wrong").status_code for _ in range(14)]
        assert answers[0] == 401
        assert answers[-1] == 429
        refused = browser.log_in(door.all)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert inside.get("/").status_code == 200
        assert door.ask("GET", "/api/v1/audit", door.all).status_code == 200


def test_a_login_survives_a_restart_of_the_server(shop: Cli) -> None:
    with guarded_door(shop.url) as door:
        browser = door.log_in()
        cookies = dict(browser.client.cookies)
    with serving(shop.url) as client:
        client.cookies.update(cookies)
        assert client.get("/").status_code == 200


def test_no_secret_is_logged(shop: Cli) -> None:
    with guarded_door(shop.url, "--log-level", "debug") as door:
        browser = door.log_in()
        door.ask("GET", "/api/v1/audit", door.all)
        door.ask("GET", "/api/v1/audit", "ust_aaaaaaaa_" + "b" * 43)
        browser.get("/jobs")
        said = door.served.said()
        assert door.all.rpartition("_")[2] not in said
        assert "b" * 43 not in said
        assert browser.client.cookies["unstuck_session"] not in said
