"""The reaper's loop and the neighbours' ring: they outlive outages, and they see a death at once."""

import heapq
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fleet import wait_for
from tests.support.stored_workers import LONG_S, StoredWorkers, a_stage

from unstuck import host
from unstuck.config import Recovery
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import Policy
from unstuck.domain.states import JobState, WorkerState
from unstuck.domain.watch_clock import Tick
from unstuck.errors import LedgerBusy, LedgerUnavailable
from unstuck.ledger.contract.maintenance import Promoted
from unstuck.maintenance.loop import Loop, pace
from unstuck.maintenance.service import run_daemon
from unstuck.recovery import leftovers
from unstuck.recovery.death_watch import DeathReporter, PeerWatch
from unstuck.recovery.reap import Reaper
from unstuck.recovery.result import SweepResult

TICK = Recovery(check_interval=0.02)
RARE = Recovery(check_interval=LONG_S)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[StoredWorkers]:
    with a_stage(f"sqlite:///{tmp_path}/jobs.db") as made:
        yield made


@pytest.fixture(autouse=True)
def no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have left pages of the dead, and a scripted ledger knows nothing of them."""
    monkeypatch.setattr(leftovers, "status_page_folder", lambda: tmp_path)


class Scripted(Reaper):
    """A reaper whose rounds are written down beforehand; the last one repeats."""

    def __init__(self, recovery: Recovery, *script: SweepResult | Exception) -> None:
        super().__init__(SimpleNamespace(single_host=True), recovery, by="test")  # type: ignore[arg-type]
        self.script = list(script)
        self.rounds = 0
        self.promotions = threading.Semaphore(0)
        self.walked = threading.Condition()

    def sweep(self, *, ticket: bool = True) -> SweepResult:
        with self.walked:
            self.rounds += 1
            self.walked.notify_all()
            step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return step

    def promote(self) -> SweepResult:
        self.promotions.release()
        return SweepResult()

    def await_rounds(self, count: int) -> None:
        with self.walked:
            assert self.walked.wait_for(lambda: self.rounds >= count, 20)


@pytest.fixture
def started() -> Iterator[list[Any]]:
    parts: list[Any] = []
    yield parts
    for part in parts:
        part.stop()
        part.join(10)


def walk(started: list[Any], reaper: Reaper) -> Loop:
    """Start a reaper who is stopped with the test."""
    reaper_loop = Loop(reaper)
    started.append(reaper_loop)
    reaper_loop.start()
    return reaper_loop


def test_it_walks_again_and_again_and_stops_when_told(started: list[Any]) -> None:
    reaper = Scripted(TICK, SweepResult())
    walk(started, reaper)
    reaper.await_rounds(5)


@pytest.fixture
def virtual_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test moves: both the time since boot and the time of day."""
    now_s, began_at = [1000.0], time.time()
    monkeypatch.setattr(host, "boottime_s", lambda: now_s[0])
    monkeypatch.setattr(time, "time", lambda: began_at + now_s[0])
    return now_s


def test_a_crowd_that_asks_at_the_same_moments_keeps_the_watch(stage: StoredWorkers, virtual_s: list[float]) -> None:
    # As after a hang of the database: everybody waited for the same answer, and rests for as long from then on.
    for _ in range(30):
        stage.worker()
    crowd = [Loop(stage.reaper(Recovery())) for _ in range(30)]
    for reaper_loop in crowd:
        reaper_loop._workers = len(crowd)
    due = [(virtual_s[0], number) for number in range(len(crowd))]
    stage.ledger.recovery.tick(Tick(None, 1.0))
    began_s = virtual_s[0]
    while due[0][0] < began_s + 60.0:
        virtual_s[0], number = heapq.heappop(due)
        heapq.heappush(due, (virtual_s[0] + crowd[number].step() + 0.001, number))
    assert stage.ledger.recovery.tick(Tick(5.0, 1.0)).watched_s == pytest.approx(60.0, abs=5.0)


def test_an_outage_is_said_once_and_survived(started: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    # By name: a command that ran in this process before may have chosen a level for all of ours.
    caplog.set_level("INFO", "unstuck.maintenance")
    down = LedgerUnavailable("no route to host")
    reaper = Scripted(TICK, SweepResult(), down, down, down, SweepResult())
    walk(started, reaper)
    reaper.await_rounds(6)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "unstuck.maintenance"]

    # He says so when the round is over.
    wait_for(lambda: "The reaper can reach the ledger again" in said(), "his word")
    assert said().count("The reaper cannot reach the ledger and keeps trying") == 1
    assert said().count("The reaper can reach the ledger again") == 1


