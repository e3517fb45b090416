"""Keep the book of a worker's life: birth, beats, turns, end."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck import failpoints
from unstuck.domain.errors import LedgerUnavailable, UncertainCommit
from unstuck.domain.rules import encode_rules
from unstuck.domain.states import Door, WorkerState
from unstuck.store.postgres import arrays, errors
from unstuck.store.postgres.base import session_values
from unstuck.store.postgres.bell import PostgresBell
from unstuck.store.postgres.journal import JournalVerbs
from unstuck.store.postgres.lanes import Row
from unstuck.store.postgres.rows import held_job
from unstuck.store.postgres.turning import (
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
from unstuck.store.postgres.workflows import WorkflowVerbs
from unstuck.store.records import BeatAnswer, DeferredOutcome, HeldJob, Progress, Pulse, Turn, TurnAnswer, WorkerBirth

MAX_HELD = 1_000_000


class WorkerVerbs(JournalVerbs, WorkflowVerbs):
    def register(self, birth: WorkerBirth) -> bool:
        tasks = sorted(birth.tasks, key=lambda task: task.name)
        try:
            values: dict[str, Any] = {
                **{name: getattr(birth, name) for name in _BIRTH_FIELDS},
                "queues": arrays.texts(birth.queues),
                "tasks": arrays.texts([task.name for task in tasks]),
                "task_queues": arrays.texts([task.queue for task in tasks]),
                "task_policies": arrays.byteas([task.policy for task in tasks]),
                "task_async": arrays.bools([task.is_async for task in tasks]),
                "metadata": msgspec.json.encode(birth.metadata).decode(),
                "recovery": encode_rules(birth.rules),
            }
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None
        with self.service_lane.hold():
            session = self.service_lane.open()
            if birth.door is not Door.PYTHON:
                # Our session proves nothing of somebody who only speaks through us.
                return bool(
                    self.serve("register", **values, session_pid=None, session_start=None, session_server=None)[0][0]
                )
            rows = self.serve("register", **values, **session_values(session))
            self.worker_id = birth.id
            self.worker_queues = frozenset(birth.queues)
            return bool(rows[0][0])

    def listen(self, worker_id: str) -> PostgresBell:
        return PostgresBell(self._bell_source(), self.schema, self._concerns_of(worker_id))

    def beat(self, pulse: Pulse) -> BeatAnswer:
        if failpoints.active:
            failpoints.reached("beat.before")
        try:
            metadata = None if pulse.metadata is None else msgspec.json.encode(pulse.metadata).decode()
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None
        with self.service_lane.hold(urgent=True):
            # A beat may be given twice.
            return self.service_lane.again_if_cut(lambda: self._beat_once(pulse, metadata))

    def turn(self, turn: Turn) -> TurnAnswer:
        values = self._turn_values(turn)
        if failpoints.active:
            failpoints.reached("turn.before_commit")
        rows = self.turn_lane.write(self.sql["turn"], values)
        if failpoints.active:
            _after_commit()
        return self._turn_answer(turn, rows)

    def held(self, worker_id: str) -> list[HeldJob]:
        rows = self.turn_lane.ask(self.sql["held_by"], {"worker_id": worker_id, "limit": MAX_HELD})
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

    def _beat_once(self, pulse: Pulse, metadata: str | None) -> BeatAnswer:
        session = self.service_lane.open()
        row = self.serve_once(
            "beat",
            worker_id=pulse.worker_id,
            running=pulse.running,
            processed=pulse.processed,
            metadata=metadata,
            **session_values(session),
        )[0]
        cancel = tuple(zip(row[3], row[4], strict=True)) if row[3] else ()
        return BeatAnswer(WorkerState(row[0]), row[1], row[2], cancel, row[5])

    def _turn_values(self, turn: Turn) -> dict[str, Any]:
        around = () if turn.wish is None else self.gaps.of(turn.wish, time.monotonic())
        try:
            return turn_values(turn, around)
        except UnicodeEncodeError as error:
            raise errors.unwritable_text(error) from None

    def _turn_answer(self, turn: Turn, rows: list[Row]) -> TurnAnswer:
        last = rows.pop()
        if last[14] != ALIVE:
            return TurnAnswer(alive=False)
        if turn.wish is not None:
            for gap, cost_s in take_gaps(rows):
                self.gaps.note(turn.wish.tasks, gap, cost_s, time.monotonic())
        if woken := take_woken(rows):
            self.ring(f"queue:{queue}" for queue in woken)
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
            found = self.turn_lane.ask(self.sql["payloads"], {"ids": arrays.int8s(list(left_out))})
        except LedgerUnavailable as error:
            raise UncertainCommit(str(error)) from error
        payloads: dict[int, bytes] = dict(found)
        # One that is not there any more was cancelled and removed meanwhile: it is nobody's.
        return [
            (*row[:5], payloads[row[0]], *row[6:]) if row[0] in left_out else row
            for row in rows
            if row[0] not in left_out or row[0] in payloads
        ]

    def _bell_source(self) -> Any:
        if not self.settings.notify:
            return None
        if self.listen_lane is not None:
            self.listen_lane.open()
            return self.listen_lane
        # A pooler gives the session to others after each transaction: nobody would hear what it listens for.
        return None if self.service_lane.open().pooled else self.service_lane

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


_BIRTH_FIELDS = (
    "id",
    "name",
    "host",
    "pid",
    "boot_id",
    "pid_namespace",
    "process_started",
    "trace",
    "concurrency",
    "version",
    "heartbeat_interval_s",
    "suspect_after_s",
    "running_stale_after_s",
    "door",
    "owner",
)
