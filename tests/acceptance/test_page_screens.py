"""Every screen on both databases, and what is said where there is nothing to show."""

from tests.acceptance.shop import Shop
from tests.web import opened

SCREENS = ("/", "/jobs", "/workflows", "/workers", "/queues", "/quarantine", "/events", "/doctor", "/upkeep", "/audit")


def test_every_screen_shows_what_is_there(either_shop: Shop) -> None:
    shop = either_shop
    shop.worker()
    failed, running, *_ = shop.jobs(4)
    shop.fail(shop.claim(start=True)[0], "the card was declined")
    shop.claim(start=True)
    shop.worker("w2", "grace")
    shop.bury("w2")
    with opened(shop.url) as served:
        for path in (*SCREENS, f"/jobs/{failed}", f"/jobs/{running}", "/workers/w1", "/workers/w2"):
            assert served.client.get(path).status_code == 200, path
        assert "its process no longer exists" in served.client.get("/").text.lower()
        assert "the card was declined" in served.client.get("/jobs?state=failed").text
        narrowed = served.client.get("/jobs?state=running&queue=default&task=add&newer=1h").text
        assert f'href="/jobs/{running}"' in narrowed
        assert f'href="/jobs/{failed}"' not in narrowed
        found = served.client.get(f"/jobs?id=%23{failed}")
        assert (found.status_code, found.headers["location"]) == (303, f"/jobs/{failed}")


def test_an_empty_ledger_has_a_friendly_word_on_every_screen(shop: Shop) -> None:
    with opened(shop.url) as served:
        for path in SCREENS:
            answer = served.client.get(path)
            assert answer.status_code == 200, path
            assert path == "/doctor" or 'class="empty"' in answer.text, path


def test_what_does_not_exist_is_a_screen_for_people_and_a_problem_for_programs(shop: Shop) -> None:
    with opened(shop.url) as served:
        for path in ("/jobs/4711", "/jobs/x", "/workers/nobody", "/nowhere"):
            shown = served.client.get(path, headers={"Accept": "text/html"})
            assert (shown.status_code, shown.headers["content-type"][:9]) == (404, "text/html"), path
            told = served.client.get(path)
            assert (told.status_code, told.json()["code"]) == (404, "not_found"), path
        wrong = served.client.get("/jobs?older=soon", headers={"Accept": "text/html"})
        assert wrong.status_code == 200
        assert "must be a duration" in wrong.text
