"""The database goes away, or a lock is in the way, while the broker serves: nobody is given up, and all is answered."""

import time
from pathlib import Path

import psycopg
import pytest
from tests.fleet import PATIENCE_S
from tests.mdp.wire import HEARTBEAT, NO_WORKERS, REQUEST, Broker, Peers, RawWorker, clear_away
from tests.pg import PgServer

OUTAGE_S = 10.0
"""Longer than every beat may be missing."""
LOCKED_S = 5.0
"""The same for the test with a lock."""
JOB = "select id from unstuck.jobs where state = 'running' for update"
WORKER = (
    "select id from unstuck.workers where id = (select worker_id from unstuck.jobs where state = 'running') for update"
)
ENOUGH = 4
"""Requests that are answered while the lock is held, and it is held until they are: none of them waits for it."""


def attend(worker: RawWorker) -> int:
    """Beat, do whatever is asked, and count what the broker says beside it."""
    beats = 0
    worker.tell(HEARTBEAT)
    while not worker.is_silent(0.05):
        _, _, command, *rest = worker.hear()
        assert command in (HEARTBEAT, REQUEST), f"a worker that beats was told {command!r}"
        beats += command == HEARTBEAT
        if command == REQUEST:
            worker.reply(rest[0], *rest[2:])
    return beats


def test_an_outage_costs_no_worker_no_reply_and_no_request(pg_server: PgServer, pg_url: str, tmp_path: Path) -> None:
    broker = Broker(pg_url, tmp_path / "log", heartbeat_interval="300ms", heartbeat_timeout="8s", busy_timeout="8s")
    peers = Peers(broker)
    try:
        busy, idle, client = peers.worker(), peers.worker(peers.service + b"-other"), peers.listener()
        client.ask(peers.service, b"begun before", correlation=b"1")
        address, body = busy.request()
        pg_server.stop()
        try:
            until_s = time.monotonic() + OUTAGE_S
            busy.reply(address, *body)
            client.ask(peers.service, b"asked meanwhile", correlation=b"2")
            client.ask(peers.service + b"-third", b"nobody serves it", correlation=b"3")
            beats = 0
            while time.monotonic() < until_s:
                beats += attend(busy) + attend(idle)
            assert beats >= 10, "the broker was silent in the outage"
            assert client.is_silent(0), "something was said that the ledger does not have"
        finally:
            pg_server.start()
        heard: dict[bytes, list[bytes]] = {}
        until_s = time.monotonic() + PATIENCE_S
        while len(heard) < 3:
            assert time.monotonic() < until_s, heard
            attend(busy)
            attend(idle)
            if not client.is_silent(0):
                correlation, _, _, *rest = client.hear()
                heard[correlation] = rest
        assert heard[b"1"] == [peers.service, b"begun before"]
        assert heard[b"2"] == [peers.service, b"asked meanwhile"]
        assert heard[b"3"][0] == NO_WORKERS
        broker.is_well()
        assert broker.stop() == 0, broker.log.read_text()[-4000:]
    finally:
        peers.close()
        broker.process.kill()
        broker.process.wait(10)
        clear_away(broker.url)


@pytest.mark.parametrize(("held", "blocks"), [(JOB, "a job"), (WORKER, "a worker")])
def test_a_row_that_is_held_costs_no_worker_and_no_reply_and_holds_up_nobody_else(
    ready_pg_url: str, tmp_path: Path, held: str, blocks: str
) -> None:
    broker = Broker(
        ready_pg_url, tmp_path / "log", heartbeat_interval="300ms", heartbeat_timeout="2s", busy_timeout="2s"
    )
    peers = Peers(broker)
    try:
        other = peers.service + b"-other"
        busy, idle, client, old = peers.worker(), peers.worker(other), peers.listener(), peers.client()
        client.ask(peers.service, b"begun before", correlation=b"1")
        address, body = busy.request()
        with psycopg.connect(ready_pg_url) as user:
            assert user.execute(held).fetchall()
            busy.reply(address, *body)
            until_s = time.monotonic() + LOCKED_S
            answered = 0
            while time.monotonic() < until_s or answered < ENOUGH:
                # Through another worker, and through that whose reply is blocked.
                for service in (other, peers.service) if blocks == "a job" else (other,):
                    begun_s = time.monotonic()
                    old.ask(service, b"beside it")
                    while old.is_silent(0):
                        assert time.monotonic() < begun_s + PATIENCE_S, broker.log.read_text()[-4000:]
                        attend(busy)
                        attend(idle)
                    assert old.answer(service) == [b"beside it"]
                    answered += 1
            assert client.is_silent(0), "a reply was sent that the ledger does not have"
            dead = user.execute("select name from unstuck.workers where state = 'dead'").fetchall()
            assert dead == [], broker.log.read_text()[-4000:]
            noted = user.execute("select count(*) from unstuck.deferred_outcomes").fetchall()
            assert noted == [(int(blocks == "a job"),)], "others must know that its code has ended"
        until_s = time.monotonic() + PATIENCE_S
        while client.is_silent(0):
            assert time.monotonic() < until_s
            attend(busy)
            attend(idle)
        assert client.answer(peers.service, b"1") == [b"begun before"]
        assert broker.log.read_text().count("cannot be written yet") == 1, broker.log.read_text()
        assert broker.stop() == 0, broker.log.read_text()[-4000:]
    finally:
        peers.close()
        broker.process.kill()
        broker.process.wait(10)
        clear_away(broker.url)
