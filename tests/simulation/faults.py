"""Let go wrong what a scenario says, and mend it when its time is over."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.database import Flaky
from tests.simulation.network import NetworkLink
from tests.simulation.scenario import Fault
from tests.simulation.scheduler import Machine, Process
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.world import World

Mend = Callable[[], None]
BACK_S = 0.3
"""How soon a supervisor replaces a worker that shut down."""


def nothing() -> None:
    """Mend what mends itself."""


class Faults:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._lasting: list[Mend] = []

    def plan(self) -> None:
        """Put every fault into the queue of events."""
        for number, fault in enumerate(self._world.scenario.faults):
            if fault.kind == "failover with lag":
                self._world.hub.at(fault.at_s - fault.size, self._saver(number))
            self._world.hub.at(fault.at_s, self._beginner(number, fault))

    def heal(self) -> None:
        """Mend what lasted until now."""
        lasting, self._lasting = self._lasting, []
        for mend in lasting:
            mend()
        self._note()

    def _saver(self, number: int) -> Callable[[], None]:
        return lambda: self._world.server.save(number)

    def _beginner(self, number: int, fault: Fault) -> Callable[[], None]:
        def begin() -> None:
            self._world.tell(f"fault: {fault}")
            mend = self._apply(number, fault)
            self._note()
            if fault.for_s is None:
                self._lasting.append(mend)
            else:
                self._world.hub.after(fault.for_s, lambda: self._end(fault, mend))

        return begin

    def _end(self, fault: Fault, mend: Mend) -> None:
        mend()
        self._note()
        self._world.tell(f"over: {fault.kind}")

    def _note(self) -> None:
        self._world.history.note_writable(self._world.server.writable)

    # ------------------------------------------------------------------------------------------

    def _apply(self, number: int, fault: Fault) -> Mend:
        world = self._world
        worker = world.workers[fault.whom % len(world.workers)]
        match fault.kind:
            case "crash":
                world.crash(worker)
                return worker.start
            case "freeze":
                return self._freeze(self._processes(worker, runners=fault.whom % 2 == 0))
            case "freeze machine":
                return self._freeze(self._on(self._machines(fault.whom)))
            case "pause reaper":
                return self._pause_reaper(fault)
            case "runner dies":
                for runner in list(worker.life.given.values() if worker.life is not None else ()):
                    runner.dies()
                return nothing
            case "deploy":
                return self._deploy(worker, fault.for_s or 0.0)
            case "slow calls":
                return self._slow(fault)
            case "error before commit" | "error after commit":
                return self._make_flaky(fault, worker)
            case "hung calls":
                return self._hang(worker)
            case "outage":
                return self._stop_server()
            case "server restart":
                world.server.restart()
                return nothing
            case "read-only":
                world.server.read_only += 1
                return self._writable_again
            case "user lock":
                world.server.locked += 1
                return self._unlock
            case "hung server":
                world.server.hung += 1
                return self._unhang
            case "failover" | "failover with lag":
                return self._fail_over(number, fault)
            case "clock step":
                return self._step(self._machines(fault.whom), fault.size)
            case "server clock step":
                return self._step_server(fault.size)
            case "reboot":
                return self._reboot()
            case "cut both ways" | "cut to the server" | "cut from the server" | "cut a machine":
                return self._cut(fault, worker)
            case "connection limit":
                return self._limit_connections(worker)
            case _:
                raise AssertionError(f"unknown fault {fault.kind!r}")

    # Processes ----------------------------------------------------------------------------------

    def _processes(self, worker: Worker, *, runners: bool) -> list[Process]:
        life = worker.life
        if life is None:
            return []
        family = [runner.process for runner in life.given.values()] if runners else []
        return [life.process, *([life.fork_server] if runners else []), *family]

    def _machines(self, whom: int) -> list[Machine]:
        """Return a machine, with the containers on it."""
        world = self._world
        index = whom % len(world.machines)
        boxes = [worker.machine for worker in world.workers if worker.plan.machine == index]
        return list({id(machine): machine for machine in (world.machines[index], *boxes)}.values())

    def _on(self, machines: list[Machine]) -> list[Process]:
        client = self._world.client.process
        found = [one for one in self._world.processes.values() if one.alive and one is not client]
        return [one for one in found if any(one.machine is machine for machine in machines)]

    def _freeze(self, processes: list[Process]) -> Mend:
        for process in processes:
            process.freeze()

        def thaw() -> None:
            for process in processes:
                process.thaw()

        return thaw

    def _pause_reaper(self, fault: Fault) -> Mend:
        alone = [process for process in self._world.reapers if process.alive]
        if alone:
            return self._freeze([alone[fault.whom % len(alone)]])
        worker = self._world.workers[fault.whom % len(self._world.workers)]
        return self._freeze(self._processes(worker, runners=False))

    def _deploy(self, worker: Worker, grace_s: float) -> Mend:
        if worker.life is None or not worker.life.process.alive:
            return worker.start
        life = worker.life
        life.drain(grace_s)

        def replace() -> None:
            if life.process.alive and worker.life is life:
                self._world.crash(worker)
            self._world.hub.after(BACK_S, worker.start)

        return replace

    def _reboot(self) -> Mend:
        world = self._world
        machines = self._machines(0)
        for worker in world.workers:
            if worker.life is not None:
                worker.life.crash()
                worker.life.end_family()
        alone = [process for process in world.reapers if process.alive]
        for process in alone:
            process.kill()
        for machine in machines:
            machine.booted_s = world.hub.now_s
            machine.boot_id += "'"

        def begin_again() -> None:
            for worker in world.workers:
                worker.start()
            for _ in alone:
                world.start_reaper()

        return begin_again

    # Roads --------------------------------------------------------------------------------------

    def _slow(self, fault: Fault) -> Mend:
        roads = [road for road in self._world.roads if fault.whom % 3 == 0 or self._is_of(road, fault.whom)]
        for road in roads:
            road.slow *= fault.size

        def hurry() -> None:
            for road in roads:
                road.slow /= fault.size

        return hurry

    def _is_of(self, road: NetworkLink, whom: int) -> bool:
        worker = self._world.workers[whom % len(self._world.workers)]
        return worker.life is not None and road is worker.life.road

    def _make_flaky(self, fault: Fault, worker: Worker) -> Mend:
        owner = None if fault.whom % 3 == 0 or worker.life is None else worker.life.process.name
        flaky = Flaky(owner, fault.size, fault.kind == "error after commit")
        self._world.server.flaky.append(flaky)
        return lambda: self._world.server.flaky.remove(flaky)

    def _hang(self, worker: Worker) -> Mend:
        life = worker.life
        if life is None:
            return nothing
        life.road.hung += 1

        def go_on() -> None:
            life.road.hung -= 1
            life.road.mend()

        return go_on

    def _cut(self, fault: Fault, worker: Worker) -> Mend:
        world = self._world
        if fault.kind == "cut a machine":
            machines = self._machines(fault.whom)
            roads = [road for road in world.roads if any(road.process.machine is one for one in machines)]
            cuts = [world.cut_of(machine) for machine in machines]
        else:
            roads = [worker.life.road] if worker.life is not None else []
            cuts = [road.cuts[0] for road in roads]
        there, back = fault.kind != "cut from the server", fault.kind != "cut to the server"
        for cut in cuts:
            cut.there += there
            cut.back += back
        over: list[bool] = []
        for road in roads:
            self._expire(road, over)

        def mend() -> None:
            over.append(True)
            for cut in cuts:
                cut.there -= there
                cut.back -= back
            for road in roads:
                road.mend()

        return mend

    def _expire(self, road: NetworkLink, over: list[bool]) -> None:
        """Let the server give up the sessions of a road that is cut, some time after it heard of them last."""
        world = self._world
        silent_s = world.hub.now_s - road.active_s
        if over or not road.process.alive:
            return
        if silent_s < world.scenario.keepalive_s:
            world.hub.after(world.scenario.keepalive_s - silent_s + 0.001, lambda: self._expire(road, over))
        else:
            road.forget_session()

    def _limit_connections(self, worker: Worker) -> Mend:
        world = self._world
        world.server.full += 1
        if worker.life is not None:
            worker.life.road.terminate_sessions()

        def free() -> None:
            world.server.full -= 1

        return free

    # The server ---------------------------------------------------------------------------------

    def _stop_server(self) -> Mend:
        server = self._world.server
        server.down += 1
        server.lose_sessions()

        def start() -> None:
            server.down -= 1
            server.restart()

        return start

    def _writable_again(self) -> None:
        self._world.server.read_only -= 1

    def _unlock(self) -> None:
        self._world.server.locked -= 1
        self._world.server.release()

    def _unhang(self) -> None:
        self._world.server.hung -= 1
        self._world.server.release()

    def _fail_over(self, number: int, fault: Fault) -> Mend:
        """Stop the primary, and let a standby take over at the end of the fault. It was started long ago.

        Sometimes the machine of the primary is gone without closing a connection, and sometimes one more worker starts
        with the new primary, as in a rolling restart."""
        world, server = self._world, self._world.server
        server.down += 1
        if fault.whom % 2 == 0:
            server.vanish()
        else:
            server.lose_sessions()

        def promote() -> None:
            server.down -= 1
            lagged = fault.kind == "failover with lag" and server.can_lag(number)
            server.fail_over(number if lagged else None, started_s=-1.0)
            if lagged:
                world.history.lose(fault.at_s - fault.size, fault.at_s)
            if fault.whom % 2 == 0:
                world.add_worker(fault.whom // 2)

        return promote

    # Clocks -------------------------------------------------------------------------------------

    def _step(self, machines: list[Machine], size_s: float) -> Mend:
        self._set_clocks(machines, size_s)
        return lambda: self._set_clocks(machines, -size_s)

    def _set_clocks(self, machines: list[Machine], size_s: float) -> None:
        for machine in machines:
            machine.step_s += size_s
        history = self._world.history
        history.forget_ticks()
        if any(machine is self._world.server.machine for machine in machines):
            history.note_step(size_s)

    def _step_server(self, size_s: float) -> Mend:
        self._set_clocks([self._world.server.machine], size_s)
        return nothing
