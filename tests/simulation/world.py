"""Replace the reaper's hands on real processes by hands on simulated ones: kill, look at marks, forget."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.client import Client
from tests.simulation.database import Database, PostgresStorage, SqliteStorage, Storage
from tests.simulation.faults import Faults
from tests.simulation.invariants import Invariants, Violation
from tests.simulation.network import Cut, NetworkLink
from tests.simulation.scenario import Scenario, WorkerPlan, draw
from tests.simulation.scheduler import Machine, Process, Scheduler, stand_on
from tests.simulation.worker import QUEUE, TASK, Worker, WorkerProcess, keep_watch, see_neighbour_die

from unstuck.config import Recovery
from unstuck.domain.jitter import jitter
from unstuck.domain.liveness import Process as Presence
from unstuck.domain.schedules import ScheduleDefinition, Timing
from unstuck.domain.states import FINAL_STATES, HELD_STATES, JobState
from unstuck.ledger.contract.jobs import JobFilter, JobRecord, NewJob
from unstuck.ledger.contract.schedules import pack_job
from unstuck.ledger.contract.workers import NewWorker
from unstuck.maintenance.loop import Loop
from unstuck.recovery import leftovers
from unstuck.recovery.leftovers import Leftovers

_world: list["World"] = []


def look_into(world: "World") -> None:
    """Let the product's reaper see the processes of this world."""
    _world[:] = [world]
    leftovers.kill = _clear
    leftovers.kill_attempts = _kill_attempts
    leftovers.remove_page = _forget
    leftovers.remove_leftovers = _remove_leftovers


def _clear(status_page: str, *, fork_server: bool = True, within_s: float = 1.0) -> Leftovers:
    """Kill the family of a dead worker, and read which of its jobs had begun."""
    life = _world[0].lives[status_page]
    if life.id != status_page and life.process.alive:
        # It goes on under a new id, and what it runs now is not of the dead.
        return Leftovers()
    entered = frozenset(life.entered)
    if fork_server:
        life.end_family()
    else:
        for runner in list(life.given.values()):
            runner.dies()
    return Leftovers(True, entered)


def _kill_attempts(status_page: str, tokens: Collection[int]) -> int:
    life = _world[0].lives[status_page]
    found = [runner for token, runner in life.given.items() if token in tokens]
    for runner in found:
        runner.dies()
    return len(found)


def _remove_leftovers(ledger: object) -> int:
    """Leave the shared memory of real workers alone."""
    return 0


def _forget(trace: str) -> None:
    """Leave nothing behind: there is nothing."""


NEIGHBOUR_S = 0.005
"""How soon a neighbour sees a process end."""
FAR_S = 100.0
AFTERMATH = 1.3
"""How many timeouts are played after the last fault, at least: a wrong verdict needs one."""
AFTER_HEALING = 6.0
"""How many timeouts after everything is healed all jobs must have ended."""


