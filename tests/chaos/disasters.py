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
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import psycopg
from tests.support.backdoor import PostgresBackdoor, SqliteBackdoor, age, watches_again
from tests.support.fleet import FAKETIME, PROMPT, Clock, Fleet, own_network, the_dead, wait_for, wait_heartbeats
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
DATABASE = "jobs"
SETTINGS = {**PROMPT, "check_interval": "0.1s"}
"""After an outage a reaper looks at the workers before the next heartbeats of all of them come."""
PATIENCE_S = 90.0
LONGER_THAN_THE_LEASE_S = 60.0
SILENT_S = 3.0
"""A worker that is silent for this long may be cut off, and `session_grace` is over. Far less than its lease."""


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
    seconds: float = 1.0
    """How long a disaster lasts. By the ledger's clock an outage is longer than a lease, see `prolonged`."""
    times: int = 1
    """How often a disaster comes back."""
    dead_before: frozenset[str] = frozenset()
    """Workers that were declared dead before the disaster."""

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

    @property
    def tables_url(self) -> str:
        """The address of the workers' database for a superuser, past every proxy."""
        return self.postgres.url(DATABASE)

    def assert_no_worker_died(self) -> None:
        dead = set(the_dead(self.fleet)) - self.dead_before
        assert not dead, f"declared dead although alive: {dead}"

    def wait_silence(self, worker_id: str, longer_s: float) -> None:
        """Wait until nothing was heard of a worker for longer than this, while the others watched."""
        query = (
            f"select unstuck.watched_s(beat_at) > {longer_s} from unstuck.worker_heartbeats "
            f"where worker_id = '{worker_id}'"
        )
        with psycopg.connect(self.tables_url, autocommit=True) as admin:
            wait_for(lambda: admin.execute(query).fetchone() == (True,), f"{longer_s} s of silence")

    @contextmanager
    def prolonged(self) -> Iterator[None]:
        """Let an outage that ends inside this block have lasted longer than every lease, by the ledger's clock.

        No worker reaches the ledger before the block is over."""
        with _write_lock(self.fleet) if self.server is None else self._roads_cut():
            yield

    @contextmanager
    def _roads_cut(self) -> Iterator[None]:
        assert self.roads, "a scene on PostgreSQL needs roads to keep its workers out"
        for road in self.roads:
            road.cut()
        yield
        busy = f"select count(*) from pg_stat_activity where usename = '{ROLE}' and state = 'active'"
        with psycopg.connect(self.tables_url, autocommit=True) as admin:
            wait_for(lambda: admin.execute(busy).fetchone() == (0,), "what the workers asked before to be answered")
        backdoor = PostgresBackdoor(self.tables_url)
        age(backdoor, LONGER_THAN_THE_LEASE_S)
        # One worker comes back first, and looks at the others.
        self.roads[0].heal()
        wait_for(lambda: watches_again(backdoor), "one worker to watch the others")
        for road in self.roads[1:]:
            road.heal()


def play(scene: DisasterScene, disaster: Callable[[DisasterScene], None]) -> Counter[str]:
    """Run jobs through the disaster, check all that must hold, and return the number of jobs by state."""
    fleet = scene.fleet
    scene.dead_before = frozenset(the_dead(fleet))
    folder = Path(tempfile.mkdtemp(dir=fleet.folder))
    over = folder / "over"
    once, again = _begin_jobs(fleet, folder, over, scene.seconds)
    quick = fleet.task("add").enqueue_many([(n, 1) for n in range(QUICK_JOBS)])
    disaster(scene)
    wait_heartbeats(scene.fleet)
    over.touch()
    jobs = [*once, *again, *quick, fleet.task("add").enqueue(1, 2)]
    _wait_until_ended(scene, jobs)
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


def _begin_jobs(fleet: Fleet, folder: Path, over: Path, seconds: float) -> tuple[list[Job], list[Job]]:
    """Begin jobs that last until the disaster is over, and some that end in the middle of it."""

    def begin(policy: str, number: int) -> Job:
        notes = str(folder / f"{policy}-{number}")
        task, argument = ("nap", seconds / 2) if number % 2 else ("wait_for_file", str(over))
        return fleet.task(f"{task}_again" if policy == "again" else task).enqueue(argument, notes)

    once, again = ([begin(policy, number) for number in range(WORKERS)] for policy in ("once", "again"))
    wait_for(lambda: len(list(folder.iterdir())) == 2 * WORKERS, "every job to begin")
    return once, again


def _wait_until_ended(scene: DisasterScene, jobs: list[Job]) -> None:
    def all_ended() -> bool:
        # A ledger that is away gives no answer: ask again.
        with suppress(LedgerUnavailable):
            scene.assert_no_worker_died()
            return all(scene.fleet.state(job) in FINAL_STATES for job in jobs)
        return False

    wait_for(all_ended, "every job to end", PATIENCE_S, every_s=0.1)