def test_a_lock_in_the_way_is_no_outage(started: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "unstuck.recovery")
    reaper = Scripted(TICK, SweepResult(), LedgerBusy("canceling statement due to lock timeout"))
    reaper_loop = walk(started, reaper)
    # No growing pauses, as there are in an outage.
    reaper.await_rounds(20)
    assert not reaper_loop.cut_off
    said = [record.getMessage() for record in caplog.records if record.name == "unstuck.recovery"]
    assert said == ["A lock holds up the reaper; the next round tries again"]


def test_a_bug_in_one_round_does_not_end_the_watch(started: list[Any]) -> None:
    reaper = Scripted(TICK, ZeroDivisionError(), SweepResult())
    walk(started, reaper)
    reaper.await_rounds(3)


def test_a_kick_walks_a_round_at_once(started: list[Any]) -> None:
    reaper = Scripted(RARE, SweepResult())
    reaper_loop = walk(started, reaper)
    reaper.await_rounds(1)
    reaper_loop.kick()
    reaper.await_rounds(2)


def test_what_becomes_due_between_two_rounds_is_made_ready_then(started: list[Any]) -> None:
    reaper = Scripted(RARE, SweepResult(next_due_in_s=0.01))
    walk(started, reaper)
    assert reaper.promotions.acquire(timeout=20)
    reaper.wake(SweepResult(next_due_in_s=0.01))
    assert reaper.promotions.acquire(timeout=20)


def test_in_a_small_fleet_everybody_asks_for_the_ticket_and_in_a_crowd_each_asks_less_often() -> None:
    assert [pace(crowd) for crowd in (0, 1, 2, 4)] == [1.0] * 4
    assert pace(8) == 2.0
    assert pace(1000) == 5.0


def test_whoever_keeps_losing_the_ticket_counts_the_fleet(stage: StoredWorkers, started: list[Any]) -> None:
    for _ in range(40):
        stage.worker()
    reaper = Scripted(TICK, SweepResult(skipped="ticket"))
    reaper.ledger = stage.ledger
    reaper_loop = walk(started, reaper)
    wait_for(lambda: reaper_loop._workers == 40, "the fleet counted")
    reaper.wake(SweepResult(deaths=Counter({Detector.LEASE: 1})))
    assert reaper_loop._workers == 1


def test_the_daemon_keeps_watch_until_it_is_told_to_stop(stage: StoredWorkers) -> None:
    body = stage.body()
    worker = stage.worker(body=body)
    stop = threading.Event()
    thread = threading.Thread(target=run_daemon, args=(stage.ledger, TICK, stop))
    thread.start()
    body.kill()
    wait_for(lambda: stage.record(worker).state is WorkerState.DEAD, "the dead worker found")
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_neighbour_that_dies_is_buried_at_once_and_its_retries_are_soon_ready(
    stage: StoredWorkers, started: list[Any]
) -> None:
    me, body = stage.body(), stage.body()
    mine, other = stage.worker(body=me), stage.worker(body=body)
    [job] = stage.running(other, policy=Policy(on_crash="retry"))
    reaper = stage.reaper(RARE)
    reaper_loop, neighbours = Loop(reaper), PeerWatch(reaper, mine)
    started += [reaper_loop, neighbours]
    reaper_loop.start()
    neighbours.start()
    wait_for(lambda: neighbours.holding == {other}, "a hold on the neighbour")
    body.kill()
    # Long before the next round, for which patience would not suffice.
    wait_for(lambda: stage.state(job) is JobState.PENDING, "the job back in its queue")
    assert stage.record(other).verdict is not None
    wait_for(lambda: neighbours.holding == set(), "the hold let go")
    queue = wait_for(lambda: [seen for seen in stage.ledger.queues.list() if seen.pending == 1], "ready again")
    assert queue[0].scheduled == 0


def test_a_neighbour_that_was_gone_before_we_looked_is_buried_too(stage: StoredWorkers, started: list[Any]) -> None:
    me, body = stage.body(), stage.body()
    mine, other = stage.worker(body=me), stage.worker(body=body)
    body.kill()
    neighbours = PeerWatch(stage.reaper(RARE), mine)
    started.append(neighbours)
    neighbours.start()
    wait_for(lambda: stage.record(other).state is WorkerState.DEAD, "the dead neighbour found")