class World:
    """Everything that there is in one run."""

    def __init__(self, scenario: Scenario, storage: Storage, tell: Callable[[float, str], None]) -> None:
        self.scenario = scenario
        self.recovery = scenario.recovery()
        self.hub = Scheduler()
        self.chance = random.Random(scenario.seed)
        self._tell = tell
        self.history = Invariants(scenario, lambda: self.hub.now_s, self.tell)
        self._pids = itertools.count(100)
        self._births = itertools.count(1)
        self.processes: dict[int, Process] = {}
        self.watchmen: dict[str, Loop] = {}
        self.roads: list[NetworkLink] = []
        self.lives: dict[str, WorkerProcess] = {}
        """By worker id, the process that has or had it."""
        self._cuts: dict[int, Cut] = {}
        self.machines = [self._new_machine(f"host{number}") for number in range(scenario.machines)]
        # Beside a file too: after a reboot it stands for a client that was started again and waits for the same jobs.
        self.client_machine = self._new_machine("client")
        server_machine = self.machines[0] if scenario.shape == "file" else self._new_machine("server")
        self.server = Database(
            self.hub, server_machine, storage, scenario.shape, self.chance, self.history.observe, self.tell
        )
        storage.notice_failovers(self.server.is_same)
        self.workers = [Worker(self, number, plan) for number, plan in enumerate(scenario.workers)]
        self.reapers: list[Process] = []
        self.faults = Faults(self)
        self.error: Exception | None = None

    # Parts --------------------------------------------------------------------------------------

    def _new_machine(self, name: str) -> Machine:
        machine = Machine(name, self.hub, boot_id=f"boot-{name}")
        machine.look = self._look
        return machine

    def machine_of_worker(self, number: int, index: int) -> Machine:
        """Return the machine of a worker: in a container it looks like another one with the same clocks."""
        machine = self.machines[index]
        if not self.scenario.containers:
            return machine
        return self._new_machine(f"box{number}")

    def new_process(self, name: str, machine: Machine) -> Process:
        process = Process(self.hub, name, machine, next(self._pids))
        self.processes[process.pid] = process
        return process

    def new_road(self, process: Process) -> NetworkLink:
        scenario = self.scenario
        road = NetworkLink(
            process,
            self.server,
            self.chance,
            deadline_s=scenario.deadline_s,
            latency_s=scenario.latency_s,
            pooled=scenario.pooled,
            late_share=scenario.late_share,
            ring=self._ring,
            on_hammering=lambda name: self.history.violate(
                "nobody hammers the ledger", f"{name} calls without a pause"
            ),
        )
        road.cuts = Cut(), self.cut_of(process.machine)
        self.server.on_lost.append(road.notice_loss)
        self.roads.append(road)
        return road

    def cut_of(self, machine: Machine) -> Cut:
        return self._cuts.setdefault(id(machine), Cut())

    def new_worker_id(self, number: int) -> str:
        return f"w{number}.{next(self._births)}"

    def expect(self, life: WorkerProcess, birth: NewWorker) -> None:
        self.lives[birth.id] = life
        self.history.expect(birth, life.process)

    def _look(self, pid: int, started: str) -> Presence:
        process = self.processes.get(pid)
        if process is None or process.started != started:
            return Presence.GONE
        return Presence.ALIVE if process.alive else Presence.GONE

    def _ring(self, words: set[str]) -> None:
        if f"queue:{QUEUE}" in words:
            for worker in self.workers:
                if worker.life is not None and worker.life.road.reaches:
                    self.hub.after(0.001, worker.life.ring)

    def tell(self, what: str) -> None:
        self._tell(self.hub.now_s, what)

    # Deaths -------------------------------------------------------------------------------------

    def crash(self, worker: Worker) -> None:
        """Kill a worker; its neighbours see it in milliseconds."""
        life = worker.life
        if life is None or not life.process.alive:
            return
        life.crash()
        if "neighbours" not in self.recovery.evidence:
            return
        for other in self.workers:
            near = other is not worker and other.up and other.machine is worker.machine and other.plan.reaps
            if near and other.life is not None:
                self._let_see(other.life, life.id)

    def _let_see(self, life: WorkerProcess, dead_id: str) -> None:
        def look() -> None:
            if life.process.alive:
                life.process.spawn("neighbours", lambda: see_neighbour_die(self, life.process, life.road, dead_id))

        self.hub.after(NEIGHBOUR_S, look)

    def start_reaper(self) -> None:
        process = self.new_process("reaper", self.machines[0])
        road = self.new_road(process)
        self.reapers.append(process)
        # It runs without the app, as `unstuck reaper` may: all that holds for a worker is stored with that worker.
        settings = Recovery(check_interval=self.scenario.check_interval_s, auto_disable_unhealthy=False)
        keep_watch(process, road, settings, f"reaper{len(self.reapers)}", lambda: True, self.watchmen)

    # The run ------------------------------------------------------------------------------------

    def run(self) -> None:
        look_into(self)
        scenario = self.scenario
        self.client = Client(self)
        if scenario.schedule_every_s is not None:
            self._know_schedule(scenario.schedule_every_s)
        for worker in self.workers:
            worker.start()
        for _ in range(scenario.reapers):
            self.start_reaper()
        self.faults.plan()
        self.hub.run(scenario.quiet_s + 0.001)
        self.tell("from here on nothing new goes wrong")
        quiet_from_s = self.hub.now_s
        self._replace_the_lost()
        self.hub.run(quiet_from_s + AFTERMATH * scenario.timeout_s)
        until_s = quiet_from_s + scenario.longest_s + self.bound_s
        while self.hub.now_s < until_s and self._undeclared(quiet_from_s):
            self.hub.run(self.hub.now_s + scenario.timeout_s / 4)
        self._check_silent(quiet_from_s)
        self.faults.heal()
        if scenario.schedule_every_s is not None:
            # Else there would always be one more job.
            self.server.storage.ledger.schedules.pause("clock", True, "the simulation")
        self.tell("everything is healed")
        self._replace_the_lost()
        self._wait_for_jobs()
        self._check_jobs()

    @property
    def bound_s(self) -> float:
        """How much later than its timeout a silent worker may be declared dead."""
        scenario = self.scenario
        return scenario.longest_s + 10 * scenario.check_interval_s + 2 * scenario.deadline_s + 10.0

    def _replace_the_lost(self) -> None:
        """Let somebody be there who works and reaps: promises are made for as long as anybody lives."""
        for worker in self.workers:
            if not worker.up:
                worker.start()
        well = [worker for worker in self.workers if worker.plan.reaps and self._is_well(worker)]
        if not well:
            self.start_reaper()
        if not any(self._is_well(worker) for worker in self.workers):
            self.add_worker(0)

    def add_worker(self, machine: int) -> None:
        """Start one more worker, which reaps too."""
        plan = WorkerPlan(machine % self.scenario.machines, slots=1, reaps=True)
        worker = Worker(self, len(self.workers), plan)
        self.workers.append(worker)
        worker.start()

    def _is_well(self, worker: Worker) -> bool:
        return worker.life is not None and worker.life.process.well and worker.life.road.reaches

    def _wait_for_jobs(self) -> None:
        scenario = self.scenario
        step_s = max(scenario.timeout_s / 2, 1.0)
        longest_s = sum(plan.runs_s * (plan.policy.max_crash_retries + 2) for plan in scenario.jobs)
        until_s = self.hub.now_s + AFTER_HEALING * scenario.longest_s + longest_s + 60.0
        while self.hub.now_s < until_s and not self._all_ended():
            self.hub.run(self.hub.now_s + step_s)
        until_s = self.hub.now_s + self.history.told_within_s
        while self.hub.now_s < until_s and self.client.waiting:
            self.hub.run(self.hub.now_s + scenario.timeout_s / 10)

    def _all_ended(self) -> bool:
        return all(job.state in FINAL_STATES or self._is_due_later(job) for job in self._stored().values())

    def _is_due_later(self, job: JobRecord) -> bool:
        """Return whether a job waits for the time that its caller named: after a step of the clock, an hour."""
        far = job.state is JobState.PENDING and job.run_at > self.server.machine.wall_s() + FAR_S
        return far and self.history.is_delayed(job.id)

    def _stored(self) -> dict[int, JobRecord]:
        ledger = self.server.storage.ledger
        return {job.id: job for job in ledger.jobs.list(JobFilter(limit=10_000))}

    # Checks -------------------------------------------------------------------------------------

    def _undeclared(self, quiet_from_s: float) -> list[str]:
        """Return the workers that have been silent since before the quiet, and that nobody has declared dead."""
        found = []
        for record in self.server.storage.ledger.workers.list(living_only=True):
            facts = self.history.workers.get(record.id)
            if facts is None or facts.beat_s is None or facts.beat_s >= quiet_from_s or self._is_left(record.id):
                continue
            found.append(f"{record.id} is {record.state} and was last heard {self.hub.now_s - facts.beat_s:.1f}s ago")
        return found

    def _check_silent(self, quiet_from_s: float) -> None:
        for what in self._undeclared(quiet_from_s):
            self.history.violate("every silent worker is declared dead", what)

    def _is_left(self, worker_id: str) -> bool:
        """Return whether the worker holds something that nobody may take: an operator decides, or a deadline."""
        held = self.server.storage.ledger.recovery.held_jobs(worker_id, 100)
        if not (self.recovery.auto_fail_stale_running and self.recovery.auto_requeue_stale_claimed) and held:
            return True
        return any(job.heartbeat_timeout_s is None for job in held)

    def _check_jobs(self) -> None:
        stored = self._stored()
        left = {job.id for job in stored.values() if self._is_due_later(job)}
        if not (self.recovery.auto_fail_stale_running and self.recovery.auto_requeue_stale_claimed):
            left |= {job.id for job in stored.values() if job.state in HELD_STATES}
        self.history.check_jobs(stored, left, self.client.waiting)

    def _know_schedule(self, every_s: float) -> None:
        job = NewJob(TASK, QUEUE, b"tick", payload_type="bytes")
        timing = Timing(every_s=every_s)
        known = ScheduleDefinition("clock", TASK, QUEUE, timing, pack_job(job), "skip")
        with stand_on(self.server.machine):
            self.server.storage.ledger.schedules.know([known], "operator")

    def close(self) -> None:
        """End every process: nothing of this run may go on in the next."""
        for process in list(self.processes.values()):
            process.kill()


