"""`unstuck alive`, as a probe asks it."""

from tests.acceptance.shop import Shop


def test_a_beating_worker_of_this_host_is_alive(either_shop: Shop) -> None:
    either_shop.worker()
    said = either_shop.run("alive")
    assert (said.code, said.out.startswith("1 worker alive on ")) == (0, True), said
    assert either_shop.run("alive", "--json").json["workers"] == ["w1"]
    short = either_shop.run("alive", "--workers", "2")
    assert short.code == 1
    assert short.out.startswith("Only 1 of 2 workers beat on ")


def test_a_dead_worker_is_not_alive(shop: Shop) -> None:
    shop.worker()
    shop.bury()
    said = shop.run("alive", "--forgive-outage")
    assert said.code == 1
    assert "(in this pid namespace) is registered in the ledger" in said.out


def test_an_outage_is_forgiven_only_where_that_was_asked_for(shop: Shop) -> None:
    nowhere = ("--url", "postgresql://127.0.0.1:9/nobody")
    assert shop.run("alive", *nowhere).code == 1
    said = shop.run("alive", "--forgive-outage", *nowhere)
    assert said.code == 0
    assert "The ledger cannot be reached, which is no reason to restart" in said.out
