"""The broker dies with everything in its hands: nothing is lost, nothing is done twice at once, and all go on."""

import itertools
import os
import signal
import socket
import time
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
import zmq
from tests.mdp.broker import (
    DISCONNECT,
    HEARTBEAT,
    NO_WORKERS,
    READY,
    REQUEST,
    Broker,
    BrokerHarness,
    Peers,
    Raw,
    RawWorker,
    Work,
    as_cbor,
    clear_away,
)
from tests.support.backdoor import PostgresBackdoor, age, backdoor_of
from tests.support.fleet import TIMEOUT_S, wait_for
from tests.support.network_proxy import Proxy
from tests.support.postgres import PgServer
from tests.support.signals import OwnProcess

from unstuck.config import MdpSettings
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.mdp.broker.batch import BatchResult
from unstuck.mdp.broker.core import BrokerCore
from unstuck.mdp.broker.handed_out import PREFIX, AbandonedWorker, DeadBrokerRecord, digest_of
from unstuck.mdp.broker.prefetch import PREFETCH_LIMIT
from unstuck.mdp.broker.socket_loop import SocketLoop, open_router, watch_connections
from unstuck.runner.status_page import status_page_folder
from unstuck.worker.registration import new_worker_id

WORK_S = 10.0
"""How long all requests of a crowd take together: the broker is killed in the middle."""
CLIENTS = 4
ACROSS_S = 2 * TIMEOUT_S
QUICKLY = {"heartbeat_timeout": "1s", "heartbeat_interval": "300ms"}
"""Of a broker that soon gives up who is idle and silent."""


def overlaps(done: list[Work]) -> list[tuple[Work, Work]]:
    """Give executions of one job that ran at the same time."""
    by_name: dict[str, list[Work]] = defaultdict(list)
    for work in done:
        by_name[work.name].append(work)
    return [
        (first, second)
        for works in by_name.values()
        for first, second in itertools.pairwise(works)
        if first.ended is None or second.began < first.ended
    ]


@pytest.mark.parametrize("requests", [100, pytest.param(1_000, marks=pytest.mark.long)])
def test_requests_in_flight_outlive_the_broker(scene: BrokerHarness, requests: int) -> None:
    clients = [scene.client() for _ in range(CLIENTS)]
    workers = [scene.worker("echo"), scene.worker("echo", "--plain"), scene.worker("echo")]
    gate, each = scene.folder / "gate", requests // CLIENTS
    calls = [
        client.submit("echo", f"job-{number}-{place} {WORK_S / requests} {shut}".encode(), timeout=ACROSS_S)
        for number, client in enumerate(clients)
        for place in range(each)
        # The last ones wait for its death, so that it is killed in the middle of them on any machine.
        for shut in [gate if place > each * 3 / 4 else ""]
    ]
    wait_for(lambda: sum(scene.fleet.ledger.jobs.count().values()) == requests, "all requests in the ledger")
    scene.kill_broker()
    gate.touch()

    # Nobody can tell whether an old worker ever got what a broker took for it before it died.
    scene.open(heartbeat_timeout="7.5s", busy_timeout="20s")
    for number, call in enumerate(calls):
        name = call.body[0].split()[0]
        assert call.result() == [b"done " + name], f"the {number}. request"
    assert all(process.poll() is None for process in workers)
    assert {job.state for job in scene.jobs()} == {JobState.SUCCEEDED}
    assert len(scene.jobs()) == requests, "no client sent a request again"
    assert overlaps(scene.done()) == []
    assert len(scene.times()) == requests
    # Ours say who they were, and lose nothing. A reply of the old worker counts, and gives back what never reached it.
    assert sum(job.crash_count for job in scene.jobs()) <= 1
    # Replies that reached the dead broker and not the ledger are lost: of each worker so many as it may have given
    # between two commits.
    assert sum(scene.times().values()) <= requests + len(workers) * PREFETCH_LIMIT


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_who_works_while_the_broker_is_away_hands_in_what_it_did(
    scene: BrokerHarness, tmp_path: Path, kind: str, stop: signal.Signals
) -> None:
    gate = tmp_path / "gate"
    scene.worker("echo", *(["--plain"] if kind == "plain" else []))
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    (before,) = scene.living("echo")
    scene.broker.send_signal(stop)
    scene.broker.wait(TIMEOUT_S)
    scene.open()
    if kind == "ours":
        # It came back as who it was: the row beats on.
        (was,) = scene.living("echo")
        wait_for(lambda: scene.living("echo")[0].last_seen_at > was.last_seen_at, "a beat of the same worker")
        assert [worker.id for worker in scene.living("echo")] == [before.id]
        assert scene.living("echo")[0].running == 1
    # A second worker finds nothing to do: the job is in good hands.
    scene.worker("echo")
    gate.touch()
    assert call.result() == [b"done job"]
    job = scene.job()
    assert (job.state, job.attempt, job.crash_count) == (JobState.SUCCEEDED, 1, 0)
    assert scene.times()["job"] == 1
    if kind == "ours":
        assert client.call("echo", b"next") == [b"done next"]
        assert before.id in {worker.id for worker in scene.living("echo")}