STORAGES: dict[str, Callable[[Recovery], Any]] = {
    "sqlite": SqliteStorage,
    "postgresql": PostgresStorage,
}
LEDGERS = tuple(STORAGES)


@dataclass
class Result:
    scenario: Scenario
    violations: list[Violation]
    story: list[str]
    verdicts: Counter[str] = field(default_factory=Counter)
    events: int = 0
    """How many steps it took."""


def run_seed(seed: int, ledger: str = "sqlite") -> Result:
    return run_scenario(draw_for(seed, ledger), ledger)


def draw_for(seed: int, ledger: str) -> Scenario:
    """Draw what this ledger can play."""
    return draw(seed, "server" if ledger == "postgresql" else None)


def run_scenario(scenario: Scenario, ledger: str = "sqlite") -> Result:
    """Play it; the same scenario always plays the same way."""
    story: list[str] = []
    storage = STORAGES[ledger](scenario.recovery())
    world = World(scenario, storage, lambda at_s, what: story.append(f"{at_s:9.3f}s  {what}"))
    # The product draws too: pauses, delays of retries.
    random.seed(scenario.seed)
    jitter.seed(scenario.seed)
    try:
        with stand_on(world.server.machine):
            try:
                world.run()
            except Exception as error:
                world.history.violate("nothing fails by surprise", f"{type(error).__name__}: {error}")
                world.error = error
    finally:
        world.close()
        storage.close()
    return Result(scenario, world.history.violations, story, world.history.verdicts, world.hub.events)