# What can happen to any PostgreSQL -----------------------------------------------------------------


def hang(scene: DisasterScene) -> None:
    """Every process of the server stops; its kernel still answers TCP."""
    for _ in range(scene.times):
        scene.postgres.hang()
        time.sleep(scene.seconds)
        with scene.prolonged():
            scene.postgres.resume()
        wait_heartbeats(scene.fleet)


def read_only(scene: DisasterScene) -> None:
    """The server refuses every write, as it does while a managed cluster moves."""
    server = scene.postgres
    server.execute("alter system set default_transaction_read_only = on")
    server.execute("select pg_reload_conf()")
    time.sleep(scene.seconds)
    with scene.prolonged():
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
    wait_heartbeats(scene.fleet, 5)
    server.execute(f"alter role {ROLE} reset all")
    _terminate(scene)


def sessions_cut(scene: DisasterScene) -> None:
    """An administrator ends every session, again and again."""
    for _ in range(2 + scene.times):
        _terminate(scene)
        time.sleep(0.3)


def connection_limit(scene: DisasterScene) -> None:
    """Others take every connection of the server while one worker loses its own."""
    worker_id = scene.fleet.workers[0].id
    # Opened first: when all try at once, not even the places of administrators are free.
    with psycopg.connect(scene.tables_url, autocommit=True) as admin:
        crowd = Crowd(scene.fleet.url)
        try:
            wait_for(lambda: crowd.refused, "the server to be full")

            def out() -> bool:
                scene.roads[0].reset()
                time.sleep(0.2)  # Long enough to come back, if there is a place.
                return not _sessions(admin, "host-0")

            wait_for(out, "one worker without a session")
            scene.wait_silence(worker_id, SILENT_S)
            assert not _sessions(admin, "host-0"), "it stayed out"
        finally:
            crowd.leave()


def road_cut(scene: DisasterScene) -> None:
    """Packets of one worker vanish for less than its lease; the server ends its sessions meanwhile."""
    for worker, road in list(zip(scene.fleet.workers, scene.roads, strict=True))[: scene.times]:
        worker_id = worker.id
        road.cut()
        scene.wait_silence(worker_id, SILENT_S)
        road.server_gives_up()
        scene.wait_silence(worker_id, SILENT_S + 1.5)
        road.heal()
        wait_heartbeats(scene.fleet)


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
    wait_heartbeats(scene.fleet, 5)
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
        wait_for(lambda: _waits_for_lock(scene), "the other enqueue to wait for the first")
        time.sleep(scene.seconds)
        wait_heartbeats(scene.fleet, 5)
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
        age(PostgresBackdoor(scene.tables_url), LONGER_THAN_THE_LEASE_S)
        scene.pooler.start()
        wait_heartbeats(scene.fleet)


def failover(scene: DisasterScene) -> None:
    """The primary is killed, its standby becomes the new one a little later; the URL names both."""
    assert scene.pair is not None
    scene.pair.catch_up()
    scene.pair.primary.kill()
    time.sleep(scene.seconds / 2)
    scene.pair.promote()


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
        with scene.prolonged():
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
    for _ in range(scene.times):
        with scene.prolonged():
            time.sleep(scene.seconds)
        wait_heartbeats(scene.fleet)


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
        server, roads = None, []
        if kind == "sqlite":
            url = f"sqlite:///{disk}/jobs.db"
        else:
            server = stack.enter_context(prepare_postgres())
            server.start()
            url = _url_of_role(server, disk)
            roads = [stack.enter_context(Proxy(url)) for _ in range(WORKERS)]
        scene = DisasterScene(stack.enter_context(_fleet(url, folder)), server=server, disk=disk, roads=roads)
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
def _fleet(url: str, folder: Path, settings: dict[str, str] = SETTINGS) -> Iterator[Fleet]:
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
    server.execute(f"create database {DATABASE} owner {ROLE} {where}")
    return server.url(DATABASE, user=ROLE)


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


def _waits_for_lock(scene: DisasterScene) -> bool:
    with psycopg.connect(scene.tables_url, autocommit=True) as admin:
        found = admin.execute("select count(*) from pg_stat_activity where wait_event_type = 'Lock'").fetchone()
    return found is not None and found[0] > 0


@contextmanager
def _write_lock(fleet: Fleet) -> Iterator[None]:
    path = Path(fleet.url.removeprefix("sqlite:///"))
    with closing(apsw.Connection(str(path))) as connection:
        connection.set_busy_timeout(10_000)
        connection.execute("begin immediate")
        yield
        age(SqliteBackdoor(path, connection), LONGER_THAN_THE_LEASE_S)
        connection.execute("commit")


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
