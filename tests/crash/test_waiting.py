"""Everyone who waits is told: results, errors, timeouts, and reasons why nothing moves."""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator

import apsw
import httpx
import psycopg
import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import Fleet, wait_for
from tests.support.http_server import serve, serving

from unstuck import (
    Event,
    JobCancelled,
    JobNotFound,
    JobQuarantined,
    NoWorkers,
    ResultNotStorable,
    ResultTimeout,
    TaskFailed,
)


def test_results_and_errors_reach_who_waits(fleet: Fleet) -> None:
    fleet.start("--concurrency", "2")
    assert fleet.task("add").enqueue(2, 3).result(timeout=30) == 5
    assert fleet.task("add_async").enqueue(2, 3).result(timeout=30) == 5
    with pytest.raises(TaskFailed) as failed:
        fleet.task("fail").enqueue("no luck").result(timeout=30)
    assert failed.value.remote_type == "RuntimeError"
    assert failed.value.message == "no luck"
    assert "no luck" in failed.value.remote_traceback
    with pytest.raises(JobQuarantined):
        fleet.task("die_again").enqueue().result(timeout=60)
    job = fleet.task("add").options(delay="1h").enqueue(1, 1)
    assert job.cancel() == "cancelled"
    with pytest.raises(JobCancelled):
        job.result(timeout=5)
    about = fleet.task("about").enqueue()
    assert about.result(timeout=30) == {"job_id": about.id, "task": "about", "attempt": 1}


@pytest.mark.parametrize("kind", ["nan", "surrogate", "set", "big"])
def test_a_result_that_cannot_be_stored_fails_alone(fleet: Fleet, kind: str) -> None:
    fleet.start("--concurrency", "2")
    bad = fleet.task("give").enqueue(kind)
    good = fleet.task("add").enqueue_many([(n, n) for n in range(20)])
    with pytest.raises(ResultNotStorable):
        bad.result(timeout=30)
    assert [job.result(timeout=30) for job in good] == [2 * n for n in range(20)]


def test_a_nul_in_a_result_comes_back_as_it_was(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    assert fleet.task("give").enqueue("nul").result(timeout=30) == "a\0b"
    with pytest.raises(TaskFailed, match="x00"):
        fleet.task("fail").enqueue("a\0b").result(timeout=30)


def test_a_timeout_says_what_the_job_is_doing(fleet: Fleet) -> None:
    job = fleet.task("add").enqueue(1, 2)
    with pytest.raises(ResultTimeout, match="No living worker serves"):
        job.result(timeout=0.2)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)
    fleet.start("--concurrency", "1")
    long, _ = fleet.begin("nap", 30)
    with pytest.raises(ResultTimeout, match="run"):
        long.result(timeout=0.2)


