"""The primary of a PostgreSQL cluster is lost, and its standby becomes the new one."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.fleet import (
    PROMPT,
    Fleet,
    WorkerProcess,
    assert_no_worker_declared_dead,
    assert_one_attempt_each,
    begin,
    begin_on_each,
    wait_for,
)
from tests.support.hosts import Host, needs_other_hosts
from tests.support.job_history import check_history
from tests.support.network_proxy import Proxy
from tests.support.points import PassedPoints
from tests.support.postgres_cluster import Pair, start_pair

from unstuck.domain.states import JobState

pytestmark = needs_other_hosts


class Cluster:
    """A primary, a standby that started before every worker, and workers on hosts of their own.

    With an address that moves (a virtual IP, a DNS name) each of them reaches the servers by its own proxy; else all
    have both servers in their URL."""

    def __init__(self, pair: Pair, folder: Path, *, moves: bool, **settings: str) -> None:
        self.pair = pair
        self._url = pair.primary.new_ledger()
        self._moves = moves
        self.roads: list[Proxy] = []
        self.concurrency = "1"
        pair.catch_up()
        self.fleet = Fleet(self._address(), folder, **{**PROMPT, **settings})

    def start(self, *, wait: bool = True, **environment: str) -> WorkerProcess:
        host = f"host-{len(self.fleet.workers)}"
        address = self._address()
        return self.fleet.start(
            "--concurrency", self.concurrency, wait=wait, place=Host(host=host), UNSTUCK_URL=address, **environment
        )

    def lose_primary(self) -> None:
        """End the primary. If the address moves its host is lost too, and nobody is told that connections ended."""
        for road in self.roads:
            road.strand()
        self.pair.primary.kill()

    def fail_over(self) -> None:
        """Promote the standby, and let the address lead there."""
        self.pair.promote()
        if self._moves:
            self._url = self.pair.url_of_standby(self._url)
        for road in self.roads:
            road.point_to(self.pair.standby.port)
        if self._moves:
            # The test itself looks on from a host that has noticed already.
            self.roads[0].reset()

    def notice_the_loss(self) -> None:
        """End the connections to the lost host, as keepalives do after a while."""
        for road in self.roads:
            road.reset()

    def close(self) -> None:
        self.fleet.close()
        for road in self.roads:
            road.close()

    def _address(self) -> str:
        if not self._moves:
            return self.pair.url_of_both(self._url)
        self.roads.append(Proxy(self._url))
        return self.roads[-1].url


MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    made: list[Cluster] = []
    with start_pair() as pair:

        def make(*, moves: bool = True, **settings: str) -> Cluster:
            made.append(Cluster(pair, tmp_path, moves=moves, **settings))
            return made[-1]

        yield make
        for cluster in made:
            cluster.close()


@pytest.mark.parametrize(
    ("moves", "number"), [(True, 2), (False, 4)], ids=["the-address-moves", "both-hosts-in-the-url"]
)
def test_living_workers_keep_their_jobs_when_one_more_starts_at_the_promotion(
    make_cluster: MakeCluster, moves: bool, number: int
) -> None:
    cluster = make_cluster(moves=moves)
    workers = [cluster.start(wait=False) for _ in range(number)]
    for worker in workers:
        cluster.fleet.wait_active(worker)
    jobs, notes = begin_on_each(cluster.fleet, workers, "nap", 6.0)
    cluster.pair.catch_up()
    cluster.lose_primary()
    cluster.fail_over()
    cluster.start()
    time.sleep(2.0)  # The outage: their connections lead to a host that is lost, and they do not know it yet.
    cluster.notice_the_loss()
    assert_one_attempt_each(cluster.fleet, jobs)
    assert notes.read_text().count("begun") == len(jobs)
    assert all(worker.process.poll() is None for worker in cluster.fleet.workers)
    check_history(cluster.fleet.ledger, [job.id for job in jobs])
    told = {finding.code.value: finding for finding in cluster.fleet.app.operator.doctor()}
    assert "ledger-outage" in told, told


def test_workers_leave_a_primary_that_hangs_and_settle_on_the_new_one(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    workers = [cluster.start(), cluster.start()]
    jobs, notes = begin_on_each(cluster.fleet, workers, "nap", 2.0)
    said_before = [len(worker.said()) for worker in workers]
    cluster.pair.catch_up()
    # Its kernel goes on acknowledging whatever is sent: no keepalive will ever find fault with it.
    cluster.pair.primary.hang()
    wait_for(lambda: notes.read_text().count("ended") == len(jobs), "both naps to end")
    cluster.fail_over()
    assert_one_attempt_each(cluster.fleet, jobs)
    assert notes.read_text().count("begun") == len(jobs)
    for worker, length in zip(workers, said_before, strict=True):
        assert "warning" in worker.said()[length:], "an outage is worth a line in the log"
    # They work on the new primary as they did on the old one.
    more, _ = begin_on_each(cluster.fleet, workers, "nap_async", 0.1)
    assert_one_attempt_each(cluster.fleet, more)


def test_a_standby_that_lags_is_not_asked_what_a_worker_holds(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(moves=False)
    cluster.concurrency = "2"
    signals = PassedPoints(cluster.fleet.folder)
    worker = cluster.start(**signals.of("worker.before_settle", "turn.before_commit", "ledger_thread.compare"))
    cluster.pair.catch_up()
    cluster.pair.lag(60)
    fleet = cluster.fleet
    jobs = []
    for name, seconds in (("short", 1.0), ("long", 5.0)):
        jobs.append(begin(fleet, "nap", seconds, name)[0])
    # The turn that settles the short nap is under way when the primary dies: what became of it is uncertain.
    cluster.pair.primary.hang()
    wait_for(lambda: "ended" in (fleet.folder / "short").read_text(), "the short nap to end")
    signals.wait("turn.before_commit", worker.pid, after="worker.before_settle")
    cluster.pair.primary.kill()
    # Only the standby answers now, and it knows neither of the two jobs.
    signals.wait("ledger_thread.compare", worker.pid, 3)
    cluster.fail_over()
    assert_one_attempt_each(fleet, jobs)
    for name in ("short", "long"):
        assert (fleet.folder / name).read_text().count("begun") == 1, f"the {name} nap began twice"
    assert worker.process.poll() is None


def test_jobs_whose_last_commits_were_lost_with_the_primary(make_cluster: MakeCluster) -> None:
    """Replication is asynchronous and stood still: the new primary knows an older story. What docs/deployment.md says
    about it is true."""
    cluster = make_cluster(moves=False)
    cluster.concurrency = "4"
    fleet = cluster.fleet
    cluster.start()
    ended_once = begin(fleet, "nap", 1.5, "ended-once")[0]
    ended_again = begin(fleet, "nap_again", 1.5, "ended-again")[0]
    begun = fleet.task("nap").options(delay="1s").enqueue(3.0, str(fleet.folder / "begun"))
    cluster.pair.catch_up()
    cluster.pair.stop_replication()
    for job in (ended_once, ended_again):
        assert job.result(timeout=20) == "rested"
    wait_for((fleet.folder / "begun").exists, "the delayed nap to begin")
    lost = [job.id for job in fleet.task("add").enqueue_many([(n, 1) for n in range(200)])]
    cluster.pair.primary.kill()
    cluster.fail_over()
    # Numbers that were given out and lost belong to nobody else, from the first moment on.
    again = [job.id for job in fleet.task("add").enqueue_many([(n, 1) for n in range(400)])]
    assert not set(again) & set(lost), "a client that waits for a lost job would get the result of another"
    for job in (ended_once, ended_again, begun):
        fleet.wait_final(job)
    # The end of these two was lost: their code had begun, so their crash policy decides.
    assert ended_once.record().error is not None
    assert fleet.state(ended_once) is JobState.FAILED
    assert (fleet.folder / "ended-once").read_text().count("begun") == 1
    assert fleet.state(ended_again) is JobState.SUCCEEDED
    assert (fleet.folder / "ended-again").read_text().count("begun") == 2
    # Of this one the beginning was lost: the new primary never knew it, so it began again, whatever its policy.
    assert fleet.state(begun) is JobState.SUCCEEDED
    assert (fleet.folder / "begun").read_text().count("begun") == 2
    assert_no_worker_declared_dead(fleet)
