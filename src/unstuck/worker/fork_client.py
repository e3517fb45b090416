"""The worker's handle on the room where user code runs: the fork server, and the runners it forks.

The worker itself never imports, runs or decodes anything of the user's: it talks to processes.
"""

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import assert_never

import msgspec

from unstuck import config
from unstuck.config import Settings
from unstuck.errors import ConfigError
from unstuck.runner import containment, messages
from unstuck.runner.fork_server import Options
from unstuck.runner.messages import JobMessage, Kind
from unstuck.runner.packets import Channel
from unstuck.runner.status_page import ASYNC, SYNC, StatusPage
from unstuck.runner.tasks import Manifest
from unstuck.worker.exit_status import exit_cause
from unstuck.worker.runner_process import Finished, RunnerProcess

__all__ = ["Finished", "ForkServerClient", "ForkServerDied", "JobMessage", "RunnerBorn", "RunnerExit", "RunnerProcess"]

CLOSE_TIMEOUT_S = 3.0
DEATH_S = 0.25
FORK_SERVER_DIED = "exit status unknown: the fork server died"


class RunnerBorn(msgspec.Struct):
    slot: int
    pid: int
    cgroup: str = ""
    """The cgroup in which its memory can be bounded (`MemoryLimits`); empty where there is none."""


class RunnerExit(msgspec.Struct):
    slot: int
    pid: int
    """0 when it could not even be started."""
    cause: str
    exit_code: int | None = None
    signal: int | None = None
    max_rss_bytes: int = 0
    cpu_s: float = 0.0
    entered: int = 0
    """The token it was in when it died, by the shared page; 0 for none."""
    runner_id: int = 0
    """Which runner of this slot: `RunnerProcess.runner_id`."""
    oom: bool = False
    """There is evidence that the kernel killed it for want of memory."""
    oom_sure: bool = False
    """That evidence can mean nothing else; where it is false the cause says "probably", and why."""
    oom_words: str = ""


class ForkServerDied(msgspec.Struct):
    cause: str


ForkServerEvent = RunnerBorn | RunnerExit | ForkServerDied


