"""Workers and hosts on PostgreSQL: register, heartbeats, held jobs, disable and enable.

On the service lane, since the reaper of every worker asks: it shall not need one more connection for it.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unstuck import failpoints
from unstuck.domain.recovery_rules import encode_rules
from unstuck.domain.states import LIVE_STATES, Transport, WorkerState
from unstuck.domain.worker_health import Standing
from unstuck.errors import UncertainCommit
from unstuck.ledger.checks import check_exchange, check_ids, name_taken
from unstuck.ledger.contract.diagnosis import SWEEP_TICKET
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
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.async_beats import HeartbeatPipeline, launch
from unstuck.ledger.postgres.database import Database, session_values
from unstuck.ledger.postgres.enqueue import JobIds
from unstuck.ledger.postgres.exchange import run_exchange, writes
from unstuck.ledger.postgres.heartbeats import answers_read, beat_answers, beat_values
from unstuck.ledger.postgres.locks import lock_holders
from unstuck.ledger.postgres.notifier import PostgresListener
from unstuck.ledger.postgres.rows import held_job, standing, worker_record
from unstuck.ledger.postgres.turn import parameters_of, read_answer

MAX_HELD = 1_000_000
_SAME_IN_SQL = (
    "id",
    "name",
    "host",
    "pid",
    "boot_id",
    "pid_namespace",
    "process_started",
    "concurrency",
    "version",
    "heartbeat_interval_s",
    "suspect_after_s",
    "running_stale_after_s",
    "owner",
)


class Workers:
    """See `unstuck.ledger.contract.workers.Workers`."""

    def __init__(self, db: Database, job_ids: JobIds, gaps: Gaps) -> None:
        self._db = db
        self._job_ids = job_ids
        self._gaps = gaps

    def register(self, new_worker: NewWorker) -> bool:
        tasks = sorted(new_worker.tasks, key=lambda task: task.name)
        try:
            values: dict[str, Any] = {
                **{name: getattr(new_worker, name) for name in _SAME_IN_SQL},
                "trace": new_worker.status_page,
                "door": new_worker.transport,
                "queues": arrays.texts(new_worker.queues),
                "tasks": arrays.texts([task.name for task in tasks]),
                "task_queues": arrays.texts([task.queue for task in tasks]),
                "task_policies": arrays.byteas([task.policy for task in tasks]),
                "task_async": arrays.bools([task.is_async for task in tasks]),
                "metadata": msgspec.json.encode(new_worker.metadata).decode(),
                "recovery": encode_rules(new_worker.rules),
            }
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None
        with self._db.service_connection.hold():
            session = self._db.service_connection.open()
            if new_worker.transport is not Transport.PYTHON:
                # Our session proves nothing of somebody who only speaks through us.
                rows = self._db.serve("register", **values, session_pid=None, session_start=None, session_server=None)
            else:
                rows = self._db.serve("register", **values, **session_values(session))
            [(disabled, name_is_free)] = rows
            if not name_is_free:
                raise name_taken(new_worker)
            if new_worker.transport is Transport.PYTHON:
                self._db.worker_id = new_worker.id
                self._db.worker_queues = frozenset(new_worker.queues)
            return bool(disabled)

    def listen(self, worker_id: str) -> PostgresListener:
        return PostgresListener(self._wakeup_source(), self._db.schema, self._concerns_of(worker_id))

    def listen_all(self) -> PostgresListener:
        return PostgresListener(self._wakeup_source(), self._db.schema, lambda word: True)

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        if failpoints.active:
            failpoints.reached("beat.before")
        try:
            metadata = None if heartbeat.metadata is None else msgspec.json.encode(heartbeat.metadata).decode()
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None
        with self._db.service_connection.hold(urgent=True):
            # A beat may be given twice.
            return self._db.service_connection.again_if_cut(lambda: self._beat_once(heartbeat, metadata))

    def beat_async(self, heartbeats: Sequence[RemoteHeartbeat]) -> HeartbeatPipeline[list[HeartbeatAnswer]] | None:
        return launch(
            self._db.heartbeat_connection,
            self._db.sql["beat_foreign_in_flight"],
            [*beat_values(heartbeats).values()],
            answers_read,
        )

    def record_heartbeats(self, heartbeats: Sequence[RemoteHeartbeat]) -> list[HeartbeatAnswer]:
        # A beat may be given twice; what it adds to the count of settled jobs is for people.
        return beat_answers(self._db.heartbeat_connection.ask(self._db.sql["beat_foreign"], beat_values(heartbeats)))

    def turn(self, turn: Turn) -> TurnAnswer:
        values = parameters_of(self._gaps, turn)
        if failpoints.active:
            failpoints.reached("turn.before_commit")
        rows = self._db.turn_connection.write(self._db.sql["turn"], values)
        if failpoints.active:
            _after_commit()
        return read_answer(self._db, self._gaps, turn, rows)

    def exchange(self, exchange: Exchange) -> ExchangeAnswer:
        check_exchange(exchange)
        beats: tuple[HeartbeatAnswer, ...] | None = None
        if exchange.heartbeats and any(map(writes, exchange.turns)):
            # In a commit of their own: who cancels goes from a job to the beat of its worker, and turns go to jobs.
            beats = tuple(self.record_heartbeats(exchange.heartbeats))
            exchange = msgspec.structs.replace(exchange, heartbeats=())
        answer = run_exchange(self._db, self._job_ids, self._gaps, exchange)
        return answer if beats is None else msgspec.structs.replace(answer, heartbeats=beats)

    def reply_addresses(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[ReplyAddress]:
        check_ids((after_job_id,))
        return [ReplyAddress(*row) for row in self._db.read("letters", client=client, after=after_job_id, limit=limit)]

    def reply_address(self, job_id: int) -> ReplyAddress | None:
        check_ids((job_id,))
        rows = self._db.read("letter", job_id=job_id)
        return ReplyAddress(*rows[0]) if rows else None

    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        found = self._db.turn_connection.ask(self._db.sql["blocked_outcomes"], {"ids": arrays.int8s(list(job_ids))})
        pids = {pid for _, pid in found if pid is not None}
        told = {pid: lock_holders(self._db, self._db.turn_connection, [pid]) for pid in pids}
        unknown = lock_holders(self._db, self._db.turn_connection) if any(pid is None for _, pid in found) else ""
        return {job_id: unknown if pid is None else told[pid] for job_id, pid in found}

    def blocked(self, worker_ids: Collection[str]) -> set[str]:
        ids = arrays.texts(sorted(worker_ids))
        return {
            worker_id for (worker_id,) in self._db.turn_connection.ask(self._db.sql["blocked_workers"], {"ids": ids})
        }

    def held(self, worker_id: str) -> list[HeldRecord]:
        rows = self._db.turn_connection.ask(self._db.sql["held_by"], {"worker_id": worker_id, "limit": MAX_HELD})
        return [held_job(row) for row in rows]

    def note_progress(self, worker_id: str, notes: Sequence[Progress]) -> None:
        self._db.serve(
            "note_progress",
            worker_id=worker_id,
            job_ids=arrays.int8s([one.job_id for one in notes]),
            tokens=arrays.int8s([one.token for one in notes]),
            ats=arrays.float8s([one.at for one in notes]),
            dones=arrays.float8s([one.done for one in notes]),
            totals=arrays.float8s([one.total for one in notes]),
            messages=arrays.texts([one.message for one in notes]),
            busy=arrays.float8s([one.busy_since for one in notes]),
        )

    def note_deferred(
        self, worker_id: str, outcomes: Sequence[DeferredOutcome], good_for_s: float | None = None
    ) -> None:
        self._db.serve(
            "note_deferred",
            worker_id=worker_id,
            job_ids=arrays.int8s([one.job_id for one in outcomes]),
            tokens=arrays.int8s([one.token for one in outcomes]),
            returns=arrays.bools([one.is_return for one in outcomes]),
            reasons=arrays.texts([one.reason for one in outcomes]),
            good_for_s=good_for_s,
        )

    def request(self, worker_id: str, what: str, by: str) -> bool:
        return bool(self._db.read("request", worker_id=worker_id, what=what, by=by))

    def drain(self, worker_id: str) -> None:
        self._db.serve("drain", worker_id=worker_id)

    def stop(self, worker_id: str) -> None:
        self._db.serve("retire", worker_id=worker_id)

    def remote(self, worker_id: str) -> WorkerRecord | None:
        rows = self._db.read("foreign_worker", worker_id=worker_id)
        return worker_record(rows[0]) if rows else None

    def find_remote(self, name: str) -> WorkerRecord | None:
        rows = self._db.read("foreign_worker_named", name=name)
        return worker_record(rows[0]) if rows else None

    def find_python(self, name: str) -> str | None:
        rows = self._db.read("living_python_worker", name=name)
        return str(rows[0][0]) if rows else None

    def standings(self) -> list[Standing]:
        return [standing(row) for row in self._db.serve("standings")]

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        rows = self._db.serve_once("disable", worker_id=worker_id, reason=reason, by=by, auto=auto)
        return bool(rows[0][0])

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        return bool(self._db.serve_once("enable", worker_id=worker_id, message=_because(f"Enabled by {by}", reason)))

    def disable_host(self, host: str, reason: str, by: str) -> bool:
        message = f"Host '{host}' was disabled by {by}: {reason}"
        return bool(self._db.serve_once("disable_host", host=host, reason=reason, by=by, message=message))

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        message = _because(f"Host '{host}' was enabled by {by}", reason)
        return bool(self._db.serve_once("enable_host", host=host, message=message))

    def fleet(self) -> Fleet:
        # On the service lane: reapers ask too, and a worker shall not need one more connection for it.
        rows = self._db.serve("fleet")
        ticket = self._db.serve("look_ticket", name=SWEEP_TICKET)
        living = [row for row in rows if row[0] in LIVE_STATES]
        return Fleet(
            workers={row[0]: row[1] for row in rows},
            late=sum(row[2] for row in living),
            silent_s=max((row[3] for row in living), default=0.0),
            unswept_s=ticket[0][0] if ticket else None,
        )

    def _beat_once(self, heartbeat: Heartbeat, metadata: str | None) -> HeartbeatAnswer:
        session = self._db.service_connection.open()
        row = self._db.serve_once(
            "beat",
            worker_id=heartbeat.worker_id,
            running=heartbeat.running,
            processed=heartbeat.processed,
            metadata=metadata,
            **session_values(session),
        )[0]
        cancel = tuple(zip(row[3], row[4], strict=True)) if row[3] else ()
        return HeartbeatAnswer(WorkerState(row[0]), row[1], row[2], cancel, row[5])

    def _wakeup_source(self) -> Any:
        if not self._db.settings.notify:
            return None
        if self._db.listen_connection is not None:
            self._db.listen_connection.open()
            return self._db.listen_connection
        # A pooler gives the session to others after each transaction: nobody would hear what it listens for.
        return None if self._db.service_connection.open().pooled else self._db.service_connection

    def _concerns_of(self, worker_id: str) -> Any:
        own = f"worker:{worker_id}"
        queues = self._db.worker_queues if worker_id == self._db.worker_id else frozenset()

        def concerns(word: str) -> bool:
            kind, _, name = word.partition(":")
            if kind == "worker":
                return word == own
            return kind != "queue" or not queues or name in queues

        return concerns

    def list(self, living_only: bool = False) -> list[WorkerRecord]:
        return [worker_record(row) for row in self._db.read("workers", living_only=living_only)]


def _because(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence


def _after_commit() -> None:
    failpoints.reached("turn.after_commit")
    try:
        failpoints.reached("turn.answer_lost")
    except failpoints.FailpointHit as error:
        raise UncertainCommit("The answer of a turn was lost. Compare what is held, and go on.") from error
