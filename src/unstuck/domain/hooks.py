"""Say which follow-up work the end of an attempt calls for, and what it is told."""

from typing import Any, Literal, get_args

from unstuck.domain.states import AttemptState, JobState

HookKind = Literal["success", "failure", "crash", "retry"]
HOOK_KINDS: tuple[HookKind, ...] = get_args(HookKind)
HOOK_SETTINGS = tuple(f"after_{kind}" for kind in HOOK_KINDS)
EVENT = "event"
"""The one argument of a hook, by name."""

Hooks = dict[str, Any]
"""By kind of end: the jobs that follow it, each as `client.hooking.follower` writes it."""


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
