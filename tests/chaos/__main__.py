"""Let disasters happen while jobs run, and check every story afterwards.

    python -m tests.chaos.__main__ --url postgresql [--scenario NAME …]

`kills` ends random processes while many jobs run (`--workers 20 --jobs 20000 --seconds 60 --seed N`). In all other
scenarios nobody is killed: see `scenarios`. Without `--scenario` all of them are played.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import psutil
from tests.chaos import disasters as chaos_disasters
from tests.support import run_guard
from tests.support.fleet import Fleet, wait_for
from tests.support.hosts import Host, can_enter, can_make_networks, leave_mounts
from tests.support.job_history import check_history
from tests.support.postgres import start_postgres
from tests.support.postgres_cluster import PGBOUNCER
from tests.support.signals import OwnProcess

QUICK = ("add", "add_again", "add_async", "add_async_again")
PAGE = 2_000
LONG_S = 7.0
"""How long a disaster really lasts; by the ledger's clock an outage is longer than every lease."""
KINDS = ("sqlite", "postgresql")
SceneMaker = Callable[[Path], AbstractContextManager[chaos_disasters.DisasterScene]]


def run_chaos(
    url: str, folder: Path, *, workers: int, jobs: int, seconds: float, seed: int, patience_s: float = 240.0
) -> Counter[str]:
    """Run it; give the number of jobs by state. Raises AssertionError at the first illegal story."""
    print(f"chaos on {url.partition(':')[0]}: seed {seed}, {workers} workers, {jobs} jobs, {seconds:g}s of kills")
    chance = random.Random(seed)
    fleet = Fleet(url, folder)
    try:
        for _ in range(workers):
            fleet.start("--concurrency", "4", wait=False)
        ids = _enqueue(fleet, jobs, chance)
        kills = _kill_for(fleet, seconds, chance)
        print(f"killed: {dict(kills)}")
        _wait_until_all_ended(fleet, ids, patience_s)
        states = check_history(fleet.ledger, ids)
        # Nobody kills four times the same job by chance so often that a retried one may be lost.
        assert states["pending"] == states["claimed"] == states["running"] == 0
        held = [worker for worker in fleet.ledger.recovery.watch() if worker.held]
        assert not held, f"held by somebody who does not know it: {held}"
        print(f"ended: {dict(states)}")
        return states
    finally:
        fleet.close()


def _enqueue(fleet: Fleet, jobs: int, chance: random.Random) -> list[int]:
    ids = []
    naps = jobs // 100
    for start in range(0, jobs - naps, 500):
        name = chance.choice(QUICK)
        count = min(500, jobs - naps - start)
        ids += [job.id for job in fleet.task(name).enqueue_many([(n, 1) for n in range(count)])]
    for _ in range(naps):
        task = fleet.task(chance.choice(("nap", "nap_again")))
        ids.append(task.options(priority=5).enqueue(chance.uniform(0.05, 2.0)).id)
    return ids


def _kill_for(fleet: Fleet, seconds: float, chance: random.Random) -> Counter[str]:
    kills: Counter[str] = Counter()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(chance.uniform(0.05, 0.5))  # The rhythm of the disaster, not luck.
        living = [worker for worker in fleet.workers if worker.process.poll() is None]
        worker = chance.choice(living)
        what = chance.choice(("worker", "family", "fork server", "runner", "runner", "runner", "freeze"))
        kills[what] += _strike(worker.family(), what)
        if worker.process.poll() is not None or what in ("worker", "family"):
            worker.process.wait(10)
            fleet.start("--concurrency", "4", wait=False)
    for worker in fleet.workers:
        worker.signal_family(signal.SIGCONT)
    return kills


def _strike(family: list[OwnProcess], what: str) -> int:
    targets = {
        "worker": family[:1],
        "family": family,
        "fork server": family[1:2],
        "runner": family[2:3],
        "freeze": family[:1],
    }[what]
    for process in targets:
        try:
            process.send_signal(signal.SIGSTOP if what == "freeze" else signal.SIGKILL)
            if what == "freeze":
                time.sleep(0.3)  # Shorter than any lease: it must cost nothing.
                process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            pass
    return len(targets[:1])


