"""Order in queues, by hand: limits, lines and keys on the command line and over HTTP."""

from tests.support.cli import Cli
from tests.support.http_server import ApiClient

APP = """
from unstuck import App
app = App()
app.queue("mail", concurrency=2)

@app.task(queue="mail", concurrency_key="to:{to}", expires="10m")
def send(to, text=""):
    return to
"""


class TestCommands:
    def test_lines_limits_and_keys(self, either_shop: Cli) -> None:
        shop = either_shop
        (shop.folder / "app.py").write_text(APP)

        def put(*arguments: str) -> str:
            said = shop.run("enqueue", "send", *arguments, "--app", "app:app")
            assert said.code == 0, said
            return said.out.strip()

        first, second = put('"ada"'), put('"ada"')
        put('"bob"', "--unique-key", "k", "--unique", "10m")
        [ada, bob] = shop.run("lines", "--json").json
        assert (ada["key"], ada["limit"], ada["blocked"]) == ("to:ada", 1, 1)
        assert [holder["job_id"] for holder in ada["holders"]] == [int(first)]
        assert bob["blocked"] == 0
        why = shop.run("why", second)
        assert f"The limit of 1 for key 'to:ada' is held by job {first}" in why.out, why
        assert "to:ada" in shop.run("lines").out

        said = shop.run("lines", "limit", "to:ada", "2", "--json")
        assert (said.json["limit"], len(said.json["holders"]), said.json["blocked"]) == (2, 2, 0)
        assert shop.run("lines", "limit", "to:ada").code == 2
        assert shop.run("lines", "limit", "to:ada", "0").code == 2

        refused = shop.run(
            "enqueue",
            "send",
            '"bob"',
            "--app",
            "app:app",
            "--unique-key",
            "k",
            "--unique",
            "10m",
            "--on-duplicate",
            "refuse",
        )
        assert refused.code == 1
        assert "has its unique key already" in refused.err, refused

        assert shop.run("queues", "limit", "mail", "--concurrency", "1", "--rate", "10/m").code == 0
        [mail] = shop.run("queues", "--json").json
        assert (mail["limit"]["concurrency"], mail["limit"]["rate"], mail["limit"]["room"]) == (1, "10/m", 1)
        assert "0 of 1; 10/m" in shop.run("queues").out
        for wrong in (("--none", "--rate", "1/s"), (), ("--rate", "often"), ("--concurrency", "0")):
            assert shop.run("queues", "limit", "mail", *wrong).code == 2, wrong
        assert shop.run("queues", "limit", "mali", "--none").code != 0
        assert shop.run("queues", "limit", "mail", "--none").code == 0
        assert [entry["verb"] for entry in shop.run("audit", "--json").json].count("limit") == 2


class TestHttp:
    def test_lines_limits_and_keys(self, door: ApiClient) -> None:
        queue = door.queue()
        body = {"task": "add", "args": [1, 2], "queue": queue, "concurrency_key": f"key of {queue}"}
        first = door.post("/jobs", body, status=201)["id"]
        second = door.post("/jobs", {**body, "expires": "10m", "keep": "1h"}, status=201)["id"]
        [line] = door.get(f"/lines?key=key of {queue}")
        assert ([holder["job_id"] for holder in line["holders"]], line["blocked"]) == ([first], 1)
        assert f"held by job {first}" in door.get(f"/jobs/{second}")["waiting"]
        line = door.post("/lines/limit", {"key": f"key of {queue}", "limit": 2})
        assert line["blocked"] == 0

        once = {"task": "add", "args": [1, 2], "queue": queue, "unique_key": f"once in {queue}"}
        stored = door.post("/jobs", once, status=201)["id"]
        problem = door.problem("POST", "/jobs", 409, json={**once, "on_duplicate": "refuse"})
        assert (problem["code"], problem["job_id"]) == ("duplicate_job", stored)
        newest = door.post("/jobs", {**once, "on_duplicate": "replace"}, status=201)
        assert newest["fresh"]
        assert door.get(f"/jobs/{stored}")["error"]["cause"] == f"replaced by job {newest['id']}"
        door.problem("POST", "/jobs", 422, json={**once, "unique": "whenever"})

        limit = door.post(f"/queues/{queue}/limit", {"concurrency": 3, "rate": "5/m"})
        assert (limit["concurrency"], limit["rate"], limit["room"]) == (3, "5/m", 3)
        [shown] = [one for one in door.get("/queues") if one["name"] == queue]
        assert shown["limit"]["concurrency"] == 3
        door.problem("POST", f"/queues/{queue}/limit", 422, json={"rate": "often"})
        assert door.post(f"/queues/{queue}/limit", {"as_declared": True}) is None
