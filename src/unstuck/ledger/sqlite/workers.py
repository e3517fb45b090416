"""Workers and hosts on SQLite: register, heartbeats, held jobs, disable and enable."""

import os
import secrets
import time
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from unstuck import failpoints
from unstuck.domain.recovery_rules import encode_rules
from unstuck.domain.states import LIVE_STATES, Transport, WorkerState
from unstuck.domain.worker_health import Disabled, Standing
from unstuck.errors import UncertainCommit
from unstuck.ledger.checks import check_exchange, check_ids, name_taken
from unstuck.ledger.contract.jobs import Progress
from unstuck.ledger.contract.workers import (
    DeferredOutcome,
    Exchange,
    ExchangeAnswer,
    Fleet,
    Heartbeat,
    HeartbeatAnswer,
    HeldRecord,
    NewWorker,
    RemoteHeartbeat,
    ReplyAddress,
    Turn,
    TurnAnswer,
    WorkerRecord,
)
from unstuck.ledger.gaps import Gaps
from unstuck.ledger.sqlite.claim import look_for, note_gaps
from unstuck.ledger.sqlite.clock import read_clock
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.diagnosis import look_at_ticket
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.exchange import answers_if_nothing, read_reply_address, write_exchange
from unstuck.ledger.sqlite.heartbeats import beat_one
from unstuck.ledger.sqlite.notifier import Notifier, SqliteListener, listener_address, reaches
from unstuck.ledger.sqlite.recovery import held_by
from unstuck.ledger.sqlite.rows import standing, worker_record
from unstuck.ledger.sqlite.turn import answer_if_nothing, only_wishes, write_turn