def test_three_followers_are_held_and_a_newcomer_is_noticed_on_refresh(
    stage: StoredWorkers, started: list[Any]
) -> None:
    ids = [stage.worker(body=stage.body()) for _ in range(6)]
    neighbours = PeerWatch(stage.reaper(RARE), ids[-1])
    started.append(neighbours)
    neighbours.start()
    wait_for(lambda: neighbours.holding == set(ids[:3]), "three followers, going round")
    newcomer = stage.worker(body=stage.body(), id="w0")
    neighbours.refresh()
    wait_for(lambda: neighbours.holding == {newcomer, *ids[:2]}, "the newcomer held")


def test_a_fleet_that_is_born_together_is_looked_at_together(
    stage: StoredWorkers, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = stage.worker(body=stage.body())
    reaper = stage.reaper(RARE)
    looks: list[str] = []
    ring_of = reaper.ledger.recovery.peers_of

    def counted(*arguments: Any) -> Any:
        looks.append("look")
        return ring_of(*arguments)

    monkeypatch.setattr(reaper.ledger.recovery, "peers_of", counted)
    neighbours = PeerWatch(reaper, mine)
    started.append(neighbours)
    neighbours.start()
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        neighbours.refresh()
    # Gaps of 0.1, 0.2, 0.4 and 0.8 s: a hundred thousand rings are a handful of looks.
    assert 1 <= len(looks) <= 6


def test_a_worker_that_stops_in_order_is_let_go_without_a_verdict(stage: StoredWorkers, started: list[Any]) -> None:
    me, body = stage.body(), stage.body()
    mine, other = stage.worker(body=me), stage.worker(body=body)
    neighbours = PeerWatch(stage.reaper(RARE), mine)
    started.append(neighbours)
    neighbours.start()
    wait_for(lambda: neighbours.holding == {other}, "a hold on the neighbour")
    stage.ledger.workers.stop(other)
    body.kill()
    wait_for(lambda: neighbours.holding == set(), "the hold let go")
    assert stage.record(other).state is WorkerState.STOPPED


def test_a_proof_of_death_is_kept_through_an_outage(
    stage: StoredWorkers, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    me, body = stage.body(), stage.body()
    mine, other = stage.worker(body=me), stage.worker(body=body)
    neighbours = PeerWatch(stage.reaper(RARE), mine)
    started.append(neighbours)
    neighbours.start()
    wait_for(lambda: neighbours.holding == {other}, "a hold on the neighbour")
    tries = threading.Semaphore(0)
    condemn = stage.ledger.recovery.declare_dead

    def refuse(*_: Any) -> bool:
        tries.release()
        raise LedgerUnavailable("gone fishing")

    monkeypatch.setattr(stage.ledger.recovery, "declare_dead", refuse)
    body.kill()
    for _ in range(3):
        assert tries.acquire(timeout=20)
    assert stage.record(other).state is WorkerState.ACTIVE
    monkeypatch.setattr(stage.ledger.recovery, "declare_dead", condemn)
    wait_for(lambda: stage.record(other).state is WorkerState.DEAD, "the proof delivered")


def test_a_worker_in_another_namespace_is_no_neighbour(stage: StoredWorkers, started: list[Any]) -> None:
    mine = stage.worker(body=stage.body())
    stage.worker(body=stage.body(), pid_namespace="pid:[42]")
    near = stage.worker(body=stage.body())
    neighbours = PeerWatch(stage.reaper(RARE), mine)
    started.append(neighbours)
    neighbours.start()
    wait_for(lambda: neighbours.holding == {near}, "only the near one held")


def test_the_undertaker_finds_the_worker_by_its_process(stage: StoredWorkers) -> None:
    body = stage.body()
    worker, stranger = stage.worker(body=body), stage.worker(body=stage.body())
    [job] = stage.running(worker)
    body.kill()
    undertaker = DeathReporter(stage.reaper(RARE))
    undertaker.start()
    undertaker.report_death(body.pid, body.started, "its supervisor saw it end: killed by SIGKILL")
    undertaker.stop(10)
    assert stage.cause(job).endswith("its supervisor saw it end: killed by SIGKILL (supervisor)")
    assert stage.record(stranger).state is WorkerState.ACTIVE


def test_promotions_are_bounded_and_the_rest_is_due_at_once(
    stage: StoredWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def endless(limit: int) -> Promoted:
        calls.append(limit)
        return Promoted(limit, frozenset({"q"}), 5.0)

    monkeypatch.setattr(stage.ledger.maintenance, "promote_due", endless)
    done = stage.reaper(Recovery()).promote()
    assert len(calls) == 10
    assert (done.next_due_in_s, done.queues) == (0.0, {"q"})
