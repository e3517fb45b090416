"""Disasters in which nobody dies: after each of them every job has ended, and no worker was declared dead.

A `Scene` is a ledger with a small fleet; `play` runs jobs of both crash policies through one disaster and checks what
must hold. `make chaos` plays each for longer than the suite does.
"""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import psycopg
from tests.support.fleet import FAKETIME, LEASE_S, SCALED, Clock, Fleet, own_network, the_dead, wait_for
from tests.support.hosts import HERE, Host, Network, can_enter
from tests.support.job_history import check_history
from tests.support.network_proxy import Proxy
from tests.support.postgres import PgServer, prepare_postgres, start_postgres
from tests.support.postgres_cluster import Pair, Pooler, start_pair, start_pooler
from tests.support.run_guard import folder_prefix

from unstuck.client.job import Job
from unstuck.domain.states import FINAL_STATES
from unstuck.errors import LedgerError, LedgerUnavailable

WORKERS = 3
CONCURRENCY = 4
QUICK_JOBS = 60
MAX_CONNECTIONS = 40
HOUR_S = 3600.0
ROLE = "app"
"""The workers' role is no superuser: limits and timeouts of a role hold for it."""
PATIENCE_S = 90.0


@dataclass
class DisasterScene:
    """A ledger, a fleet on it, and whatever of its surroundings can be disturbed."""

    fleet: Fleet
    server: PgServer | None = None
    clock: Clock | None = None
    pooler: Pooler | None = None
    pair: Pair | None = None
    disk: Path | None = None
    """A small file system that the ledger is on, with nothing else."""
    roads: list[Proxy] = field(default_factory=list)
    """How each worker reaches the server."""
    networks: list[Network] = field(default_factory=list)
    """The network that each worker is in."""
    seconds: float = 5.0
    """How long a disaster lasts that may be longer than a lease."""
    times: int = 1
    """How often a disaster comes back."""

    def start_workers(self, number: int = WORKERS) -> None:
        """Start workers that do not see each other's processes, each on a road of its own if there are roads."""
        for n in range(number):
            place = Host(host=f"host-{n}") if can_enter(Host(host="elsewhere")) else HERE
            address = {}
            if self.roads:
                address = {"UNSTUCK_URL": f"{self.roads[n].url}?application_name=host-{n}"}
            if self.networks:
                place = place._replace(network=self.networks[n].path)
                address = {"UNSTUCK_URL": self.fleet.url.replace("127.0.0.1", self.networks[n].here)}
            self.fleet.start("--concurrency", str(CONCURRENCY), wait=False, place=place, **address)
        for worker in self.fleet.workers:
            self.fleet.wait_active(worker)

    @property
    def postgres(self) -> PgServer:
        assert self.server is not None
        return self.server


def play(scene: DisasterScene, disaster: Callable[[DisasterScene], None]) -> Counter[str]:
    """Run jobs through the disaster, check all that must hold, and return the number of jobs by state."""
    fleet = scene.fleet
    dead_before = set(the_dead(fleet))
    folder = Path(tempfile.mkdtemp(dir=fleet.folder))
    once, again = _begin_naps(fleet, folder, scene.seconds)
    quick = fleet.task("add").enqueue_many([(n, 1) for n in range(QUICK_JOBS)])
    disaster(scene)
    jobs = [*once, *again, *quick, fleet.task("add").enqueue(1, 2)]
    _wait_until_ended(fleet, jobs, dead_before)
    states = check_history(
        fleet.ledger, [job.id for job in jobs], clock_was_set=disaster in (clock_forward, clock_back)
    )
    assert states == {"succeeded": len(jobs)}, states
    for number, job in enumerate(once):
        begun = (folder / f"once-{number}").read_text().count("begun")
        assert begun == 1, f'job {job.id} with on_crash="fail" began {begun} times'
    for job in again:
        assert job.record().crash_count == 0, f"job {job.id}: trouble of the ledger counts as no crash"
    for worker in fleet.workers:
        assert worker.process.poll() is None, f"a worker ended:\n{worker.said()}"
    return states


