"""Import the app once, fork runners from it, enforce their leases, reap them, and leave nothing behind.

Started by the worker as `python -m unstuck.runner.fork_server`. After the import it runs no user code. It is
one thread and one loop, and never blocks: a frozen worker must find its leases enforced.
"""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from unstuck import host
from unstuck.errors import ConfigError
from unstuck.runner import child, containment, linux, loader, messages, output, processes
from unstuck.runner.call import user_traceback
from unstuck.runner.cgroups import RunnerCgroup
from unstuck.runner.loader import load_app, manifest_of
from unstuck.runner.oom import OomEvidence, OomWatch, shared_counter
from unstuck.runner.packets import Channel
from unstuck.runner.status_page import StatusPage
from unstuck.runner.tasks import AppDefinition, Manifest

TICK_S = 0.2
FAREWELL_S = 5.0
MAX_REAPED_AT_ONCE = 64
LEASE_ENDED = "its lease had ended"


class Options(msgspec.Struct):
    """What the worker tells on the command line."""

    target: str
    control_fd: int
    worker_pid: int
    mark: int
    die_with_parent: bool
    """False when the worker's main thread did not start us: the signal follows the thread, not the process."""
    cgroup: bool = True
    url: str | None = None
    """The ledger to use instead of the app's."""
    directory: str | None = None
    """Where the worker started: the import of the app may have gone elsewhere."""


class _Runner(msgspec.Struct):
    runner_id: int
    slot: int
    pid: int
    cgroup: RunnerCgroup
    process: "subprocess.Popen[bytes] | None" = None
    why: str = ""
    killed: bool = False