def test_a_broker_that_ends_in_order_takes_what_an_old_worker_has_just_done(
    scene: BrokerHarness, tmp_path: Path
) -> None:
    """A reply on its way to a socket that closes would be lost, and it would not say it again."""
    gate = tmp_path / "gate"
    scene.worker("echo", "--plain")
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    with closing(RawWorker(scene.endpoint, b"other")) as idle:
        wait_for(lambda: scene.living("other"), "an idle worker")
        scene.broker.terminate()
        idle.is_sent_away()
    gate.touch()
    assert scene.broker.wait(TIMEOUT_S) == 0
    assert scene.job().state is JobState.SUCCEEDED
    scene.open()
    assert call.result() == [b"done job"]


def test_a_job_that_was_done_while_the_broker_was_away_is_handed_in_at_once(
    scene: BrokerHarness, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    scene.worker("echo")
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    scene.kill_broker()
    gate.touch()
    wait_for(lambda: scene.done()[0].ended, "the end of its work")
    scene.open()
    assert call.result() == [b"done job"]
    assert client.call("echo", b"next", timeout=ACROSS_S) == [b"done next"]
    assert scene.times() == {"job": 1, "next": 1}
    assert [job.crash_count for job in scene.jobs()] == [0, 0]


def test_a_worker_that_dies_while_the_broker_is_away_loses_its_job_to_another(
    scene: BrokerHarness, tmp_path: Path
) -> None:
    """Nobody saw it die, so the job comes back when its row has been silent for too long, or an operator says so."""
    gate = tmp_path / "gate"
    victim = scene.worker("echo")
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    (before,) = scene.living("echo")
    scene.kill_broker()
    victim.kill()
    victim.wait()
    scene.open()
    gate.touch()
    scene.declare_dead(before)
    scene.worker("echo")
    assert call.result() == [b"done job"]
    assert (scene.job().attempt, scene.times()["job"]) == (2, 2)


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_a_reply_whose_token_no_longer_stands_is_refused(scene: BrokerHarness, tmp_path: Path, kind: str) -> None:
    gate = tmp_path / "gate"
    scene.worker("echo", *(["--plain"] if kind == "plain" else []))
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    (before,) = scene.living("echo")
    scene.kill_broker()
    # Somebody says that it is dead while it works on.
    scene.declare_dead(before)
    assert scene.job().state is JobState.PENDING
    scene.open()
    scene.worker("other")
    wait_for(lambda: kind == "plain" or scene.living("echo"), "it to come back")
    # It is still busy with what is no longer its own, and gets nothing else meanwhile.
    assert scene.job().state is JobState.PENDING
    assert before.id not in {worker.id for worker in scene.living("echo")}
    gate.touch()
    assert call.result() == [b"done job"]
    assert scene.times()["job"] == 2, "the first reply was refused, and the job done anew"
    assert scene.job().attempt == 2


def test_a_request_with_several_calls_is_answered_whole_after_a_restart(scene: BrokerHarness, tmp_path: Path) -> None:
    """Some of its calls had ended before, others not."""
    client = scene.client()
    options, *maps = as_cbor(priority=1), as_cbor(first=1), as_cbor(second=2)
    scene.worker("echo")
    gate = tmp_path / "gate"
    blocked = client.submit("echo", f"first 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("first")
    several = client.submit("echo", options, *maps, timeout=ACROSS_S)
    wait_for(lambda: len(scene.jobs()) == 3, "all calls in the ledger")
    scene.kill_broker()
    scene.open()
    gate.touch()
    assert blocked.result() == [b"done first"]
    reply = several.result()
    assert len(reply) == 2
    assert {job.state for job in scene.jobs()} <= FINAL_STATES


def test_an_old_client_is_never_sent_what_another_asked_before_the_restart(scene: BrokerHarness) -> None:
    """Identities that sockets made up repeat: after a restart nobody is found by them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        before = context.socket(zmq.DEALER)
        before.connect(scene.endpoint)
        before.send_multipart([b"", b"MDPC01", b"echo", b"secret"])
        wait_for(lambda: scene.jobs(), "the request in the ledger")
        scene.kill_broker()
        before.close(linger=0)
        scene.open()
        after = context.socket(zmq.DEALER)
        after.connect(scene.endpoint)
        after.send_multipart([b"", b"MDPC01", b"mmi.service", b"nobody"])
        assert after.recv_multipart()[-1] == b"404"
        scene.worker("echo")
        wait_for(lambda: scene.job().state is JobState.SUCCEEDED, "the old request to be done")
        after.send_multipart([b"", b"MDPC01", b"mmi.service", b"echo"])
        assert after.recv_multipart()[-2:] == [b"mmi.service", b"200"]
    finally:
        context.destroy(linger=0)


def test_what_a_dead_broker_kept_for_old_workers_is_settled_by_the_next_one(scene: BrokerHarness) -> None:
    """The worker is gone too, so that no late reply says what it had. Only that one job waits for a moment."""
    requests = 150
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = RawWorker(scene.endpoint, b"quick")
    try:
        wait_for(lambda: scene.living("quick"), "the worker")
        client = context.socket(zmq.DEALER)
        client.connect(scene.endpoint)
        for number in range(requests):
            client.send_multipart([b"", b"MDPC01", b"quick", b"%d" % number])
        answered = 0
        while True:
            address, body = worker.request()
            if answered > 20:
                scene.broker.send_signal(signal.SIGSTOP)
                if len(scene.jobs(JobState.RUNNING)) > 5:
                    break
                scene.broker.send_signal(signal.SIGCONT)
            worker.reply(address, *body)
            answered += 1
            assert answered < requests, "it never got more than one at a time"
        scene.kill_broker()
        worker.close(0)
        scene.open(**QUICKLY)
        worker = RawWorker(scene.endpoint, b"quick")
        left = sum(job.state is not JobState.SUCCEEDED for job in scene.jobs())
        # The last one is the job that it had: nobody can say whether it was begun. It was quick before, and silent for
        # too long now.
        for _ in range(left):
            address, body = next_request(worker)
            worker.reply(address, *body)
        wait_for(lambda: scene.fleet.ledger.jobs.count() == {JobState.SUCCEEDED: requests}, "all of them")
        assert sorted(job.crash_count for job in scene.jobs())[-2:] == [0, 1]
    finally:
        worker.close(0)
        context.destroy(linger=0)
    mine = f"{PREFIX}{digest_of(scene.fleet.url)}-*"
    wait_for(lambda: len(list(status_page_folder().glob(mine))) == 1, "what dead brokers left to be cleared away")


def next_request(worker: RawWorker) -> tuple[bytes, list[bytes]]:
    """Return address and body of the next request. A worker that was given up for its silence comes back."""
    while True:
        command, rest = worker.heard()
        if command == REQUEST:
            return rest[0], rest[2:]
        assert command == DISCONNECT
        worker.tell(READY, *worker.services)


def beat(worker: RawWorker) -> bool:
    """Say that it is idle, as old workers do, and READY again if it is sent away; return whether it got a request."""
    worker.tell(HEARTBEAT)
    while not worker.is_silent(0.05):
        command = worker.hear()[2]
        if command == DISCONNECT:
            worker.tell(READY, *worker.services)
        elif command == REQUEST:
            return True
    return False


@pytest.mark.parametrize("how", ["dies", "goes on"])
def test_a_request_whose_reply_was_lost_with_the_broker_does_not_wait_for_the_busy_timeout(
    scene: BrokerHarness, how: str
) -> None:
    """Its worker died too, or had replied to the dead broker and goes on: in both cases no connection is silent."""
    client = scene.client()
    with ExitStack() as stack:
        worker, second = (stack.enter_context(closing(RawWorker(scene.endpoint, name))) for name in (b"echo", b"other"))
        wait_for(lambda: scene.living("echo") and scene.living("other"), "the workers")
        call = client.submit("echo", b"job", timeout=ACROSS_S)
        worker.request()
        scene.kill_broker()
        if how == "dies":
            worker.close(0)
        scene.open(**QUICKLY)
        fresh = stack.enter_context(closing(RawWorker(scene.endpoint, b"echo")))
        idle = [second, fresh] if how == "dies" else [worker, second, fresh]
        until_s = time.monotonic() + TIMEOUT_S
        while not any(map(beat, idle)):
            assert time.monotonic() < until_s, "nobody gave it up"
        assert (scene.job().attempt, scene.job().crash_count) == (2, 1)
        assert not call.done()


def test_an_old_worker_that_says_ready_under_its_own_routing_id_has_nothing_in_hand(scene: BrokerHarness) -> None:
    """Another peer is silent, so that the connections say nothing."""
    client = scene.client()
    with ExitStack() as stack:
        worker = stack.enter_context(closing(RawWorker(scene.endpoint, b"echo", identity=b"my own name")))
        stack.enter_context(closing(RawWorker(scene.endpoint)))
        wait_for(lambda: scene.living("echo"), "the worker")
        client.submit("echo", b"job", timeout=ACROSS_S)
        worker.request()
        scene.kill_broker()
        scene.open(**QUICKLY)
        until_s = time.monotonic() + TIMEOUT_S
        while not beat(worker):
            assert time.monotonic() < until_s, "nobody gave it up"
        assert (scene.job().attempt, scene.job().crash_count) == (2, 1)


IDLE_S = 5.0
"""Long enough for a worker to connect again on a busy machine. The rule itself is tested with a clock of its own."""


def test_an_old_worker_that_is_silent_because_it_works_keeps_its_request_across_a_restart(
    scene: BrokerHarness, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    scene.worker("echo", "--plain")
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    scene.kill_broker()
    scene.open(heartbeat_timeout=f"{IDLE_S}s", heartbeat_interval="300ms")
    with closing(RawWorker(scene.endpoint, b"echo")) as idle:
        # Longer than a worker may be silent that has nothing to do.
        until_s = time.monotonic() + IDLE_S + 1
        while time.monotonic() < until_s:
            beat(idle)
        gate.touch()
        assert call.result() == [b"done job"]
    assert (scene.job().attempt, scene.times()["job"]) == (1, 1)


@pytest.mark.parametrize(
    ("is_quick", "have_spoken", "given_up_s"), [(False, False, 20.5), (False, True, 2.0), (True, False, 2.0)]
)
def test_what_an_old_worker_had_in_hand_is_given_up_when_all_peers_have_spoken_or_it_was_quick(
    is_quick: bool, have_spoken: bool, given_up_s: float
) -> None:
    left = [AbandonedWorker("old", (1, 11), _NoRecord(), is_quick=is_quick, is_same_address=True)]

    def found() -> list[AbandonedWorker]:
        now, left[:] = [*left], []
        return now

    settings = MdpSettings(heartbeat_interval="500ms", heartbeat_timeout="2s", busy_timeout="20s")
    core = BrokerCore(settings, new_worker_id, time.time, find_abandoned=found)
    told: list[tuple[bool, float]] = []
    for half in range(1, 60):
        now_s = half / 2
        core.on_tick(now_s, all_have_spoken=have_spoken)
        while (batch := core.take_batch(now_s)) is not None:
            told += [(one.is_given_up, now_s) for one in batch.abandoned]
            core.on_batch_done(BatchResult(), now_s)
    # Seen half a second after the start.
    assert told == [(False, 0.5), (True, 0.5 + given_up_s)]


class _NoRecord(DeadBrokerRecord):
    """What a dead broker left, without a file."""

    def __init__(self) -> None:
        pass

    def settled(self, worker_id: str) -> None:
        pass


@pytest.mark.parametrize("where", ["this host", "another host"])
def test_a_living_broker_settles_what_another_one_leaves_that_dies(scene: BrokerHarness, where: str) -> None:
    """Brokers of other hosts cannot read what it noted. They know that it is dead when it has been silent for long."""
    dying, dying_endpoint = scene.broker, scene.endpoint
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    scene.endpoint = "tcp://127.0.0.1:0"
    scene.open(**QUICKLY)
    quick = RawWorker(dying_endpoint, b"quick")
    try:
        wait_for(lambda: scene.living("quick"), "the worker")
        (before,) = scene.living("quick")
        client = context.socket(zmq.DEALER)
        client.connect(dying_endpoint)
        for number in range(150):
            client.send_multipart([b"", b"MDPC01", b"quick", b"%d" % number])
        answered = 0
        while True:
            address, body = quick.request()
            if answered > 20:
                dying.send_signal(signal.SIGSTOP)
                if len(scene.jobs(JobState.RUNNING)) > 5:
                    break
                dying.send_signal(signal.SIGCONT)
            quick.reply(address, *body)
            answered += 1
            assert answered < 150, "it never got more than one at a time"
        if where == "another host":
            for path in status_page_folder().glob(f"{PREFIX}{digest_of(scene.fleet.url)}-*"):
                path.unlink()
        dying.kill()
        dying.wait()
        quick.close(0)
        if where == "another host":
            backdoor_of(scene.fleet.url).age_beat(before.id, 3600.0)
        quick = RawWorker(scene.endpoint, b"quick")
        for _ in range(sum(job.state is not JobState.SUCCEEDED for job in scene.jobs())):
            address, body = next_request(quick)
            quick.reply(address, *body)
        wait_for(lambda: scene.fleet.ledger.jobs.count() == {JobState.SUCCEEDED: 150}, "all of them")
    finally:
        quick.close(0)
        context.destroy(linger=0)


LEASES = {"heartbeat_interval": "300ms", "heartbeat_timeout": "30s", "busy_timeout": "30s"}
NOWHERE = 1
"""A port that no one listens on."""
BEATS = 10
"""Heartbeats that are heard before an outage ends."""
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
    """By the ledger's clock it is longer than any lease."""
    road = Proxy(pg_url)
    broker = Broker(road.url, tmp_path / "log", **LEASES)
    peers = Peers(broker)
    try:
        busy, idle, client = peers.worker(), peers.worker(peers.service + b"-other"), peers.listener()
        client.ask(peers.service, b"begun before", correlation=b"1")
        address, body = busy.request()
        road.point_to(NOWHERE)
        pg_server.stop()
        try:
            busy.reply(address, *body)
            client.ask(peers.service, b"asked meanwhile", correlation=b"2")
            client.ask(peers.service + b"-third", b"nobody serves it", correlation=b"3")
            until_s, beats = time.monotonic() + TIMEOUT_S, 0
            while beats < BEATS:
                assert time.monotonic() < until_s, "the broker is silent in the outage"
                beats += attend(busy) + attend(idle)
            assert client.is_silent(0), "something was said that the ledger does not have"
        finally:
            pg_server.start()
        age(PostgresBackdoor(pg_url), 2 * 30)
        road.point_to(pg_server.port)
        heard: dict[bytes, list[bytes]] = {}
        until_s = time.monotonic() + TIMEOUT_S
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
        road.close()


@pytest.mark.parametrize(("held", "blocks"), [(JOB, "a job"), (WORKER, "a worker")])
def test_a_row_that_is_held_costs_no_worker_and_no_reply_and_holds_up_nobody_else(
    ready_pg_url: str, tmp_path: Path, held: str, blocks: str
) -> None:
    broker = Broker(ready_pg_url, tmp_path / "log", heartbeat_interval="300ms")
    peers = Peers(broker)
    try:
        other = peers.service + b"-other"
        busy, idle, client, old = peers.worker(), peers.worker(other), peers.listener(), peers.client()
        client.ask(peers.service, b"begun before", correlation=b"1")
        address, body = busy.request()
        with psycopg.connect(ready_pg_url) as user:
            assert user.execute(held).fetchall()
            busy.reply(address, *body)
            backdoor = PostgresBackdoor(ready_pg_url)
            began = dict(backdoor.rows("select worker_id, beat_at from worker_heartbeats"))
            assert len(began) == 2

            def all_beat() -> bool:
                beats = backdoor.rows("select worker_id, beat_at from worker_heartbeats")
                return all(beat_at > began[worker_id] for worker_id, beat_at in beats)

            answered = 0
            while answered < ENOUGH or not all_beat():
                # Through another worker, and through that whose reply is blocked.
                for service in (other, peers.service) if blocks == "a job" else (other,):
                    begun_s = time.monotonic()
                    old.ask(service, b"beside it")
                    while old.is_silent(0):
                        assert time.monotonic() < begun_s + TIMEOUT_S, broker.log.read_text()[-4000:]
                        attend(busy)
                        attend(idle)
                    assert old.answer(service) == [b"beside it"]
                    answered += 1
            assert client.is_silent(0), "a reply was sent that the ledger does not have"
            dead = user.execute("select name from unstuck.workers where state = 'dead'").fetchall()
            assert dead == [], broker.log.read_text()[-4000:]
            noted = user.execute("select count(*) from unstuck.deferred_outcomes").fetchall()
            assert noted == [(int(blocks == "a job"),)], "others must know that its code has ended"
        until_s = time.monotonic() + TIMEOUT_S
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


LEAST_BYTES = 1024 * 1024
"""Below what the process holds when it has done nothing: then it may hold twice as much."""
GROWTH = 4
CHUNK = bytes(64 * 1024)


class Shadow:
    """Talks under a routing id that is somebody else's."""

    def __init__(self, endpoint: str) -> None:
        self._first = Raw(endpoint, b"an identity of many")
        self._first.say(b"", b"MDPC01", b"mmi.service", b"echo")
        assert self._first.hear()[-1] == b"200"
        self._second = Raw(endpoint, b"an identity of many", sndhwm=100)

    def talk(self) -> None:
        if self._second.socket.poll(100, zmq.POLLOUT):
            self._second.say(b"", b"MDPC01", b"echo", CHUNK)

    def close(self) -> None:
        self._second.close(0)
        self._first.close(0)


class Endless:
    """Talks in one message that never ends. No library sends a part before it has the whole: so by hand, ZMTP 3.0."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._line = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        self._line.sendall(b"\x04" + bytes([len(ready)]) + ready)
        heard = b""
        while b"READY" not in heard:
            heard += self._line.recv(4096)

    def talk(self) -> None:
        with suppress(OSError):  # the socket that began afresh has hung up
            self._line.sendall(b"\x03" + len(CHUNK).to_bytes(8, "big") + CHUNK)

    def close(self) -> None:
        self._line.close()


def ports_of(pid: int, endpoint: str) -> set[int]:
    """Return the local ports of the connections that a process has to an endpoint."""
    port = int(endpoint.rpartition(":")[2])
    found = OwnProcess(pid).net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_ESTABLISHED and one.raddr.port == port}


@pytest.mark.parametrize("kind", ["ours", "plain"])
@pytest.mark.parametrize("talker", [Shadow, Endless])
def test_a_socket_that_holds_too_much_begins_afresh_and_all_go_on(
    scene: BrokerHarness, tmp_path: Path, talker: type[Shadow | Endless], kind: str
) -> None:
    scene.kill_broker()
    scene.open(max_memory_bytes=LEAST_BYTES)
    process = OwnProcess(scene.broker.pid)
    gate = tmp_path / "gate"
    worker = scene.worker("echo", *(["--plain"] if kind == "plain" else []))
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")

    first_ports, first_bytes = ports_of(worker.pid, scene.endpoint), process.memory_info().rss
    most_bytes, until_s = first_bytes, time.monotonic() + TIMEOUT_S
    with closing(talker(scene.endpoint)) as somebody:
        # The broker measures its memory from time to time: say enough, then wait for it.
        while most_bytes < GROWTH * first_bytes and "begins afresh" not in scene.log.read_text():
            assert time.monotonic() < until_s, f"it holds only {most_bytes} bytes"
            somebody.talk()
            most_bytes = max(most_bytes, process.memory_info().rss)
        wait_for(lambda: "begins afresh" in scene.log.read_text(), "the broker to close its socket")
    wait_for(lambda: process.memory_info().rss < most_bytes / 1.5, "the memory to be given back")
    wait_for(lambda: "open again" in scene.log.read_text(), "a new socket")
    # A reply on the old connection would be lost with it, if the worker has not seen its end yet.
    wait_for(lambda: ports_of(worker.pid, scene.endpoint) - first_ports, "the worker to connect again")

    gate.touch()
    assert call.result() == [b"done job"]
    job = scene.job()
    assert (job.state, job.attempt, job.crash_count) == (JobState.SUCCEEDED, 1, 0)
    # With a key: said before it has seen the end of the old connection, it would be lost with that.
    assert client.call("echo", b"next", timeout=ACROSS_S, idempotency_key="next") == [b"done next"]
    assert scene.times() == {"job": 1, "next": 1}


def test_whoever_wakes_a_loop_that_is_closed_writes_into_nobody_elses_file() -> None:
    """The ledger thread after an outage, or a second signal: another file has the descriptor by then."""
    settings = MdpSettings()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = open_router(context, settings)
        core = BrokerCore(settings, new_worker_id, time.time)
        loop = SocketLoop(router, watch_connections(router), core, print, settings)
        loop.close()
        theirs = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(50)]
        loop.on_batch_done(BatchResult())
        loop.stop()
        for fd in theirs:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
            os.close(fd)
    finally:
        context.destroy(0)


def test_a_broker_that_is_told_again_and_again_to_end_ends_in_order(scene: BrokerHarness) -> None:
    gate = scene.folder / "gate"
    scene.worker("echo", "--plain")
    scene.client().submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    while scene.broker.poll() is None:
        scene.broker.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    # When all is written and closed, the signal has its usual meaning again.
    assert scene.broker.returncode in (0, -signal.SIGTERM), scene.log.read_text()[-2000:]
    assert "Traceback" not in scene.log.read_text()
