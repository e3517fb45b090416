"""Keep the book of a worker's life: birth, beats, turns, end."""

import time
from collections.abc import Collection, Sequence

import msgspec

from unstuck import failpoints
from unstuck.domain.errors import UncertainCommit
from unstuck.domain.rules import encode_rules
from unstuck.domain.states import LIVING, Door, WorkerState
from unstuck.store.records import (
    BeatAnswer,
    DeferredOutcome,
    HeldJob,
    Progress,
    Pulse,
    Turn,
    TurnAnswer,
    Wish,
    WorkerBirth,
)
from unstuck.store.sqlite.bell import SqliteBell, bell_address
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.looking import Look, is_still_a_gap
from unstuck.store.sqlite.rows import held_job
from unstuck.store.sqlite.silence import read_clock
from unstuck.store.sqlite.turn import answer_if_nothing, only_wishes, write_turn
from unstuck.store.sqlite.verbs import SQL, Verbs, fetch, write_event

MAX_HELD = 1_000_000


class WorkerVerbs(Verbs):
    def register(self, birth: WorkerBirth) -> bool:
        refuse_nul(birth.id, birth.name, birth.host, birth.version, birth.owner)
        clock = read_clock()
        with self.db.write() as cursor:
            cursor.execute(SQL["insert_worker"], _worker_row(birth, clock.at))
            if not cursor.connection.changes():
                # Written down before the answer was lost: once is enough, and the dead are not raised.
                return bool(fetch(cursor, "disabled_host", (birth.host,)))
            cursor.execute(SQL["insert_beat"], (birth.id, clock.at))
            for task in birth.tasks:
                row = (task.name, task.queue, task.policy or None, task.is_async, clock.at)
                cursor.execute(SQL["know_task"], row)
            for queue in sorted({*birth.queues, *(task.queue for task in birth.tasks)}):
                cursor.execute(SQL["know_queue"], (queue,))
            how = f"pid {birth.pid} on" if birth.door is Door.PYTHON else f"over {birth.door}, on"
            started = f"Worker started: {birth.name} ({how} {birth.host})"
            write_event(cursor, "worker_started", started, worker_id=birth.id)
            return bool(fetch(cursor, "disabled_host", (birth.host,)))

    def listen(self, worker_id: str) -> SqliteBell:
        bell = SqliteBell(bell_address(self.db.path, worker_id))
        try:
            with self.db.write() as cursor:
                cursor.execute(SQL["set_bell"], (worker_id, bell.address))
        except BaseException:
            bell.close()
            raise
        return bell

    def beat(self, pulse: Pulse) -> BeatAnswer:
        if failpoints.active:
            failpoints.reached("beat.before")
        with self.db.write() as cursor:
            found = cursor.execute(SQL["worker_pulse"], (pulse.worker_id,)).fetchone()
            if found is None:
                return BeatAnswer(WorkerState.DEAD)
            state, draining, request, disabled = found
            if state not in LIVING:
                return BeatAnswer(WorkerState(state), request=request)
            cursor.execute(SQL["beat"], (pulse.worker_id, time.time(), pulse.running, pulse.processed))
            was_suspect = state == WorkerState.SUSPECT
            if was_suspect:
                cursor.execute(SQL["clear_suspicion"], (pulse.worker_id,))
                state = WorkerState.DRAINING if draining else WorkerState.ACTIVE
                write_event(cursor, "worker_recovered", "It beat again: it was only slow.", worker_id=pulse.worker_id)
            if pulse.metadata is not None:
                cursor.execute(SQL["set_metadata"], (pulse.worker_id, msgspec.json.encode(pulse.metadata).decode()))
            cancel = tuple(fetch(cursor, "cancel_asked", (pulse.worker_id,)))
        return BeatAnswer(WorkerState(state), was_suspect, request, cancel, bool(disabled))

    def turn(self, turn: Turn) -> TurnAnswer:
        look = None if turn.wish is None else self._look(turn.wish)
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
        self.ring_queues(woken)
        if failpoints.active:
            failpoints.reached("turn.after_commit")
            try:
                failpoints.reached("turn.answer_lost")
            except failpoints.FailpointHit as error:
                raise UncertainCommit("The answer of a turn was lost. Compare what is held, and go on.") from error
        return answer

    def _look(self, wish: Wish) -> Look:
        """Say how to look for what is wished. Gaps whose time is over are looked into first, beside those who write."""
        over = self.gaps.due(wish, time.monotonic())
        if over:
            with self.db.read() as cursor:
                begun_s = time.monotonic()
                for gap in over:
                    if is_still_a_gap(cursor, wish.tasks, gap):
                        now_s = time.monotonic()
                        self.gaps.note(wish.tasks, gap, now_s - begun_s, now_s)
        return Look(wish, self.gaps.of(wish, time.monotonic()))

    def _note_gaps(self, look: Look) -> None:
        for gap, cost_s in look.found:
            self.gaps.note(look.wish.tasks, gap, cost_s, time.monotonic())

    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        # There are no locks on rows: a turn that cannot write writes nothing, and is done again as a whole.
        return {}

    def held(self, worker_id: str) -> list[HeldJob]:
        return self.held_by(worker_id, MAX_HELD)

    def held_by(self, worker_id: str, limit: int) -> list[HeldJob]:
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


def _worker_row(birth: WorkerBirth, now: float) -> tuple[object, ...]:
    return (
        birth.id,
        birth.name,
        birth.host,
        birth.pid,
        birth.boot_id,
        birth.pid_namespace,
        birth.process_started,
        msgspec.json.encode(birth.queues).decode(),
        msgspec.json.encode([task.name for task in birth.tasks]).decode(),
        birth.concurrency,
        birth.version,
        birth.heartbeat_interval_s,
        birth.suspect_after_s,
        birth.running_stale_after_s,
        msgspec.json.encode(birth.metadata).decode(),
        birth.bell,
        birth.trace,
        birth.door,
        birth.owner,
        encode_rules(birth.rules),
        now,
    )
