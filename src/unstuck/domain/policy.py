"""The rules that are stored with a job, and which hooks its end calls for."""

from typing import Any, Literal, get_args

import msgspec

from unstuck.domain.limits import KeyRule
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.units import brief
from unstuck.errors import ConfigError

HookKind = Literal["success", "failure", "crash", "retry"]
HOOK_KINDS: tuple[HookKind, ...] = get_args(HookKind)
HOOK_SETTINGS = tuple(f"after_{kind}" for kind in HOOK_KINDS)
EVENT = "event"
"""The one argument of a hook, by name."""

Hooks = dict[str, Any]
"""By kind of end: the jobs that follow it, each as `client.hooks.hook_spec` writes it."""


def fires(ended: AttemptState, state: JobState) -> list[HookKind]:
    """Give the kinds of hooks that fire where an attempt ended so and left its job in this state.

    What was cancelled, drained or suspended fires none: somebody asked for it, or it goes on."""
    kinds: list[HookKind] = []
    if ended is AttemptState.SUCCEEDED and state is JobState.SUCCEEDED:
        kinds.append("success")
    if state in (JobState.FAILED, JobState.QUARANTINED):
        kinds.append("failure")
    if ended is AttemptState.CRASHED:
        kinds.append("crash")
    if state is JobState.PENDING and ended in (AttemptState.FAILED, AttemptState.CRASHED):
        kinds.append("retry")
    return kinds


OnCrash = Literal["fail", "retry"]
Overlap = Literal["bounded", "never"]

DEFAULT_MAX_CRASH_RETRIES = 3
MAX_CRASH_RETRIES = 1000
LEAST_SILENCE_S = 0.5
LEAST_MEMORY_BYTES = 16 * 1024 * 1024
TASK_SETTINGS = (
    "name",
    "queue",
    "retry",
    "on_crash",
    "max_crash_retries",
    "timeout",
    "heartbeat",
    "heartbeat_interval",
    "heartbeat_timeout",
    "overlap",
    "stall_timeout",
    "interpreter_timeout",
    "memory_limit",
    "concurrency_key",
    "concurrency_limit",
    "expires",
    "keep",
    *HOOK_SETTINGS,
)
"""The names of the settings that a task has, wherever it is registered."""


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rules of one job. Defaults are left out when stored, so most jobs store `{}`."""

    retry: RetryRule = RetryRule()
    on_crash: OnCrash = "fail"
    max_crash_retries: int = DEFAULT_MAX_CRASH_RETRIES
    timeout_s: float | None = None
    heartbeat: bool = True
    heartbeat_interval_s: float | None = None
    """None: the app's."""
    heartbeat_timeout_s: float | None = None
    """None: the app's `running_stale_after`."""
    overlap: Overlap = "bounded"
    stall_timeout_s: float | None = None
    """How long it may go without `ctx.heartbeat()` or `ctx.progress(…)`."""
    interpreter_timeout_s: float | None = None
    """How long no Python code may run in its process; None: C code may take as long as it needs."""
    memory_limit_bytes: int | None = None
    order: KeyRule = KeyRule()
    """What its enqueues say of lines, expiry and keeping where they say nothing themselves."""
    hidden_args: tuple[int, ...] = ()
    """Places of arguments that no door shows: their parameters are called like secrets."""
    hidden_args_from: int | None = None
    """From this place on none is shown: `*tokens`."""
    auto_requeue_stale_claimed: bool = True
    auto_fail_stale_running: bool = True
    """The app's, when the job was enqueued. Off, here or for its worker: a silent worker keeps it for an operator."""
    hooks: Hooks | None = None
    """What follows its ends. Only with the task: a job has its own copy beside its policy."""

    def hides_place(self, place: int) -> bool:
        rest = self.hidden_args_from
        return place in self.hidden_args or (rest is not None and place >= rest)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Policy)
_DEFAULT = Policy()


def encode_policy(policy: Policy) -> bytes:
    return b"" if policy == _DEFAULT else _encoder.encode(policy)


def without_hooks(policy: Policy) -> tuple[Policy, Hooks | None]:
    """Part the policy of a task into the rules of a job and what follows its ends."""
    return (policy, None) if policy.hooks is None else (msgspec.structs.replace(policy, hooks=None), policy.hooks)


def decode_policy(stored: bytes | None) -> Policy:
    """Give the stored rules, or the careful default where a version that we do not know wrote them.

    A job must end all the same, and a worker that died of reading it would leave it to kill the next one."""
    try:
        return _decoder.decode(stored) if stored else _DEFAULT
    except msgspec.MsgspecError:
        return _DEFAULT