def _wait_until_all_ended(fleet: Fleet, ids: list[int], patience_s: float) -> None:
    left = set(ids)

    def none_left() -> bool:
        page = list(left)[:PAGE]
        left.difference_update(outcome.job_id for outcome in fleet.ledger.jobs.outcomes(page))
        return not left

    try:
        wait_for(none_left, "every job to end", patience_s)
    except AssertionError:
        sample = [fleet.ledger.jobs.get(job_id) for job_id in list(left)[:5]]
        raise AssertionError(f"{len(left)} jobs did not end, such as {sample}") from None


def scenes_of(
    kind: str, lasting_s: float = LONG_S
) -> dict[str, tuple[SceneMaker, tuple[chaos_disasters.Disaster, ...], float]]:
    """Return the scenes that this machine can make, each with its disasters and how long each of them lasts."""
    on_disk = partial(chaos_disasters.on_small_disk, kind=kind)
    made: dict[str, tuple[SceneMaker, tuple[chaos_disasters.Disaster, ...], float]] = {}
    if kind == "sqlite":
        made["file"] = (chaos_disasters.on_sqlite, (chaos_disasters.write_lock,), lasting_s)
    else:
        made["server"] = (chaos_disasters.on_postgres, chaos_disasters.SERVER, lasting_s)
        made["clock"] = (chaos_disasters.on_postgres_with_clock, chaos_disasters.CLOCK, lasting_s)
        made["pair"] = (chaos_disasters.on_pair, (chaos_disasters.failover,), lasting_s)
        if PGBOUNCER is not None:
            made["pooler"] = (chaos_disasters.behind_pooler, (chaos_disasters.pooler_restarts,), lasting_s)
        if can_make_networks():
            # The server ends sessions after 13 to 15 s; the lease is 30 s.
            made["networks"] = (chaos_disasters.on_networks, (chaos_disasters.packets_lost,), 20.0)
    if can_enter(Host(boot_id="another")):
        made["disk"] = (on_disk, (chaos_disasters.disk_full,), lasting_s)
    return made


def run_scenarios(kind: str, asked: list[str], times: int, lasting_s: float = LONG_S) -> None:
    """Play the scenarios that are asked for, or all."""
    for maker, disasters, seconds in scenes_of(kind, lasting_s).values():
        chosen = [one for one in disasters if not asked or one.__name__ in asked]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder, maker(Path(folder)) as scene:
            scene.seconds, scene.times = seconds, times
            for disaster in chosen:
                began_s = time.monotonic()
                states = chaos_disasters.play(scene, disaster)
                took_s = time.monotonic() - began_s
                print(f"{disaster.__name__} on {kind}: {dict(states)}, nobody declared dead, {took_s:.0f}s", flush=True)


def main() -> int:
    run_guard.start()
    if can_enter(Host(boot_id="another")):
        leave_mounts()
    names = sorted({one.__name__ for kind in KINDS for _, some, _ in scenes_of(kind).values() for one in some})
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", action="append", default=[], choices=["kills", *names], help="all if not given")
    parser.add_argument("--times", type=int, default=4, help="how often a disaster that can come back does")
    parser.add_argument("--lasting", type=float, default=LONG_S, help="how many seconds a disaster really lasts")
    parser.add_argument("--url", default="sqlite", help="or 'postgresql': both ours, in a temporary folder; or any URL")
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    asked = parser.parse_args()
    if asked.url in KINDS:
        run_scenarios(asked.url, asked.scenario, asked.times, asked.lasting)
    if asked.scenario and "kills" not in asked.scenario:
        return 0
    chaos = {"workers": asked.workers, "jobs": asked.jobs, "seconds": asked.seconds, "seed": asked.seed}
    with tempfile.TemporaryDirectory() as folder:
        if asked.url == "postgresql":
            with start_postgres() as server:
                run_chaos(server.new_database(), Path(folder), **chaos)
        else:
            run_chaos(f"sqlite:///{folder}/jobs.db" if asked.url == "sqlite" else asked.url, Path(folder), **chaos)
    return 0


if __name__ == "__main__":
    sys.exit(main())
