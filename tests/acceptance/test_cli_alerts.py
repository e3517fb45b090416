"""The commands of alerts, as people use them."""

import pytest
from tests.acceptance.shop import Shop
from tests.receiver import SECRET, receiving

SECRETS = {"UNSTUCK_ALERTS_WEBHOOK_SECRET": SECRET, "UNSTUCK_ALERTS_ALLOW_PRIVATE": "true"}


def test_a_trial_says_of_each_target_whether_it_arrived(shop: Shop) -> None:
    with receiving() as good, receiving() as bad:
        bad.status = 410
        said = shop.run("alerts", "test", UNSTUCK_ALERTS_TARGETS=f"{good.url} {bad.url}", **SECRETS)
        assert said.code == 1
        first, second = said.out.splitlines()[1:]
        assert first.split() == [f"http://127.0.0.1:{good.port}/…", "arrived", "-"]
        assert f"http://127.0.0.1:{bad.port}/…" in second
        assert second.split()[1:] == ["failed", "it", "answered", "410"]
        assert "token-in-the-path" not in said.out + said.err
        [post] = good.posts
        assert post.is_signed()
        assert post.body["trial"] is True
        said = shop.run("alerts", "test", "--json", UNSTUCK_ALERTS_TARGETS=good.url, **SECRETS)
        assert said.json == [{"target": f"http://127.0.0.1:{good.port}/…", "arrived": True, "why": ""}]


def test_a_private_address_is_refused_with_the_cure(shop: Shop) -> None:
    with receiving() as receiver:
        said = shop.run("alerts", "test", UNSTUCK_ALERTS_TARGETS=receiver.url, UNSTUCK_ALERTS_WEBHOOK_SECRET=SECRET)
        assert said.code == 1
        assert "alerts.allow_private" in said.out
        assert receiver.posts == []


def test_targets_are_listed_before_anybody_was_told(shop: Shop) -> None:
    shop.run("migrate")
    assert "No alert target is set" in shop.run("alerts", "list").err
    said = shop.run("alerts", UNSTUCK_ALERTS_TARGETS="https://h.example/T0KEN", **SECRETS)
    assert "no sender has met it yet" in said.out
    assert "T0KEN" not in said.out


@pytest.mark.parametrize("command", ["test", "run"])
def test_what_can_never_be_sent_is_said_in_one_sentence(shop: Shop, command: str) -> None:
    shop.run("migrate")
    assert "Set alerts.targets" in shop.refused(1, "alerts", command)
    said = shop.refused(1, "alerts", command, UNSTUCK_ALERTS_TARGETS="https://h.example/T0KEN")
    assert "needs a secret" in said
    assert "T0KEN" not in said


def test_a_service_that_apprise_does_not_know_is_named_without_its_token(shop: Shop) -> None:
    shop.run("migrate")
    said = shop.refused(1, "alerts", "run", UNSTUCK_ALERTS_TARGETS="nosuch://b0ttoken/77")
    assert "Apprise does not understand the alert target nosuch://…" in said
    assert "b0ttoken" not in said