def is_readable(stored: bytes | None) -> bool:
    """Say whether stored rules can be read; those that cannot are replaced by the careful default."""
    try:
        return not stored or _decoder.decode(stored) is not None
    except msgspec.MsgspecError:
        return False


def check_heartbeat(owner: str, interval_s: float, timeout_s: float) -> None:
    """Refuse a timeout that one late beat would break."""
    if interval_s <= 0 or timeout_s <= 0:
        raise ConfigError(f"{owner} needs a heartbeat interval and timeout above zero.")
    if interval_s > timeout_s / 2:
        raise ConfigError(
            f"{owner} has unsafe heartbeat config. Interval ({_plain(interval_s)}) must be <= half of "
            f"timeout ({_plain(timeout_s)}) to prevent false positives."
        )


LONGEST_PULSE_S = 1.0
"""A runner gives a sign at least this often, whatever `runner_heartbeat_interval` says."""


def check_runner_heartbeat(owner: str, interval_s: float, timeout_s: float, timeout: str) -> None:
    """Refuse a threshold for running jobs that is shorter than two heartbeats of their runner."""
    if interval_s > LONGEST_PULSE_S and timeout_s < 2 * interval_s:
        raise ConfigError(
            f"{owner} has unsafe heartbeat config. {timeout} ({_plain(timeout_s)}) must be at least twice "
            f"runner_heartbeat_interval ({_plain(interval_s)}) to prevent false positives."
        )


def check_policy(
    task: str,
    policy: Policy,
    *,
    app_interval_s: float,
    app_timeout_s: float,
    pulse_interval_s: float = 1.0,
    is_async: bool = False,
) -> None:
    """Refuse what would lose or doubt healthy jobs, when the task is built and not at night."""
    owner = f"Task {task!r}"
    if policy.on_crash not in ("fail", "retry"):
        raise ConfigError(f"{owner}: on_crash must be 'fail' or 'retry', not {policy.on_crash!r}.")
    if policy.overlap not in ("bounded", "never"):
        raise ConfigError(f"{owner}: overlap must be 'bounded' or 'never', not {policy.overlap!r}.")
    retries = policy.max_crash_retries
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= MAX_CRASH_RETRIES:
        raise ConfigError(
            f"{owner}: max_crash_retries must be a whole number from 0 to {MAX_CRASH_RETRIES}, not {retries!r}."
        )
    if not isinstance(policy.heartbeat, bool):
        raise ConfigError(f"{owner}: heartbeat must be true or false, not {policy.heartbeat!r}.")
    if policy.timeout_s is not None and policy.timeout_s <= 0:
        raise ConfigError(f"{owner}: timeout must be above zero.")
    for name, value_s in (
        ("stall_timeout", policy.stall_timeout_s),
        ("interpreter_timeout", policy.interpreter_timeout_s),
    ):
        if value_s is not None and value_s < LEAST_SILENCE_S:
            raise ConfigError(f"{owner}: {name} must be at least {brief(LEAST_SILENCE_S)}, or a busy machine ends it.")
    if policy.interpreter_timeout_s is not None and pulse_interval_s > policy.interpreter_timeout_s / 2:
        raise ConfigError(
            f"{owner}: interpreter_timeout ({brief(policy.interpreter_timeout_s)}) must be at least twice the "
            f"runner_heartbeat_interval ({brief(pulse_interval_s)}), or healthy code looks silent."
        )
    if policy.memory_limit_bytes is not None and is_async:
        raise ConfigError(
            f"{owner} is async and has a memory_limit: async jobs share a process, and nobody can tell whose memory "
            "it is. Make it a sync task, or limit the whole worker."
        )
    if policy.memory_limit_bytes is not None and policy.memory_limit_bytes < LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"{owner}: memory_limit must be at least 16MB, not {policy.memory_limit_bytes} bytes: "
            "Python itself needs as much. Write it as '512MB' or '2GiB'."
        )
    if not policy.heartbeat:
        if policy.timeout_s is None:
            raise ConfigError(
                f"{owner} has heartbeat=False and no timeout: if its host were lost it would never end. "
                "Give it timeout=…, or leave the heartbeat on."
            )
        return
    timeout_s = app_timeout_s if policy.heartbeat_timeout_s is None else policy.heartbeat_timeout_s
    check_heartbeat(
        owner, app_interval_s if policy.heartbeat_interval_s is None else policy.heartbeat_interval_s, timeout_s
    )
    check_runner_heartbeat(owner, pulse_interval_s, timeout_s, "heartbeat_timeout")


def _plain(value_s: float) -> str:
    # The seed writes "60s" and "100s"; below a second milliseconds read better.
    return f"{value_s:g}s" if value_s >= 1 else brief(value_s)