class ForkServerClient:
    """Start it, configure it, start runners. Limits that are not given here are those of the app's settings."""

    def __init__(
        self,
        target: str,
        *,
        url: str | None = None,
        max_output_bytes: int | None = None,
        max_payload_bytes: int | None = None,
        pulse_interval_s: float | None = None,
        import_timeout_s: float = 60.0,
        cgroup: bool = True,
    ) -> None:
        self.target = target
        self.url = url
        self.import_timeout_s = import_timeout_s
        self._asked = (max_output_bytes, max_payload_bytes, pulse_interval_s)
        self._limits = messages.Limits(0, 0, 1.0)
        self._cgroup = cgroup
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._mark = 0
        self._status_page: StatusPage | None = None
        self._runners: dict[int, RunnerProcess] = {}
        self._last_runner_id = 0
        self.importing = False
        """Whether it waits for the fork server to import the app, which has a time limit of its own."""

    # Life of the fork server ----------------------------------------------------------------------

    def start(self) -> Manifest:
        """Start the fork server and give what it found; ConfigError with the user's traceback when it cannot import.

        May be called again after `close`; then `configure` again."""
        assert self._channel is None, "the fork server runs already; close it first"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._mark = secrets.randbits(62) + 1
        options = Options(
            target=self.target,
            control_fd=theirs.fileno(),
            worker_pid=os.getpid(),
            mark=self._mark,
            # The death signal follows the thread that forked; the control socket tells the rest.
            die_with_parent=threading.current_thread() is threading.main_thread(),
            cgroup=self._cgroup,
            url=self.url,
            directory=_directory(),
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unstuck.runner.fork_server", msgspec.json.encode(options).decode()],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, containment.MARK_VARIABLE: containment.mark_text(self._mark)},
            )
        self._channel = Channel(ours)
        self.importing = True
        try:
            manifest = self._await_manifest()
            self._limits = self._limits_of(config.restore(manifest.settings))
            return manifest
        except BaseException:
            self.close()
            raise
        finally:
            self.importing = False

    def kill_fork_server(self) -> None:
        """End a fork server that does not answer; `read` tells of its end as of any other."""
        if self._process is not None:
            self._process.kill()

    def configure(self, status_page: StatusPage, worker_id: str) -> None:
        """Say which shared page the runners use from now on."""
        self._status_page = status_page
        self._tell(messages.Configure(str(status_page.path), worker_id, self._limits))

    def close(self) -> None:
        """Kill the fork server and everything below it, and wait for that, bounded."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.send(messages.encoder.encode(messages.Shutdown()))
            channel.close()
        if process is not None:
            _end(process)
            containment.kill_marked(self._mark)
        for runner in self._runners.values():
            runner.gone = True
            runner.close()
        self._runners.clear()

    # Events -----------------------------------------------------------------------------------

    def fileno(self) -> int:
        assert self._channel is not None, "the fork server is not running; start it first"
        return self._channel.fileno()

    def read(self) -> list[ForkServerEvent]:
        """Return what happened to the fork server and the runners since the last call."""
        channel = self._channel
        if channel is None or self._process is None:
            return []
        events: list[ForkServerEvent] = []
        channel.flush()
        for message, fds in channel.receive():
            event = self._understand(messages.to_worker.decode(message), fds)
            if event is not None:
                events.append(event)
        if channel.ended:
            events += self._fork_server_died()
        return events

    def start_runner(self, slot: int, kind: Kind) -> RunnerProcess:
        """Ask for a runner. Jobs may be sent at once: they wait in its sockets."""
        assert self._status_page is not None, "configure the fork server before you start runners"
        assert 0 <= slot < self._status_page.slots, f"slot {slot} is outside the trace"
        self._last_runner_id += 1
        runner_id = self._last_runner_id
        self._status_page.set_kind(slot, SYNC if kind == "sync" else ASYNC)
        runner = RunnerProcess(
            runner_id, slot, kind, self._limits.max_output_bytes, lambda: self._tell(messages.KillRunner(runner_id))
        )
        self._runners[runner_id] = runner
        self._tell(messages.StartRunner(runner_id, slot, kind), runner.descriptors())
        runner.handed_over()
        return runner

    # ------------------------------------------------------------------------------------------

    def _limits_of(self, settings: Settings) -> messages.Limits:
        output_bytes, payload_bytes, pulse_s = self._asked
        return messages.Limits(
            settings.max_output_bytes if output_bytes is None else output_bytes,
            settings.max_payload_bytes if payload_bytes is None else payload_bytes,
            settings.recovery.runner_heartbeat_interval_s if pulse_s is None else pulse_s,
            settings.max_processes,
        )

    def _await_manifest(self) -> Manifest:
        channel, process = self._channel, self._process
        assert channel is not None
        assert process is not None
        give_up_at = time.monotonic() + self.import_timeout_s
        while True:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise ConfigError(
                    f"Importing {self.target!r} took more than {self.import_timeout_s:g}s. Move slow work out of the "
                    "module's top level, into the tasks."
                )
            select.select([channel], [], [], left_s)
            for message, _ in channel.receive():
                answer = messages.to_worker.decode(message)
                if isinstance(answer, messages.Ready):
                    return answer.manifest
                if isinstance(answer, messages.ImportFailed):
                    raise ConfigError(answer.reason)
            if channel.ended:
                raise ConfigError(
                    f"Importing {self.target!r} ended its process: {_died(process)}. Import it by hand "
                    f"(python -X faulthandler -c 'import {self.target.partition(':')[0]}') to see why."
                )

    def _understand(self, message: messages.ToWorker, fds: list[int]) -> ForkServerEvent | None:
        match message:
            case messages.RunnerStarted():
                runner = self._runners.get(message.runner_id)
                if runner is None:
                    for fd in fds:
                        os.close(fd)
                    return None
                runner.born(message.pid, fds[0] if fds else None)
                return RunnerBorn(runner.slot, message.pid, message.cgroup)
            case messages.RunnerExited():
                runner = self._runners.pop(message.runner_id, None)
                if runner is None:
                    return None
                runner.gone = True
                cause, code, number = exit_cause(message.status, message.why)
                return RunnerExit(
                    runner.slot,
                    message.pid,
                    cause,
                    code,
                    number,
                    message.max_rss_bytes,
                    message.cpu_s,
                    message.entered,
                    message.runner_id,
                    message.oom,
                    message.oom_sure,
                    message.oom_words,
                )
            case messages.Ready() | messages.ImportFailed():
                return None
            case _:
                assert_never(message)

    def _fork_server_died(self) -> list[ForkServerEvent]:
        """Make sure that nothing of a dead fork server lives on, and tell the end of all its runners."""
        process, self._process = self._process, None
        assert process is not None
        runners, self._runners = self._runners, {}
        for runner in runners.values():
            runner.kill()
        cause = _died(process)
        _await_deaths(list(runners.values()))
        containment.kill_marked(self._mark)
        events: list[ForkServerEvent] = [ForkServerDied(cause)]
        for runner in runners.values():
            runner.gone = True
            entered = 0 if self._status_page is None else self._status_page.entered(runner.slot)
            events.append(
                RunnerExit(runner.slot, runner.pid or 0, FORK_SERVER_DIED, entered=entered, runner_id=runner.runner_id)
            )
        return events

    def _tell(self, message: messages.ToForkServer, fds: list[int] | None = None) -> None:
        if self._channel is not None and not self._channel.ended:
            self._channel.send(messages.encoder.encode(message), fds or [])


def _await_deaths(runners: list[RunnerProcess]) -> None:
    # They were killed just now and take a moment; whoever asks next must not find them running.
    poller = select.poll()
    waiting = {fd for runner in runners if (fd := runner.pidfd()) is not None}
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    give_up_at = time.monotonic() + DEATH_S
    while waiting and (left_s := give_up_at - time.monotonic()) > 0:
        for fd, _ in poller.poll(left_s * 1000):
            poller.unregister(fd)
            waiting.discard(fd)


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it is gone; runners are in it all the same
        return None


def _died(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=DEATH_S)
    except subprocess.TimeoutExpired:
        # It closed its end without ending: it is of no use any more.
        process.kill()
        process.wait()
        return "it let go of the worker and was killed"
    return exit_cause(-code if code < 0 else code << 8, "")[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
