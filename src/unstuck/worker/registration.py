"""Give a worker its identity: a random id that is never reused, and the facts that prove its life."""

import os
import secrets
import time
from typing import Any

import msgspec

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.policy import encode_policy
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import NewWorker
from unstuck.runner import containment
from unstuck.runner.status_page import status_page_path
from unstuck.runner.tasks import Manifest
from unstuck.version import VERSION

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ID_CHARS = 12


def new_worker_id() -> str:
    """Make an id of 60 random bits, without letters that people mix up."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))


def heartbeat_interval_s(settings: Settings, manifest: Manifest) -> float:
    """Beat as often as the most demanding task asks: there is one beat for all of them."""
    asked = [task.policy.heartbeat_interval_s for task in manifest.tasks if task.policy.heartbeat_interval_s]
    return min([settings.recovery.heartbeat_interval_s, *asked])


def registration_of(
    worker_id: str,
    *,
    name: str | None,
    settings: Settings,
    manifest: Manifest,
    queues: tuple[str, ...],
    concurrency: int,
    metadata: dict[str, Any],
) -> NewWorker:
    """Write down who this process is."""
    pid = os.getpid()
    recovery = settings.recovery
    return NewWorker(
        id=worker_id,
        name=name or f"{host.hostname()}-{pid}",
        host=host.hostname(),
        pid=pid,
        boot_id=host.boot_id(),
        pid_namespace=host.pid_namespace(),
        process_started=host.process_started(pid),
        queues=queues,
        tasks=tuple(
            TaskRecord(task.name, task.queue, encode_policy(task.policy), task.is_async) for task in manifest.tasks
        ),
        concurrency=concurrency,
        version=VERSION,
        heartbeat_interval_s=heartbeat_interval_s(settings, manifest),
        suspect_after_s=recovery.claimed_stale_after_s,
        running_stale_after_s=recovery.running_stale_after_s,
        metadata=metadata,
        status_page=str(status_page_path(worker_id)),
        rules=recovery.rules,
    )


def self_description(settings: Settings, manifest: Manifest, *, reaper: bool) -> dict[str, Any]:
    """Give what the doctor compares between workers: by which settings this one lives, and in what containment."""
    recovery = settings.recovery
    description = {
        "reaper": reaper,
        "containment": manifest.containment,
        "oom_group": containment.oom_group(),
        "settings": {
            "heartbeat_interval_s": recovery.heartbeat_interval_s,
            "heartbeat_timeout_s": recovery.heartbeat_timeout_s,
            "running_stale_after_s": recovery.running_stale_after_s,
            "check_interval_s": recovery.check_interval_s,
            "notify": settings.notify,
        },
    }
    if manifest.schedules:
        description["schedules"] = [one.fingerprint for one in manifest.schedules]
    return {name: value for name, value in description.items() if value is not None}


def with_clock(born: NewWorker) -> NewWorker:
    """Add what our wall clock says now: the ledger writes its own time beside it, and the two can be compared."""
    return msgspec.structs.replace(born, metadata={**born.metadata, "clock_at": time.time()})
