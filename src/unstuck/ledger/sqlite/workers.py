"""Workers and hosts on SQLite: register, heartbeats, held jobs, disable and enable."""

import os
import secrets
import time
from collections.abc import Collection, Sequence

import apsw
import msgspec

from unstuck import failpoints
from unstuck.domain.recovery_rules import encode_rules
from unstuck.domain.states import LIVE_STATES, Transport, WorkerState
from unstuck.domain.worker_health import Disabled, Standing
from unstuck.errors import UncertainCommit
from unstuck.ledger.checks import name_taken
from unstuck.ledger.contract.jobs import Fate, read_fate
from unstuck.ledger.contract.workers import (
    ClaimRequest,
    DeferredOutcome,
    Heartbeat,
    HeartbeatAnswer,
    HeldRecord,
    NewWorker,
    Progress,
    RemoteHeartbeat,
    Turn,
    TurnAnswer,
    WorkerRecord,
)
from unstuck.ledger.sqlite.claim import Look, is_still_a_gap
from unstuck.ledger.sqlite.clock import Clock, read_clock
from unstuck.ledger.sqlite.database import SQL, Verbs, fetch, write_event
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.notifier import SqliteListener, listener_address, reaches
from unstuck.ledger.sqlite.rows import held_job, standing, worker_record
from unstuck.ledger.sqlite.turn import answer_if_nothing, only_wishes, write_turn


class HealthVerbs(Verbs):
    def standings(self) -> list[Standing]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            return [standing(row, clock) for row in cursor.execute(SQL["standings"])]

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        refuse_nul(worker_id, reason, by)
        with self.db.write() as cursor:
            if auto and fetch(cursor, "unserved_without", (worker_id, read_clock().at)):
                return False
            cursor.execute(SQL["disable"], (worker_id, _flag(reason, by, auto=auto)))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "worker_disabled", f"Disabled by {by}: {reason}", worker_id=worker_id)
            if auto:
                write_event(cursor, "crash_loop", f"Worker {worker_id} was disabled: {reason}", worker_id=worker_id)
        return True

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        refuse_nul(worker_id, reason, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["enable"], (worker_id,))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "worker_enabled", _because(f"Enabled by {by}", reason), worker_id=worker_id)
        return True

    def disable_host(self, host: str, reason: str, by: str) -> bool:
        refuse_nul(host, reason, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["disable_host"], (host, _flag(reason, by, auto=False)))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "host_disabled", f"Host '{host}' was disabled by {by}: {reason}")
        return True

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        refuse_nul(host, reason, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["enable_host"], (host,))
            if not cursor.connection.changes():
                return False
            cursor.execute(SQL["forget_health_of_host"], (host,))
            write_event(cursor, "host_enabled", _because(f"Host '{host}' was enabled by {by}", reason))
        return True


def _flag(reason: str, by: str, *, auto: bool) -> str:
    return msgspec.json.encode(Disabled(reason, by, time.time(), auto)).decode()