def test_who_waits_without_end_is_told_why(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unstuck.notify.results.FIRST_WORRY_S", 0.2)
    told: list[str] = []
    monkeypatch.setattr("unstuck.notify.results.log", _Listener(told))
    caplog.set_level(logging.WARNING)
    job = fleet.task("add").enqueue(1, 2)
    fleet.app.operator.queues.pause("default")
    waiting = threading.Thread(target=lambda: job.result(timeout=60), daemon=True)
    waiting.start()
    wait_for(lambda: any("paused" in line for line in told), "the reason")
    fleet.app.operator.queues.resume("default")
    fleet.start()
    waiting.join(30)
    assert not waiting.is_alive()


class _Listener:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def warning(self, sentence: str, **_fields: object) -> None:
        self._told.append(sentence)


def test_waiting_for_a_job_that_does_not_exist_ends(fleet: Fleet) -> None:
    with pytest.raises(JobNotFound):
        fleet.app.job(987654321).result(timeout=10)


@pytest.mark.parametrize("waiting", [100, pytest.param(1_000, marks=pytest.mark.long)])
def test_a_crowd_waits_at_once_in_one_event_loop(make_fleet: MakeFleet, waiting: int) -> None:
    fleet = make_fleet()
    fleet.start("--concurrency", "50")

    async def all_of_them() -> list[int]:
        jobs = await asyncio.gather(*(fleet.task("add_async").enqueue_async(n, 1) for n in range(waiting)))
        return await asyncio.gather(*(job.result_async(timeout=60) for job in jobs))

    assert asyncio.run(all_of_them()) == [n + 1 for n in range(waiting)]


def test_output_is_kept_with_the_attempt_and_bounded(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    quiet = fleet.task("shout").enqueue("hello", 2)
    loud = fleet.task("shout").enqueue("x" * 1000, 2000)
    quiet.result(timeout=30)
    loud.result(timeout=30)
    kept = fleet.ledger.jobs.outputs(quiet.id)[0]
    assert kept.stdout == kept.stderr == b"hello\nhello\n"
    flood = fleet.ledger.jobs.outputs(loud.id)[0]
    assert 60_000 < len(flood.stdout) < 70_000
    assert b"left out" in flood.stdout


class Listener:
    """Gathers what a stream gives, in a thread of its own."""

    def __init__(self, events: Iterator[Event]) -> None:
        self.got: list[Event] = []
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def _listen(self, events: Iterator[Event]) -> None:
        for event in events:
            self.got.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.got]


def lines(client: httpx.Client, path: str, headers: dict[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Read a stream of server-sent events, one dict of fields each."""
    with client.stream("GET", path, headers=headers, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in response.iter_lines():
            if line.startswith(":"):
                continue  # It says that it is still there.
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            else:
                if "data" in fields or "retry" in fields:
                    yield fields
                # Else it only said where it stands, as it does now and then.
                fields = {}


def test_the_death_of_a_worker_is_told_to_everyone_who_listens(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.start()
    listener = Listener(iter(fleet.app.events()))
    wait_for(lambda: fleet.app._runtime.services().feed._wakes, "a listener")
    with serving(fleet.url) as client:
        stream = lines(client, "/api/v1/events?kind=worker_dead")
        place = next(stream)["id"]
        job, _ = fleet.begin("nap", 30.0)
        worker_id = fleet.ledger.jobs.get(job.id).worker_id  # type: ignore[union-attr]
        victim = next(worker for worker in fleet.workers if worker.id == worker_id)
        victim.kill_family()
        told = next(stream)
        body = json.loads(told["data"])
        assert (told["event"], body["worker_id"]) == ("worker_dead", worker_id)
        wait_for(lambda: {"worker_dead", "failed"} <= set(listener.kinds()), "the death and what it cost")
        # Who reconnects with the last place it knew hears of it once.
        again = lines(client, "/api/v1/events?kind=worker_dead", {"Last-Event-ID": place})
        assert next(again)["id"] == place
        assert json.loads(next(again)["data"])["id"] == body["id"]


def test_a_job_can_be_followed_from_its_beginning_to_its_end(fleet: Fleet) -> None:
    fleet.start()
    job = fleet.task("nap").enqueue(0.5)
    kinds = [event.kind for event in job.events()]
    assert kinds[-1] == "succeeded"
    assert "running" in kinds

    async def follow() -> list[str]:
        return [event.kind async for event in fleet.task("fail").enqueue("boom").events()]

    assert asyncio.run(follow())[-1] == "failed"
    with serving(fleet.url) as client:
        told = [fields.get("event") for fields in lines(client, f"/api/v1/events?job={job.id}")]
        assert told == [None, "succeeded"]


def test_who_comes_back_to_a_job_hears_its_end_once_and_is_then_sent_home(fleet: Fleet) -> None:
    fleet.start()
    with serving(fleet.url) as client:
        for task, arguments, end in (("nap", (0.0,), "succeeded"), ("fail", ("boom",), "failed")):
            job = fleet.task(task).enqueue(*arguments)
            assert [event.kind for event in job.events()][-1] == end
            path = f"/api/v1/events?job={job.id}"
            # Cut off before it ended, and from a place that this ledger never had: both hear how it ended.
            for place, gap in (("0", []), ("4711.4711.5", ["gap"])):
                told = [fields.get("event") for fields in lines(client, path, {"Last-Event-ID": place})]
                assert (told[: 1 + len(gap)], told[-1]) == ([None, *gap], end)
            place = re.findall(r"^id: (.+)$", client.get(path).text, re.MULTILINE)[-1]
            # A browser would else come back every second, for ever.
            assert client.get(path, headers={"Last-Event-ID": place}).status_code == 204
            # An operator has it begin anew: there is something to tell again.
            if end == "failed":
                fleet.ledger.events.write("retried", "once more", job_id=job.id)
                told = [fields.get("event") for fields in lines(client, path, {"Last-Event-ID": place})]
                assert told == [None, "retried"]


def test_a_job_that_does_not_exist_and_a_place_that_is_none_are_refused(fleet: Fleet) -> None:
    with serving(fleet.url) as client:
        assert client.get("/api/v1/events?job=4711").status_code == 404
        assert client.get("/api/v1/events", headers={"Last-Event-ID": "rubbish"}).status_code == 422
        assert client.get("/api/v1/events?gather=never").status_code == 422


def test_a_reader_that_does_not_read_slows_nobody(fleet: Fleet) -> None:
    with serve(fleet.url) as served, httpx.Client(base_url=served.url, timeout=60, trust_env=False) as other:
        lazy = lines(served.client, "/api/v1/events?gather=0s")
        next(lazy)
        quick = lines(other, "/api/v1/events?gather=0s")
        next(quick)
        text = "x" * 2_000
        for _ in range(3_000):
            fleet.ledger.events.write("failed", text)
        for _ in range(3_000):
            assert next(quick)["event"] == "failed"
        assert httpx.get(f"{served.url}/healthz", trust_env=False).status_code == 200


def test_a_job_in_a_transaction_of_its_callers_is_told_of_without_an_event(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be rolled back; and on SQLite whoever wrote the event would wait for the transaction that waits for it."""
    fleet.app.migrate()
    if fleet.url.startswith("sqlite"):
        own = apsw.Connection(fleet.url.removeprefix("sqlite:///"))
        own.execute("begin immediate")
    else:
        own = psycopg.connect(fleet.url)
    job = fleet.task("add").options(connection=own).enqueue(1, 2)
    own.execute("rollback")
    own.close()
    assert "No living worker takes task 'add'" in (job.warning or "")
    assert "No living worker takes task 'add'" in caplog.text
    assert "(ledger: " in caplog.records[-1].getMessage()
    assert "Could not write" not in caplog.text
    assert [event.kind for event in fleet.ledger.events.list(limit=100)] == []
    assert fleet.task("add").enqueue(1, 2).warning is not None
    assert [event.kind for event in fleet.ledger.events.list(limit=100)] == ["no_workers"]


def test_enqueueing_to_a_queue_that_nobody_serves_is_told_at_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    job = fleet.task("add").enqueue(1, 2)
    assert job.warning is not None
    assert "No living worker takes task 'add' from queue 'default'" in job.warning
    for _ in range(5):
        fleet.task("add").enqueue(1, 2)
    told = [event for event in fleet.ledger.events.list(limit=100) if event.kind == "no_workers"]
    assert len(told) == 1, "told once, however many enqueue"
    strict = make_fleet(no_workers="error")
    with pytest.raises(NoWorkers, match="stays queued") as caught:
        strict.task("add").enqueue(3, 4)
    assert caught.value.job_ids
    fleet.start()
    assert job.result(timeout=30) == 3
    assert fleet.app.job(caught.value.job_ids[0]).result(timeout=30) == 7

    def warned() -> bool:
        return fleet.task("add").enqueue(1, 2).warning is None

    wait_for(warned, "the warning to end when a worker came")


def test_a_stream_ends_when_the_server_leaves(fleet: Fleet) -> None:
    with serve(fleet.url) as served:
        stream = lines(served.client, "/api/v1/events")
        next(stream)
        served.process.terminate()
        assert list(stream) == []
        assert served.process.wait(30) == 0
