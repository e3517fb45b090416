"""Workers and hosts on PostgreSQL: register, heartbeats, held jobs, disable and enable.

On the service lane, since the reaper of every worker asks: it shall not need one more connection for it.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unstuck import failpoints
from unstuck.domain.recovery_rules import encode_rules
from unstuck.domain.states import Transport, WorkerState
from unstuck.domain.worker_health import Standing
from unstuck.errors import LedgerUnavailable, UncertainCommit
from unstuck.ledger.checks import name_taken
from unstuck.ledger.contract.jobs import Fate, read_fate
from unstuck.ledger.contract.workers import (
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
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.async_beats import HeartbeatPipeline, Texts, launch
from unstuck.ledger.postgres.connection import Row
from unstuck.ledger.postgres.database import Verbs, session_values
from unstuck.ledger.postgres.jobs import JournalVerbs
from unstuck.ledger.postgres.notifier import PostgresListener
from unstuck.ledger.postgres.rows import held_job, standing, worker_record
from unstuck.ledger.postgres.turn import (
    ALIVE,
    CLAIMED,
    INPUTS,
    JOURNAL,
    NO_EXTRAS,
    Extras,
    claims,
    take_gaps,
    take_woken,
    turn_values,
)
from unstuck.ledger.postgres.workflows import WorkflowVerbs


class HealthVerbs(Verbs):
    def standings(self) -> list[Standing]:
        return [standing(row) for row in self.serve("standings")]

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        rows = self.serve_once("disable", worker_id=worker_id, reason=reason, by=by, auto=auto)
        return bool(rows[0][0])

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        return bool(self.serve_once("enable", worker_id=worker_id, message=_because(f"Enabled by {by}", reason)))

    def disable_host(self, host: str, reason: str, by: str) -> bool:
        message = f"Host '{host}' was disabled by {by}: {reason}"
        return bool(self.serve_once("disable_host", host=host, reason=reason, by=by, message=message))

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        message = _because(f"Host '{host}' was enabled by {by}", reason)
        return bool(self.serve_once("enable_host", host=host, message=message))


def _because(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence


MAX_HELD = 1_000_000


class WorkerVerbs(JournalVerbs, WorkflowVerbs):
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
        with self.service_connection.hold():
            session = self.service_connection.open()
            if new_worker.transport is not Transport.PYTHON:
                # Our session proves nothing of somebody who only speaks through us.
                rows = self.serve("register", **values, session_pid=None, session_start=None, session_server=None)
            else:
                rows = self.serve("register", **values, **session_values(session))
            [(disabled, name_is_free)] = rows
            if not name_is_free:
                raise name_taken(new_worker)
            if new_worker.transport is Transport.PYTHON:
                self.worker_id = new_worker.id
                self.worker_queues = frozenset(new_worker.queues)
            return bool(disabled)

    def listen(self, worker_id: str) -> PostgresListener:
        return PostgresListener(self._wakeup_source(), self.schema, self._concerns_of(worker_id))

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        if failpoints.active:
            failpoints.reached("beat.before")
        try:
            metadata = None if heartbeat.metadata is None else msgspec.json.encode(heartbeat.metadata).decode()
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None
        with self.service_connection.hold(urgent=True):
            # A beat may be given twice.
            return self.service_connection.again_if_cut(lambda: self._beat_once(heartbeat, metadata))

    def turn(self, turn: Turn) -> TurnAnswer:
        values = self._turn_values(turn)
        if failpoints.active:
            failpoints.reached("turn.before_commit")
        rows = self.turn_connection.write(self.sql["turn"], values)
        if failpoints.active:
            _after_commit()
        return self._turn_answer(turn, rows)

    def held(self, worker_id: str) -> list[HeldRecord]:
        rows = self.turn_connection.ask(self.sql["held_by"], {"worker_id": worker_id, "limit": MAX_HELD})
        return [held_job(row) for row in rows]

    def note_progress(self, worker_id: str, notes: Sequence[Progress]) -> None:
        self.serve(
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
        self.serve(
            "note_deferred",
            worker_id=worker_id,
            job_ids=arrays.int8s([one.job_id for one in outcomes]),
            tokens=arrays.int8s([one.token for one in outcomes]),
            returns=arrays.bools([one.is_return for one in outcomes]),
            reasons=arrays.texts([one.reason for one in outcomes]),
            good_for_s=good_for_s,
        )

    def drain(self, worker_id: str) -> None:
        self.serve("drain", worker_id=worker_id)

    def retire(self, worker_id: str) -> None:
        self.serve("retire", worker_id=worker_id)

    # ------------------------------------------------------------------------------------------

    def _beat_once(self, heartbeat: Heartbeat, metadata: str | None) -> HeartbeatAnswer:
        session = self.service_connection.open()
        row = self.serve_once(
            "beat",
            worker_id=heartbeat.worker_id,
            running=heartbeat.running,
            processed=heartbeat.processed,
            metadata=metadata,
            **session_values(session),
        )[0]
        cancel = tuple(zip(row[3], row[4], strict=True)) if row[3] else ()
        return HeartbeatAnswer(WorkerState(row[0]), row[1], row[2], cancel, row[5])

    def _turn_values(self, turn: Turn) -> dict[str, Any]:
        around = () if turn.claim_request is None else self.gaps.of(turn.claim_request, time.monotonic())
        try:
            return turn_values(turn, around)
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None

    def _turn_answer(self, turn: Turn, rows: list[Row]) -> TurnAnswer:
        last = rows.pop()
        if last[14] != ALIVE:
            return TurnAnswer(alive=False)
        if turn.claim_request is not None:
            for gap, cost_s in take_gaps(rows):
                self.gaps.note(turn.claim_request.tasks, gap, cost_s, time.monotonic())
        if woken := take_woken(rows):
            self.notify(f"queue:{queue}" for queue in woken)
        if last[4]:
            rows = self._with_payloads(rows)
        claimed, superseded = claims(rows, self._extras(rows))
        return TurnAnswer(True, claimed, superseded, last[13], more=bool(last[12]))

    def _extras(self, rows: list[Row]) -> Extras:
        """Fetch what belongs to claimed jobs beside their payloads; the commit is behind us here too."""
        asked = [(row[0], row[15]) for row in rows if row[14] == CLAIMED and row[15]]
        if not asked:
            return NO_EXTRAS
        try:
            return Extras(
                self._journals([job_id for job_id, which in asked if which & JOURNAL]),
                self._inputs([job_id for job_id, which in asked if which & INPUTS]),
            )
        except LedgerUnavailable as error:
            raise UncertainCommit(str(error)) from error

    def _with_payloads(self, rows: list[Row]) -> list[Row]:
        """Fetch what was too large for the answer; the commit is behind us, so nobody waits for a slow reader."""
        left_out = {row[0] for row in rows if row[14] == CLAIMED and row[5] is None}
        try:
            found = self.turn_connection.ask(self.sql["payloads"], {"ids": arrays.int8s(list(left_out))})
        except LedgerUnavailable as error:
            raise UncertainCommit(str(error)) from error
        payloads: dict[int, bytes] = dict(found)
        # One that is not there any more was cancelled and removed meanwhile: it is nobody's.
        return [
            (*row[:5], payloads[row[0]], *row[6:]) if row[0] in left_out else row
            for row in rows
            if row[0] not in left_out or row[0] in payloads
        ]

    def _wakeup_source(self) -> Any:
        if not self.settings.notify:
            return None
        if self.listen_connection is not None:
            self.listen_connection.open()
            return self.listen_connection
        # A pooler gives the session to others after each transaction: nobody would hear what it listens for.
        return None if self.service_connection.open().pooled else self.service_connection

    def _concerns_of(self, worker_id: str) -> Any:
        own = f"worker:{worker_id}"
        queues = self.worker_queues if worker_id == self.worker_id else frozenset()

        def concerns(word: str) -> bool:
            kind, _, name = word.partition(":")
            if kind == "worker":
                return word == own
            return kind != "queue" or not queues or name in queues

        return concerns


def _after_commit() -> None:
    failpoints.reached("turn.after_commit")
    try:
        failpoints.reached("turn.answer_lost")
    except failpoints.FailpointHit as error:
        raise UncertainCommit("The answer of a turn was lost. Compare what is held, and go on.") from error


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


AS_IT_WAS = -1


class ForeignVerbs(WorkerVerbs):
    def remote_worker(self, worker_id: str) -> WorkerRecord | None:
        rows = self.read("foreign_worker", worker_id=worker_id)
        return worker_record(rows[0]) if rows else None

    def remote_worker_named(self, name: str) -> WorkerRecord | None:
        rows = self.read("foreign_worker_named", name=name)
        return worker_record(rows[0]) if rows else None

    def living_python_worker(self, name: str) -> str | None:
        rows = self.read("living_python_worker", name=name)
        return str(rows[0][0]) if rows else None

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        rows = self.read(
            "fates",
            job_ids=arrays.int8s([job_id for job_id, _ in attempts]),
            tokens=arrays.int8s([token for _, token in attempts]),
        )
        return [read_fate(row) for row in rows]

    def blocked_workers(self, worker_ids: Collection[str]) -> set[str]:
        ids = arrays.texts(sorted(worker_ids))
        return {worker_id for (worker_id,) in self.turn_connection.ask(self.sql["blocked_workers"], {"ids": ids})}

    def record_heartbeats(self, heartbeats: Sequence[RemoteHeartbeat]) -> list[HeartbeatAnswer]:
        # A beat may be given twice; what it adds to the count of settled jobs is for people.
        return beat_answers(self.heartbeat_connection.ask(self.sql["beat_foreign"], beat_values(heartbeats)))

    def beat_async(self, heartbeats: Sequence[RemoteHeartbeat]) -> HeartbeatPipeline[list[HeartbeatAnswer]] | None:
        return launch(
            self.heartbeat_connection,
            self.sql["beat_foreign_in_flight"],
            [*beat_values(heartbeats).values()],
            _answers_read,
        )

    def listen_all(self) -> PostgresListener:
        return PostgresListener(self._wakeup_source(), self.schema, lambda word: True)


def beat_values(heartbeats: Sequence[RemoteHeartbeat]) -> dict[str, Any]:
    """Give the parameters of a beat for many."""
    try:
        metadata = [None if one.metadata is None else msgspec.json.encode(one.metadata).decode() for one in heartbeats]
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None
    return {
        "worker_ids": arrays.texts([one.worker_id for one in heartbeats]),
        "running": arrays.int8s([AS_IT_WAS if one.running is None else one.running for one in heartbeats]),
        "settled": arrays.int8s([one.settled for one in heartbeats]),
        "metadata": arrays.texts(metadata),
    }


def _answers_read(rows: list[Texts]) -> list[HeartbeatAnswer]:
    return beat_answers(
        [
            (n, _text(state), suspect == b"t", _text(request), _numbers(ids), _numbers(tokens), off == b"t")
            for n, state, suspect, request, ids, tokens, off in rows
        ]
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _numbers(value: bytes | None) -> list[int]:
    """Read an array of numbers as the server writes it: {1,2}."""
    inside = (value or b"{}")[1:-1]
    return [int(one) for one in inside.split(b",")] if inside else []


def beat_answers(rows: list[Row]) -> list[HeartbeatAnswer]:
    """Read what they are told, in their order."""
    return [
        HeartbeatAnswer(WorkerState(state), was_suspect, request, tuple(zip(ids or (), tokens or (), strict=True)), off)
        for _, state, was_suspect, request, ids, tokens, off in rows
    ]