def _begin_naps(fleet: Fleet, folder: Path, seconds: float) -> tuple[list[Job], list[Job]]:
    """Begin jobs that last through the disaster, and some that end in the middle of it."""
    naps = [seconds + 1.0, seconds / 2]
    once = [fleet.task("nap").enqueue(naps[n % 2], str(folder / f"once-{n}")) for n in range(WORKERS)]
    again = [fleet.task("nap_again").enqueue(naps[n % 2], str(folder / f"again-{n}")) for n in range(WORKERS)]
    wait_for(lambda: len(list(folder.iterdir())) == 2 * WORKERS, "every nap to begin")
    return once, again


def _wait_until_ended(fleet: Fleet, jobs: list[Job], dead_before: set[str]) -> None:
    def all_ended() -> bool:
        # Whoever asks while the ledger is away gets no answer: it is asked again.
        with suppress(LedgerUnavailable):
            dead = set(the_dead(fleet)) - dead_before
            assert not dead, f"declared dead although alive: {dead}"
            return all(fleet.state(job) in FINAL_STATES for job in jobs)
        return False

    wait_for(all_ended, "every job to end", PATIENCE_S, every_s=0.1)


# What can happen to any PostgreSQL -----------------------------------------------------------------


def hang(scene: DisasterScene) -> None:
    """Every process of the server stops; its kernel still answers TCP."""
    for _ in range(scene.times):
        scene.postgres.hang()
        time.sleep(scene.seconds)
        scene.postgres.resume()
        time.sleep(0.5)


def read_only(scene: DisasterScene) -> None:
    """The server refuses every write, as it does while a managed cluster moves."""
    server = scene.postgres
    server.execute("alter system set default_transaction_read_only = on")
    server.execute("select pg_reload_conf()")
    time.sleep(scene.seconds)
    server.execute("alter system reset default_transaction_read_only")
    server.execute("select pg_reload_conf()")


def role_timeouts(scene: DisasterScene) -> None:
    """Whoever connects as our role has a statement_timeout and a lock_timeout."""
    server = scene.postgres
    server.execute(f"alter role {ROLE} set statement_timeout = '1s'")
    server.execute(f"alter role {ROLE} set lock_timeout = '200ms'")
    server.execute(f"alter role {ROLE} set idle_session_timeout = '1s'")
    _terminate(scene)
    time.sleep(scene.seconds)
    server.execute(f"alter role {ROLE} reset all")
    _terminate(scene)


def sessions_cut(scene: DisasterScene) -> None:
    """An administrator ends every session, again and again."""
    for _ in range(2 + scene.times):
        _terminate(scene)
        time.sleep(0.3)


def connection_limit(scene: DisasterScene) -> None:
    """Others take every connection of the server while one worker loses its own."""
    # Opened first: when all try at once, not even the places of administrators are free.
    with psycopg.connect(scene.postgres.url(), autocommit=True) as admin:
        crowd = Crowd(scene.fleet.url)
        try:
            wait_for(lambda: crowd.refused, "the server to be full")

            def out() -> bool:
                scene.roads[0].reset()
                time.sleep(0.2)  # Long enough to come back, if there is a place.
                return not _sessions(admin, "host-0")

            wait_for(out, "one worker without a session")
            time.sleep(LEASE_S * 0.55)  # Longer than `session_grace`, and well within the lease.
            assert not _sessions(admin, "host-0"), "it stayed out"
        finally:
            crowd.leave()


def road_cut(scene: DisasterScene) -> None:
    """Packets of one worker vanish for less than its lease; the server ends its sessions meanwhile."""
    for road in scene.roads[: scene.times]:
        road.cut()
        time.sleep(LEASE_S * 0.6)
        road.server_gives_up()
        time.sleep(LEASE_S * 0.2)
        road.heal()


def roads_broken(scene: DisasterScene) -> None:
    """A firewall forgets every connection."""
    for _ in range(2 + scene.times):
        for road in scene.roads:
            road.reset()
        time.sleep(0.3)


def roads_slow(scene: DisasterScene) -> None:
    """Each packet needs a while."""
    for road in scene.roads:
        road.delay(0.1)
    time.sleep(scene.seconds)
    for road in scene.roads:
        road.delay(0)


def clock_forward(scene: DisasterScene) -> None:
    """The server's clock is set forward by an hour, and goes on from there."""
    _step(scene, HOUR_S)


def clock_back(scene: DisasterScene) -> None:
    """The server's clock is set back by an hour, and goes on from there."""
    _step(scene, -HOUR_S)