class Workers:
    """See `unstuck.ledger.contract.workers.Workers`."""

    def __init__(self, db: Database, wakeups: Notifier, gaps: Gaps) -> None:
        self._db = db
        self._wakeups = wakeups
        self._gaps = gaps

    def register(self, new_worker: NewWorker) -> bool:
        refuse_nul(new_worker.id, new_worker.name, new_worker.host, new_worker.version, new_worker.owner)
        clock = read_clock()
        with self._db.write() as cursor:
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
        listener = SqliteListener(listener_address(self._db.path, worker_id))
        try:
            with self._db.write() as cursor:
                cursor.execute(SQL["set_bell"], (worker_id, listener.address))
        except BaseException:
            listener.close()
            raise
        return listener

    def listen_all(self) -> SqliteListener:
        listener = SqliteListener(listener_address(self._db.path, f"listener-{os.getpid()}-{secrets.token_hex(8)}"))
        try:
            with self._db.write() as cursor:
                for (address,) in fetch(cursor, "listeners"):
                    if not reaches(address):
                        # A process that was killed could not remove its address.
                        cursor.execute(SQL["remove_listener"], (address,))
                cursor.execute(SQL["add_listener"], (listener.address,))
        except BaseException:
            listener.close()
            raise
        # What this process rings from now on reaches it. Other processes learn of it within CACHE_S.
        self._wakeups.look_again()
        return listener

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        if failpoints.active:
            failpoints.reached("beat.before")
        with self._db.write() as cursor:
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

    def beat_async(self, heartbeats: Sequence[RemoteHeartbeat]) -> None:
        """There is nothing to wait for but the disk, and that is waited for in a thread."""

    def record_heartbeats(self, heartbeats: Sequence[RemoteHeartbeat]) -> list[HeartbeatAnswer]:
        with self._db.write(durable=False) as cursor:
            clock = read_clock()
            return [beat_one(cursor, heartbeat, clock) for heartbeat in heartbeats]

    def turn(self, turn: Turn) -> TurnAnswer:
        look = None if turn.claim_request is None else look_for(self._db, self._gaps, turn.claim_request)
        if look is not None and only_wishes(turn):
            # An idle worker that finds nothing must not stand in the line of those who write.
            with self._db.read() as cursor:
                nothing = answer_if_nothing(cursor, turn.worker_id, look)
            if nothing is not None:
                note_gaps(self._gaps, look)
                return nothing
        woken: set[str] = set()
        with self._db.write() as cursor:
            answer = write_turn(cursor, turn, look, woken)
            if failpoints.active:
                failpoints.reached("turn.before_commit")
        if look is not None:
            note_gaps(self._gaps, look)
        self._wakeups.notify_queues(woken)
        if failpoints.active:
            failpoints.reached("turn.after_commit")
            try:
                failpoints.reached("turn.answer_lost")
            except failpoints.FailpointHit as error:
                raise UncertainCommit("The answer of a turn was lost. Compare what is held, and go on.") from error
        return answer

    def exchange(self, exchange: Exchange) -> ExchangeAnswer:
        check_exchange(exchange)
        looks = [
            (turn, None if turn.claim_request is None else look_for(self._db, self._gaps, turn.claim_request))
            for turn in exchange.turns
        ]
        turns = None
        if not (exchange.jobs or exchange.once or exchange.answered):
            # Who only wishes in vain must not stand in the line of those who write, nor wait for the disk.
            turns = answers_if_nothing(self._db, looks)
        if turns is None:
            answer = write_exchange(self._db, self._wakeups, exchange, looks)
        elif exchange.heartbeats:
            answer = ExchangeAnswer(turns=turns, heartbeats=tuple(self.record_heartbeats(exchange.heartbeats)))
        else:
            answer = ExchangeAnswer(turns=turns)
        for _, look in looks:
            if look is not None:
                note_gaps(self._gaps, look)
        return answer

    def reply_addresses(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[ReplyAddress]:
        check_ids((after_job_id,))
        with self._db.read() as cursor:
            return [read_reply_address(row) for row in cursor.execute(SQL["letters"], (client, after_job_id, limit))]

    def reply_address(self, job_id: int) -> ReplyAddress | None:
        check_ids((job_id,))
        with self._db.read() as cursor:
            row = cursor.execute(SQL["letter"], (job_id,)).fetchone()
        return None if row is None else read_reply_address(row)

    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        # There are no locks on rows: a turn that cannot write writes nothing, and is done again as a whole.
        return {}

    def blocked(self, worker_ids: Collection[str]) -> set[str]:
        # There are no locks on rows.
        return set()

    def held(self, worker_id: str) -> list[HeldRecord]:
        return held_by(self._db, worker_id, MAX_HELD)

    def note_progress(self, worker_id: str, notes: Sequence[Progress]) -> None:
        rows = [
            (one.job_id, one.token, worker_id, one.at, one.done, one.total, one.message, one.busy_since)
            for one in notes
        ]
        refuse_nul(*(one.message for one in notes))
        with self._db.write() as cursor:
            cursor.executemany(SQL["note_progress"], rows)

    def note_deferred(
        self, worker_id: str, outcomes: Sequence[DeferredOutcome], good_for_s: float | None = None
    ) -> None:
        refuse_nul(*(one.reason for one in outcomes))
        now = time.time()
        until = None if good_for_s is None else now + good_for_s
        rows = [(worker_id, one.token, one.job_id, one.is_return, one.reason, now, until) for one in outcomes]
        with self._db.write() as cursor:
            cursor.execute(SQL["forget_deferred"], (worker_id,))
            cursor.executemany(SQL["note_deferred"], rows)

    def request(self, worker_id: str, what: str, by: str) -> bool:
        refuse_nul(worker_id, by)
        with self._db.write() as cursor:
            cursor.execute(SQL["request"], (worker_id, what))
            if not cursor.connection.changes():
                return False
            write_event(cursor, f"worker_asked_to_{what}", f"Asked to {what} by {by}", worker_id=worker_id)
        return True

    def drain(self, worker_id: str) -> None:
        with self._db.write() as cursor:
            cursor.execute(SQL["drain"], (worker_id,))

    def stop(self, worker_id: str) -> None:
        with self._db.write() as cursor:
            cursor.execute(SQL["retire"], (worker_id, time.time()))
            if cursor.connection.changes():
                write_event(cursor, "worker_stopped", "It shut down in order.", worker_id=worker_id)

    def remote(self, worker_id: str) -> WorkerRecord | None:
        return self._find_foreign("foreign_worker", worker_id)

    def find_remote(self, name: str) -> WorkerRecord | None:
        return self._find_foreign("foreign_worker_named", name)

    def find_python(self, name: str) -> str | None:
        with self._db.read() as cursor:
            found = cursor.execute(SQL["living_python_worker"], (name,)).get
            return None if found is None else str(found)

    def standings(self) -> list[Standing]:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            return [standing(row, clock) for row in cursor.execute(SQL["standings"])]

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        refuse_nul(worker_id, reason, by)
        with self._db.write() as cursor:
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
        with self._db.write() as cursor:
            cursor.execute(SQL["enable"], (worker_id,))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "worker_enabled", _because(f"Enabled by {by}", reason), worker_id=worker_id)
        return True

    def disable_host(self, host: str, reason: str, by: str) -> bool:
        refuse_nul(host, reason, by)
        with self._db.write() as cursor:
            cursor.execute(SQL["disable_host"], (host, _flag(reason, by, auto=False)))
            if not cursor.connection.changes():
                return False
            write_event(cursor, "host_disabled", f"Host '{host}' was disabled by {by}: {reason}")
        return True

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        refuse_nul(host, reason, by)
        with self._db.write() as cursor:
            cursor.execute(SQL["enable_host"], (host,))
            if not cursor.connection.changes():
                return False
            cursor.execute(SQL["forget_health_of_host"], (host,))
            write_event(cursor, "host_enabled", _because(f"Host '{host}' was enabled by {by}", reason))
        return True

    def fleet(self) -> Fleet:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            rows = fetch(cursor, "fleet")
            unswept_s = look_at_ticket(cursor)
        living = [(clock.silent_s(row[1]), row[2]) for row in rows if row[0] in LIVE_STATES]
        return Fleet(
            workers=dict(Counter(row[0] for row in rows)),
            late=sum(silent_s > 2 * interval_s for silent_s, interval_s in living),
            silent_s=max((silent_s for silent_s, _ in living), default=0.0),
            unswept_s=unswept_s,
        )

    def _find_foreign(self, query: str, key: str) -> WorkerRecord | None:
        with self._db.read() as cursor:
            row = cursor.execute(SQL[query], (key,)).fetchone()
            return None if row is None else worker_record(row, read_clock(cursor))

    def list(self, living_only: bool = False) -> list[WorkerRecord]:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            return [worker_record(row, clock) for row in cursor.execute(SQL["workers"], (living_only,))]


def _flag(reason: str, by: str, *, auto: bool) -> str:
    return msgspec.json.encode(Disabled(reason, by, time.time(), auto)).decode()


def _because(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence


MAX_HELD = 1_000_000


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