class ForkServer:
    def __init__(self, options: Options, channel: Channel, app: AppDefinition, manifest: Manifest) -> None:
        self._options = options
        self._channel = channel
        self._app = app
        self._fork = manifest.fork
        self._containment = containment.detect(containment.mark_text(options.mark), cgroup=options.cgroup)
        self.manifest = msgspec.structs.replace(manifest, containment=self._containment.describe())
        self._equipment: messages.Configure | None = None
        self._status_page: StatusPage | None = None
        self._runners: dict[int, _Runner] = {}
        self._cgroups: list[RunnerCgroup] = []
        """Those of dead runners in which a process is still dying."""
        self._guests = frozenset(processes.children())
        """Processes that the import started; they belong to the app."""
        self._oom = OomWatch(shared_counter())
        self._counted_s = 0.0
        self._orphans_due = False
        """Somebody died, and what it left may have fallen to us."""
        self._ended = False
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        if options.die_with_parent and not linux.die_with_parent(signal.SIGTERM, options.worker_pid):
            self._ended = True

    def run(self) -> None:
        """Serve the worker until it disbands us or dies; then take everything below along."""
        poller = select.poll()
        poller.register(self._wake_in, select.POLLIN)
        while not self._ended and not self._channel.ended:
            poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.wants_write() else 0))
            poller.poll(TICK_S * 1000 if self._runners or self._cgroups else None)
            # Before anything else: we may have been frozen together with a lease that ended meanwhile.
            self._enforce_leases()
            self._drain_wake()
            self._reap()
            self._bound_crowds()
            self._oom.look(host.boottime_s())
            for message, fds in self._channel.receive():
                self._obey(messages.to_fork_server.decode(message), fds)
            self._channel.flush()
        self._disband()

    # Orders -----------------------------------------------------------------------------------

    def _obey(self, order: messages.ToForkServer, fds: list[int]) -> None:
        match order:
            case messages.Configure():
                self._equip(order)
            case messages.StartRunner():
                try:
                    self._open(order, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
            case messages.KillRunner():
                runner = self._runners.get(order.runner_id)
                if runner is not None:
                    self._kill(runner)
            case messages.Shutdown():
                self._ended = True

    def _equip(self, order: messages.Configure) -> None:
        self._status_page = StatusPage.open(Path(order.status_page), live_by_it=True)
        self._status_page.set_fork_server(os.getpid(), host.process_started(os.getpid()))
        self._status_page.set_mark(self._options.mark)
        self._equipment = order

    def _open(self, order: messages.StartRunner, fds: list[int]) -> None:
        status_page, equipment = self._status_page, self._equipment
        assert status_page is not None
        assert equipment is not None
        cgroup = self._containment.make_cgroup(order.runner_id, equipment.limits.max_processes)
        config = child.RunnerConfig(
            order.slot,
            order.kind,
            os.getpid(),
            equipment.worker_id,
            equipment.limits,
            equipment.status_page,
            cgroup,
            *fds,
        )
        try:
            runner = self._forked(order, config, status_page) if self._fork else self._spawned(order, config, fds)
        except OSError as error:
            self._containment.remove(cgroup)
            self._tell(
                messages.RunnerExited(order.runner_id, 0, None, why=f"a runner could not be started: {error.strerror}")
            )
            return
        self._runners[order.runner_id] = runner
        self._oom.watch_cgroup(cgroup.memory_path)
        status_page.set_runner(order.slot, runner.pid, host.process_started(runner.pid))
        pidfd = _pidfd(runner.pid)
        born = messages.RunnerStarted(order.runner_id, runner.pid, cgroup.memory_path)
        self._channel.send(messages.encoder.encode(born), [] if pidfd is None else [pidfd])
        if pidfd is not None:
            os.close(pidfd)

    def _forked(self, order: messages.StartRunner, config: child.RunnerConfig, status_page: StatusPage) -> _Runner:
        output.flush_standard_streams()
        pid = os.fork()
        if pid == 0:
            self._become(config, status_page)
        return _Runner(order.runner_id, order.slot, pid, config.cgroup)

    def _become(self, config: child.RunnerConfig, status_page: StatusPage) -> NoReturn:
        """Be the runner from here on: nothing of the fork server's may be touched or returned to."""
        try:
            signal.set_wakeup_fd(-1)
            child.isolate(config)
            os.close(self._channel.fileno())
            os.close(self._wake_in)
            os.close(self._wake_out)
            child.serve(config, self._app, status_page)
        finally:
            os._exit(child.EXIT_BROKEN)

    def _spawned(self, order: messages.StartRunner, config: child.RunnerConfig, fds: list[int]) -> _Runner:
        command = msgspec.json.encode(child.SpawnRequest(self._options.target, config, self._options.url)).decode()
        process = subprocess.Popen(
            [sys.executable, "-m", "unstuck.runner.child", command],
            stdin=subprocess.DEVNULL,
            stdout=config.stdout,
            stderr=config.stderr,
            pass_fds=fds,
            cwd=self._options.directory,
            start_new_session=True,
        )
        return _Runner(order.runner_id, order.slot, process.pid, config.cgroup, process)

    # Deaths -----------------------------------------------------------------------------------

    def _enforce_leases(self) -> None:
        if self._status_page is None:
            return
        now_s = host.boottime_s()
        for runner in self._runners.values():
            kill_at_s = self._status_page.kill_at_s(runner.slot)
            if kill_at_s and now_s >= kill_at_s and not runner.killed:
                runner.why = LEASE_ENDED
                self._kill(runner)

    def _bound_crowds(self) -> None:
        """End every runner that started more processes than one may."""
        now_s = host.boottime_s()
        if self._equipment is None or now_s - self._counted_s < TICK_S:
            return
        self._counted_s = now_s
        most = self._equipment.limits.max_processes
        for runner in self._runners.values():
            if not runner.killed and processes.over_process_limit(runner.pid, runner.cgroup, most):
                runner.why = processes.over_limit_text(most)
                if runner.cgroup.path:
                    self._containment.clear(runner.cgroup)
                else:
                    processes.kill_trees([runner.pid])
                self._kill(runner)

    def _kill(self, runner: _Runner) -> None:
        runner.killed = True
        try:
            os.kill(runner.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        except OSError:
            pass

    def _reap(self) -> None:
        by_pid = {runner.pid: runner for runner in self._runners.values()}
        more = False
        dead: list[tuple[_Runner, int, int, float]] = []
        for _ in range(MAX_REAPED_AT_ONCE):
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            pid = found.si_pid
            runner = by_pid.pop(pid, None)  # once: the number may be somebody else's as soon as it is reaped
            if runner is not None:
                # While the dead is not reaped its group's number cannot be given to anybody else.
                self._clear_group(runner)
            _, status, usage = os.wait4(pid, 0)
            self._orphans_due = True
            if runner is not None:
                dead.append((runner, status, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime))
        else:
            more = True  # the rest of a crowd must not delay what the worker waits to hear
            self._wake()
        # Together: how many died at one moment decides how far a count of kills explains each.
        struck = [runner.runner_id for runner, status, _, _ in dead if _is_plain_kill(runner, status)]
        for runner, status, max_rss_bytes, cpu_s in dead:
            evidence = OomEvidence(False)
            if runner.runner_id in struck:
                evidence = self._oom.explain(runner.cgroup.memory_path, len(struck), max_rss_bytes)
                struck.remove(runner.runner_id)
            self._runner_gone(runner, status, max_rss_bytes, cpu_s, evidence)
        if self._orphans_due and not more:
            self._orphans_due = False
            self._kill_orphans()
        if self._cgroups:
            self._cgroups = [cgroup for cgroup in self._cgroups if not self._containment.remove(cgroup)]

    def _clear_group(self, runner: _Runner) -> None:
        self._containment.clear(runner.cgroup)
        try:
            os.killpg(runner.pid, signal.SIGKILL)
        except OSError:
            pass

    def _runner_gone(self, runner: _Runner, status: int, max_rss_bytes: int, cpu_s: float, oom: OomEvidence) -> None:
        del self._runners[runner.runner_id]
        if runner.process is not None:
            runner.process.returncode = status  # reaped here: its own bookkeeping must not look for it
        entered = 0
        if self._status_page is not None:
            entered = self._status_page.entered(runner.slot)
            if self._status_page.occupant(runner.slot)[0] == runner.pid:
                self._status_page.clear_runner(runner.slot)
            kill_at_s = self._status_page.kill_at_s(runner.slot)
            if kill_at_s and os.WIFSIGNALED(status) and host.boottime_s() >= kill_at_s:
                runner.why = LEASE_ENDED
        if not runner.why and not self._fork and status == child.EXIT_NO_APP << 8:
            runner.why = "it could not import the app"
        self._oom.forget_cgroup(runner.cgroup.memory_path)
        if not self._containment.remove(runner.cgroup):
            self._cgroups.append(runner.cgroup)
        why = runner.why or oom.words
        exited = messages.RunnerExited(runner.runner_id, runner.pid, status, entered, max_rss_bytes, cpu_s, why)
        exited.oom, exited.oom_sure, exited.oom_words = oom.struck, oom.sure, oom.words
        self._tell(exited)

    def _kill_orphans(self) -> None:
        """Kill what fell to us from the dead. Their own children fall to us when they die: SIGCHLD comes again."""
        spared = {runner.pid for runner in self._runners.values()} | self._guests
        processes.kill_trees([pid for pid in processes.children() if pid not in spared])

    def _disband(self) -> None:
        for runner in self._runners.values():
            self._clear_group(runner)
            self._kill(runner)
        processes.kill_children()
        for cgroup in [*self._cgroups, *(runner.cgroup for runner in self._runners.values())]:
            self._containment.remove(cgroup)
        self._containment.close()

    # ------------------------------------------------------------------------------------------

    def _tell(self, message: messages.ToWorker) -> None:
        self._channel.send(messages.encoder.encode(message))

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"\0")
        except BlockingIOError:
            pass  # full: then we wake anyway

    def _drain_wake(self) -> None:
        try:
            while os.read(self._wake_in, 4096):
                pass
        except BlockingIOError:
            pass

    def _on_terminate(self, *_: object) -> None:
        # The kernel's word that the worker is dead. Told by anybody else while it lives (systemd tells every process
        # of a service to end), it is for the worker to decide: it may be draining.
        self._ended = os.getppid() != self._options.worker_pid


def _is_plain_kill(runner: _Runner, status: int) -> bool:
    """Say whether SIGKILL ended it, and not by us: then somebody else or the kernel did."""
    return not runner.killed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def main(options_text: str) -> int:
    options = msgspec.json.decode(options_text, type=Options)
    # While the app is imported user code runs here and nothing is below us: the plain way to die is right.
    if options.die_with_parent and not linux.die_with_parent(signal.SIGKILL, options.worker_pid):
        return 1
    linux.name_process("unstuck-fork")
    linux.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=options.control_fd))
    os.set_inheritable(channel.fileno(), False)
    output.install_routers()
    before = loader.descriptors()
    try:
        app = load_app(options.target, options.url)
        manifest = manifest_of(app, loader.why_not_fork(before))
    except ConfigError as error:
        return _give_up(channel, str(error))
    except BaseException as error:  # noqa: BLE001 - the app's own code ran; the user must read what it did
        return _give_up(channel, f"The app {options.target!r} is broken; mend this first:\n\n{user_traceback(error)}")
    output.flush_standard_streams()
    gc.collect()
    gc.freeze()  # what the import made is shared with every runner as long as nobody writes to it
    fork_server = ForkServer(options, channel, app, manifest)
    channel.send(messages.encoder.encode(messages.Ready(fork_server.manifest)))
    fork_server.run()
    return 0


def _give_up(channel: Channel, reason: str) -> int:
    channel.send(messages.encoder.encode(messages.ImportFailed(reason.encode(errors="backslashreplace").decode())))
    give_up_at = time.monotonic() + FAREWELL_S
    while channel.wants_write() and time.monotonic() < give_up_at:
        select.select([], [channel], [], TICK_S)
        channel.flush()
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1])
    output.flush_standard_streams()
    os._exit(code)  # threads that the app started must not keep us