def open_transactions(scene: DisasterScene) -> None:
    """A user's transaction enqueues with a unique key, and takes its time; others ask for the same key."""
    add = scene.fleet.task("add").options(unique_key="the-one", on_duplicate="return")
    with psycopg.connect(scene.fleet.url) as connection:
        add.options(connection=connection).enqueue(1, 1)
        other = threading.Thread(target=_enqueue_anyhow, args=(add,), daemon=True)
        other.start()
        time.sleep(scene.seconds)
        connection.rollback()
    other.join(PATIENCE_S)
    assert not other.is_alive(), "an enqueue waits for a transaction that is over"


# What needs surroundings of its own ----------------------------------------------------------------


def pooler_restarts(scene: DisasterScene) -> None:
    """PgBouncer is stopped and started again."""
    assert scene.pooler is not None
    for _ in range(1 + scene.times):
        scene.pooler.stop()
        time.sleep(scene.seconds / 4)
        scene.pooler.start()
        time.sleep(0.5)


def failover(scene: DisasterScene) -> None:
    """The primary is killed, its standby becomes the new one a little later; the URL names both."""
    assert scene.pair is not None
    scene.pair.catch_up()
    scene.pair.primary.kill()
    time.sleep(scene.seconds / 2)
    scene.pair.promote()
    time.sleep(0.5)


def disk_full(scene: DisasterScene) -> None:
    """Somebody fills the file system that the ledger is on."""
    assert scene.disk is not None
    filler = scene.disk / "filler"
    for _ in range(scene.times):
        _fill(filler)
        # What still fits into pages that exist is written; more is refused.
        with suppress(LedgerError):
            scene.fleet.task("add").enqueue_many([(os.urandom(5_000).hex(), "") for _ in range(200)])
        _fill(filler)
        time.sleep(scene.seconds)
        filler.unlink()


def packets_lost(scene: DisasterScene) -> None:
    """Packets of one worker vanish one way, those of another the other way, until the server ends their sessions."""
    scene.networks[0].cut(answers=False)
    scene.networks[1].cut(requests=False)
    time.sleep(scene.seconds)
    for network in scene.networks:
        network.heal()


def write_lock(scene: DisasterScene) -> None:
    """A user's transaction keeps the write lock of a SQLite file."""
    path = scene.fleet.url.removeprefix("sqlite:///")
    for _ in range(scene.times):
        connection = apsw.Connection(path)
        connection.set_busy_timeout(10_000)
        connection.execute("begin immediate")
        time.sleep(scene.seconds)
        connection.execute("rollback")
        connection.close()
        time.sleep(0.2)


Disaster = Callable[[DisasterScene], None]
SERVER: tuple[Disaster, ...] = (
    hang,
    read_only,
    role_timeouts,
    sessions_cut,
    connection_limit,
    road_cut,
    roads_broken,
    roads_slow,
    open_transactions,
)
"""Disasters on one PostgreSQL; `on_postgres` makes their scene."""
CLOCK: tuple[Disaster, ...] = (clock_forward, clock_back) if FAKETIME else ()
"""Disasters of its clock; `on_postgres_with_clock` makes their scene."""


@contextmanager
def on_postgres(folder: Path, *, with_clock: bool = False) -> Iterator[DisasterScene]:
    """A server of its own, and a road for each worker.

    Its clock can be set if that is asked for. No other disaster is played with the library that sets it: it opens a
    file and allocates memory in signal handlers of the server, which can crash it."""
    with ExitStack() as stack:
        server = stack.enter_context(prepare_postgres(f"max_connections = {MAX_CONNECTIONS}"))
        clock = Clock(server.folder / "clock") if with_clock else None
        if clock is not None:
            server.environment = clock.environment
        server.start()
        url = _url_of_role(server)
        roads = [stack.enter_context(Proxy(url)) for _ in range(WORKERS)]
        fleet = stack.enter_context(_fleet(url, folder))
        scene = DisasterScene(fleet, server=server, clock=clock, roads=roads)
        scene.start_workers()
        yield scene


on_postgres_with_clock = partial(on_postgres, with_clock=True)


@contextmanager
def behind_pooler(folder: Path) -> Iterator[DisasterScene]:
    with ExitStack() as stack:
        server = stack.enter_context(prepare_postgres())
        server.start()
        pooler = stack.enter_context(start_pooler(_url_of_role(server), pool_size=4))
        scene = DisasterScene(stack.enter_context(_fleet(pooler.url, folder)), server=server, pooler=pooler)
        scene.start_workers()
        yield scene


