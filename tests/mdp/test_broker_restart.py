"""The broker dies with everything in its hands: nothing is lost, nothing is done twice at once, and all go on."""

import itertools
import signal
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from tests.fleet import PATIENCE_S, wait_for
from tests.mdp.scene import Scene, Work, as_cbor
from tests.mdp.wire import RawWorker

from unstuck.domain.states import FINAL, JobState
from unstuck.mdp.broker.piles import HIGHEST

REQUESTS = 1_000
CLIENTS = 4
ACROSS_S = 2 * PATIENCE_S


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


def test_a_thousand_requests_in_flight_outlive_the_broker(scene: Scene) -> None:
    clients = [scene.client() for _ in range(CLIENTS)]
    workers = [scene.worker("echo"), scene.worker("echo", "--plain"), scene.worker("echo")]
    calls = [
        client.submit("echo", f"job-{number}-{place} 0.01".encode(), timeout=ACROSS_S)
        for number, client in enumerate(clients)
        for place in range(REQUESTS // CLIENTS)
    ]
    wait_for(lambda: sum(scene.fleet.ledger.count_jobs().values()) == REQUESTS, "all requests in the ledger")
    scene.kill_broker()
    left = REQUESTS - scene.fleet.ledger.count_jobs().get(JobState.SUCCEEDED, 0)
    assert left > REQUESTS / 4, "it was killed in the middle of them"

    scene.open()
    for number, call in enumerate(calls):
        name = call.body[0].split()[0]
        assert call.result() == [b"done " + name], f"the {number}. request"
    assert all(process.poll() is None for process in workers)
    assert {job.state for job in scene.jobs()} == {JobState.SUCCEEDED}
    assert len(scene.jobs()) == REQUESTS, "nobody sent anything again"
    assert overlaps(scene.done()) == []
    assert len(scene.times()) == REQUESTS
    # Ours say who they were, and lose nothing. A reply of the old worker counts, and gives back what never reached it.
    assert sum(job.crash_count for job in scene.jobs()) <= 1
    # Replies that reached the dead broker and not the ledger are lost: of each worker so many as it may have given
    # between two commits.
    assert sum(scene.times().values()) <= REQUESTS + len(workers) * HIGHEST


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_who_works_while_the_broker_is_away_hands_in_what_it_did(
    scene: Scene, tmp_path: Path, kind: str, stop: signal.Signals
) -> None:
    gate = tmp_path / "gate"
    scene.worker("echo", *(["--plain"] if kind == "plain" else []))
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    (before,) = scene.living("echo")
    scene.broker.send_signal(stop)
    scene.broker.wait(PATIENCE_S)
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


def test_a_broker_that_ends_in_order_takes_what_an_old_worker_has_just_done(scene: Scene, tmp_path: Path) -> None:
    """A reply on its way to a socket that closes would be lost, and it would not say it again."""
    gate = tmp_path / "gate"
    scene.worker("echo", "--plain")
    client = scene.client()
    call = client.submit("echo", f"job 0 {gate}".encode(), timeout=ACROSS_S)
    scene.wait_begun("job")
    with closing(RawWorker(scene.endpoint, b"other")) as idle:
        scene.broker.terminate()
        idle.is_sent_away()
    gate.touch()
    assert scene.broker.wait(PATIENCE_S) == 0
    assert scene.job().state is JobState.SUCCEEDED
    scene.open()
    assert call.result() == [b"done job"]


def test_a_job_that_was_done_while_the_broker_was_away_is_handed_in_at_once(scene: Scene, tmp_path: Path) -> None:
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


def test_a_worker_that_dies_while_the_broker_is_away_loses_its_job_to_another(scene: Scene, tmp_path: Path) -> None:
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
def test_a_reply_whose_token_no_longer_stands_is_refused(scene: Scene, tmp_path: Path, kind: str) -> None:
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


def test_a_request_with_several_calls_is_answered_whole_after_a_restart(scene: Scene, tmp_path: Path) -> None:
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
    assert {job.state for job in scene.jobs()} <= FINAL


def test_an_old_client_is_never_sent_what_another_asked_before_the_restart(scene: Scene) -> None:
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