def _because(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence


MAX_HELD = 1_000_000


class WorkerVerbs(Verbs):
    def register(self, new_worker: NewWorker) -> bool:
        refuse_nul(new_worker.id, new_worker.name, new_worker.host, new_worker.version, new_worker.owner)
        clock = read_clock()
        with self.db.write() as cursor:
            others = "living_foreign_worker" if new_worker.transport is Transport.PYTHON else "living_python_worker"
            if fetch(cursor, others, (new_worker.name,)) and not fetch(cursor, "is_registered", (new_worker.id,)):
                raise name_taken(new_worker)
            cursor.execute(SQL["insert_worker"], _worker_row(new_worker, clock.at))
            if not cursor.connection.changes():
                # Written down before the answer was lost: once is enough, and the dead are not raised.
                return bool(fetch(cursor, "disabled_host", (new_worker.host,)))
            cursor.execute(SQL["insert_beat"], (new_worker.id, clock.at))
            for task in new_worker.tasks:
                row = (task.name, task.queue, task.policy or None, task.is_async, clock.at)
                cursor.execute(SQL["know_task"], row)
            for queue in sorted({*new_worker.queues, *(task.queue for task in new_worker.tasks)}):
                cursor.execute(SQL["know_queue"], (queue,))
            how = (
                f"pid {new_worker.pid} on"
                if new_worker.transport is Transport.PYTHON
                else f"over {new_worker.transport}, on"
            )
            started = f"Worker started: {new_worker.name} ({how} {new_worker.host})"
            write_event(cursor, "worker_started", started, worker_id=new_worker.id)
            return bool(fetch(cursor, "disabled_host", (new_worker.host,)))

    def listen(self, worker_id: str) -> SqliteListener:
        listener = SqliteListener(listener_address(self.db.path, worker_id))
        try:
            with self.db.write() as cursor:
                cursor.execute(SQL["set_bell"], (worker_id, listener.address))
        except BaseException:
            listener.close()
            raise
        return listener

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        if failpoints.active:
            failpoints.reached("beat.before")
        with self.db.write() as cursor:
            found = cursor.execute(SQL["worker_pulse"], (heartbeat.worker_id,)).fetchone()
            if found is None:
                return HeartbeatAnswer(WorkerState.DEAD)
            state, draining, request, disabled = found
            if state not in LIVE_STATES:
                return HeartbeatAnswer(WorkerState(state))
            cursor.execute(SQL["beat"], (heartbeat.worker_id, time.time(), heartbeat.running, heartbeat.processed))
            was_suspect = state == WorkerState.SUSPECT
            if was_suspect:
                cursor.execute(SQL["clear_suspicion"], (heartbeat.worker_id,))
                state = WorkerState.DRAINING if draining else WorkerState.ACTIVE
                write_event(
                    cursor, "worker_recovered", "It beat again: it was only slow.", worker_id=heartbeat.worker_id
                )
            if heartbeat.metadata is not None:
                cursor.execute(
                    SQL["set_metadata"], (heartbeat.worker_id, msgspec.json.encode(heartbeat.metadata).decode())
                )
            cancel = tuple(fetch(cursor, "cancel_asked", (heartbeat.worker_id,)))
        return HeartbeatAnswer(WorkerState(state), was_suspect, request, cancel, bool(disabled))

    def turn(self, turn: Turn) -> TurnAnswer:
        look = None if turn.claim_request is None else self._look(turn.claim_request)
        if look is not None and only_wishes(turn):
            # An idle worker that finds nothing must not stand in the line of those who write.
            with self.db.read() as cursor:
                nothing = answer_if_nothing(cursor, turn.worker_id, look)
            if nothing is not None:
                self._note_gaps(look)
                return nothing
        woken: set[str] = set()
        with self.db.write() as cursor:
            answer = write_turn(cursor, turn, look, woken)
            if failpoints.active:
                failpoints.reached("turn.before_commit")
        if look is not None:
            self._note_gaps(look)
        self.notify_queues(woken)
        if failpoints.active:
            failpoints.reached("turn.after_commit")
            try:
                failpoints.reached("turn.answer_lost")
            except failpoints.FailpointHit as error:
                raise UncertainCommit("The answer of a turn was lost. Compare what is held, and go on.") from error
        return answer

    def _look(self, claim_request: ClaimRequest) -> Look:
        """Say how to look for what is wished. Gaps whose time is over are looked into first, beside those who write."""
        over = self.gaps.due(claim_request, time.monotonic())
        if over:
            with self.db.read() as cursor:
                begun_s = time.monotonic()
                for gap in over:
                    if is_still_a_gap(cursor, claim_request.tasks, gap):
                        now_s = time.monotonic()
                        self.gaps.note(claim_request.tasks, gap, now_s - begun_s, now_s)
        return Look(claim_request, self.gaps.of(claim_request, time.monotonic()))

    def _note_gaps(self, look: Look) -> None:
        for gap, cost_s in look.found:
            self.gaps.note(look.claim_request.tasks, gap, cost_s, time.monotonic())

    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        # There are no locks on rows: a turn that cannot write writes nothing, and is done again as a whole.
        return {}

    def held(self, worker_id: str) -> list[HeldRecord]:
        return self.held_jobs(worker_id, MAX_HELD)

    def held_jobs(self, worker_id: str, limit: int) -> list[HeldRecord]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            return [held_job(row, clock) for row in cursor.execute(SQL["held_by"], (worker_id, limit))]

    def note_progress(self, worker_id: str, notes: Sequence[Progress]) -> None:
        rows = [
            (one.job_id, one.token, worker_id, one.at, one.done, one.total, one.message, one.busy_since)
            for one in notes
        ]
        refuse_nul(*(one.message for one in notes))
        with self.db.write() as cursor:
            cursor.executemany(SQL["note_progress"], rows)

    def note_deferred(
        self, worker_id: str, outcomes: Sequence[DeferredOutcome], good_for_s: float | None = None
    ) -> None:
        refuse_nul(*(one.reason for one in outcomes))
        now = time.time()
        until = None if good_for_s is None else now + good_for_s
        rows = [(worker_id, one.token, one.job_id, one.is_return, one.reason, now, until) for one in outcomes]
        with self.db.write() as cursor:
            cursor.execute(SQL["forget_deferred"], (worker_id,))
            cursor.executemany(SQL["note_deferred"], rows)

    def drain(self, worker_id: str) -> None:
        with self.db.write() as cursor:
            cursor.execute(SQL["drain"], (worker_id,))

    def retire(self, worker_id: str) -> None:
        with self.db.write() as cursor:
            cursor.execute(SQL["retire"], (worker_id, time.time()))
            if cursor.connection.changes():
                write_event(cursor, "worker_stopped", "It shut down in order.", worker_id=worker_id)


def _worker_row(new_worker: NewWorker, now: float) -> tuple[object, ...]:
    return (
        new_worker.id,
        new_worker.name,
        new_worker.host,
        new_worker.pid,
        new_worker.boot_id,
        new_worker.pid_namespace,
        new_worker.process_started,
        msgspec.json.encode(new_worker.queues).decode(),
        msgspec.json.encode([task.name for task in new_worker.tasks]).decode(),
        new_worker.concurrency,
        new_worker.version,
        new_worker.heartbeat_interval_s,
        new_worker.suspect_after_s,
        new_worker.running_stale_after_s,
        msgspec.json.encode(new_worker.metadata).decode(),
        new_worker.wakeup_address,
        new_worker.status_page,
        new_worker.transport,
        new_worker.owner,
        encode_rules(new_worker.rules),
        now,
    )


class ForeignVerbs(WorkerVerbs):
    def remote_worker(self, worker_id: str) -> WorkerRecord | None:
        return self._find_foreign("foreign_worker", worker_id)

    def remote_worker_named(self, name: str) -> WorkerRecord | None:
        return self._find_foreign("foreign_worker_named", name)

    def living_python_worker(self, name: str) -> str | None:
        with self.db.read() as cursor:
            found = cursor.execute(SQL["living_python_worker"], (name,)).get
            return None if found is None else str(found)

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        with self.db.read() as cursor:
            return [read_fate(row) for row in fetch(cursor, "fates", (msgspec.json.encode(attempts).decode(),))]

    def blocked_workers(self, worker_ids: Collection[str]) -> set[str]:
        # There are no locks on rows.
        return set()

    def record_heartbeats(self, heartbeats: Sequence[RemoteHeartbeat]) -> list[HeartbeatAnswer]:
        with self.db.write(durable=False) as cursor:
            clock = read_clock()
            return [beat_one(cursor, heartbeat, clock) for heartbeat in heartbeats]

    def beat_async(self, heartbeats: Sequence[RemoteHeartbeat]) -> None:
        """There is nothing to wait for but the disk, and that is waited for in a thread."""

    def listen_all(self) -> SqliteListener:
        listener = SqliteListener(listener_address(self.db.path, f"listener-{os.getpid()}-{secrets.token_hex(8)}"))
        try:
            with self.db.write() as cursor:
                for (address,) in fetch(cursor, "listeners"):
                    if not reaches(address):
                        # A process that was killed could not remove its address.
                        cursor.execute(SQL["remove_listener"], (address,))
                cursor.execute(SQL["add_listener"], (listener.address,))
        except BaseException:
            listener.close()
            raise
        # What this process rings from now on reaches it. Other processes learn of it within CACHE_S.
        self.wakeups.look_again()
        return listener

    def _find_foreign(self, query: str, key: str) -> WorkerRecord | None:
        with self.db.read() as cursor:
            row = cursor.execute(SQL[query], (key,)).fetchone()
            return None if row is None else worker_record(row, read_clock(cursor))


def beat_one(cursor: apsw.Cursor, heartbeat: RemoteHeartbeat, clock: Clock) -> HeartbeatAnswer:
    """Beat for one of them, inside a write."""
    worker_id = heartbeat.worker_id
    found = cursor.execute(SQL["foreign_pulse"], (worker_id,)).fetchone()
    if found is None:
        return HeartbeatAnswer(WorkerState.DEAD)
    state, draining, request, boot_id, disabled = found
    if state not in LIVE_STATES:
        return HeartbeatAnswer(WorkerState(state))
    if boot_id != clock.boot_id:
        cursor.execute(SQL["move_to_this_boot"], (worker_id, clock.boot_id))
        cursor.execute(SQL["restart_deadlines"], (worker_id, clock.boot_s, clock.at))
    cursor.execute(SQL["beat_foreign"], (worker_id, clock.at, heartbeat.running, heartbeat.settled))
    was_suspect = state == WorkerState.SUSPECT
    if was_suspect:
        cursor.execute(SQL["clear_suspicion"], (worker_id,))
        state = WorkerState.DRAINING if draining else WorkerState.ACTIVE
        write_event(cursor, "worker_recovered", "It beat again: it was only slow.", worker_id=worker_id)
    if heartbeat.metadata is not None:
        cursor.execute(SQL["set_metadata"], (worker_id, msgspec.json.encode(heartbeat.metadata).decode()))
    cancel = tuple(fetch(cursor, "cancel_asked", (worker_id,)))
    return HeartbeatAnswer(WorkerState(state), was_suspect, request, cancel, bool(disabled))
