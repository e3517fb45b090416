"""Know which foreign workers there are: register them, find them by id or name, and let nobody else speak for them."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import msgspec

from unstuck import host
from unstuck.config import HttpSettings, Settings
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.endings import storable_text
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import Policy, check_heartbeat, check_policy, decode_policy, encode_policy
from unstuck.domain.retry import Retry, RetryRule
from unstuck.domain.states import LIVE_STATES, Transport
from unstuck.domain.text import checked_name
from unstuck.domain.units import seconds
from unstuck.errors import ConfigError, NameTaken
from unstuck.http.problems import Problem
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import NewWorker, WorkerRecord
from unstuck.recovery.reap import Reaper
from unstuck.remote.explain import worker_gone_problem
from unstuck.remote.messages import MAX_METADATA_BYTES, RegisterBody, TaskBody
from unstuck.worker.registration import new_worker_id

DEFAULT_QUEUE = "default"
MAX_KEPT = 20_000
MAX_ID_CHARS = 64
MAX_KNOWN_TASKS = 10_000
LEAST_TIMEOUT_S = 1.0
BEATS_PER_TIMEOUT = 4
SAID_S = 60.0
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_CHARS = 12


@dataclass(frozen=True)
class RemoteWorker:
    """Who a foreign worker is. None of it changes while it lives."""

    id: str
    name: str
    owner: str | None
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    interval_s: float
    timeout_s: float


class Registry:
    """Remembers who sits where, so that a beat is one call to the ledger. What is dead is found out by beating."""

    def __init__(self, settings: Settings, http: HttpSettings) -> None:
        self._settings = settings
        self._http = http
        self._lock = threading.Lock()
        self._known: OrderedDict[str, RemoteWorker] = OrderedDict()
        self._by_name: dict[str, str] = {}
        self._said: dict[str, tuple[dict[str, Any], float]] = {}

    # Finding ------------------------------------------------------------------------------------

    def known(self, key: str) -> RemoteWorker | None:
        """Give the seat of an id or a name, if it is remembered."""
        with self._lock:
            worker = self._known.get(key) or self._known.get(self._by_name.get(key, ""))
            if worker is not None:
                self._known.move_to_end(worker.id)
            return worker

    def find(self, ledger: Ledger, worker_id: str, caller: Caller) -> RemoteWorker:
        """Give the seat of a worker that the caller may speak for."""
        worker = self.known_id(worker_id)
        if worker is None:
            record = ledger.workers.remote(worker_id) if could_be_id(worker_id) else None
            if record is None or record.transport is not Transport.HTTP:
                raise Problem(
                    404,
                    "not_found",
                    f"There is no worker {worker_id!r} over HTTP.",
                    cure="Register with POST /api/v1/workers and use the id that it answers.",
                )
            worker = self.keep(record)
        return allowed(worker, caller)

    def known_id(self, worker_id: str) -> RemoteWorker | None:
        with self._lock:
            return self._known.get(worker_id)

    def keep(self, record: WorkerRecord) -> RemoteWorker:
        worker = RemoteWorker(
            record.id,
            record.name,
            record.owner,
            record.queues,
            record.tasks,
            record.heartbeat_interval_s,
            record.suspect_after_s,
        )
        with self._lock:
            self._known[worker.id] = worker
            if record.state in LIVE_STATES:
                self._by_name[worker.name] = worker.id
            while len(self._known) > MAX_KEPT:
                _, old = self._known.popitem(last=False)
                self._forget_name(old)
        return worker

    def forget(self, worker: RemoteWorker) -> None:
        with self._lock:
            self._known.pop(worker.id, None)
            self._forget_name(worker)

    def news(self, worker: RemoteWorker, metadata: dict[str, Any]) -> dict[str, Any] | None:
        """Return the metadata if they are new, so that most beats write nothing but the beat. Those that were said a
        while ago count as new: another server may have written others meanwhile."""
        now_s = time.monotonic()
        with self._lock:
            said, at_s = self._said.get(worker.id, (None, 0.0))
            if said == metadata and now_s < at_s + SAID_S:
                return None
            self._said[worker.id] = (metadata, now_s)
            return metadata

    def unsay(self, worker: RemoteWorker) -> None:
        """Take the next metadata for new, whatever they are."""
        with self._lock:
            self._said.pop(worker.id, None)

    def _forget_name(self, worker: RemoteWorker) -> None:
        self._said.pop(worker.id, None)
        if self._by_name.get(worker.name) == worker.id:
            del self._by_name[worker.name]

    # Registering --------------------------------------------------------------------------------

    def register(self, ledger: Ledger, body: RegisterBody, caller: Caller, address: str) -> WorkerRecord:
        """Write a worker down; repeated with the same `instance` it gives the same one."""
        name = checked_name(body.name, "Worker") if body.name else f"http-{new_worker_id()}"
        worker_id = new_worker_id() if body.instance is None else _id_of(caller.token_id, name, body.instance)
        new_worker = self._new_worker(ledger, worker_id, name, caller, body, address)
        for _ in range(2):
            write_down(ledger, new_worker)
            record = ledger.workers.remote(worker_id)
            if record is not None:
                if record.state not in LIVE_STATES:
                    raise worker_gone_problem(record, "Register with another `instance`.")
                ledger.notify({"workers"})
                self.keep(record)
                return record
            standing = ledger.workers.find_remote(name)
            if standing is not None and standing.state in LIVE_STATES:
                self._make_room(ledger, standing, body, caller)
        raise Problem(503, "busy", f"Others register as {name!r} just now. Try again.", headers={"Retry-After": "1"})

    def _make_room(self, ledger: Ledger, standing: WorkerRecord, body: RegisterBody, caller: Caller) -> None:
        worker = allowed(self.keep(standing), caller)
        if not body.replace:
            raise Problem(
                409,
                "name_taken",
                f"A worker named {worker.name!r} lives ({worker.id}, last heard {standing.silent_s:.1f}s ago).",
                cure="Choose another name. If it is this very worker, started anew, send replace: true.",
                id=worker.id,
            )
        evidence = "a worker of the same name was started in its place"
        Reaper(ledger, self._settings.recovery, by=caller.name).report_death(worker.id, Detector.OPERATOR, evidence)
        self.forget(worker)

    def reopen(
        self,
        ledger: Ledger,
        name: str,
        last: WorkerRecord | None,
        metadata: dict[str, Any] | None,
        caller: Caller,
        address: str,
    ) -> WorkerRecord:
        """Open a new life for a name: as its last one was, or with the defaults."""
        if metadata is None:
            metadata = {} if last is None else last.metadata
        new_worker = self._new_worker(
            ledger,
            new_worker_id(),
            checked_name(name, "Worker"),
            caller,
            RegisterBody(metadata=metadata),
            address,
        )
        if last is not None:
            known = {task.name: task for task in ledger.queues.tasks()}
            new_worker = msgspec.structs.replace(
                new_worker,
                queues=last.queues,
                tasks=tuple(known[task] for task in last.tasks if task in known),
                concurrency=last.concurrency,
                heartbeat_interval_s=last.heartbeat_interval_s,
                suspect_after_s=last.suspect_after_s,
                running_stale_after_s=last.suspect_after_s,
            )
        write_down(ledger, new_worker)
        # Another door may have been faster: then it is that one.
        record = ledger.workers.find_remote(name)
        if record is None or record.state not in LIVE_STATES:
            raise Problem(
                503, "busy", f"{name!r} dies and registers just now. Try again.", headers={"Retry-After": "1"}
            )
        allowed(self.keep(record), caller)
        ledger.notify({"workers"})
        return record

    def _new_worker(
        self, ledger: Ledger, worker_id: str, name: str, caller: Caller, body: RegisterBody, address: str
    ) -> NewWorker:
        interval_s, timeout_s = self._heartbeat(body)
        tasks = self._tasks(ledger, body, caller, interval_s, timeout_s)
        queues = tuple(dict.fromkeys(checked_name(queue, "Queue") for queue in body.queues))
        return NewWorker(
            id=worker_id,
            name=name,
            host=host_of(body.metadata, address),
            # No process of any machine is meant by these: the lease alone says whether it lives.
            pid=0,
            boot_id=host.boot_id() if ledger.single_host else "",
            pid_namespace="",
            process_started="",
            queues=queues or tuple(dict.fromkeys(task.queue for task in tasks)),
            tasks=tasks,
            concurrency=body.concurrency,
            version=storable_text(str(body.metadata.get("version", "")), 100),
            heartbeat_interval_s=interval_s,
            suspect_after_s=timeout_s,
            running_stale_after_s=timeout_s,
            metadata=checked_metadata(body.metadata),
            transport=Transport.HTTP,
            owner=caller.token_id,
            rules=self._settings.recovery.rules,
        )

    def _heartbeat(self, body: RegisterBody) -> tuple[float, float]:
        most_s = self._http.heartbeat_timeout_s
        timeout_s = most_s if body.heartbeat_timeout is None else seconds(body.heartbeat_timeout, "heartbeat_timeout")
        interval_s = min(self._http.heartbeat_interval_s, timeout_s / BEATS_PER_TIMEOUT)
        if body.heartbeat_interval is not None:
            interval_s = seconds(body.heartbeat_interval, "heartbeat_interval")
        if not LEAST_TIMEOUT_S <= timeout_s <= most_s:
            raise ConfigError(
                f"heartbeat_timeout must be {LEAST_TIMEOUT_S:g}s to {most_s:g}s, not {timeout_s:g}s: a worker may ask "
                "for less than heartbeat_timeout of the [http] settings, not for more."
            )
        check_heartbeat("Worker", interval_s, timeout_s)
        return interval_s, timeout_s

    def _tasks(
        self, ledger: Ledger, body: RegisterBody, caller: Caller, interval_s: float, timeout_s: float
    ) -> tuple[TaskRecord, ...]:
        if not body.tasks:
            return ()
        usual = body.queues[0] if body.queues else DEFAULT_QUEUE
        known = {task.name: task for task in ledger.queues.tasks()}
        records: dict[str, TaskRecord] = {}
        for item in body.tasks:
            if isinstance(item, str):
                name = checked_name(item, "Task")
                # A bare name changes nothing of what another worker said about the same task.
                records[name] = known.get(name) or TaskRecord(name, checked_name(usual, "Queue"))
            else:
                policy = _with_switches_of(known.get(item.name), _policy(item))
                check_policy(item.name, policy, app_interval_s=interval_s, app_timeout_s=timeout_s)
                queue = checked_name(item.queue or usual, "Queue")
                records[item.name] = TaskRecord(checked_name(item.name, "Task"), queue, encode_policy(policy))
        _check_number(known.keys(), records.keys())
        changed = {name for name, task in records.items() if name in known and not _same(known[name], task)}
        if changed:
            leave_to_others(ledger, changed, caller)
        return tuple(records.values())


def could_be_id(text: str) -> bool:
    """Say whether the ledger is worth asking: what people send may be no text for a database at all."""
    return len(text) <= MAX_ID_CHARS and text.isascii() and text.isalnum()


def may_speak_for(worker: RemoteWorker | WorkerRecord, caller: Caller) -> bool:
    return worker.owner == caller.token_id or Scope.OPERATE in caller.scopes


def allowed(worker: RemoteWorker, caller: Caller) -> RemoteWorker:
    """Let the caller speak for this worker, or say that it may not."""
    if not may_speak_for(worker, caller):
        raise Problem(
            403,
            "not_your_worker",
            f"Worker {worker.name!r} ({worker.id}) was registered with another token.",
            cure="Use the token that it registered with, or one with the scope 'operate'.",
        )
    return worker


def _check_number(known: Set[str], named: Set[str]) -> None:
    """Refuse new tasks if there are too many: they are kept for good, and every enqueue over HTTP reads all of them."""
    if len(known | named) > max(MAX_KNOWN_TASKS, len(known)):
        raise Problem(
            409,
            "too_many_tasks",
            f"The ledger knows {len(known):,} tasks, and workers over HTTP may bring them to {MAX_KNOWN_TASKS:,}.",
            cure="Register tasks that are known, or pass what differs between these tasks as an argument of one task.",
        )


def write_down(ledger: Ledger, new_worker: NewWorker) -> None:
    """Register a worker. Refuse the name of a living Python worker: people could not tell the two apart."""
    try:
        ledger.workers.register(new_worker)
    except NameTaken as error:
        raise Problem(
            409,
            "name_taken",
            f"A Python worker named {new_worker.name!r} lives.",
            cure="Choose another name. A worker over HTTP cannot replace one that was started with `unstuck worker`.",
            id=ledger.workers.find_python(new_worker.name),
        ) from error


def leave_to_others(ledger: Ledger, changed: set[str], caller: Caller) -> None:
    """Refuse new rules for tasks that others have at work: the rules are stored with every job of theirs."""
    for worker in ledger.workers.list(living_only=True):
        if (theirs := changed.intersection(worker.tasks)) and not may_speak_for(worker, caller):
            raise Problem(
                409,
                "task_of_others",
                f"Task {min(theirs)!r} has other rules or another queue, and worker {worker.name!r} ({worker.id}), "
                "which is not yours, has it at work.",
                cure="Register with the bare name of the task to take it as it is, or use a token with the scope "
                "'operate'.",
            )


def _with_switches_of(known: TaskRecord | None, policy: Policy) -> Policy:
    """Keep the switches of the app that owns the task: a remote worker cannot name them, and must not drop them."""
    if known is None:
        return policy
    theirs = decode_policy(known.policy)
    return msgspec.structs.replace(
        policy,
        auto_requeue_stale_claimed=theirs.auto_requeue_stale_claimed,
        auto_fail_stale_running=theirs.auto_fail_stale_running,
    )


def _same(known: TaskRecord, said: TaskRecord) -> bool:
    return known.queue == said.queue and decode_policy(known.policy) == decode_policy(said.policy)


def checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        data = msgspec.json.encode(metadata)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise Problem(422, "not_valid", f"metadata cannot be stored: {error}") from None
    if len(data) > MAX_METADATA_BYTES or b"\\u0000" in data:
        raise Problem(
            422, "not_valid", f"metadata must be at most {MAX_METADATA_BYTES} bytes of JSON without NUL characters."
        )
    return metadata


def host_of(metadata: dict[str, Any], address: str) -> str:
    """Give the host as the worker names it, for people; else the address that it comes from."""
    said = metadata.get("hostname")
    return storable_text(said, 200) if isinstance(said, str) and said else address


def _id_of(owner: str | None, name: str, instance: str) -> str:
    digest = hashlib.sha256("\0".join((owner or "", name, instance)).encode("utf-8", "surrogatepass")).digest()
    return "".join(_ALPHABET[byte % 32] for byte in digest[:_ID_CHARS])


def _policy(task: TaskBody) -> Policy:
    return Policy(
        retry=_rule(task),
        on_crash=task.on_crash,
        max_crash_retries=task.max_crash_retries,
        timeout_s=None if task.timeout is None else seconds(task.timeout, "timeout"),
        heartbeat_timeout_s=(
            None if task.heartbeat_timeout is None else seconds(task.heartbeat_timeout, "heartbeat_timeout")
        ),
        overlap=task.overlap,
        hidden_args=tuple(sorted(set(task.hidden_args))),
    )


def _rule(task: TaskBody) -> RetryRule:
    match task.retry:
        case None:
            return RetryRule()
        case int():
            return Retry(max_attempts=task.retry).rule()
        case given:
            return Retry(given.max_attempts, given.backoff, given.delay, given.max_delay).rule()