@contextmanager
def on_pair(folder: Path) -> Iterator[DisasterScene]:
    with start_pair() as pair, _fleet(pair.url_of_both(pair.primary.new_ledger()), folder) as fleet:
        scene = DisasterScene(fleet, pair=pair)
        scene.start_workers()
        yield scene


@contextmanager
def on_networks(folder: Path) -> Iterator[DisasterScene]:
    """Default settings, so that the kernels' own timeouts are shorter than the lease as they are everywhere."""
    with ExitStack() as stack:
        hub = stack.enter_context(own_network())
        networks = [stack.enter_context(hub.connect()) for _ in range(WORKERS)]
        server = stack.enter_context(start_postgres(networks=networks))
        fleet = stack.enter_context(_fleet(server.new_ledger(), folder, {}))
        scene = DisasterScene(fleet, server=server, networks=networks)
        scene.start_workers()
        yield scene


@contextmanager
def on_small_disk(folder: Path, kind: str) -> Iterator[DisasterScene]:
    """A SQLite file, or the tables of a database, on a file system of a few megabytes."""
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk())
        if kind == "sqlite":
            url, server = f"sqlite:///{disk}/jobs.db", None
        else:
            server = stack.enter_context(prepare_postgres())
            server.start()
            url = _url_of_role(server, disk)
        scene = DisasterScene(stack.enter_context(_fleet(url, folder)), server=server, disk=disk)
        scene.start_workers()
        yield scene


@contextmanager
def on_sqlite(folder: Path) -> Iterator[DisasterScene]:
    with _fleet(f"sqlite:///{folder}/jobs.db", folder) as fleet:
        scene = DisasterScene(fleet)
        scene.start_workers()
        yield scene


@contextmanager
def small_disk(megabytes: int = 64) -> Iterator[Path]:
    """Mount a small file system in memory. The process has left the mounts of the machine, see `leave_mounts`."""
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix("disk"), dir="/tmp"))
    folder.chmod(0o755)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    finally:
        folder.rmdir()


@contextmanager
def _fleet(url: str, folder: Path, settings: dict[str, str] = SCALED) -> Iterator[Fleet]:
    fleet = Fleet(url, folder, **settings)
    try:
        fleet.app.migrate()
        yield fleet
    finally:
        fleet.close()


def _url_of_role(server: PgServer, disk: Path | None = None) -> str:
    """Create a database that belongs to an ordinary role, on a disk of its own if one is given."""
    server.execute(f"create role {ROLE} login")
    where = ""
    if disk is not None:
        place = disk / "tables"
        place.mkdir()
        if server.account is not None:
            shutil.chown(place, server.account.pw_uid, server.account.pw_gid)
        server.execute(f"create tablespace small location '{place}'")
        where = "tablespace small"
    server.execute(f"create database jobs owner {ROLE} {where}")
    return server.url("jobs", user=ROLE)


class Crowd:
    """Clients that take every free connection of a server and keep it."""

    def __init__(self, url: str, threads: int = 8) -> None:
        self.refused = False
        self._url = url
        self._left = threading.Event()
        self._threads = [threading.Thread(target=self._push, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join(30)

    def _push(self) -> None:
        held = []
        while not self._left.is_set():
            try:
                held.append(psycopg.connect(self._url, connect_timeout=5))
            except psycopg.OperationalError:
                self.refused = True
                time.sleep(0.005)
        for connection in held:
            connection.close()


def _terminate(scene: DisasterScene) -> None:
    scene.postgres.execute(
        "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity"
        f" where usename = '{ROLE}' and pid <> pg_backend_pid()"
    )


def _sessions(admin: psycopg.Connection[Any], name: str) -> int:
    row = admin.execute("select count(*) from pg_stat_activity where application_name = %s", (name,)).fetchone()
    assert row is not None
    return int(row[0])


def _step(scene: DisasterScene, by_s: float) -> None:
    assert scene.clock is not None
    scene.clock.step_to(scene.clock.off_s + by_s)
    time.sleep(scene.seconds)


def _enqueue_anyhow(task: object) -> None:
    with suppress(LedgerError):
        task.enqueue(2, 2)  # type: ignore[attr-defined]


def _fill(filler: Path) -> None:
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * (1 << 16)):
            pass
